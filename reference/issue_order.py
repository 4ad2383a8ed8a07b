"""In which order a rank issues collectives, per data group, and a trainer that compares the orders of its ranks.

A communicator carries what its members issue, in the order in which each issues it. Where a push in the background and
the training loop share a group, or two pushes do, two ranks may issue in two orders; each then waits for the other. A
deadline ends that, and says nothing. The orders say what to mend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import Group
from weightsync.reference.seams import Fabric
from weightsync.reference.trainer import Trainer
from weightsync.reference.verdict import Verdict, Vote

TAIL = 16
"""How many of a group's latest operations two ranks compare."""


class IssueOrderMismatch(WeightSyncError):
    """Two ranks issued the collectives of one group in two orders; on a real communicator they wait for each other.

    Attributes:
        group: key of the group.
        orders: rank name -> its latest operations, oldest first, each with its number in the update.
    """

    def __init__(self, group: str, orders: Mapping[str, Sequence[str]]) -> None:
        words = " and ".join(f"{rank} issued {', '.join(order)}" for rank, order in orders.items())
        super().__init__(
            f"the ranks of group {group} issued its collectives in different orders: {words}; expected one order on "
            "all ranks; give each task that issues collectives a group of its own"
        )
        self.group = group
        self.orders = dict(orders)


class IssueOrder:
    """What one rank issued in the present update: per group the number of operations and the latest of them."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._latest: dict[str, deque[str]] = {}

    def begin(self) -> None:
        """An update begins, on all ranks alike: count from 1 again."""
        self._counts, self._latest = {}, {}

    def issue(self, group: str, op: str) -> None:
        """An operation is about to be issued; whoever shares a group with a push says so too.

        Args:
            group: the group's key.
            op: the operation, in words that are equal on all ranks.
        """
        self._counts[group] = self._counts.get(group, 0) + 1
        self._latest.setdefault(group, deque(maxlen=TAIL)).append(op)

    def report(self) -> dict[str, list[str]]:
        """Group key -> its latest operations, ``"number op"`` each; JSON-able."""
        return {
            group: [
                f"{number} {op}" for number, op in enumerate(latest, self._counts[group] - len(latest) + 1)
            ]
            for group, latest in self._latest.items()
        }


def check_orders(reports: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Return if no two ranks issued different operations under one number of one group.

    A rank that stopped before another one did is no mismatch. Raises IssueOrderMismatch, the same one on every rank
    that has the same reports.

    Args:
        reports: rank name -> what its ``IssueOrder.report`` answered.
    """
    for (one, left), (other, right) in combinations(sorted(reports.items()), 2):
        for group in sorted(set(left) & set(right)):
            mine, theirs = _numbered(left[group]), _numbered(right[group])
            if any(mine[number] != theirs[number] for number in mine.keys() & theirs.keys()):
                raise IssueOrderMismatch(group, {one: left[group], other: right[group]})


class RecordingFabric:
    """A fabric that notes what is issued to it; implements ``seams.Fabric``.

    Args:
        inner: what moves the bytes.
        order: where it is noted.
    """

    def __init__(self, inner: Fabric, order: IssueOrder) -> None:
        self.inner = inner
        self.order = order

    async def open(self, group: Group, deadline_ns: int) -> None:
        """See ``Fabric.open``."""
        self.order.issue(group.key, "open")
        await self.inner.open(group, deadline_ns)

    async def close(self, group: Group) -> None:
        """See ``Fabric.close``; it is no collective."""
        await self.inner.close(group)

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        """See ``Fabric.exchange``."""
        self.order.issue(group.key, f"exchange of {len(vector)}")
        return await self.inner.exchange(group, vector, deadline_ns)

    async def gather(
        self, group: Group, part: Any, sizes: Sequence[int], deadline_ns: int
    ) -> list[Any] | None:
        """See ``Fabric.gather``."""
        self.order.issue(group.key, f"gather of {sum(sizes)} bytes")
        return await self.inner.gather(group, part, sizes, deadline_ns)

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        """See ``Fabric.send``."""
        self.order.issue(group.key, "broadcast")
        await self.inner.send(group, bucket, deadline_ns)

    async def receive(self, group: Group, deadline_ns: int) -> Any:
        """See ``Fabric.receive``."""
        self.order.issue(group.key, "broadcast")
        return await self.inner.receive(group, deadline_ns)


class OrderedTrainer(Trainer):
    """A trainer rank that tells its peers in which order it issues collectives, and compares.

    The orders ride on the votes that end each stage, so every rank finds a mismatch, and the same one: ``update``
    then raises IssueOrderMismatch, in place of an outcome that names a deadline.

    Attributes:
        order: what this rank issues; a training loop that shares a group tells it too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.order = IssueOrder()
        self.verbs.fabric = RecordingFabric(self.verbs.fabric, self.order)

    async def connect(self, deadline_ns: int) -> None:
        """See ``Trainer.connect``; the update's first stage."""
        self.order.begin()
        await super().connect(deadline_ns)

    async def agree(self, stage: str, vote: Vote, deadline_ns: int) -> Verdict:
        """See ``Trainer.agree``; raises IssueOrderMismatch on every rank."""
        told = replace(vote, data={**vote.data, "issued": self.order.report()})
        verdict = await super().agree(stage, told, deadline_ns)
        check_orders({rank: one.data.get("issued", {}) for rank, one in verdict.votes.items()})
        return verdict


def _numbered(ops: Sequence[str]) -> dict[int, str]:
    return {int(number): op for number, _, op in (text.partition(" ") for text in ops)}
