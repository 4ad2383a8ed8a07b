"""Tagged snapshots: bits and attributes come back, and none of the silent traps of such a store is silent."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.devices import Device, TorchDevice
from weightsync.reference.errors import AttributeMismatch, PlanMismatch, TagError
from weightsync.reference.flat_buffers import ALIGNMENT, FlatBuffers, FlatLayout
from weightsync.reference.params import TPAttributes, compare, int_view, read, same_bits
from weightsync.reference.tags import TaggedSnapshots
from weightsync.testing.stand_in import StandIn
from weightsync.testing.strategies import named_tensors, tp_attributes

SHARD = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})


def flip(params: dict[str, Tensor]) -> None:
    for tensor in params.values():
        bits = tensor.detach().view(int_view(tensor[..., :0] if tensor.ndim else tensor).dtype)
        bits.bitwise_not_()


def store(params: dict[str, Tensor], device: Device | None = None, **places: str) -> TaggedSnapshots:
    said: list[str] = []
    tags = places or {"actor": "host", "ref": "host", "old_actor": "host"}
    return TaggedSnapshots(lambda: params, tags, device or TorchDevice("cpu"), "actor", said.append)  # type: ignore[arg-type]


def plain() -> dict[str, Tensor]:
    return {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor(3, dtype=torch.int16)}


# ---- bits --------------------------------------------------------------------------------------------------------


@given(params=named_tensors(max_size=6))
def test_flat_views_are_aligned_apart_and_of_any_size(params: dict[str, Tensor]) -> None:
    layout = FlatLayout.of(params)
    flat = FlatBuffers(layout, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    assert len(flat.buffers) == len({tensor.dtype for tensor in params.values()})
    for name, tensor in params.items():
        view = flat.views[name]
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
        assert layout.offsets[name] % ALIGNMENT == 0
        int_view(view).copy_(int_view(tensor))
    for name, tensor in params.items():
        assert same_bits(flat.views[name], tensor)
    for dtype, nbytes in layout.nbytes.items():
        ends = sorted((layout.offsets[n], m.nbytes) for n, m in layout.metas.items() if m.dtype == dtype)
        assert all(start + size <= after for (start, size), (after, _) in pairwise(ends))
        assert nbytes >= ends[-1][0] + ends[-1][1]


@given(params=named_tensors(), device=st.sampled_from([TorchDevice("cpu"), StandIn()]), wait=st.booleans())
def test_backup_change_restore_gives_every_bit_back(
    params: dict[str, Tensor], device: Device, wait: bool
) -> None:
    before = {name: tensor.detach().clone() for name, tensor in params.items()}
    tags = store(params, device)
    tags.backup("actor", wait=wait)
    tags.settle()
    flip(params)
    with tags.reading("actor", "a push") as held:
        assert all(same_bits(held[name], tensor) for name, tensor in before.items())
        assert all(held[name].data_ptr() != params[name].data_ptr() for name in held if held[name].numel())
    tags.restore("actor")
    assert all(same_bits(params[name], tensor) for name, tensor in before.items())


def test_two_tags_are_independent_and_memory_is_reused() -> None:
    live = plain()
    tags = store(live)
    tags.backup("actor")
    live["a"].add_(1)
    tags.backup("actor")
    with tags.reading("actor", "test") as held:
        address = held["a"].data_ptr()
    tags.load("ref", lambda: live["a"].fill_(5.0))
    assert (tags.active, tags.tags) == ("ref", ("actor", "ref"))
    tags.switch("actor")
    assert live["a"].tolist() == [2.0, 2.0]
    with tags.reading("actor", "test") as held, tags.reading("ref", "test") as other:
        assert held["a"].data_ptr() == address
        assert other["a"].tolist() == [5.0, 5.0]


def test_what_load_fails_with_leaves_the_former_weights_live() -> None:
    live = plain()
    tags = store(live)
    tags.backup("actor")

    def fill() -> None:
        live["a"].fill_(9.0)
        raise OSError("no such checkpoint")

    with pytest.raises(OSError, match="no such checkpoint"):
        tags.load("ref", fill)
    assert (tags.active, live["a"].tolist(), tags.is_saved()) == ("actor", [1.0, 1.0], True)


# ---- traps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda tags: tags.backup("rfe"),
        lambda tags: tags.restore("rfe"),
        lambda tags: tags.switch("rfe"),
        lambda tags: tags.copy("actor", "rfe"),
        lambda tags: tags.copy("rfe", "ref"),
        lambda tags: tags.drop("rfe"),
        lambda tags: tags.load("rfe", lambda: None),
        lambda tags: tags.reading("rfe", "test").__enter__(),
    ],
)
def test_no_use_of_a_misspelt_tag_makes_one(use: Callable[[TaggedSnapshots], None]) -> None:
    tags = store(plain())
    tags.backup("actor")
    with pytest.raises(TagError, match="'rfe' is unknown"):
        use(tags)
    assert tags.tags == ("actor",)


@pytest.mark.parametrize("use", ["switch", "restore", "drop"])
def test_a_declared_tag_that_holds_nothing_is_no_tag_yet(use: str) -> None:
    tags = store(plain())
    tags.backup("actor")
    with pytest.raises(TagError, match="'ref' holds no weights"):
        getattr(tags, use)("ref")
    with pytest.raises(TagError, match="'ref' holds no weights"):
        tags.copy("ref", "old_actor")


def test_a_copy_to_a_tag_that_held_nothing_is_there() -> None:
    live = plain()
    tags = store(live)
    tags.backup("actor")
    tags.copy("actor", "ref")
    live["a"].fill_(7.0)
    tags.backup("actor")
    tags.switch("ref")
    assert live["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("target", ["actor"])
def test_a_copy_never_leaves_the_live_weights_without_a_tag(target: str) -> None:
    tags = store(plain())
    tags.backup("actor")
    tags.copy("actor", "ref")
    with pytest.raises(TagError, match="another tag"):
        tags.copy("ref", target)


@pytest.mark.parametrize("write", ["in place", "through data", "one bit", "swap"])
def test_a_forgotten_backup_cannot_revert_a_step(write: str) -> None:
    """However the optimizer wrote: version counters would miss two of these."""
    live = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])}
    tags = store(live)
    tags.backup("actor")
    tags.copy("actor", "ref")
    if write == "in place":
        live["a"].mul_(2)
    elif write == "through data":
        live["a"].data[0] = 4.0
    elif write == "one bit":
        live["b"].data.copy_(torch.tensor([-0.0]))
    else:
        live["a"].data.copy_(torch.tensor([2.0, 1.0]))
    stepped = {name: tensor.clone() for name, tensor in live.items()}
    for lose in (lambda: tags.switch("ref"), lambda: tags.load("ref", lambda: None), tags.sleep):
        with pytest.raises(TagError, match=r"would be lost; backup\('actor'\) first"):
            lose()
    assert all(same_bits(live[name], tensor) for name, tensor in stepped.items())
    tags.backup("actor")
    tags.switch("ref")
    tags.switch("actor")
    assert all(same_bits(live[name], tensor) for name, tensor in stepped.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": torch.zeros(3)}, r"'a' is torch.float32 \[3\], was torch.float32 \[2\]"),
        ({"a": torch.zeros(2, dtype=torch.bfloat16)}, "'a' is torch.bfloat16"),
        ({"c": torch.zeros(1)}, "'c' is new"),
    ],
)
def test_changed_parameters_are_refused_before_anything_is_written(
    change: dict[str, Tensor], said: str
) -> None:
    live = plain()
    tags = store(live)
    tags.backup("actor")
    live.update(change)
    for use in (tags.backup, tags.restore):
        with pytest.raises(PlanMismatch, match=said):
            use("actor")
    del live["a"]
    with pytest.raises(PlanMismatch, match="'a' is missing"):
        tags.backup("actor")


# ---- attributes --------------------------------------------------------------------------------------------------


@given(attributes=tp_attributes(), late=tp_attributes())
def test_attributes_that_come_late_are_on_every_tag_and_stay_on_the_live_model(
    attributes: TPAttributes, late: TPAttributes
) -> None:
    live = {"w": torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)}
    attributes.stamp(live["w"])
    tags = store(live)  # type: ignore[arg-type]
    tags.backup("actor")
    tags.copy("actor", "ref")
    now = TPAttributes({**late.values, **attributes.values})
    now.stamp(live["w"])
    for tag in ("actor", "ref"):
        with tags.reading(tag, "test") as held:
            assert read(held["w"]) == now
    tags.switch("ref")
    assert read(live["w"]) == now


def test_a_live_parameter_that_lost_an_attribute_is_refused() -> None:
    live = plain()
    SHARD.stamp(live["a"])
    tags = store(live)
    tags.backup("actor")
    live["a"] = live["a"].clone()
    for use in (tags.backup, tags.restore, lambda tag: tags.reading(tag, "test").__enter__()):
        with pytest.raises(AttributeMismatch, match="partition_dim of parameter 'a' is absent, expected 0"):
            use("actor")


class StampsOnce(TaggedSnapshots):
    """The fault: attributes are carried when memory is allocated, and never again."""

    def _copy(self, source: object, held: object, tag: str) -> None:
        fresh = [view for view in held.buffers.views.values() if read(view) == TPAttributes({})]  # type: ignore[attr-defined]
        super()._copy(source, held, tag)  # type: ignore[arg-type]
        for name, view in held.buffers.views.items():  # type: ignore[attr-defined]
            if all(view is not one for one in fresh):
                TPAttributes({}).stamp(view)
            self._ledger.check(tag, {name: view}, part=True)


def test_stale_attributes_are_seen_after_the_hop() -> None:
    live = plain()
    SHARD.stamp(live["a"])
    tags = StampsOnce(lambda: live, {"actor": "host"}, TorchDevice("cpu"), "actor", [].append)
    tags.backup("actor")
    with pytest.raises(AttributeMismatch, match="after hop 'actor'"):
        tags.backup("actor")


# ---- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_told_per_tag_and_place() -> None:
    live = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(1000)}
    tags = store(live, StandIn(), actor="device", ref="host")
    assert tags.memory() == ()
    tags.backup("actor")
    tags.copy("actor", "ref")
    each = ALIGNMENT + 4096
    assert [(one.tag, one.place, one.nbytes) for one in tags.memory()] == [
        ("actor", "device", each),
        ("ref", "pinned", each),
    ]
    tags.drop("ref")
    assert [one.tag for one in tags.memory()] == ["actor"]


def test_where_pinning_fails_pageable_memory_is_used_and_said() -> None:
    said: list[str] = []
    live = {"a": torch.tensor([float("nan"), -0.0])}
    tags = TaggedSnapshots(
        lambda: live, {"actor": "host", "ref": "host"}, StandIn(pinnable=0), "actor", said.append
    )
    tags.backup("actor")
    tags.copy("actor", "ref")
    assert {one.place for one in tags.memory()} == {"host"}
    assert len(said) == 1
    assert "pinning 256 bytes of host memory for stand-in:0 failed" in said[0]


def test_compare_is_of_the_objects() -> None:
    live = plain()
    SHARD.stamp(live["a"])
    tags = store(live)
    tags.backup("actor")
    with tags.reading("actor", "test") as held:
        assert compare(held["a"], live["a"]) == ()
        with pytest.raises(TypeError):
            held["a"] = live["a"]  # type: ignore[index]
