"""Models of Transformers themselves: captured from their own loading, probed from their own saving, same logits.

Small, random weights, built offline. ``from_pretrained`` and ``save_pretrained`` convert between checkpoint and
runtime tensors on their own, such as experts that are stacked; nothing here says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from weightsync.reference.capture import Captured, capture
from weightsync.reference.digest import state_digest
from weightsync.reference.params import ParamMeta, int_view, same_bits
from weightsync.reference.plan import TransferPlan
from weightsync.reference.probe import Probe, plan_of
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.byhand import deliver, make_update
from weightsync.testing.twosides import cut_map

TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
WORDS = {"input_ids": torch.tensor([[1, 2, 3, 90, 17, 40]])}
PICTURE = {
    "input_ids": torch.tensor([[1, 7, 5, 5, 5, 5, 8, 9, 10]]),
    "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0]]),
    "image_grid_thw": torch.tensor([[1, 4, 4]]),
    "pixel_values": torch.linspace(-1, 1, 16 * 96).reshape(16, 96),
}


@dataclass(frozen=True)
class Family:
    """One kind of model, and what it reads."""

    config: Any
    of: Any
    inputs: Mapping[str, Tensor]

    def make(self, seed: int) -> Any:
        torch.manual_seed(seed)
        make = getattr(self.of, "_from_config" if self.of is not AutoModelForCausalLM else "from_config")
        return make(self.config, dtype=torch.bfloat16).eval()

    def logits(self, model: Any) -> Tensor:
        with torch.no_grad():
            inputs = {
                name: one.to(torch.bfloat16) if one.is_floating_point() else one
                for name, one in self.inputs.items()
            }
            return model(**inputs).logits


def moe() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**TEXT, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)


FAMILIES: dict[str, Callable[[], Family]] = {
    "Llama": lambda: Family(LlamaConfig(**TEXT), AutoModelForCausalLM, WORDS),
    "Qwen3, tied": lambda: Family(Qwen3Config(**TEXT, tie_word_embeddings=True), AutoModelForCausalLM, WORDS),
    "Qwen3-MoE": lambda: Family(moe(), AutoModelForCausalLM, WORDS),
    "Qwen3-VL": lambda: Family(
        Qwen3VLConfig(**TOKENS, text_config={**TEXT, "rope_parameters": ROPE}, vision_config=VISION),
        Qwen3VLForConditionalGeneration,
        PICTURE,
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    transformers.utils.logging.disable_progress_bar()
    return FAMILIES[request.param]()


def runtime(model: Any) -> dict[str, Tensor]:
    """Every parameter and buffer by every name, tied names too."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    """The checkpoint that Transformers writes of a model."""
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def stepped(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint after a step in which one element in twenty changes."""
    generator = torch.Generator().manual_seed(1)
    new = {}
    for name, tensor in checkpoint.items():
        chosen = torch.rand(tensor.shape, generator=generator) < 0.05
        new[name] = torch.where(chosen, tensor * 1.25 + 0.01, tensor)
    return new


def metas_of(checkpoint: Mapping[str, Tensor]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta.of(name, tensor) for name, tensor in checkpoint.items())


def check_delta(
    family: Family,
    live: Any,
    fresh: Any,
    found: Captured,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
) -> None:
    """``live`` holds ``old``; the delta through the capture makes it what loading ``new`` made of ``fresh``."""
    metas = metas_of(old)
    rows = tuple(cut_map(meta, number, None, 0, 1) for number, meta in enumerate(metas))
    plan = TransferPlan(metas, (rows,), 1 << 12)
    params = {f"p{number}": tensor.clone() for number, tensor in enumerate(old.values())}
    source = Source(plan, 0, params)
    make_update(plan, [source], slot=0, version=1)
    for param, tensor in zip(params.values(), new.values(), strict=True):
        int_view(param).copy_(int_view(tensor))
    delta = make_update(plan, [source], slot=1, version=2, base_slot=0, base=1)
    before = family.logits(live)
    target = Target(metas, found.maps, runtime(live), found.aliases)
    assert 0 < deliver(target, delta) < sum(tensor.nbytes for tensor in old.values())
    assert run(target.digest()) == delta.digest == state_digest(zip(metas, new.values(), strict=True))
    expected = runtime(fresh)
    for name, tensor in runtime(live).items():
        assert same_bits(tensor, expected[name]), name
    assert same_bits(family.logits(live), family.logits(fresh))
    assert not same_bits(family.logits(live), before)


def test_a_delta_gives_the_bits_and_logits_of_load_state_dict(family: Family) -> None:
    live, fresh = family.make(0), family.make(1)
    tied = set(live.state_dict()) - {name for name, _ in live.named_parameters()}
    old = {name: tensor.clone() for name, tensor in live.state_dict().items() if name not in tied}
    new = stepped(old)
    found = capture(
        lambda pairs: live.load_state_dict(dict(pairs), strict=False), runtime(live), metas_of(old)
    )
    assert set(found.aliases) == tied
    assert found.untouched == tuple(name for name, _ in live.named_buffers())
    assert (found.ignored, found.overwritten, found.replicas) == ((), {}, {})
    fresh.load_state_dict(new, strict=False)
    check_delta(family, live, fresh, found, old, new)


def test_a_delta_gives_the_bits_and_logits_of_from_pretrained(family: Family, tmp_path: Path) -> None:
    """The checkpoint has its own names: experts one by one."""
    live = family.make(0)
    old = saved(live, tmp_path)
    new = stepped(old)
    (file,) = tmp_path.glob("*.safetensors")

    def loaded(checkpoint: Mapping[str, Tensor]) -> Any:
        save_file(dict(checkpoint), file, metadata={"format": "pt"})
        return family.of.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()

    def load_weights(pairs: Iterable[tuple[str, Tensor]]) -> None:
        live.load_state_dict(loaded(dict(pairs)).state_dict())

    found = capture(load_weights, runtime(live), metas_of(old))
    assert (found.ignored, found.overwritten, found.replicas) == ((), {}, {})
    experts = [name for name in old if ".experts." in name]
    assert len(experts) == (2 * 4 * 3 if isinstance(family.config, Qwen3MoeConfig) else 0)
    check_delta(family, live, loaded(new), found, old, new)


def test_a_probe_of_save_pretrained_says_what_a_capture_of_from_pretrained_says(
    family: Family, tmp_path: Path
) -> None:
    model = family.make(0)
    params = dict(model.named_parameters())
    scratch = family.make(1)

    def export(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scratch.load_state_dict(dict(given), strict=False)
        return saved(scratch, tmp_path)

    probed = Probe(export).of(params)
    expected = saved(model, tmp_path)
    assert probed.tensors == metas_of(expected)
    source = Source(plan_of(probed, 1 << 16), 0, params)
    run(source.snapshot(0))
    assert run(source.digest(0)) == state_digest((meta, expected[meta.name]) for meta in probed.tensors)

    def load_weights(pairs: Iterable[tuple[str, Tensor]]) -> None:
        (file,) = tmp_path.glob("*.safetensors")
        save_file(dict(pairs), file, metadata={"format": "pt"})
        model.load_state_dict(family.of.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict())

    captured = capture(load_weights, params, probed.tensors)
    assert list(captured.maps) == list(probed.maps[0])
    for name, one in captured.maps.items():
        other = probed.maps[0][name]
        assert (one.outputs, one.width, one.full_widths) == (other.outputs, other.width, other.full_widths)
        assert torch.equal(one.tensor, other.tensor)
        assert torch.equal(one.row, other.row)
