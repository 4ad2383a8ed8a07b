"""DecoderConfig: a Hugging Face ``config.json``, checked; every refusal names the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightsync.reference.errors import WeightSyncError
from weightsync.reference.model import ModelShape

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class CheckpointError(WeightSyncError):
    """A checkpoint folder that cannot be read; names file and key, what stood there, what is needed."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the rotary wavelengths (``rope_type`` ``llama3``).

    Attributes:
        factor: by how much the long wavelengths are stretched.
        low_freq_factor: longer wavelengths than ``original_positions / low_freq_factor`` are all stretched.
        high_freq_factor: shorter ones than ``original_positions / high_freq_factor`` are left alone.
        original_positions: positions the model was first trained with.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a Llama-, Qwen2- or Qwen3-shaped decoder needs to know, apart from its weights.

    Attributes:
        model_type: ``llama``, ``mistral``, ``qwen2`` or ``qwen3``.
        shape: the sizes, and with them every tensor of the checkpoint.
        eps: RMSNorm epsilon.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: Llama 3's stretching of them, or None.
        max_positions: longest sequence, in tokens.
    """

    model_type: str
    shape: ModelShape
    eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 4096

    def to_json(self) -> dict[str, Any]:
        """The ``config.json`` that ``read_config`` reads back to an equal object, ``rope_scaling`` apart."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        architecture = {"qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}.get(
            self.model_type, "Llama"
        )
        return {
            "architectures": [f"{architecture}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.shape.vocab,
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.intermediate,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "tie_word_embeddings": self.shape.tied,
            "max_position_embeddings": self.max_positions,
            "torch_dtype": names[self.shape.dtype],
        }


def read_config(path: Path) -> DecoderConfig:
    """The checked configuration in ``path``, a ``config.json``.

    Raises CheckpointError, naming the key, for whatever this decoder would compute wrongly: an unknown
    ``model_type`` or activation, a missing or non-positive size, biases or rotary variants it does not have.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; expected a Hugging Face folder with config.json and *.safetensors"
        ) from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download the folder again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{path} holds a {type(raw).__name__}; expected a JSON object of configuration keys"
        )
    return _config(Keys(path, raw))


@dataclass(frozen=True)
class Keys:
    """Typed look-ups in one configuration, so that each error names the key and the file.

    Attributes:
        path: the file, or what else errors are to name.
        raw: its keys.
    """

    path: Path | str
    raw: Mapping[str, Any]

    def fail(self, key: str, found: object, expected: str) -> CheckpointError:
        """The error for a key that holds ``found``."""
        return CheckpointError(f"{self.path}: key {key!r} is {found!r}; expected {expected}")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; one that is missing is ``default``, or an error without."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.path}: key {key!r} is missing; expected a positive integer")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(key, value, "a positive integer")
        return value

    def count(self, key: str) -> int:
        """An integer of 0 or more; null counts as 0."""
        value = self.raw.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise self.fail(key, value, "an integer of 0 or more")
        return value or 0

    def number(self, raw: Mapping[str, Any], key: str, default: float) -> float:
        """A positive number of ``raw``."""
        value = raw.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise self.fail(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false")
        return value

    def refuse(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """Refuse a key that holds anything but the ``allowed`` values."""
        if key in self.raw and self.raw[key] not in allowed:
            raise self.fail(key, self.raw[key], f"{allowed[0]!r}: {why}")

    def dtype(self, prefix: str = "") -> torch.dtype:
        """The dtype of every tensor, under either of its keys."""
        key = f"{prefix}dtype" if f"{prefix}dtype" in self.raw else f"{prefix}torch_dtype"
        name = self.raw.get(key, "bfloat16")
        if name not in DTYPES:
            raise self.fail(key, name, "one of " + ", ".join(DTYPES))
        return DTYPES[name]


def _config(keys: Keys) -> DecoderConfig:
    kind = keys.raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise keys.fail("model_type", kind, "one of " + ", ".join(MODEL_TYPES))
    keys.refuse("hidden_act", ("silu", "swish"), "the gated MLP is SwiGLU")
    keys.refuse("mlp_bias", (False, None), "the MLP has no biases")
    keys.refuse("partial_rotary_factor", (1.0, 1, None), "every head dimension is rotated")
    keys.refuse("quantization_config", (None,), "the trainer holds unquantised weights")
    if kind == "mistral":
        keys.refuse("sliding_window", (None,), "attention looks at the whole prefix")
    keys.refuse("use_sliding_window", (False, None), "attention looks at the whole prefix")
    if kind != "qwen2":
        keys.refuse("attention_bias", (False, None), "only Qwen2's q, k and v have biases")
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    kv_heads = keys.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.fail(
            "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, which is {heads}"
        )
    if kind != "qwen3" and keys.raw.get("head_dim") is None and hidden % heads:
        raise keys.fail("num_attention_heads", heads, f"a divisor of hidden_size {hidden}, or a head_dim")
    head_dim = keys.size("head_dim", None if kind == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise keys.fail("head_dim", head_dim, "an even number: rotary embeddings turn pairs")
    theta, scaling = _rope(keys)
    return DecoderConfig(
        model_type=kind,
        shape=ModelShape(
            vocab=keys.size("vocab_size"),
            hidden=hidden,
            intermediate=keys.size("intermediate_size"),
            layers=keys.size("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            tied=keys.flag("tie_word_embeddings", False),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
            dtype=keys.dtype(),
        ),
        eps=keys.number(keys.raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=keys.size("max_position_embeddings", 4096),
    )


def _rope(keys: Keys) -> tuple[float, RopeScaling | None]:
    key = "rope_parameters" if keys.raw.get("rope_parameters") else "rope_scaling"
    rope = keys.raw.get(key) or {}
    if not isinstance(rope, dict):
        raise keys.fail(key, rope, "a JSON object or null")
    theta = keys.number(rope if "rope_theta" in rope else keys.raw, "rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise keys.fail(f"{key}.rope_type", kind, "'default' or 'llama3'")
    original = rope.get("original_max_position_embeddings", 0)
    if not isinstance(original, int) or original < 1:
        raise keys.fail(f"{key}.original_max_position_embeddings", original, "a positive integer")
    low = keys.number(rope, "low_freq_factor", 1.0)
    high = keys.number(rope, "high_freq_factor", 4.0)
    if high <= low:
        raise keys.fail(f"{key}.high_freq_factor", high, f"more than low_freq_factor, which is {low}")
    return theta, RopeScaling(keys.number(rope, "factor", 1.0), low, high, original)
