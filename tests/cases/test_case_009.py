"""Fault case 009: strided positions and values are read as if their memory were contiguous."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.delta import SparsePatch, apply
from weightsync.reference.params import ParamMeta, fresh_copy, int_view, same_bits
from weightsync.reference.reshard import execute, reshard, schedule
from weightsync.reference.shards import parts, take
from weightsync.testing.strategies import tensors


def test_strided_positions_and_values_are_read_by_their_elements() -> None:
    """Fault case 009: every second of four; the memory between them must not be sent."""
    positions = torch.tensor([0, 1, 2, 3], dtype=torch.int32)[::2]
    values = torch.tensor([10, 11, 12, 13], dtype=torch.bfloat16)[::2]
    assert int_view(positions).tolist() == [0, 2]
    assert int_view(values).view(torch.bfloat16).tolist() == [10, 12]
    target = torch.zeros(4, dtype=torch.bfloat16)
    int_view(target)[int_view(positions).long()] = int_view(values)
    assert target.tolist() == [10, 0, 12, 0]


@given(tensor=tensors(strided=True))
def test_the_bytes_of_any_strides_are_those_of_the_elements_in_order(tensor: Tensor) -> None:
    """Fault case 009: what leaves the process is a flat byte buffer, whatever the strides were."""
    sent = int_view(tensor).view(torch.uint8)
    elements = [int_view(element.reshape(1).clone()) for element in tensor.reshape(-1)]
    expected = torch.cat([one.view(torch.uint8) for one in elements]) if elements else sent.new_empty(0)
    assert torch.equal(sent, expected)


@given(tensor=tensors(strided=True))
def test_a_snapshot_is_contiguous_where_empty_like_would_not_be(tensor: Tensor) -> None:
    """Fault case 009: positions of a diff are flat in row-major order, so the snapshot is too."""
    snapshot = fresh_copy(tensor)
    assert snapshot.is_contiguous()
    assert same_bits(snapshot, tensor)


def test_a_patch_of_strided_views_writes_the_elements_it_names() -> None:
    """Fault case 009: also into a target that is strided itself."""
    positions = torch.tensor([0, 1, 2, 3], dtype=torch.int32)[::2]
    values = torch.tensor([10, 11, 12, 13], dtype=torch.bfloat16)[::2]
    for target in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)[::2]):
        apply(SparsePatch(ParamMeta.of("w", target), positions, values), target)
        assert target.tolist() == [10, 0, 12, 0]


@given(tensor=tensors(strided=True), world=st.integers(1, 4), data=st.data())
def test_strided_shards_are_resharded_by_their_elements(
    tensor: Tensor, world: int, data: st.DataObject
) -> None:
    """Fault case 009: on both sides of a copy, whatever lies between the elements."""
    dim = data.draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else None
    source, destination = parts(tensor.shape, 1, None), parts(tensor.shape, world, dim)
    made = reshard([tensor], source, destination)
    assert all(same_bits(shard, take(tensor, part)) for shard, part in zip(made, destination, strict=True))
    back = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0]
    execute(schedule(destination, source), made, [back])
    assert same_bits(back, tensor)
