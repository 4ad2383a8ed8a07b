"""The verbs: everything the protocol asks of a rank, as typing.Protocols. This page is the contract.

``rank.Verbs`` implements both; a test checks that the signatures agree. A verb does one thing and decides
nothing; the protocol decides everything and touches no byte. What travels between verbs are handles: a
``bucket``, ``decoded`` and ``part`` know their ``nbytes``; ``changes``, and what ``merge`` and ``narrow`` give, also
their ``nnz`` and ``counts``.

For every verb:

- *Deadlines.* ``deadline_ns`` is absolute on the rank's own clock; a verb that waits for a peer ends by it.
- *Errors.* A verb that raises may have taken effect or not; the protocol is written for both. Verbs said to
  be repeatable may be called again after an error. Cancelling throws ``asyncio.CancelledError``, which is no
  Exception.
- *Memory.* Trainer: ``live`` (the parameters, the caller's), ``slot0``, ``slot1`` (the source's snapshots).
  Rollout: ``weights`` (the engine's, written in place, never replaced), the undo log (the target's). A handle
  that a verb returns is its caller's; what it points at is said below.
- *Phase.* The span of a verb is summed under the phase in brackets (``rank.PHASES``).
- *Digests* are signed 64-bit ints; the shares of ranks add up with wrap-around (``docs/wire.md``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from weightsync.reference.clock import Task
from weightsync.reference.control import Request
from weightsync.reference.members import Group, RankId
from weightsync.reference.verdict import Verdict, Vote


class CommonVerbs(Protocol):
    """What both sides ask for.

    Attributes:
        me: this rank.
        update: number of the update that spans are recorded under; set by the protocol.
    """

    me: RankId
    update: int

    async def connect(self, group: Group, deadline_ns: int) -> None:
        """[connect] The group is open: every member called this, and its communicator is initialised here.

        Members agree by passing equal groups. Raises DeadlineExceeded when one does not come, GroupBroken
        when other members come under this group's key.
        """

    async def disconnect(self, group: Group) -> None:
        """[connect] The group is dropped, with whatever still waits in it; its peers' operations fail.

        Repeatable; nothing happens for a group that is not open.
        """

    async def call(
        self, peer: RankId, op: str, body: Mapping[str, Any], deadline_ns: int
    ) -> Mapping[str, Any]:
        """[control] The peer's reply to one request; ``body`` and reply are JSON-able.

        The peer may have acted although this raises: DeadlineExceeded (no reply in time), PeerLost (its lease
        ended, named), RemoteError (it refused, in its own words).
        """

    async def post(self, peer: RankId, op: str, body: Mapping[str, Any]) -> None:
        """[control] A request is on its way that nobody answers; it may arrive late or, from here, never."""

    def now_ns(self) -> int:
        """Time of this rank's clock, int ns; only differences of one rank's times mean anything."""

    def is_lost(self, rank: RankId) -> bool:
        """True while the lease of ``rank`` is over, as far as this rank knows."""

    def losses(self, rank: RankId) -> int:
        """How often this rank has seen the lease of ``rank`` end; one that is replaced by a new process ends too."""

    async def until_found(self, ranks: Sequence[RankId], deadline_ns: int) -> None:
        """[wait] No lease of ``ranks`` is over any more. DeadlineExceeded at ``deadline_ns``."""

    def inquire(self, peer: RankId, deadline_ns: int) -> Awaitable[Mapping[str, Any]]:
        """What ``peer`` discloses of itself, whatever it does at that moment; errors as of ``call``.

        It leaves no span, on neither side, and no fault is planted in it: asking changes no run.
        """

    def disclose(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """From now on ``state()``, JSON-able, is what peers hear that inquire; it must not wait."""

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> Task:
        """A task of this rank, running. Whoever spawns joins or cancels it; its error reaches the joiner."""

    async def join(self, tasks: Sequence[Task], deadline_ns: int | None) -> None:
        """[wait] All tasks are done. The first failure is raised at once and the others go on.

        Raises DeadlineExceeded at ``deadline_ns``; the tasks go on.
        """

    async def cancel(self, task: Task) -> None:
        """[control] The task has ended, its outcome dropped; nothing happens for one that is done."""


class TrainerVerbs(CommonVerbs, Protocol):
    """What a trainer rank is asked for. The lead alone encodes, sends and calls rollouts."""

    async def agree(
        self, members: Sequence[RankId], key: str, vote: Vote, deadline_ns: int, patience_ns: int
    ) -> Verdict:
        """[control] The one verdict of ``members`` on the stage ``key``, equal on every rank that gets one.

        The first member counts votes until ``deadline_ns``; the others wait for it until ``patience_ns``,
        because leaving alone would split the group. Repeatable: a rank's first vote counts. Raises PeerLost
        when the first member is lost, DeadlineExceeded at ``patience_ns``.
        """

    async def snapshot(self, slot: int) -> Any:
        """[snapshot] ``slot`` holds a bit-exact, contiguous copy of ``live``, attributes carried.

        A live tensor of another floating dtype than the plan's is cast, here and once. The caller may mutate
        ``live`` once this returned, and must not before. After an error the slot is torn, and says so.
        """

    async def diff(self, slot: int, base: int | None) -> Any:
        """[diff] This rank's elements whose bits changed from slot ``base`` to ``slot``.

        The handle owns its memory, in checkpoint coordinates: per piece of the plan int32 positions (n,),
        ascending, and new bits (n,); ``counts`` (pieces,) of owned elements only, so that replicas count
        once. ``base`` None compares nothing and counts every owned element. Nothing is advanced.
        """

    def trail(self, changes: Any) -> Any:
        """What ``squash`` needs of a step between two versions: its positions; knows its ``nbytes``. No await."""

    async def squash(self, slot: int, trails: Sequence[Any]) -> Any:
        """[diff] Several steps as one delta: every element that any trail names, with its bits in ``slot``.

        A handle like that of ``diff``, in memory of its own; at least one trail, all of this rank.
        """

    async def source_digest(self, slot: int, afresh: bool = False) -> int:
        """[digest] This rank's share of the digest of ``slot``; O(changed) after a diff with a known base.

        ``afresh`` reads every element, since a share derived from a diff cannot show that the diff missed one.
        """

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        """[tp_gather] Every member's int64 vector, all of one length, in member order: (world, length)."""

    async def gather(
        self, group: Group, rows: Any, slot: int, changes: Any, sizes: Sequence[int], deadline_ns: int
    ) -> list[Any] | None:
        """[tp_gather] Every rank's part of one row group, in member order, at the first member; else None.

        A part is uint8 (sizes[rank],). ``changes`` None takes whole tensors from ``slot``. All members call
        it for the same ``rows`` in the same order, also those that bring nothing. The parts are the caller's.
        Raises PlanMismatch when a part is not of its announced size; DeadlineExceeded, GroupBroken.
        """

    async def merge(self, parts: Sequence[Any], rows: Any, matrix: Sequence[Sequence[int]]) -> Any:
        """[encode] Handle to all parts of a row group as one, in canonical order and in checkpoint coordinates.

        It shares the parts' memory, which must stay as it is while the handle is in use. ``counts`` are its elements
        per piece of ``rows``; ``matrix`` is the exchanged counts. Raises PlanMismatch when parts and counts do not
        fit, or two ranks tell one element.
        """

    async def narrow(self, merged: Any, route: Any) -> Any:
        """[encode] Handle to as much of a merged row group as the ranks of ``route`` hold, in slice coordinates.

        Its ``counts`` decide the cuts. It may share memory with ``merged``, which stays as it is.
        """

    async def encode(self, contents: Any, spec: Any, head: Any) -> Any:
        """[encode] One bucket, as ``spec`` cuts it, of what ``merge`` or ``narrow`` gave; in new memory.

        ``spec.nbytes`` is the most that it may take, ``nbytes`` of the bucket what it takes. Repeatable.
        """

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        """[broadcast] Header, then exactly the bytes it announces, have left for every other member.

        The bucket may be dropped or overwritten once this returned. That it returned proves no arrival: the
        trailer's checksum and the reply to ``prepare`` do. Raises DeadlineExceeded, GroupBroken.
        """


class RolloutVerbs(CommonVerbs, Protocol):
    """What a rollout rank is asked for."""

    async def serve(self, deadline_ns: int | None, watch: RankId) -> Request:
        """[idle] The oldest waiting request; one whose serving failed is the next one again.

        Raises DeadlineExceeded, PeerLost once ``watch`` is gone and no request waits.
        """

    async def reply(
        self,
        request: Request,
        body: Mapping[str, Any] | None = None,
        *,
        error: str | None = None,
        lost: str | None = None,
    ) -> None:
        """[control] The answer is on its way: a body, or an error and who was lost. Repeatable."""

    def holding(self) -> int:
        """Fingerprint of what this rank takes of every checkpoint tensor, signed 64 bits; see ``holdings.Holding``.

        The trainer names that of the buckets it is about to send; with another one an update is refused.
        """

    async def receive(self, group: Group, deadline_ns: int) -> Any:
        """[broadcast] The next bucket, header and whole payload, unproved; its memory is the caller's.

        Raises DeadlineExceeded, GroupBroken. After a cancel its buffer belongs to the group until the group
        is dropped.
        """

    async def decode(self, bucket: Any) -> Any:
        """[decode] The bucket taken apart, its checksum, table, sizes and encodings proved.

        The handle shares the bucket's memory, which must stay until ``apply``. ``end`` is the trailer of a
        success (``digest``, ``buckets``, ``nbytes``) or None, ``aborted`` the sender's reason or None. Raises
        PatchMismatch; nothing is written.
        """

    async def validate(self, decoded: Any, *, version: int, base: int, epoch: int, sequence: int) -> None:
        """[validate] It is the expected next bucket, and every position lies in bounds, ascending, once.

        ``base`` 0 is a full update, whose trailer is refused until every element came. Repeatable for the
        latest bucket. Raises StaleVersion, PatchMismatch; nothing is written.
        """

    async def apply(self, decoded: Any, undo: bool) -> int:
        """[apply] Bytes written: this rank's elements of a validated bucket are in ``weights``, O(changed).

        With ``undo`` the old bits went to the undo log before the first write. Nobody may read ``weights``
        meanwhile, or rely on them until ``commit``. Repeatable. Raises PlanMismatch for an unvalidated one.
        """

    async def digest(self, afresh: bool = False) -> int:
        """[digest] This rank's share of the digest of ``weights``, rows it owns only; O(1) where ``apply`` kept it.

        What was kept while writing cannot show a bit that changed elsewhere: ``afresh`` reads every element now.
        """

    async def compare_digests(self, found: int, expected: int) -> bool:
        """[digest] True when they are equal. A verb, so that one that always agrees can be planted."""

    async def rollback(self) -> None:
        """[rollback] ``weights`` hold again every bit that an ``apply`` with undo overwrote. Repeatable."""

    async def commit(self) -> None:
        """[commit] The undo log is dropped: what was applied stays. Repeatable."""

    async def pause(self) -> None:
        """[pause_flush] No request reads ``weights`` on any rank of this rollout. Leader; repeatable."""

    async def resume(self) -> None:
        """[continue] Requests may read ``weights``. Leader; repeatable."""
