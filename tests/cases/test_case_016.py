"""Fault case 016: a buffer that was never sent is overwritten from memory that holds nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from weightsync.reference.params import ParamMeta, fresh_copy, int_view, same_bits
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.byhand import Update, deliver
from weightsync.testing.twosides import TwoSides, cut_map

W, K = ParamMeta("w", torch.bfloat16, (2,)), ParamMeta("k", torch.float32, (1,))
MASKS = (1, 0x7F, 0x40)


class Receiver(nn.Module):
    """A weight, a buffer in its state and one that is not, as rotary embeddings keep theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("k", torch.ones(1))
        self.register_buffer("r", torch.tensor(0.0188, dtype=torch.bfloat16), persistent=False)

    def live(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def updates(sides: TwoSides, changed: int) -> Iterator[Update]:
    """A full update, and one for each of ``MASKS`` that flips bits of one tensor."""
    yield sides.full()
    for number, mask in enumerate(MASKS):
        flips = [[(0, mask)] if number == changed else [] for number in range(len(sides.metas))]
        sides.train(flips)
        yield sides.delta(version=number + 2, slot=(number + 1) % 2)


def sender(*metas: ParamMeta) -> TwoSides:
    maps = [{f"p{number}": cut_map(meta, number, None, 0, 1) for number, meta in enumerate(metas)}]
    state = [torch.full(meta.shape, 3).to(meta.dtype) for meta in metas]
    return TwoSides(metas, maps, maps, 1 << 20, 1 << 31, state)


def target_of(module: Receiver, *metas: ParamMeta) -> Target:
    names = {meta.name: number for number, meta in enumerate(metas)}
    maps = {meta.name: cut_map(meta, names[meta.name], None, 0, 1) for meta in metas}
    return Target(metas, maps, module.live())


def test_three_updates_of_the_weight_leave_both_buffers_alone_and_name_them() -> None:
    """Fault case 016: only w is sent; k and r keep bits and memory, and are reported."""
    module, sides = Receiver(), sender(W)
    target = target_of(module, W)
    assert target.unsent == ("k", "r")
    before = {name: (fresh_copy(one), one.data_ptr()) for name, one in module.named_buffers()}
    for update in updates(sides, changed=0):
        deliver(target, update)
        run(target.commit())
        assert same_bits(module.w, sides.state[0])
        for name, one in module.named_buffers():
            bits, memory = before[name]
            assert same_bits(one, bits)
            assert one.data_ptr() == memory


def test_a_buffer_in_the_plan_changes_when_it_is_sent_and_only_then() -> None:
    """Fault case 016: k travels like a weight; deltas of w alone do not touch it."""
    for changed in (0, 1):
        module, sides = Receiver(), sender(W, K)
        target = target_of(module, W, K)
        assert target.unsent == ("r",)
        seen = []
        for update in updates(sides, changed):
            deliver(target, update)
            run(target.commit())
            assert same_bits(module.k, sides.state[1])
            assert same_bits(module.w, sides.state[0])
            seen.append(int(int_view(module.k)[0]))
            assert same_bits(module.r, torch.tensor(0.0188, dtype=torch.bfloat16))
        assert len(set(seen)) == (1 if changed == 0 else 1 + len(MASKS))


@pytest.mark.parametrize("stage", [False, True])
def test_taking_an_update_back_leaves_what_was_not_sent_alone(stage: bool) -> None:
    """Fault case 016: rollback restores what was written, from a log of that, not from a copy of all."""
    module, sides = Receiver(), sender(W)
    target = target_of(module, W)
    first, second, *_ = updates(sides, changed=0)
    deliver(target, first)
    run(target.commit())
    held = fresh_copy(module.w)
    module.r.fill_(0.5)  # the engine's own doing, in the middle of an update
    deliver(target, second, stage=stage)
    module.r.fill_(0.25)
    run(target.rollback())
    assert same_bits(module.w, held)
    assert module.r.item() == 0.25
    assert module.k.item() == 1.0
