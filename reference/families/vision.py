"""Qwen3-VL: Qwen3's decoder behind a vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.families.attention import Attention, VisionAttention
from weightsync.reference.families.basic import BF16, MLP, GatedMLP, Norm, Whole
from weightsync.reference.families.places import Decoder
from weightsync.reference.families.sizes import require_groups, require_sizes
from weightsync.reference.modules import Model, Module, Placed
from weightsync.reference.params import ParamMeta

DECODER = Decoder(
    checkpoint="model.language_model.", trainer="language_model.",
    rollout="language_model.model.", rollout_head="language_model.lm_head.",
)  # fmt: skip
"""Where Qwen3-VL's decoder is on each side."""


@dataclass(frozen=True)
class VisionTower:
    """Sizes of Qwen3-VL's vision tower, and whether tensor parallelism cuts it.

    Attributes:
        hidden: its width.
        intermediate: width of its MLPs.
        blocks: layers.
        heads: attention heads; divides ``hidden``.
        out: width of the decoder.
        patch: (channels, frames, height, width) of a patch.
        positions: learned positions.
        merge: patches that are merged in one token.
        deepstack: mergers beside the last one.
        cut: Megatron's own tower, cut by TP. Else both sides hold all of it on every rank, under the checkpoint's
            names.
    """

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    out: int
    patch: tuple[int, int, int, int] = (3, 2, 16, 16)
    positions: int = 2304
    merge: int = 4
    deepstack: int = 3
    cut: bool = True
    dtype: torch.dtype = BF16

    def __post_init__(self) -> None:
        require_sizes(self, "hidden", "intermediate", "blocks", "heads", "out", "positions", "merge")
        require_sizes(self, "deepstack", least=0)
        if self.hidden % self.heads:
            raise PlanMismatch(
                f"vision tower has {self.heads} heads and width {self.hidden}, expected a width that the heads "
                "divide; correct the sizes"
            )

    def places(self, checkpoint: str, rollout: str) -> Iterator[Placed]:
        """Its modules; prefixes end in the tower's name. On the first pipeline stage, as Megatron's encoders are."""

        def put(module: Module, name: str, trainer: str) -> Placed:
            if self.cut:
                return Placed(module, "first", checkpoint + name, "vision_model." + trainer, rollout + name)
            whole = Whole(tuple(module.tensors()))
            return Placed(whole, "first", checkpoint + name, "vision_model." + name, rollout + name)

        embed = ParamMeta("proj.weight", self.dtype, (self.hidden, *self.patch))
        yield put(
            Whole((embed, ParamMeta("proj.bias", self.dtype, (self.hidden,)))), "patch_embed.", "patch_embed."
        )
        table = ParamMeta("weight", self.dtype, (self.positions, self.hidden))
        yield put(Whole((table,)), "pos_embed.", "pos_embed.")
        norm = Norm(self.hidden, bias=True, dtype=self.dtype)
        attention = VisionAttention(self.hidden, self.heads, self.dtype)
        mlp = MLP(self.hidden, self.intermediate, "linear_fc1", "linear_fc2", bias=True, dtype=self.dtype)
        for block in range(self.blocks):
            name, layer = f"blocks.{block}.", f"decoder.layers.{block}."
            yield put(norm, f"{name}norm1.", f"{layer}self_attention.linear_qkv.layer_norm_")
            yield put(attention, f"{name}attn.", f"{layer}self_attention.")
            yield put(norm, f"{name}norm2.", f"{layer}mlp.linear_fc1.layer_norm_")
            yield put(mlp, f"{name}mlp.", f"{layer}mlp.")
        wide = self.hidden * self.merge
        out = replace(mlp, hidden=wide, intermediate=wide, out=self.out)
        yield put(norm, "merger.norm.", "merger.patch_norm.")
        yield put(out, "merger.", "merger.")
        for number in range(self.deepstack):
            name = f"deepstack_merger_list.{number}."
            yield put(Norm(wide, bias=True, dtype=self.dtype), f"{name}norm.", f"decoder.{name}patch_norm.")
            yield put(out, name, f"decoder.{name}")


@dataclass(frozen=True)
class Qwen3VL(Model):
    """Qwen3-VL: a dense Qwen3 decoder and a vision tower.

    Megatron's names are those of Megatron-Bridge (``vision_model``, ``language_model``), as far as known here; check
    ``patch_norm`` and ``deepstack_merger_list`` against your version.

    Attributes: as those of ``ModelShape``, and

        vision: the tower.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vision: VisionTower
    tied: bool = False
    dtype: torch.dtype = BF16

    def __post_init__(self) -> None:
        require_sizes(self, "vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
        require_groups(self.heads, self.kv_heads)
        if self.vision.out != self.hidden:
            raise PlanMismatch(
                f"vision tower gives tokens of width {self.vision.out}, expected the decoder's {self.hidden}; "
                "correct the sizes"
            )

    def modules(self) -> tuple[Placed, ...]:
        """The tower; embedding, layers, norm and head."""
        at, norm = DECODER, Norm(self.hidden, dtype=self.dtype)
        heads = (self.heads, self.kv_heads, self.head_dim)
        attention = Attention(self.hidden, *heads, qk_norm=True, dtype=self.dtype)
        mlp = GatedMLP(self.hidden, self.intermediate, self.dtype)
        layers = [
            placed for layer in range(self.layers) for placed in at.dense_layer(layer, norm, attention, mlp)
        ]
        decoder = at.whole(norm, layers, self.vocab, self.hidden, tied=self.tied, dtype=self.dtype)
        return (*self.vision.places("model.visual.", "visual."), *decoder)
