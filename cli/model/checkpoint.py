"""Hugging Face safetensors folders: a small seeded one made on the spot, or one of the user's own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weightsync.cli.model.config import CheckpointError, DecoderConfig, read_config
from weightsync.reference.model import ModelShape
from weightsync.reference.modules import Model
from weightsync.reference.params import ParamMeta, same_bits

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """One folder, read.

    Attributes:
        folder: where it lies.
        config: its ``config.json``.
        weights: Hugging Face name -> whole tensor, in wire order; a tied head is absent. Owned by the caller.
        unused: names in the files that a decoder of this shape does not have, such as ``inv_freq`` buffers.
    """

    folder: Path
    config: DecoderConfig
    weights: dict[str, Tensor]
    unused: tuple[str, ...] = ()


def seeded_weights(config: DecoderConfig, seed: int) -> dict[str, Tensor]:
    """Random weights at a trained model's scale: norms 1, biases 0, the rest normal with deviation 0.02.

    Projections back into the residual stream are divided by sqrt(2 * layers), as GPT-2 does. A pure function
    of its arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for meta in config.shape.tensors():
        if meta.name.endswith("norm.weight"):
            tensor = torch.ones(meta.shape)
        elif meta.name.endswith(".bias"):
            tensor = torch.zeros(meta.shape)
        else:
            back = meta.name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.02 / math.sqrt(2 * config.shape.layers) if back else 0.02
            tensor = torch.randn(meta.shape, generator=generator) * deviation
        weights[meta.name] = tensor.to(meta.dtype)
    return weights


def make_checkpoint(folder: Path, config: DecoderConfig, seed: int, *, files: int = 1) -> Path:
    """Write a folder of seeded weights that any Hugging Face reader opens, and return it.

    Args:
        folder: made if it is not there; files of the same names are overwritten.
        config: what ``config.json`` will say.
        seed: draws the weights.
        files: 1 for ``model.safetensors``; more to spread the tensors over that many files with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")
    weights = seeded_weights(config, seed)
    if files == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(weights)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        mine = names[number::files]
        save_file({name: weights[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a Llama-, Qwen2- or Qwen3-shaped folder, with one safetensors file or several under an index.

    Raises:
        CheckpointError: a configuration key that this decoder does not honour, a file missing or outside of
            the folder, or a tensor that is missing or has another shape or dtype than the configuration.
    """
    config = read_config(folder / "config.json")
    files = _files(folder)
    weights = _read(folder, config.shape.tensors(), files)
    extra = set(files) - set(weights)
    head = config.shape.head
    if config.shape.tied and head.name in extra:
        extra.remove(head.name)
        with _open(files[head.name]) as opened:
            stored = opened.get_tensor(head.name)
        if not same_bits(stored, weights[config.shape.embedding.name]):
            raise CheckpointError(
                f"{files[head.name]}: key 'tie_word_embeddings' is true in config.json, but "
                f"{head.name!r} differs "
                f"from {config.shape.embedding.name!r}; expected equal bits, so set the key to false"
            )
    return Checkpoint(folder, config, weights, tuple(sorted(extra)))


def load_weights(folder: Path, model: Model) -> dict[str, Tensor]:
    """Hugging Face name -> whole tensor of a folder of any family, in wire order; what no module names is left out.

    Raises:
        CheckpointError: as ``load_checkpoint``.
    """
    if isinstance(model, ModelShape):
        return load_checkpoint(folder).weights
    return _read(folder, model.tensors(), _files(folder))


def _read(folder: Path, metas: tuple[ParamMeta, ...], files: Mapping[str, Path]) -> dict[str, Tensor]:
    _require(folder, metas, files)
    weights: dict[str, Tensor] = {}
    for path in sorted({files[meta.name] for meta in metas}):
        with _open(path) as opened:
            for meta in metas:
                if files[meta.name] == path:
                    weights[meta.name] = _tensor(path, meta, opened.get_tensor(meta.name))
    return {meta.name: weights[meta.name] for meta in metas}


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if len(paths) != 1:
        raise CheckpointError(
            f"{folder} holds {len(paths)} safetensors files and no {INDEX}; expected "
            "model.safetensors, or an index "
            "that says which file holds which tensor"
        )
    with _open(paths[0]) as opened:
        return dict.fromkeys(opened.keys(), paths[0])


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name): folder / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{index}: key 'weight_map' is missing or no object; expected tensor names and the files "
            "that hold them"
        ) from None
    for path in sorted(set(named.values())):
        if path.parent != folder or path.name in ("", "..") or not path.is_file():
            raise CheckpointError(
                f"{index}: key 'weight_map' names {path}, which is no file of this folder; download "
                "the folder again"
            )
    return named


def _require(folder: Path, metas: tuple[ParamMeta, ...], files: Mapping[str, Path]) -> None:
    missing = [meta for meta in metas if meta.name not in files]
    if missing:
        first = missing[0]
        hint = "; is 'tie_word_embeddings' in config.json right?" if first.name == "lm_head.weight" else ""
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(metas)} tensors, first {first.name!r} of shape "
            f"{list(first.shape)}; expected every tensor that config.json implies{hint}"
        )


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no safetensors file ({error}); download it again") from None


def _tensor(path: Path, meta: ParamMeta, tensor: Tensor) -> Tensor:
    if tuple(tensor.shape) != meta.shape:
        raise CheckpointError(
            f"{path}: tensor {meta.name!r} has shape {list(tensor.shape)}; expected "
            f"{list(meta.shape)}, as the "
            "sizes in config.json say"
        )
    if tensor.dtype != meta.dtype:
        raise CheckpointError(
            f"{path}: tensor {meta.name!r} is {tensor.dtype}; expected {meta.dtype}, as key "
            "'torch_dtype' or 'dtype' "
            "of config.json says; correct the key, or store every tensor in that dtype"
        )
    return tensor
