"""Push schedules that are wrong in one method each; runs with pushes in the background must find every one."""

from __future__ import annotations

from weightsync.reference.push import Pushed, PushSchedule


class LosesTheFinalError(PushSchedule):
    """Closes without joining, since no publication follows that would."""

    async def close(self) -> tuple[Pushed, ...]:
        """Gives up what is under way."""
        task, self._task = self._task, None
        self._closed = True
        await self.trainer.fanout.stop(task)
        await self.trainer.close()
        return ()


class SwallowsErrors(PushSchedule):
    """Takes a push that ended with an error for none."""

    async def join(self) -> tuple[Pushed, ...]:
        """Drops the error."""
        try:
            return await super().join()
        except Exception:
            return ()


class ForgetsToJoin(PushSchedule):
    """Starts a push while the one before is under way."""

    async def publish(
        self, step: int, *, last: int | None = None, evaluates: bool = False
    ) -> tuple[Pushed, ...]:
        """Does not wait for the slot to be free."""
        before, self._task = self._task, None
        ended = await super().publish(step, last=last, evaluates=evaluates)
        if before is not None:
            running, self._task = self._task, before
            ended += await self.join()
            self._task = running
        return ended


class GoesOnAtOnce(PushSchedule):
    """Lets the trainer go on before the snapshot is taken."""

    async def _start(self, step: int) -> None:
        """Does not wait."""
        verbs = self.trainer.verbs
        self._task = verbs.spawn(self._push(verbs.clock.future()), f"push {step}")


WRONG_SCHEDULES: tuple[type[PushSchedule], ...] = (
    LosesTheFinalError,
    SwallowsErrors,
    ForgetsToJoin,
    GoesOnAtOnce,
)
