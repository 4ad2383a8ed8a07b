"""A delta in checkpoint coordinates applied to a rollout rank's fused slice, against densify and copy.

Densify and copy is what a receiver without a placement plan does: the changed values into a dense tensor of the
checkpoint's shape that is NaN elsewhere, which the loader's slicing cuts, and ``where`` merges with the live weight.
Ours maps positions to the slice, keeps the old bits for a rollback, writes what is this rank's, and moves the digest
along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from harness import Row, compete
from torch import Tensor

from weightsync.reference.buckets import DELTA, Bucket, Heading, Range, RangeSpec, pack_bucket
from weightsync.reference.encoding import Encoding
from weightsync.reference.model import ModelShape
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.placement import rollout_maps
from weightsync.reference.rowmap import local_tensor
from weightsync.reference.steps import run
from weightsync.reference.target import Decoded, Target

MODEL = ModelShape(
    vocab=64, hidden=4096, intermediate=16_384, layers=1, heads=32, kv_heads=8, head_dim=128, tied=True
)  # fmt: skip
NAME = "model.layers.0.mlp.gate_up_proj.weight"
TP, RANK = 2, 1
DENSITIES = (0.001, 0.01, 0.03)
HEADING = Heading(DELTA, epoch=1, base=1, version=2)


def rows() -> Iterator[Row]:
    tensors = MODEL.tensors()
    row_map = rollout_maps(MODEL, RANK, TP, True)[NAME]
    generator = torch.Generator().manual_seed(0)
    halves = [
        torch.randn(tensors[number].shape, generator=generator).to(torch.bfloat16)
        for number in row_map.outputs
    ]
    for density in DENSITIES:
        changes = [drawn(half, density, generator) for half in halves]
        target = Target(tensors, {NAME: row_map}, {NAME: local_tensor(row_map, halves)})
        ours, theirs = target.weights[NAME], local_tensor(row_map, halves)
        apply = applying(target, row_map.outputs, changes)
        stock = densifying(theirs, halves, changes)
        apply()
        stock()
        if not same_bits(ours, theirs):
            raise RuntimeError(f"both ways must end in the same bits; they differ at density {density}")
        times = compete({"ours": apply, "stock": stock}, rounds=7)
        conditions = {
            "dtype": "bfloat16", "slice": "x".join(map(str, row_map.local_shape)), "tp": TP, "rank": RANK,
            "density": density, "changed_in_slice": int(sum(len(positions) for positions, _ in changes)) // TP,
            "threads": torch.get_num_threads(), "statistic": "median of 7 interleaved calls",
        }  # fmt: skip
        name = f"apply to a fused slice, with undo, {density:.1%}"
        yield Row(name, "ms", times["ours"], "densify and copy", times["stock"], conditions)


def drawn(half: Tensor, density: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions (n,) int64, ascending, and new values that are no NaN, which the dense form could not say."""
    chosen = torch.randperm(half.numel(), generator=generator)[: round(density * half.numel())].sort().values
    bits = int_view(half)[chosen] ^ 1
    return chosen, bits.view(half.dtype)


def applying(
    target: Target, outputs: tuple[int, ...], changes: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    ranges = [
        Range(
            RangeSpec(number, Encoding.INT32, 0, len(positions)), positions.to(torch.int32), int_view(values)
        )
        for number, (positions, values) in zip(outputs, changes, strict=True)
    ]
    bucket: Bucket = pack_bucket(HEADING, ranges, target.tensors)

    run(target.digest())

    def apply() -> None:
        decoded: Decoded = run(target.decode(bucket))
        run(target.validate(decoded, version=2, base=1, epoch=1, sequence=0))
        run(target.apply(decoded, undo=True))
        run(target.commit())

    return apply


def densifying(
    weight: Tensor, halves: list[Tensor], changes: list[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    def densify() -> None:
        rows = len(weight) // 2
        for place, (half, (positions, values)) in enumerate(zip(halves, changes, strict=True)):
            dense = torch.full(half.shape, torch.nan, dtype=half.dtype)
            dense.view(-1)[positions] = values
            loaded = dense[RANK * rows : (RANK + 1) * rows]
            live = weight[place * rows : (place + 1) * rows]
            live.copy_(torch.where(loaded.isnan(), live, loaded))

    return densify
