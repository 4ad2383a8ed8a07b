"""Small states and what tests of the disk transport ask about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from weightsync.backends.disk.checkpoint import Checkpoint
from weightsync.backends.disk.files import Files
from weightsync.reference.params import ParamMeta, int_view

State = Mapping[str, Tensor]


@lru_cache(maxsize=4)
def states(count: int = 4) -> tuple[State, ...]:
    """States that follow each other: NaN, infinities and -0.0 in three dtypes, an empty and a 0-dim tensor.

    The third is equal to the second, and in the fourth more than half of a tensor differs from the first.
    """
    stream = torch.Generator().manual_seed(5)
    state: dict[str, Tensor] = {
        "a.weight": torch.tensor(
            [[0.0, -0.0, float("nan")], [1.0, float("inf"), -2.0]], dtype=torch.bfloat16
        ),
        "b.bias": torch.arange(7, dtype=torch.float32),
        "c.empty": torch.empty(0, 3),
        "d.scale": torch.tensor(3, dtype=torch.uint8),
    }
    made = []
    for number in range(count):
        made.append({name: tensor.clone() for name, tensor in state.items()})
        if number == 1:
            continue
        for name in ("a.weight", "b.bias", "d.scale"):
            bits = int_view(state[name])
            chosen = torch.rand(bits.numel(), generator=stream) < 0.4
            bits[chosen] += torch.randint(1, 100, (int(chosen.sum()),), generator=stream).to(bits.dtype)
    return tuple(made)


def metas(state: State) -> list[ParamMeta]:
    """Metadata of a state's tensors."""
    return [ParamMeta.of(name, tensor) for name, tensor in state.items()]


def bits_of(state: State) -> dict[str, bytes]:
    """The bytes of every tensor."""
    return {name: int_view(tensor).numpy().tobytes() for name, tensor in state.items()}


def bits_in(files: Files) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint folder."""
    checkpoint = Checkpoint(files)
    found = {name: checkpoint.read(name).tobytes() for name in checkpoint.metas}
    checkpoint.close()
    return found


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder, sorted."""
    return iter(sorted(path for path in folder.rglob("*") if path.is_file()))
