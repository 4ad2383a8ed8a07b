"""From Hugging Face's configuration keys to a family of ``weightsync.reference.families``, sizes only."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync.cli.model.config import MODEL_TYPES, CheckpointError, Keys, read_config
from weightsync.reference.families import (
    DeepSeek,
    GatedDeltaNet,
    Mamba,
    NemotronH,
    Qwen3Moe,
    Qwen3Next,
    Qwen3VL,
    VisionTower,
)
from weightsync.reference.modules import Model

DECLARE = "or declare the family in Python: derive from weightsync.reference.modules.Model"

SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
GROUPS = SIZES | {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
EXPERTS = {"expert_intermediate": "moe_intermediate_size", "experts": "num_experts"}
LATENT = {
    "intermediate": "intermediate_size",
    "expert_intermediate": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "kv_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}
LINEAR = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
MAMBA = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state": "ssm_state_size",
    "kernel": "conv_kernel",
}
VISION = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "blocks": "depth",
    "heads": "num_heads",
    "out": "out_hidden_size",
    "positions": "num_position_embeddings",
}
PATCH = ("in_channels", "temporal_patch_size", "patch_size")


def _sizes(keys: Keys, names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    return {name: keys.size(prefix + key) for name, key in names.items()}


def _qwen3_moe(keys: Keys) -> Model:
    keys.refuse("mlp_only_layers", ([], None), "every layer has experts")
    keys.refuse("decoder_sparse_step", (1, None), "every layer has experts")
    keys.refuse("attention_bias", (False, None), "attention has no biases")
    tied = keys.flag("tie_word_embeddings", False)
    return Qwen3Moe(**_sizes(keys, GROUPS | EXPERTS), tied=tied, dtype=keys.dtype())


def _deepseek(keys: Keys) -> Model:
    keys.refuse("moe_layer_freq", (1, None), "every layer after the first dense ones has experts")
    keys.refuse("tie_word_embeddings", (False, None), "the head is a matrix of its own")
    keys.refuse("attention_bias", (False, None), "attention has no biases")
    rank = keys.raw.get("q_lora_rank")
    return DeepSeek(
        **_sizes(keys, SIZES | LATENT),
        q_rank=None if rank is None else keys.size("q_lora_rank"),
        dense_layers=keys.count("first_k_dense_replace"),
        shared_experts=keys.count("n_shared_experts"),
        router_bias=keys.raw["model_type"] == "deepseek_v3",
        dtype=keys.dtype(),
    )


def _qwen3_vl(keys: Keys) -> Model:
    text, vision = "text_config.", "vision_config."
    sizes = _sizes(keys, GROUPS | {"intermediate": "intermediate_size"}, text)
    channels, frames, side = (keys.size(vision + key) for key in PATCH)
    deepstack = keys.raw.get(f"{vision}deepstack_visual_indexes")
    if not isinstance(deepstack, list):
        raise keys.fail(f"{vision}deepstack_visual_indexes", deepstack, "a list of layers")
    dtype = keys.dtype(text if f"{text}dtype" in keys.raw else "")
    tower = VisionTower(
        **_sizes(keys, VISION, vision), patch=(channels, frames, side, side),
        merge=keys.size(f"{vision}spatial_merge_size") ** 2, deepstack=len(deepstack), dtype=dtype,
    )  # fmt: skip
    return Qwen3VL(**sizes, vision=tower, tied=keys.flag("tie_word_embeddings", False), dtype=dtype)


def _qwen3_next(keys: Keys) -> Model:
    keys.refuse("mlp_only_layers", ([], None), "every layer has experts")
    keys.refuse("decoder_sparse_step", (1, None), "every layer has experts")
    dtype = keys.dtype()
    return Qwen3Next(
        **_sizes(keys, GROUPS | EXPERTS | {"shared_intermediate": "shared_expert_intermediate_size"}),
        linear=GatedDeltaNet(keys.size("hidden_size"), **_sizes(keys, LINEAR), dtype=dtype),
        every=keys.size("full_attention_interval"),
        tied=keys.flag("tie_word_embeddings", False),
        dtype=dtype,
    )


def _nemotron_h(keys: Keys) -> Model:
    for bias in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        keys.refuse(bias, (False, None), "projections have no biases")
    keys.refuse("use_conv_bias", (True, None), "the convolution has a bias")
    dtype, pattern = keys.dtype(), keys.raw.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise keys.fail("hybrid_override_pattern", pattern, "a letter per layer")
    keys.refuse("num_hidden_layers", (len(pattern), None), "hybrid_override_pattern has a letter per layer")
    sizes = {**GROUPS, "intermediate": "intermediate_size"}
    del sizes["layers"]
    return NemotronH(
        **_sizes(keys, sizes),
        pattern=pattern,
        mamba=Mamba(keys.size("hidden_size"), **_sizes(keys, MAMBA), dtype=dtype),
        tied=keys.flag("tie_word_embeddings", False),
        dtype=dtype,
    )


@dataclass(frozen=True)
class Family:
    """How one ``model_type`` is read.

    Attributes:
        make: the family from the keys.
        keys: every key that it reads, dotted.
    """

    make: Callable[[Keys], Model]
    keys: tuple[str, ...]


_COMMON = ("model_type", "dtype", "torch_dtype", "tie_word_embeddings", "attention_bias")
_SPARSE = ("mlp_only_layers", "decoder_sparse_step")
_LATENT = (
    *SIZES.values(), *LATENT.values(), "q_lora_rank", "first_k_dense_replace", "n_shared_experts",
    "moe_layer_freq",
)  # fmt: skip
_VL = (
    *(f"text_config.{key}" for key in (*GROUPS.values(), "intermediate_size", "dtype")),
    *(f"vision_config.{key}" for key in (*VISION.values(), *PATCH)),
    "vision_config.spatial_merge_size", "vision_config.deepstack_visual_indexes",
)  # fmt: skip
_NEXT = (
    *GROUPS.values(), *EXPERTS.values(), *LINEAR.values(), *_SPARSE, "full_attention_interval",
    "shared_expert_intermediate_size",
)  # fmt: skip
_NEMOTRON = (
    *GROUPS.values(), *MAMBA.values(), "intermediate_size", "hybrid_override_pattern", "mlp_bias", "use_bias",
    "mamba_proj_bias", "use_conv_bias",
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": Family(_qwen3_moe, (*_COMMON, *GROUPS.values(), *EXPERTS.values(), *_SPARSE)),
    "deepseek_v2": Family(_deepseek, (*_COMMON, *_LATENT)),
    "deepseek_v3": Family(_deepseek, (*_COMMON, *_LATENT)),
    "qwen3_vl": Family(_qwen3_vl, (*_COMMON, *_VL)),
    "qwen3_next": Family(_qwen3_next, (*_COMMON, *_NEXT)),
    "nemotron_h": Family(_nemotron_h, (*_COMMON, *_NEMOTRON)),
}
"""Families beyond the dense decoder, by ``model_type``."""


def make_family(raw: Mapping[str, Any], where: str) -> Model:
    """The family that a scenario's table of configuration keys describes; errors call it ``where``.

    Raises CheckpointError for an unknown ``model_type`` or key, or a size that does not fit.
    """
    flat = _flat(raw)
    family = _family(flat, where)
    for key in flat:
        if key not in family.keys:
            near = ", ".join(difflib.get_close_matches(key, family.keys) or family.keys[5:9])
            raise CheckpointError(
                f"{where}: {key!r} is not a key of {flat['model_type']!r}; near names: {near}; {DECLARE}"
            )
    return family.make(Keys(where, flat))


def read_model(path: Path) -> Model:
    """The family of a ``config.json``, dense ones included; keys that no family reads are passed over.

    Raises CheckpointError as ``read_config`` and ``make_family``.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        raw = {}
    if not isinstance(raw, dict) or raw.get("model_type") in (*MODEL_TYPES, None):
        return read_config(path).shape
    flat = _flat(raw)
    family, keys = _family(flat, str(path)), Keys(path, flat)
    keys.refuse("quantization_config", (None,), "the trainer holds unquantised weights")
    return family.make(keys)


def _family(flat: Mapping[str, Any], where: str) -> Family:
    kind = flat.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join((*MODEL_TYPES, *FAMILIES))
        raise CheckpointError(f"{where}: key 'model_type' is {kind!r}; expected one of {known}; {DECLARE}")
    return FAMILIES[kind]


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables of text and vision under dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if key in ("text_config", "vision_config") and isinstance(value, dict):
            flat |= {f"{key}.{inner}": one for inner, one in value.items()}
        else:
            flat[key] = value
    return flat
