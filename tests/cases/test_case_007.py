"""Fault case 007: weights that are tied on the trainer and two separate matrices in the engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightsync.reference.buckets import DELTA, Heading, Range, RangeSpec, pack_bucket
from weightsync.reference.delta import diff
from weightsync.reference.digest import wrap
from weightsync.reference.encoding import Encoding
from weightsync.reference.layouts import cut, plain
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, int_view, same_bits
from weightsync.reference.placement import rollout_aliases
from weightsync.reference.steps import run
from weightsync.reference.target import Target

EMBEDDING = ParamMeta("model.embed_tokens.weight", torch.bfloat16, (3, 1))
NESTED = ParamMeta("mtp.lm_head.weight", torch.bfloat16, (3, 1))
TENSORS = (EMBEDDING, NESTED)
NUMBERS = {meta.name: number for number, meta in enumerate(TENSORS)}
TIED = {"lm_head.weight": EMBEDDING.name}
OLD = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.bfloat16)
NEW = torch.tensor([[9.0], [2.0], [3.0]], dtype=torch.bfloat16)


def target_of(weights: dict[str, Tensor], aliases: dict[str, str]) -> Target:
    maps = {meta.name: cut(plain(meta), meta.name, NUMBERS) for meta in TENSORS}
    return Target(TENSORS, maps, weights, aliases)


def separate() -> dict[str, Tensor]:
    return {EMBEDDING.name: OLD.clone(), "lm_head.weight": OLD.clone(), NESTED.name: OLD.clone()}


def push(target: Target, *changed: ParamMeta) -> None:
    ranges = []
    for meta in changed:
        patch = diff(meta, NEW, OLD)
        spec = RangeSpec(NUMBERS[meta.name], Encoding.INT32, 0, patch.nnz)
        ranges.append(Range(spec, patch.positions, int_view(patch.values)))
    decoded = run(target.decode(pack_bucket(Heading(DELTA, epoch=1, base=1, version=2), ranges, TENSORS)))
    run(target.validate(decoded, version=2, base=1, epoch=1, sequence=0))
    run(target.apply(decoded, undo=True))


def test_one_patch_under_the_first_name_reaches_both_matrices() -> None:
    """Fault case 007: the tied weight is sent once; a nested head of its own is left alone."""
    target = target_of(separate(), TIED)
    push(target, EMBEDDING)
    assert same_bits(target.weights[EMBEDDING.name], NEW)
    assert same_bits(target.weights["lm_head.weight"], NEW)
    assert same_bits(target.weights[NESTED.name], OLD)
    run(target.rollback())
    assert all(same_bits(weight, OLD) for weight in target.weights.values())


def test_a_head_that_only_ends_like_a_tied_one_is_still_sent() -> None:
    """Fault case 007: ties are declared by whole names, never guessed from a suffix."""
    target = target_of(separate(), TIED)
    push(target, NESTED)
    assert same_bits(target.weights[NESTED.name], NEW)
    assert same_bits(target.weights["lm_head.weight"], OLD)


@pytest.mark.parametrize("stale", ["lm_head.weight", EMBEDDING.name])
def test_the_digest_tells_of_a_copy_that_stayed_old(stale: str) -> None:
    """Fault case 007: what the fault leaves behind is seen, on whichever side of the tie."""
    right, wrong = target_of(separate(), TIED), target_of(separate(), TIED)
    push(right, EMBEDDING)
    push(wrong, EMBEDDING)
    assert run(wrong.digest()) == run(right.digest())
    wrong.weights[stale].copy_(OLD)
    assert wrap(run(wrong.digest(afresh=True)) - run(right.digest())) != 0


def test_the_fault_itself_two_names_and_no_tie_leaves_the_head_old() -> None:
    """Fault case 007: without the declaration nothing reaches the second matrix, and it is named as unsent."""
    target = target_of(separate(), {})
    push(target, EMBEDDING)
    assert same_bits(target.weights["lm_head.weight"], OLD)
    assert target.unsent == ("lm_head.weight",)


def test_a_tied_model_sends_its_head_under_one_name() -> None:
    """Fault case 007: the checkpoint of a tied model lists no head, and the rollout's alias says where it is."""
    model = ModelShape(
        vocab=3, hidden=1, intermediate=2, layers=1, heads=1, kv_heads=1, head_dim=1, tied=True
    )
    assert [meta.name for meta in model.tensors() if meta.shape[0] == 3] == [EMBEDDING.name]
    assert rollout_aliases(model) == TIED
