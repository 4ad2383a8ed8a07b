"""Fault case 013: an update without a change, which must move the version and nothing else."""

from __future__ import annotations

import pytest
import torch

from weightsync.reference.buckets import DELTA, END, END_BYTES, Heading, Range, RangeSpec, pack_bucket
from weightsync.reference.delta import apply, diff
from weightsync.reference.encoding import Encoding
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta, same_bits
from weightsync.reference.plan import TransferPlan
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.byhand import deliver, make_update
from weightsync.testing.twosides import cut_map

W = ParamMeta("w", torch.bfloat16, (3,))
FIRST = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)


def test_a_patch_of_nothing_is_whole() -> None:
    """Fault case 013: no concatenation of an empty list."""
    patch = diff(W, FIRST, FIRST.clone())
    assert patch.nnz == 0
    target = FIRST.clone()
    assert apply(patch, target) == 0
    assert same_bits(target, FIRST)


def test_nothing_changed_then_one_element() -> None:
    """Fault case 013: version 2 is a trailer alone, proved by its digest; version 3 is exactly position 0."""
    live = {"p0": FIRST.clone()}
    row_map = cut_map(W, 0, None, 0, 1)
    plan = TransferPlan((W,), ((row_map,),), 1000)
    source = Source(plan, 0, live)
    targets = [Target((W,), {"p0": row_map}, {"p0": torch.zeros_like(FIRST)}) for _ in range(2)]
    first = make_update(plan, [source], slot=0, version=1)
    second = make_update(plan, [source], slot=1, base_slot=0, version=2, base=1)
    live["p0"][0] = 5.0
    third = make_update(plan, [source], slot=0, base_slot=1, version=3, base=2)

    assert second.counts == (0,)
    assert [bucket.header.kind for bucket in second.buckets] == [END]
    assert second.buckets[0].nbytes == END_BYTES == plan.update_bytes((0,))
    assert second.digest == first.digest
    assert third.counts == (1,)
    assert run(source.diff(0, 1)).patches[0][0].tolist() == [0]
    for target in targets:
        for update in (first, second):
            deliver(target, update)
            run(target.commit())
            assert same_bits(target.weights["p0"], FIRST)
            assert run(target.digest()) == update.digest
        deliver(target, third)
        assert target.weights["p0"].tolist() == [5.0, 2.0, 3.0]
        assert run(target.digest()) == third.digest


def test_a_bucket_that_names_nothing_known_is_an_error() -> None:
    """Fault case 013: unlike an empty update, a payload whose names match nothing is refused."""
    other = (W, ParamMeta("v", torch.bfloat16, (3,)))
    spec = RangeSpec(1, Encoding.DENSE, 0, 3)
    bits = torch.zeros(3, dtype=torch.int16)
    stray = pack_bucket(Heading(DELTA, 1, 1, 2), [Range(spec, None, bits)], other)
    target = Target((W,), {"p0": cut_map(W, 0, None, 0, 1)}, {"p0": FIRST.clone()})
    with pytest.raises(PatchMismatch, match="range names tensor 1, expected 0 to 0"):
        run(target.decode(stray))
