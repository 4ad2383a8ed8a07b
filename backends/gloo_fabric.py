"""One rank's data groups over gloo: what each operation of ``rank.Fabric`` is in collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.communicator import Communicator, Issue
from weightsync.backends.roll_call import Note
from weightsync.backends.store import Store, client_of, prefixed
from weightsync.reference.buckets import HEADER_BYTES, Bucket, Header
from weightsync.reference.control import Message
from weightsync.reference.errors import GroupBroken, PatchMismatch, PlanMismatch
from weightsync.reference.members import Group, RankId

NOTE = "group"
"""Kind of the control messages that members of a group send each other about it."""

REMEMBERED_DEATHS = 64
"""Dead groups a rank knows of, so that it need not wait in one that it has not opened yet."""


class GlooFabric:
    """One rank's data groups over gloo; implements ``rank.Fabric``. Payloads live in host memory.

    Args:
        me: this rank.
        clock: its clock.
        store: the run's store.
        put: sends a control message to a rank by name; notes of the members travel that way.
        prefix: of every key.
        hostname: address of this host to bind to, which the peers can reach.
    """

    def __init__(
        self,
        me: RankId,
        clock: AsyncioClock,
        store: Store,
        put: Callable[[str, Message], None],
        prefix: str,
        hostname: str,
    ) -> None:
        self.me = me
        self.clock = clock
        self._store = store
        self._put = put
        self._prefix = prefix
        self._hostname = hostname
        self._open: dict[str, Communicator] = {}
        self._dead: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._idle: list[Store] = []
        self._bound: Any = None

    async def open(self, group: Group, deadline_ns: int) -> None:
        """See ``rank.Fabric.open``. A key that was opened before, or with other members, is refused."""
        if group.key in self._open:
            raise GroupBroken(
                f"group {group.key} is open on {self.me}; close it and connect a new group epoch"
            )
        communicator = Communicator(group, self.me, self.clock, self._start, self._tell)
        communicator.broken = self._dead.get(group.key)
        communicator.check()
        self._open[group.key] = communicator
        try:
            await communicator.open(self._client, self._device, deadline_ns)
        except BaseException:
            self._open.pop(group.key, None)
            raise

    async def close(self, group: Group) -> None:
        """See ``rank.Fabric.close``; the peers' pending operations fail."""
        communicator = self._open.pop(group.key, None)
        if communicator is not None:
            communicator.close()

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        """See ``rank.Fabric.exchange``; vectors of different lengths break the group."""
        communicator = self._of(group)
        await communicator.announce("exchange", len(vector), deadline_ns)
        if not vector:
            return [[] for _ in group.members]
        rows = await communicator.allgather(list(vector), "exchange", deadline_ns)
        return [list(row) for row in rows.tolist()]

    async def gather(
        self, group: Group, part: Any, sizes: Sequence[int], deadline_ns: int
    ) -> list[Any] | None:
        """See ``rank.Fabric.gather``; ``part`` has a uint8 ``payload``, and the root gets uint8 tensors."""
        communicator, mine = self._of(group), sizes[group.index(self.me)]
        if part.nbytes != mine or part.payload.numel() != mine:
            raise PlanMismatch(
                f"{self.me} brings {part.payload.numel()} bytes to a gather where its peers expect {mine}; "
                "the counts it announced were others"
            )
        given = _bytes(part.payload)
        await communicator.announce("gather", _fingerprint(sizes), deadline_ns)
        root, others = communicator.index == 0, [0, *sizes[1:]]
        found = torch.empty(sum(others) if root else 0, dtype=torch.uint8)
        if sum(others):
            incoming = others if root else [0] * len(sizes)
            outgoing = [0 if root else mine] + [0] * (len(sizes) - 1)
            given = given[:0] if root else given
            started = communicator.issue(
                lambda pg, timeout: pg.alltoall_base(found, given, incoming, outgoing, timeout), deadline_ns
            )
            await communicator.finish(started, "gather", deadline_ns)
        return [part, *_cut(found, others[1:])] if root else None

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        """See ``rank.Fabric.send``. Header and payload start together, so no receiver is left with half."""
        communicator = self._of(group)
        if communicator.index:
            raise PlanMismatch(
                f"{self.me} sends in group {group.key}, whose root is {group.members[0]}; receive there"
            )
        payload = _bytes(bucket.payload)
        if payload.numel() != bucket.header.payload_bytes:
            raise PatchMismatch(
                f"bucket carries {payload.numel()} bytes, its header announces "
                f"{bucket.header.payload_bytes}; seal it anew"
            )
        header = torch.frombuffer(bytearray(bucket.header.pack()), dtype=torch.uint8)
        communicator.turn()
        started = [
            communicator.issue(_broadcast(one), deadline_ns) for one in (header, payload) if one.numel()
        ]
        for future in started:
            await communicator.finish(future, "send", deadline_ns)

    async def receive(self, group: Group, deadline_ns: int) -> Bucket:
        """See ``rank.Fabric.receive``. Raises PatchMismatch for what is no header; the group is dead then."""
        communicator = self._of(group)
        if not communicator.index:
            raise PlanMismatch(f"{self.me} receives in group {group.key}, whose root it is; send there")
        communicator.turn()
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        await communicator.finish(communicator.issue(_broadcast(head), deadline_ns), "receive", deadline_ns)
        try:
            header = Header.unpack(bytes(head.numpy()))
        except PatchMismatch as error:
            communicator.fail(f"{self.me} received no header: {error}")
            raise
        payload = torch.empty(header.payload_bytes, dtype=torch.uint8)
        if header.payload_bytes:
            started = communicator.issue(_broadcast(payload), deadline_ns)
            await communicator.finish(started, "receive", deadline_ns)
        return Bucket(header, payload)

    # ---- what others say -----------------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Take in a member's note about a group."""
        key, note = message["key"], message["note"]
        if "broken" in note or "closed" in note:
            while len(self._dead) >= REMEMBERED_DEATHS:
                del self._dead[next(iter(self._dead))]
            self._dead[key] = note["broken"] if "broken" in note else note["why"]
        if key in self._open:
            self._open[key].hear(message["from"], note)

    def lost(self, peer: str) -> None:
        """A rank is gone: every group it is in is dead."""
        for communicator in list(self._open.values()):
            if any(str(member) == peer for member in communicator.group.members):
                communicator.end(f"{peer} is gone")

    # ---- the end -------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Drop every group and the device, without a word to whoever waits. From any thread."""
        for communicator in list(self._open.values()):
            communicator.release()
        with self._lock:
            self._bound = None

    def join(self, timeout_s: float) -> tuple[str, ...]:
        """Wait for the threads that open and drop groups; names of those that still run."""
        until = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        return tuple(thread.name for thread in self._threads if thread.is_alive())

    # ---- inner ---------------------------------------------------------------------------------------------

    def _of(self, group: Group) -> Communicator:
        try:
            communicator = self._open[group.key]
        except KeyError:
            raise GroupBroken(f"group {group.key} is not open on {self.me}; connect it first") from None
        communicator.check()
        return communicator

    def _tell(self, group: Group, note: Note) -> None:
        for member in group.members:
            if member != self.me:
                self._put(str(member), {"kind": NOTE, "from": str(self.me), "key": group.key, "note": note})

    def _start(self, work: Callable[[], None], name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @contextmanager
    def _client(self) -> Iterator[Store]:
        """A connection of its own while a group connects, since that waits on the store; kept for the next."""
        with self._lock:
            client = self._idle.pop() if self._idle else None
        client = client if client is not None else client_of(self._store)
        try:
            yield prefixed(client, [self._prefix, "group"])
        finally:
            with self._lock:
                self._idle.append(client)

    def _device(self) -> Any:
        with self._lock:
            if self._bound is None:
                self._bound = ProcessGroupGloo.create_device(hostname=self._hostname)
            return self._bound


def _broadcast(tensor: Tensor) -> Issue:
    return lambda pg, timeout: pg.broadcast(tensor, 0, timeout)


def _bytes(payload: Tensor) -> Tensor:
    """The payload as gloo may have it: of a strided view it would send other bytes, without a word."""
    if payload.dtype != torch.uint8 or payload.device.type != "cpu":
        raise PatchMismatch(
            f"payload is {payload.dtype} on {payload.device}, expected torch.uint8 on cpu; "
            "encode it, and copy it to the host"
        )
    return payload.reshape(-1).contiguous()


def _cut(found: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = [*accumulate(sizes)]
    return [found[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _fingerprint(sizes: Sequence[int]) -> int:
    """A non-negative int64 that equal sizes share."""
    return xxhash.xxh3_64_intdigest(repr([int(size) for size in sizes]).encode()) >> 1
