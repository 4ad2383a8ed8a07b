"""``check_weight_sync`` names what wrong pushes lose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightsync.reference.params import fresh_copy, int_view
from weightsync.testing.changes import KINDS
from weightsync.testing.check_weight_sync import check_weight_sync

State = dict[str, Tensor]


def trainer(dtype: torch.dtype = torch.bfloat16) -> State:
    """Three tensors, the second one strided; with attributes."""
    stream = torch.Generator().manual_seed(1)
    made = {
        "first": torch.rand(7, generator=stream).to(dtype),
        "strided": torch.rand(4, 6, generator=stream).to(dtype).t()[1:4],
        "scalar": torch.rand((), generator=stream).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "last": torch.rand(2, 5, generator=stream).to(dtype),
    }
    made["last"].partition_dim = 1  # type: ignore[attr-defined]
    return made


class Rollout:
    """A rollout and a right push to it: what changed in any bit is copied."""

    def __init__(self) -> None:
        self.weights: State = {}

    def __call__(self, live: State) -> None:
        for name, tensor in live.items():
            self.weights.setdefault(name, torch.zeros(tensor.shape, dtype=tensor.dtype))
            self.move(name, tensor, self.weights[name])

    def move(self, name: str, new: Tensor, held: Tensor) -> None:
        bits, old = int_view(new), int_view(held)
        changed = self.changed(new.contiguous().reshape(-1), held.reshape(-1))
        old[changed] = bits[changed]

    def changed(self, new: Tensor, held: Tensor) -> Tensor:
        return int_view(new) != int_view(held)


class ComparesValues(Rollout):
    def changed(self, new: Tensor, held: Tensor) -> Tensor:
        return new != held


class TreatsNanAsUnchanged(Rollout):
    def changed(self, new: Tensor, held: Tensor) -> Tensor:
        return super().changed(new, held) & ~new.isnan()


class CallsAllNansEqual(Rollout):
    def changed(self, new: Tensor, held: Tensor) -> Tensor:
        return super().changed(new, held) & ~(new.isnan() & held.isnan())


class Tolerates(Rollout):
    def changed(self, new: Tensor, held: Tensor) -> Tensor:
        return ~torch.isclose(new, held, rtol=0.05, equal_nan=False) | (
            super().changed(new, held) & (new == 0)
        )


class ForgetsTheLastTensor(Rollout):
    def __call__(self, live: State) -> None:
        super().__call__(live if not self.weights else {n: t for n, t in live.items() if n != "last"})


class StopsShort(Rollout):
    def move(self, name: str, new: Tensor, held: Tensor) -> None:
        before = int_view(held).clone()
        super().move(name, new, held)
        if before.any():
            int_view(held)[-1:] = before[-1:]


class ReadsStridesAsMemory(Rollout):
    def move(self, name: str, new: Tensor, held: Tensor) -> None:
        super().move(name, torch.as_strided(new, new.shape, held.stride()), held)


class Aliases(Rollout):
    def __call__(self, live: State) -> None:
        self.weights = {name: tensor.detach() for name, tensor in live.items()}


class SendsTheSnapshotBefore(Rollout):
    def __init__(self) -> None:
        super().__init__()
        self.snapshot: State | None = None

    def __call__(self, live: State) -> None:
        now = {name: fresh_copy(tensor) for name, tensor in live.items()}
        super().__call__(self.snapshot or now)
        self.snapshot = now


class NeverMovesItsBaseline(Rollout):
    def __init__(self) -> None:
        super().__init__()
        self.baseline: State = {}

    def move(self, name: str, new: Tensor, held: Tensor) -> None:
        base = self.baseline.setdefault(name, fresh_copy(new))
        if not int_view(held).any():
            super().move(name, new, held)
        changed = int_view(new) != int_view(base)
        int_view(held)[changed] = int_view(new)[changed]


class TouchesOthers(Rollout):
    def __call__(self, live: State) -> None:
        known = bool(self.weights)
        super().__call__(live)
        if known:
            int_view(self.weights["last"])[0] ^= 1


class Mangles(Rollout):
    def move(self, name: str, new: Tensor, held: Tensor) -> None:
        fresh = bool(int_view(held).any())
        super().move(name, new, held)
        if fresh:
            int_view(held)[:] ^= 2


class Replaces(Rollout):
    def __call__(self, live: State) -> None:
        super().__call__(live)
        del live["scalar"]


class WritesTheTrainer(Rollout):
    def __call__(self, live: State) -> None:
        super().__call__(live)
        live["first"].nan_to_num_()


class DropsAttributes(Rollout):
    def __call__(self, live: State) -> None:
        super().__call__(live)
        live["last"] = live["last"].clone()


class Widens(Rollout):
    def __call__(self, live: State) -> None:
        super().__call__({name: tensor.float() for name, tensor in live.items()})


class ForgetsAName(Rollout):
    def __call__(self, live: State) -> None:
        super().__call__({name: tensor for name, tensor in live.items() if name != "scalar"})


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (
            ComparesValues,
            "signed zero",
            ["0.0 became -0.0", "0x0000 (0.0)", "expected 0x8000 (-0.0)", "lost"],
        ),
        (
            TreatsNanAsUnchanged,
            "NaN",
            ["became NaN", "expected 0x7fc0 (nan)", "the rollout kept the old bits"],
        ),
        (CallsAllNansEqual, "NaN", ["another payload", "0x7fc0 (nan)", "expected 0xffff (nan)"]),
        (Tolerates, "lowest bit", ["in its lowest bit", "the rollout kept the old bits"]),
        (ForgetsTheLastTensor, "last tensor", ["tensor 'last'", "10 of its 10 changes were lost"]),
        (StopsShort, "last element", ["tensor 'first'", "at position 6", "1 of its 1 changes were lost"]),
        (ReadsStridesAsMemory, "nothing", ["push 1", "tensor 'strided'", "did not bring it whole"]),
        (Aliases, "one element", ["before push 2", "shares memory with the trainer"]),
        (SendsTheSnapshotBefore, "one element", ["1 of its 1 changes were lost"]),
        (NeverMovesItsBaseline, "back", ["went back", "the rollout kept the old bits"]),
        (
            TouchesOthers,
            "first tensor",
            ["tensor 'last'", "nothing changed there, and the push overwrote it"],
        ),
        (Mangles, "all elements", ["bits arrived that are neither the trainer's new ones nor the old ones"]),
        (WritesTheTrainer, "NaN", ["changed the trainer's own tensor 'first'", "a push only reads it"]),
        (DropsAttributes, "nothing", ["trainer's tensor 'last'", "{'partition_dim': 1}", "carry them"]),
        (Replaces, "nothing", ["left the trainer nothing in place of its tensor 'scalar'"]),
        (Widens, "nothing", ["'first' is torch.float32 [7]", "expected torch.bfloat16 [7]"]),
        (ForgetsAName, "nothing", ["'scalar' is missing"]),
    ],
)
def test_a_wrong_push_is_caught_by_name(wrong: type[Rollout], kind: str, says: list[str]) -> None:
    kinds = ["all elements", kind] if kind == "back" else [kind]
    rollout = wrong()
    with pytest.raises(AssertionError) as error:
        check_weight_sync(trainer, rollout, lambda: rollout.weights, kinds=kinds)
    for words in says:
        assert words in str(error.value)
    other = wrong()
    with pytest.raises(AssertionError):
        check_weight_sync(trainer, other, lambda: other.weights, seed=1)


def test_a_stale_push_is_recognised_when_several_tensors_changed() -> None:
    rollout = SendsTheSnapshotBefore()
    with pytest.raises(AssertionError, match="the rollout holds the state of the push before"):
        check_weight_sync(trainer, rollout, lambda: rollout.weights, kinds=["all elements"])


def test_the_message_names_place_bits_and_seed() -> None:
    rollout = StopsShort()
    with pytest.raises(AssertionError) as error:
        check_weight_sync(
            lambda: {"w": torch.ones(2, 3)}, rollout, lambda: rollout.weights, kinds=["last element"]
        )
    said = str(error.value)
    assert said.startswith(
        "after push 2 (seed 0, kind 'last element': the last element of each tensor changed): "
    )
    assert "tensor 'w' has 0x3f800000 (1.0) at position 5 (index (1, 2)), expected 0x" in said


def test_each_of_several_rollouts_is_looked_at() -> None:
    right, wrong = Rollout(), ForgetsTheLastTensor()

    def push(live: State) -> None:
        right(live)
        wrong(live)

    with pytest.raises(AssertionError, match="rollout 1, tensor 'last'"):
        check_weight_sync(trainer, push, lambda: [right.weights, wrong.weights])


def test_known_failures_can_be_left_out() -> None:
    rollout = ComparesValues()
    kinds = [kind for kind in KINDS if kind != "signed zero"]
    check_weight_sync(trainer, rollout, lambda: rollout.weights, kinds=kinds)
