"""Attributes survive every copy, nothing is invented, and bits are compared as integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn import Parameter

from weightsync.reference.errors import MissingTPAttributes, UnsupportedCapability
from weightsync.reference.params import (
    TP_ATTRIBUTES,
    ParamMeta,
    TPAttributes,
    carry,
    compare,
    fresh_copy,
    int_view,
    read,
    require,
    same_bits,
)
from weightsync.testing.copies import DROPPING, KEEPING, Route
from weightsync.testing.strategies import DTYPES, param_metas, special_bits, tensors, tp_attributes

FRESH: dict[str, Route] = {
    "fresh_copy": fresh_copy,
    "fresh_copy(meta)": lambda t: fresh_copy(t, device="meta"),
    "fresh_copy(float32)": lambda t: fresh_copy(t, dtype=torch.float32),
}


def same_attributes(source: Tensor, made: Tensor, attributes: TPAttributes) -> None:
    assert read(made) == attributes
    assert compare(source, made) == ()
    assert [name for name in TP_ATTRIBUTES if hasattr(made, name)] == [
        name for name in TP_ATTRIBUTES if name in attributes.values
    ]


def parameter(attributes: TPAttributes) -> Parameter:
    tensor = Parameter(torch.zeros(4, 6, dtype=torch.bfloat16))
    attributes.stamp(tensor)
    return tensor


@pytest.mark.parametrize("route", DROPPING)
@given(attributes=tp_attributes())
def test_carry_restores_every_attribute_and_invents_none_on_every_copy(
    route: str, attributes: TPAttributes
) -> None:
    source = parameter(attributes)
    made = DROPPING[route](source)
    assert made is not source
    assert read(made).values == {}, "torch began to keep attributes here; the list of routes is out of date"
    assert carry(source, made) is made
    same_attributes(source, made, attributes)


@pytest.mark.parametrize("route", FRESH)
@given(attributes=tp_attributes())
def test_a_fresh_copy_carries_every_attribute_and_invents_none(route: str, attributes: TPAttributes) -> None:
    source = parameter(attributes)
    made = FRESH[route](source)
    assert made is not source
    same_attributes(source, made, attributes)


@pytest.mark.parametrize("route", KEEPING)
def test_operations_that_keep_attributes_still_do(route: str) -> None:
    attributes = TPAttributes({"tensor_model_parallel": True, "partition_sizes": [1, 2]})
    assert read(KEEPING[route](parameter(attributes))) == attributes


@given(before=tp_attributes(), after=tp_attributes())
def test_carrying_again_refreshes_values_and_removes_stale_names(
    before: TPAttributes, after: TPAttributes
) -> None:
    source, snapshot = parameter(before), torch.empty(4, 6)
    carry(source, snapshot)
    after.stamp(source)
    assert read(carry(source, snapshot)) == after


def test_carry_leaves_other_python_attributes_alone() -> None:
    source, snapshot = parameter(TPAttributes({"shared": True})), torch.zeros(2)
    source.main_grad = torch.zeros(1)  # type: ignore[attr-defined]
    snapshot.note = "mine"  # type: ignore[attr-defined]
    carry(source, snapshot)
    assert not hasattr(snapshot, "main_grad")
    assert snapshot.note == "mine"  # type: ignore[attr-defined]


def test_a_list_changed_on_the_live_parameter_does_not_change_the_copy() -> None:
    source = parameter(TPAttributes({"partition_sizes": [1, 2]}))
    snapshot = fresh_copy(source)
    source.partition_sizes.append(3)  # type: ignore[attr-defined]
    assert read(snapshot).values == {"partition_sizes": [1, 2]}
    assert compare(source, snapshot) == (
        "partition_sizes is [1, 2, 3] on the first and [1, 2] on the second",
    )


def test_stamping_two_tensors_gives_each_its_own_list() -> None:
    attributes = TPAttributes({"partition_sizes": [1, 2]})
    first, second = (attributes.stamp(torch.zeros(1)) for _ in range(2))
    first.partition_sizes.append(3)  # type: ignore[attr-defined]
    assert read(second).values == {"partition_sizes": [1, 2]}


def test_carry_onto_itself_changes_nothing() -> None:
    source = parameter(TPAttributes({"allreduce": False}))
    assert carry(source, source) is source
    assert read(source).values == {"allreduce": False}


def test_compare_tells_absent_from_the_default() -> None:
    assert compare(parameter(TPAttributes({"shared": False})), torch.zeros(1)) == (
        "shared is False on the first and absent on the second",
    )


def test_views_answer_with_megatrons_defaults_and_store_none() -> None:
    empty = TPAttributes({})
    assert (empty.sharded, empty.partition_dim, empty.partition_stride) == (False, -1, 1)
    assert (empty.partition_sizes, empty.parallel_mode, dict(empty.values)) == (None, None, {})


def test_the_duplicated_mode_wins_over_the_flag() -> None:
    assert not TPAttributes({"tensor_model_parallel": True, "parallel_mode": "duplicated"}).sharded


def test_unknown_attribute_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'partition_dimension'"):
        TPAttributes({"partition_dimension": 0})


@given(tensor=tensors(strided=True), attributes=tp_attributes())
def test_a_fresh_copy_is_new_contiguous_bit_exact_storage(tensor: Tensor, attributes: TPAttributes) -> None:
    attributes.stamp(tensor)
    made = fresh_copy(tensor)
    assert made is not tensor
    assert made.is_contiguous()
    assert same_bits(made, tensor)
    assert read(made) == attributes
    if tensor.numel():
        assert made.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_the_cpu_trap_is_real_and_fresh_copy_is_out_of_it() -> None:
    live = Parameter(torch.ones(2))
    assert live.to("cpu") is live
    snapshot = fresh_copy(live, device="cpu")
    with torch.no_grad():
        live.mul_(3)
    assert snapshot.tolist() == [1, 1]
    assert not snapshot.requires_grad


def test_a_fresh_copy_of_a_transposed_view_has_row_major_positions() -> None:
    live = torch.arange(6).reshape(2, 3).t()
    assert int_view(fresh_copy(live)).tolist() == [0, 3, 1, 4, 2, 5]
    assert fresh_copy(live).stride() == (2, 1)
    assert int_view(torch.empty_like(live).copy_(live)).tolist() == [0, 3, 1, 4, 2, 5]


@given(tensor=tensors(strided=True))
def test_int_view_shows_the_bits_in_row_major_order(tensor: Tensor) -> None:
    bits = int_view(tensor)
    assert bits.shape == (tensor.numel(),)
    assert bits.is_contiguous()
    assert bits.dtype.itemsize == tensor.dtype.itemsize
    assert not bits.dtype.is_floating_point
    assert same_bits(bits.view(tensor.dtype).reshape(tensor.shape), tensor)


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int_view_of_a_short_strided_slice_can_be_seen_as_bytes(length: int, dtype: torch.dtype) -> None:
    slices = torch.ones(length, dtype=dtype)[::2]
    assert int_view(slices).view(torch.uint8).shape == ((length + 1) // 2 * dtype.itemsize,)


@given(tensor=tensors())
def test_int_view_of_a_contiguous_tensor_writes_through(tensor: Tensor) -> None:
    int_view(tensor).fill_(7)
    assert int_view(tensor).eq(7).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int64, torch.float64, torch.complex64])
def test_int_view_takes_scalars_and_empty_tensors(dtype: torch.dtype) -> None:
    assert int_view(torch.ones((), dtype=dtype)).shape == (1,)
    assert int_view(torch.ones((3, 0), dtype=dtype)).shape == (0,)


def test_int_view_resolves_a_lazy_conjugate() -> None:
    tensor = torch.tensor([1 + 2j], dtype=torch.complex64)
    assert torch.equal(int_view(tensor.conj()), int_view(torch.tensor([1 - 2j], dtype=torch.complex64)))


def test_int_view_refuses_elements_wider_than_any_integer() -> None:
    with pytest.raises(UnsupportedCapability, match="16 bytes"):
        int_view(torch.zeros(1, dtype=torch.complex128))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_tells_apart_all_patterns_and_equals_itself(dtype: torch.dtype) -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    patterns = sorted(set(special_bits(dtype)))
    for one in patterns:
        for other in patterns:
            left, right = (torch.tensor([bits], dtype=integers).view(dtype) for bits in (one, other))
            assert same_bits(left, right) == (one == other)


def test_same_bits_needs_the_same_dtype_and_shape() -> None:
    assert not same_bits(torch.zeros(2, dtype=torch.int16), torch.zeros(2, dtype=torch.bfloat16))
    assert not same_bits(torch.zeros(2, 1), torch.zeros(2))


@given(meta=param_metas())
def test_param_meta_counts_what_the_tensor_has(meta: ParamMeta) -> None:
    tensor = torch.zeros(meta.shape, dtype=meta.dtype)
    assert (meta.numel, meta.itemsize) == (tensor.numel(), tensor.element_size())
    assert meta.nbytes == tensor.numel() * tensor.element_size()
    assert ParamMeta.of(meta.name, tensor) == meta


def test_param_meta_of_two_to_the_31_elements_needs_no_memory() -> None:
    assert ParamMeta("w", torch.bfloat16, (2**16, 2**16)).nbytes == 2**33


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "carries no tensor_model_parallel attribute"),
        ({"partition_dim": 0}, "carries no tensor_model_parallel attribute"),
        ({"tensor_model_parallel": True}, "partition_dim -1"),
        ({"tensor_model_parallel": True, "partition_dim": 2}, "partition_dim 2"),
        ({"tensor_model_parallel": False}, "marked as replicated"),
    ],
)
def test_require_names_the_parameter_and_both_shapes(values: dict[str, object], problem: str) -> None:
    tensor = TPAttributes(values).stamp(torch.zeros(2, 6))
    with pytest.raises(MissingTPAttributes) as caught:
        require(tensor, "mlp.fc1.weight", full_shape=(4, 6))
    for part in ("'mlp.fc1.weight'", "[2, 6]", "[4, 6]", problem):
        assert part in str(caught.value)


def test_require_returns_what_is_there() -> None:
    values = {"tensor_model_parallel": True, "partition_dim": 0}
    tensor = TPAttributes(values).stamp(torch.zeros(2, 6))
    assert require(tensor, "w", full_shape=(4, 6)).values == values
