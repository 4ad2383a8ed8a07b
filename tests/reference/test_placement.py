"""Whole models: trainer and rollouts hold every checkpoint element, built here a second time by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.errors import MissingTPAttributes, PlanMismatch
from weightsync.reference.layouts import RowMap, export, local_tensor, row_maps
from weightsync.reference.megatron import trainer_attributes, trainer_layouts, trainer_maps
from weightsync.reference.model import ModelShape, padded_vocab
from weightsync.reference.params import read, same_bits
from weightsync.reference.placement import rollout_aliases, rollout_maps
from weightsync.testing.strategies import checkpoints, model_shapes

SMALL = ModelShape(
    vocab=10, hidden=8, intermediate=6, layers=2, heads=4, kv_heads=2, head_dim=2, qk_norm=True
)
ATTENTION = "model.layers.0.self_attn"


def build(maps: dict[str, RowMap], checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """One rank's parameters."""
    tensors = list(checkpoint.values())
    return {name: local_tensor(one, [tensors[o] for o in one.outputs]) for name, one in maps.items()}


def check_told_once(maps: list[dict[str, RowMap]], model: ModelShape, checkpoint: dict[str, Tensor]) -> None:
    exported = export(maps, [build(one, checkpoint) for one in maps], model.tensors())
    assert list(exported) == list(checkpoint)
    for name, tensor in checkpoint.items():
        assert same_bits(exported[name], tensor), name


def numbered(model: ModelShape) -> dict[str, Tensor]:
    """A float32 checkpoint in which no two elements are equal."""
    made, start = {}, 1
    for meta in model.tensors():
        made[meta.name] = torch.arange(start, start + meta.numel, dtype=meta.dtype).reshape(meta.shape)
        start += meta.numel
    return made


def sized(**changes: object) -> ModelShape:
    sizes: dict[str, object] = {"vocab": 10, "hidden": 8, "intermediate": 6, "layers": 1, "heads": 4}
    sizes |= {"kv_heads": 2, "head_dim": 2, "dtype": torch.float32}
    return ModelShape(**(sizes | changes))  # type: ignore[arg-type]


@given(data=st.data(), tp=st.integers(1, 4), model=model_shapes(tp=(1, 2, 3, 4)))
def test_the_trainers_ranks_tell_every_element_once(data: st.DataObject, tp: int, model: ModelShape) -> None:
    checkpoint = data.draw(checkpoints(model=model))
    check_told_once([trainer_maps(model, rank, tp) for rank in range(tp)], model, checkpoint)


@given(data=st.data(), tp=st.integers(1, 4), model=model_shapes(tp=(1, 2, 3, 4)), fused=st.booleans())
def test_a_rollouts_ranks_tell_every_element_once(
    data: st.DataObject, tp: int, model: ModelShape, fused: bool
) -> None:
    checkpoint = data.draw(checkpoints(model=model))
    check_told_once([rollout_maps(model, rank, tp, fused) for rank in range(tp)], model, checkpoint)


@given(
    data=st.data(),
    sides=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    model=model_shapes(tp=(1, 2, 3, 4)),
)
def test_elements_told_by_the_trainer_rebuild_any_rollout(
    data: st.DataObject, sides: tuple[int, int], model: ModelShape
) -> None:
    """What goes through checkpoint coordinates element by element is what is built from whole tensors."""
    checkpoint = data.draw(checkpoints(model=model))
    target = rollout_maps(model, sides[1] - 1, sides[1])
    wanted = build(target, checkpoint)
    got = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    for rank in range(sides[0]):
        for name, source in trainer_maps(model, rank, sides[0]).items():
            local = build({name: source}, checkpoint)[name].flatten()
            output, flat = source.to_checkpoint(torch.arange(local.numel()))
            for index, number in enumerate(source.outputs):
                chosen = output == index
                for runtime, one in target.items():
                    if number in one.outputs:
                        held, place = one.to_local(one.outputs.index(number), flat[chosen])
                        got[runtime].view(torch.int16).view(-1)[place] = local[chosen][held].view(torch.int16)
    for name, tensor in wanted.items():
        assert same_bits(got[name], tensor), name


@pytest.mark.parametrize("tp", [1, 2])
def test_trainer_parameters_are_megatrons_own(tp: int) -> None:
    model = sized(qkv_bias=True, tied=False)
    checkpoint = numbered(model)
    shards = [build(trainer_maps(model, rank, tp, vocab_multiple=4), checkpoint) for rank in range(tp)]

    def part(name: str, dim: int = 0, stride: int = 1) -> Tensor:
        blocks = [shard[name].chunk(stride, dim) for shard in shards]
        return torch.cat([block[k] for k in range(stride) for block in blocks], dim)

    q, k, v = (checkpoint[f"{ATTENTION}.{x}_proj.weight"] for x in "qkv")
    fused = torch.cat([q[0:4], k[0:2], v[0:2], q[4:8], k[2:4], v[2:4]])
    assert torch.equal(part("decoder.layers.0.self_attention.linear_qkv.weight"), fused)
    q, k, v = (checkpoint[f"{ATTENTION}.{x}_proj.bias"] for x in "qkv")
    fused = torch.cat([q[0:4], k[0:2], v[0:2], q[4:8], k[2:4], v[2:4]])
    assert torch.equal(part("decoder.layers.0.self_attention.linear_qkv.bias"), fused)
    gate, up = (checkpoint[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(part("decoder.layers.0.mlp.linear_fc1.weight", stride=2), torch.cat([gate, up]))
    down = checkpoint["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(part("decoder.layers.0.mlp.linear_fc2.weight", dim=1), down)
    out = checkpoint[f"{ATTENTION}.o_proj.weight"]
    assert torch.equal(part("decoder.layers.0.self_attention.linear_proj.weight", dim=1), out)
    padded = padded_vocab(10, 4 * tp)
    for runtime, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        whole = part(runtime)
        assert whole.shape == (padded, 8)
        assert torch.equal(whole[:10], checkpoint[name])
    for shard in shards:
        norm = shard["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"]
        assert torch.equal(norm, checkpoint["model.layers.0.input_layernorm.weight"])
        norm = shard["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"]
        assert torch.equal(norm, checkpoint["model.layers.0.post_attention_layernorm.weight"])
        assert torch.equal(shard["decoder.final_layernorm.weight"], checkpoint["model.norm.weight"])


def test_norms_on_heads_have_megatrons_names() -> None:
    maps = trainer_maps(SMALL, 0, 1)
    numbers = SMALL.numbers()
    for which in "qk":
        one = maps[f"decoder.layers.1.self_attention.{which}_layernorm.weight"]
        assert one.outputs == (numbers[f"model.layers.1.self_attn.{which}_norm.weight"],)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_rollout_parameters_are_stacked_per_rank(tp: int) -> None:
    model = sized(qkv_bias=True, tied=False, intermediate=8)
    checkpoint = numbered(model)
    for rank in range(tp):
        held = build(rollout_maps(model, rank, tp), checkpoint)
        for kind in ("weight", "bias"):
            q, k, v = (checkpoint[f"{ATTENTION}.{x}_proj.{kind}"] for x in "qkv")
            shard, shards = (rank // 2, 2) if tp == 4 else (rank, tp)
            stacked = torch.cat([q.chunk(tp)[rank], k.chunk(shards)[shard], v.chunk(shards)[shard]])
            assert torch.equal(held[f"{ATTENTION}.qkv_proj.{kind}"], stacked)
        gate, up, down = (checkpoint[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
        stacked = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        assert torch.equal(held["model.layers.0.mlp.gate_up_proj.weight"], stacked)
        assert torch.equal(held["model.layers.0.mlp.down_proj.weight"], down.chunk(tp, 1)[rank])
        assert held["lm_head.weight"].shape == (64 // tp, 8)
        if rank == 0:
            assert torch.equal(held["lm_head.weight"][:10], checkpoint["lm_head.weight"])
            assert held["lm_head.weight"][10:].eq(0).all()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_plain_rollout_parameters_have_the_checkpoints_names(tp: int) -> None:
    checkpoint = numbered(sized(tied=False))
    held = [build(rollout_maps(sized(tied=False), rank, tp, fused=False), checkpoint) for rank in range(tp)]
    assert sorted(held[0]) == sorted(checkpoint)
    if tp == 1:
        for name, tensor in checkpoint.items():
            assert torch.equal(held[0][name], tensor)
    if tp == 4:
        k = checkpoint[f"{ATTENTION}.k_proj.weight"]
        for rank in range(4):
            assert torch.equal(held[rank][f"{ATTENTION}.k_proj.weight"], k.chunk(2)[rank // 2])


def test_a_tied_head_is_an_alias_and_no_tensor_of_its_own() -> None:
    assert "lm_head.weight" not in SMALL.numbers()
    assert "output_layer.weight" not in trainer_maps(SMALL, 0, 1)
    assert "lm_head.weight" not in rollout_maps(SMALL, 0, 1)
    assert rollout_aliases(SMALL) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert rollout_aliases(sized(tied=False)) == {}


@given(model=model_shapes(tp=(1, 2, 3)), tp=st.sampled_from([1, 2, 3]))
def test_maps_from_live_attributes_are_the_models_maps(model: ModelShape, tp: int) -> None:
    layouts = {name: layout for name, (layout, _) in trainer_layouts(model, tp).items()}
    for rank in range(tp):
        maps = trainer_maps(model, rank, tp)
        params = {name: torch.zeros(one.local_shape, dtype=one.dtype) for name, one in maps.items()}
        for name, attributes in trainer_attributes(model, tp).items():
            attributes.stamp(params[name])
            assert read(params[name]) == attributes
        live = row_maps(layouts, params, rank, tp, model.numbers())
        assert list(live) == list(maps)
        for name, one in maps.items():
            assert torch.equal(live[name].row, one.row)
            assert torch.equal(live[name].tensor, one.tensor)
            assert torch.equal(live[name].owned, one.owned)


def test_every_rank_lists_the_same_names_in_the_same_order_with_the_same_outputs() -> None:
    first, second = (trainer_maps(SMALL, rank, 2) for rank in range(2))
    assert [(name, one.outputs) for name, one in first.items()] == [
        (name, one.outputs) for name, one in second.items()
    ]


def test_a_live_parameter_that_lost_its_attributes_stops_everything() -> None:
    layouts = {name: layout for name, (layout, _) in trainer_layouts(SMALL, 2).items()}
    maps = trainer_maps(SMALL, 0, 2)
    params = {name: torch.zeros(one.local_shape, dtype=one.dtype) for name, one in maps.items()}
    for name, attributes in trainer_attributes(SMALL, 2).items():
        attributes.stamp(params[name])
    lost = "decoder.layers.1.mlp.linear_fc1.weight"
    params[lost] = params[lost].clone()
    with pytest.raises(MissingTPAttributes, match=r"linear_fc1.weight' of local shape \[6, 8\].*\[12, 8\]"):
        row_maps(layouts, params, 0, 2, SMALL.numbers())


def test_wire_order_starts_with_the_embedding_and_ends_with_the_head() -> None:
    names = [meta.name for meta in sized(tied=False, qk_norm=True).tensors()]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert len(names) == len(set(names))
    assert sized().tensors()[1].shape == (8,)


@pytest.mark.parametrize(
    ("vocab", "multiple", "padded"), [(10, 16, 16), (16, 16, 16), (17, 16, 32), (1, 1, 1)]
)
def test_the_vocabulary_is_padded_to_the_next_multiple(vocab: int, multiple: int, padded: int) -> None:
    assert padded_vocab(vocab, multiple) == padded


def test_models_and_cuts_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanMismatch, match="model hidden is 0"):
        sized(hidden=0)
    with pytest.raises(PlanMismatch, match="4 query heads and 3 key/value heads"):
        sized(kv_heads=3)
    with pytest.raises(PlanMismatch, match="4 query heads cannot be cut for 6 ranks"):
        rollout_maps(SMALL, 0, 6)
    with pytest.raises(PlanMismatch, match="4 query heads cannot be cut for 6 ranks"):
        trainer_maps(SMALL, 0, 6)
    with pytest.raises(PlanMismatch, match=r"linear_fc1.weight': a dimension of 12"):
        trainer_maps(SMALL, 0, 4)
    with pytest.raises(PlanMismatch, match="vocabulary 0"):
        padded_vocab(0, 4)
