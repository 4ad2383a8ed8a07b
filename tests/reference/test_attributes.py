"""The table of attributes is whole and consistent, handles stay behind, defaults never hide a loss."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from weightsync.reference.attributes import ATTRIBUTES, BY_NAME, HANDLES, TP_ATTRIBUTES
from weightsync.reference.errors import MissingTPAttributes, UnsupportedCapability
from weightsync.reference.params import TPAttributes, backfill, carry, fresh_copy, read, require
from weightsync.testing.strategies import tp_attributes

TABLE = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "expert_tp": False,
    "is_qkv": False,
    "qkv_split_shapes": None,
}
SHARD = {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 2}


def parameter(**values: object) -> Parameter:
    made = Parameter(torch.zeros(2, 4))
    TPAttributes(values).stamp(made)
    return made


class Group:
    """Like a process group: it cannot be copied."""

    def __deepcopy__(self, memo: object) -> Group:
        raise TypeError("cannot pickle 'ProcessGroup' object")


def test_no_name_is_listed_twice_and_no_handle_is_carried() -> None:
    assert len(set(TP_ATTRIBUTES)) == len(TP_ATTRIBUTES) == len(BY_NAME)
    assert set(HANDLES) & set(TP_ATTRIBUTES) == set()


def test_every_row_says_what_it_means_who_sets_it_and_who_reads_it() -> None:
    for attribute in ATTRIBUTES:
        assert attribute.meaning
        assert attribute.set_by
        assert attribute.read_by


def test_the_defaults_to_fill_in_are_megatrons_six() -> None:
    assert {one.name: one.default for one in ATTRIBUTES if one.backfilled} == TABLE


def test_properties_answer_with_the_tables_defaults() -> None:
    empty = TPAttributes({})
    for name in ("partition_dim", "partition_stride", "partition_sizes", "parallel_mode"):
        assert getattr(empty, name) == BY_NAME[name].default
    assert empty.sharded == BY_NAME["tensor_model_parallel"].default


@pytest.mark.parametrize("handle", HANDLES)
def test_handles_of_the_live_parameter_reach_no_copy(handle: str) -> None:
    live = parameter(**SHARD)
    setattr(live, handle, torch.ones(1))
    assert not hasattr(fresh_copy(live), handle)
    assert not hasattr(carry(live, torch.empty(2, 4)), handle)
    with pytest.raises(ValueError, match=handle):
        TPAttributes({handle: None})


@pytest.mark.parametrize("name", [one.name for one in ATTRIBUTES if one.reference])
def test_a_process_group_is_carried_as_the_same_object(name: str) -> None:
    group = Group()
    copied = fresh_copy(fresh_copy(parameter(**{name: group})))
    assert getattr(copied, name) is group
    with pytest.raises(TypeError):
        deepcopy(group)


@given(attributes=tp_attributes())
def test_a_gathered_tensor_keeps_all_but_the_cut(attributes: TPAttributes) -> None:
    kept = attributes.uncut()
    assert not kept.sharded
    assert set(kept.values) == {name for name in attributes.values if not BY_NAME[name].cut}
    assert kept.uncut() == kept


def test_a_gtp_shard_is_refused_where_a_tp_shard_is_expected() -> None:
    shard = parameter(**SHARD, is_gtp_weight_remat=True, pad_length=1)
    with pytest.raises(UnsupportedCapability, match=r"'fc1\.weight' is a GTP shard of shape \[2, 4\]"):
        require(shard, "fc1.weight", full_shape=(2, 8))


@given(attributes=tp_attributes(), declared=st.booleans())
def test_backfill_keeps_every_real_attribute_and_adds_only_missing_defaults(
    attributes: TPAttributes, declared: bool
) -> None:
    live, copied = parameter(**attributes.values), torch.empty(2, 4)
    lost = "tensor_model_parallel" not in attributes.values
    if (lost and not declared) or (attributes.sharded and declared):
        with pytest.raises(MissingTPAttributes, match=r"'w'"):
            backfill(copied, live, "w", replicated=declared)
        assert read(copied).values == {}
        return
    assert backfill(copied, live, "w", replicated=declared) is copied
    assert dict(read(copied).values) == {**TABLE, **attributes.values}
    assert read(live) == attributes
    assert backfill(live, live, "w", replicated=declared) is live
    assert read(live) == read(copied)


def test_backfill_over_defaults_that_came_too_early_puts_the_real_ones_back() -> None:
    copied = parameter(**TABLE)
    backfill(copied, parameter(**SHARD), "w")
    assert dict(read(copied).values) == {**TABLE, **SHARD}


def test_backfill_refuses_a_source_that_lost_what_the_copy_still_has() -> None:
    copied = parameter(**SHARD, shared=True)
    with pytest.raises(MissingTPAttributes, match=r"has lost \['shared'\]"):
        backfill(copied, parameter(**SHARD), "w")
    with pytest.raises(MissingTPAttributes, match=r"has lost \['tensor_model_parallel', "):
        backfill(copied, parameter(), "w", replicated=True)
    assert read(copied).values == {**SHARD, "shared": True}


def test_the_wrong_order_itself_turns_a_loud_loss_into_a_silent_one() -> None:
    """Defaults on a bare copy of a shard: nothing fails any more where the shapes agree."""
    bare = parameter(**SHARD).detach()
    with pytest.raises(MissingTPAttributes, match="carries no tensor_model_parallel"):
        require(bare, "w", full_shape=(2, 4))
    TPAttributes(TABLE).stamp(bare)
    assert not require(bare, "w", full_shape=(2, 4)).sharded
    with pytest.raises(MissingTPAttributes):
        backfill(torch.empty(2, 4), parameter(**SHARD).detach(), "w")
