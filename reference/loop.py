"""The hybrid training loop as a protocol: forwards under other weights, merge, train, snapshot, push, next.

It decides the order and whose weights are live; what a step computes are the caller's callables. Every trainer rank
runs it, in the same order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from weightsync.reference.errors import PlanMismatch, TagError
from weightsync.reference.push import Pushed, PushSchedule
from weightsync.reference.tags import TaggedSnapshots

Batch = TypeVar("Batch")
Scores = TypeVar("Scores")

ACTOR, OLD_ACTOR = "actor", "old_actor"


@dataclass(frozen=True)
class LoopParts(Generic[Batch, Scores]):
    """What a step computes. All are called on every rank, in this order.

    Attributes:
        collect: from the number of the step, from 1, to what it learns from; waits for the rollouts.
        forward: tag and batch to scores, under the weights of that tag, which are live meanwhile.
        merge: the batch and the scores by tag to what is trained on.
        train: takes one optimizer step on that; changes the live parameters of the actor in place.
        evaluates: True when an evaluation follows a step, which needs its weights on the rollouts.
    """

    collect: Callable[[int], Awaitable[Batch]]
    forward: Callable[[str, Batch], Awaitable[Scores]]
    merge: Callable[[Batch, Mapping[str, Scores]], Batch]
    train: Callable[[int, Batch], Awaitable[None]]
    evaluates: Callable[[int], bool] = lambda step: False


class HybridLoop(Generic[Batch, Scores]):
    """The loop of one trainer rank.

    Args:
        snapshots: weights by tag; the actor's are live, and backed up once the loop starts.
        schedule: of this rank; its settings say ``old_actor`` when that tag is in use.
        parts: what a step computes.
        forwards: the tags under which each batch is scored, such as ``("ref", "teacher", "actor")``.
        ref_interval: copy the actor to ``ref`` every so many steps; None never.

    Raises:
        PlanMismatch: an option cannot apply: a tag is scored twice, ``ref`` is refreshed and not scored, or
            ``old_actor`` is scored and the schedule does not know of it.
    """

    def __init__(
        self,
        snapshots: TaggedSnapshots,
        schedule: PushSchedule,
        parts: LoopParts[Batch, Scores],
        forwards: Sequence[str] = (ACTOR,),
        ref_interval: int | None = None,
    ) -> None:
        if len(set(forwards)) != len(forwards):
            raise PlanMismatch(f"forwards {list(forwards)} name a tag twice, expected each once")
        if ref_interval is not None and (ref_interval <= 0 or "ref" not in forwards):
            raise PlanMismatch(
                f"ref_interval is {ref_interval} with forwards {list(forwards)}, expected 1 or more steps and 'ref' "
                "among the forwards; nothing would read what is copied"
            )
        settings = schedule.settings
        if OLD_ACTOR in forwards and not (settings.old_actor or settings.correction == "old-actor"):
            raise PlanMismatch(
                "forwards name 'old_actor' and the push settings do not, expected old_actor = True there; a push in "
                "the background would race with its queue"
            )
        self.snapshots = snapshots
        self.schedule = schedule
        self.parts = parts
        self.forwards = tuple(forwards)
        self.ref_interval = ref_interval

    async def run(self, steps: int) -> tuple[Pushed, ...]:
        """Take ``steps`` optimizer steps; every push, in order. The rollouts are released, however it ends.

        Raises what a part or a push raised; when both did, the part's, and the push's error is a note on it.
        """
        found: list[Pushed] = []
        try:
            if self.snapshots.active != ACTOR:
                raise TagError(
                    f"the live model holds {self.snapshots.active!r}, expected 'actor'; switch to it first"
                )
            self.snapshots.backup(ACTOR)
            for step in range(1, steps + 1):
                found += await self._step(step, steps)
        except BaseException as error:
            try:
                await self.schedule.close()
            except Exception as other:
                error.add_note(f"closing the push schedule failed as well: {other!r}")
            raise
        return (*found, *await self.schedule.close())

    async def _step(self, step: int, last: int) -> tuple[Pushed, ...]:
        tags, parts = self.snapshots, self.parts
        batch = await parts.collect(step)
        scores = {}
        for tag in self.forwards:
            tags.switch(tag)
            scores[tag] = await parts.forward(tag, batch)
        tags.switch(ACTOR)
        merged = parts.merge(batch, scores)
        if OLD_ACTOR in self.forwards:
            tags.copy(ACTOR, OLD_ACTOR)
        await parts.train(step, merged)
        tags.backup(ACTOR)
        if self.ref_interval is not None and step % self.ref_interval == 0:
            tags.copy(ACTOR, "ref")
        return await self.schedule.publish(step, last=last, evaluates=parts.evaluates(step))
