"""The ledger names the hop, the parameter, the attribute, what was found and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from weightsync.reference.attribute_ledger import AttributeLedger
from weightsync.reference.attributes import ATTRIBUTES, TP_ATTRIBUTES
from weightsync.reference.errors import AttributeMismatch, PlanMismatch
from weightsync.reference.params import TPAttributes, backfill, carry, fresh_copy, read
from weightsync.reference.shards import join
from weightsync.reference.snapshot import SnapshotSlots
from weightsync.reference.steps import run
from weightsync.testing.copies import DROPPING, KEEPING
from weightsync.testing.strategies import ShardedParam, sharded_params, tp_attributes

COLUMN = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2, "parallel_mode": "column"}
Params = Mapping[str, Tensor]


def live_params(**attributes: TPAttributes) -> dict[str, Tensor]:
    return {
        name: values.stamp(Parameter(torch.zeros(4, 6, dtype=torch.bfloat16)))
        for name, values in attributes.items()
    }


def snapshot(params: Params) -> Params:
    slots = SnapshotSlots({name: tensor.dtype for name, tensor in params.items()})
    run(slots.write(0, params))
    return slots.tensors(0)


HOPS: dict[str, Callable[[Params], Params]] = {
    "snapshot": snapshot,
    "move to the device": lambda params: {n: fresh_copy(t, device="meta") for n, t in params.items()},
    "fp32 master": lambda params: {n: fresh_copy(t, dtype=torch.float32) for n, t in params.items()},
}


@given(first=tp_attributes(), second=tp_attributes(), order=st.permutations(["snapshot", "fp32 master"]))
def test_the_hops_of_this_package_pass_one_after_the_other(
    first: TPAttributes, second: TPAttributes, order: list[str]
) -> None:
    params: Params = live_params(a=first, b=second)
    ledger = AttributeLedger(params)
    for hop in (*order, "move to the device"):
        before, params = params, HOPS[hop](params)
        ledger.check(hop, params, moved_from=before)


@pytest.mark.parametrize("route", DROPPING)
@given(attributes=tp_attributes())
def test_the_hop_that_drops_attributes_is_named_and_every_lost_one_is_told(
    route: str, attributes: TPAttributes
) -> None:
    params: Params = live_params(a=attributes)
    ledger = AttributeLedger(params)
    for hop in ("snapshot", "fp32 master"):
        before, params = params, {name: DROPPING[route](tensor) for name, tensor in params.items()}
        if attributes.values:
            with pytest.raises(AttributeMismatch) as caught:
                ledger.check(hop, params, moved_from=before)
            assert caught.value.hop == hop
            assert [found[:3] for found in caught.value.findings] == [
                ("a", name, "absent") for name in TP_ATTRIBUTES if name in attributes.values
            ]
        for name in params:
            carry(before[name], params[name])
        ledger.check(hop, params, moved_from=before)


WRONG_COPIES: dict[str, tuple[str, ...]] = {
    "Megatron's table only": tuple(one.name for one in ATTRIBUTES if one.backfilled),
    "what a gather needs only": (
        "tensor_model_parallel",
        "partition_dim",
        "partition_stride",
        "parallel_mode",
    ),
    "what a gradient norm needs only": ("tensor_model_parallel", "allreduce", "shared"),
}


@pytest.mark.parametrize("kept", WRONG_COPIES)
@pytest.mark.parametrize("filled", [False, True], ids=["bare", "defaults filled in"])
def test_a_copy_that_carries_a_shorter_list_is_refused_by_what_it_lacks(kept: str, filled: bool) -> None:
    """The lists of other helpers: each is enough for one reader, and silent for the next."""
    every = {one.name: one.default for one in ATTRIBUTES} | COLUMN | {"allreduce": False, "shared": True}
    params = live_params(w=TPAttributes(every))
    copied = fresh_copy(params["w"])
    for one in ATTRIBUTES:
        if one.name not in WRONG_COPIES[kept]:
            delattr(copied, one.name)
            if filled and one.backfilled:
                setattr(copied, one.name, one.default)
    with pytest.raises(AttributeMismatch) as caught:
        AttributeLedger(params).check("send", {"w": copied})
    found = {finding.attribute for finding in caught.value.findings}
    silent = {one.name for one in ATTRIBUTES if filled and one.backfilled and one.default == every[one.name]}
    assert found == set(TP_ATTRIBUTES) - set(WRONG_COPIES[kept]) - silent


def test_the_error_reads_as_one_sentence_with_everything_in_it() -> None:
    params = live_params(fc1=TPAttributes(COLUMN))
    ledger = AttributeLedger(params)
    sent = fresh_copy(params["fc1"])
    sent.partition_stride = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeMismatch) as caught:
        ledger.check("move to the device", {"fc1": sent})
    assert str(caught.value).startswith(
        "after hop 'move to the device': partition_stride of parameter 'fc1' is 1, expected 2; "
    )


def test_an_attribute_that_a_hop_invented_is_refused() -> None:
    params = live_params(norm=TPAttributes({}))
    ledger = AttributeLedger(params)
    copied = backfill(fresh_copy(params["norm"]), params["norm"], "norm", replicated=True)
    with pytest.raises(
        AttributeMismatch, match="tensor_model_parallel of parameter 'norm' is False, expected absent"
    ):
        ledger.check("snapshot", {"norm": copied})


@pytest.mark.parametrize("route", ["to(same device)", "cpu()", "contiguous()"])
def test_a_move_that_moved_nothing_proves_nothing_and_is_refused(route: str) -> None:
    params = live_params(fc1=TPAttributes(COLUMN))
    moved = {"fc1": KEEPING[route](params["fc1"])}
    ledger = AttributeLedger(params)
    ledger.check("move", moved)  # the trap: the attributes are there
    with pytest.raises(PlanMismatch, match="is the object it was before"):
        ledger.check("move", moved, moved_from=params)


def test_an_attribute_that_comes_late_is_refreshed_and_older_copies_are_refused() -> None:
    """The embedding got its attributes after the first backup was made of it."""
    params = live_params(word=TPAttributes({}), fc1=TPAttributes(COLUMN))
    ledger = AttributeLedger(params)
    old = HOPS["snapshot"](params)
    ledger.check("snapshot", old)
    TPAttributes(COLUMN).stamp(params["word"])
    with pytest.raises(AttributeMismatch, match="refresh the ledger first"):
        ledger.check("next snapshot", HOPS["snapshot"](params))
    assert [found[:2] for found in ledger.refresh(params)] == [("word", name) for name in COLUMN]
    assert ledger.refresh(params) == ()
    with pytest.raises(AttributeMismatch, match="'word' is absent, expected True"):
        ledger.check("attributes copied at the first allocation only", old)
    ledger.check("next snapshot", HOPS["snapshot"](params))


@given(before=tp_attributes(), after=tp_attributes())
def test_a_refresh_takes_additions_and_refuses_losses_and_changes(
    before: TPAttributes, after: TPAttributes
) -> None:
    params = live_params(a=before, b=TPAttributes({}))
    ledger = AttributeLedger(params)
    after.stamp(params["a"])
    TPAttributes(COLUMN).stamp(params["b"])
    if all(name in after.values and after.values[name] == value for name, value in before.values.items()):
        assert len(ledger.refresh(params)) == len(after.values) - len(before.values) + len(COLUMN)
        ledger.check("live", params)
    else:
        with pytest.raises(AttributeMismatch, match="after hop 'refresh'"):
            ledger.refresh(params)
        assert ledger["a"] == before
        assert ledger["b"].values == {}


@given(param=sharded_params())
def test_a_gathered_tensor_no_longer_says_that_it_is_a_shard(param: ShardedParam) -> None:
    layout = param.layout
    for shard in param.shards:
        shard.allreduce = False  # type: ignore[attr-defined]
    ledger = AttributeLedger({"w": param.shards[0]})
    full = join(param.shards, layout.dim, layout.stride, layout.sizes)
    with pytest.raises(AttributeMismatch, match="allreduce of parameter 'w' is absent, expected False"):
        ledger.check("gather", {"w": full}, gathered=True)
    ledger.check("gather", {"w": ledger["w"].uncut().stamp(full)}, gathered=True)
    with pytest.raises(
        AttributeMismatch, match="tensor_model_parallel of parameter 'w' is True, expected absent"
    ):
        ledger.check("gather", {"w": carry(param.shards[0], full)}, gathered=True)


def test_a_parameter_that_vanished_or_was_never_recorded_is_refused() -> None:
    params = live_params(a=TPAttributes({}), b=TPAttributes({}))
    ledger = AttributeLedger(params)
    ledger.check("bucket", {"a": params["a"]}, part=True)
    with pytest.raises(PlanMismatch, match=r"\['b'\] are missing"):
        ledger.check("snapshot", {"a": params["a"]})
    for wrong in (
        lambda: ledger.check("x", {"c": params["a"]}, part=True),
        lambda: ledger.refresh({"c": params["a"]}),
    ):
        with pytest.raises(PlanMismatch, match="'c' is not in the ledger"):
            wrong()


def test_the_ledger_keeps_its_own_values() -> None:
    params = live_params(a=TPAttributes({"partition_sizes": [1, 2]}))
    ledger = AttributeLedger(params)
    params["a"].partition_sizes.append(3)  # type: ignore[attr-defined]
    assert read(params["a"]) != ledger["a"]
    with pytest.raises(AttributeMismatch, match=r"is \[1, 2, 3\], expected \[1, 2\]"):
        ledger.refresh(params)
