"""Who holds which attention row: Megatron's shards, the checkpoint, a rollout's shards; from the real row maps."""

from __future__ import annotations

import torch
from canvas import BUCKET, INK, MUTED, ROLLOUT, TRAINER, Canvas

from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.model import ModelShape
from weightsync.reference.rowmap import RowMap

MODEL = ModelShape(vocab=8, hidden=4, intermediate=4, layers=1, heads=8, kv_heads=4, head_dim=1)
MEGATRON = "decoder.layers.0.self_attention.linear_qkv.weight"
FUSED = "model.layers.0.self_attn.qkv_proj.weight"
RANK, ROW, COLUMN = 1, 6, 3
"""The element that the picture follows: of trainer rank 1, at this row and column of its shard."""

COLORS = {"q": TRAINER, "k": BUCKET, "v": ROLLOUT}
TINTS = {"q": "#dfe6ff", "k": "#ffe3d1", "v": "#d3f0ea"}
WIDTH, CELL, TALL, TOP = 720, 92, 19, 78
LEFT, MIDDLE, RIGHT = 72, 314, 556


def show() -> str:
    """The picture as SVG text."""
    deployment = Deployment(MODEL, 2, (RolloutLayout(2, True),), 1 << 20)
    canvas = Canvas(WIDTH, "The way of attention rows from trainer shards to rollout shards")
    canvas.text(
        20, 24, "Attention input of one layer: 8 query heads, 4 key and 4 value heads, one row each.",
        anchor="start", color=MUTED,
    )  # fmt: skip
    names = {
        number: f"{kind}_proj"
        for number, meta in enumerate(deployment.tensors)
        for kind in COLORS
        if f".{kind}_proj." in meta.name
    }
    trainers = [maps[MEGATRON] for maps in deployment.trainer_maps]
    rollouts = [deployment.rollout_maps(rank)[FUSED] for rank in deployment.rollouts[0].ranks]
    middle = _checkpoint(canvas, names, deployment)
    chosen, _ = _place(trainers[RANK], ROW)
    for side, maps, x in (("trainer", trainers, LEFT), ("rollout0", rollouts, RIGHT)):
        _side(canvas, side, maps, x, names, middle, chosen)
    _follow(canvas, deployment, trainers[RANK], rollouts)
    return canvas.render(TOP + 2 * (8 * TALL) + 130)


def _place(row_map: RowMap, row: int) -> tuple[tuple[int, int], int]:
    """Checkpoint tensor and row of a local row, and the number of the tensor among the map's outputs."""
    output = int(row_map.tensor[row])
    return (row_map.outputs[output], int(row_map.row[row])), output


def _cell(canvas: Canvas, x: float, y: float, label: str, *, bold: bool) -> None:
    kind = label[0]
    canvas.rect(x, y, CELL, TALL - 2, fill=COLORS[kind] if bold else TINTS[kind], edge=COLORS[kind], radius=4)
    canvas.text(x + CELL / 2, y + 13, label, size=11.5, color="#ffffff" if bold else INK, bold=bold)


def _checkpoint(
    canvas: Canvas, names: dict[int, str], deployment: Deployment
) -> dict[tuple[int, int], float]:
    """Draw the checkpoint's rows; (tensor, row) -> height of its middle."""
    canvas.text(MIDDLE + CELL / 2, 48, "checkpoint", bold=True, size=13)
    canvas.text(MIDDLE + CELL / 2, 64, "Hugging Face names", size=11, color=MUTED)
    heights, y = {}, float(TOP)
    trainer = deployment.trainer_maps[RANK][MEGATRON]
    for number, name in names.items():
        for row in range(deployment.tensors[number].shape[0]):
            _cell(canvas, MIDDLE, y, f"{name} {row}", bold=(number, row) == _place(trainer, ROW)[0])
            heights[number, row] = y + TALL / 2 - 1
            y += TALL
        y += 12
    return heights


def _side(
    canvas: Canvas, side: str, maps: list[RowMap], x: float, names: dict[int, str],
    middle: dict[tuple[int, int], float], chosen: tuple[int, int],
) -> None:  # fmt: skip
    """Draw one side's shards, and the ways between them and the checkpoint."""
    what = {"trainer": ("trainer", "linear_qkv, by query group"), "rollout0": ("rollout", "qkv_proj, fused")}[
        side
    ]
    canvas.text(x + CELL / 2, 48, what[0], bold=True, size=13)
    canvas.text(x + CELL / 2, 64, what[1], size=11, color=MUTED)
    y = float(TOP)
    for rank, row_map in enumerate(maps):
        name_x, anchor = (x - 10, "end") if x == LEFT else (x + CELL + 10, "start")
        canvas.text(
            name_x, y + len(row_map.tensor) * TALL / 2 + 4, f"rank {rank}", size=11.5, color=MUTED, anchor=anchor
        )  # fmt: skip
        for row in range(len(row_map.tensor)):
            place, _ = _place(row_map, row)
            bold = place == chosen
            label = f"{names[place[0]][0]} {place[1]}"
            _cell(canvas, x, y, label, bold=bold)
            ends = (x + CELL, MIDDLE) if x == LEFT else (MIDDLE + CELL, x)
            heights = (y + TALL / 2 - 1, middle[place])
            canvas.curve(
                ends[0], heights[0] if x == LEFT else heights[1], ends[1], heights[1] if x == LEFT else heights[0],
                color=COLORS[label[0]], width=2.6 if bold else 1, opacity=1 if bold else 0.45,
            )  # fmt: skip
            y += TALL
        y += 24


def _follow(canvas: Canvas, deployment: Deployment, trainer: RowMap, rollouts: list[RowMap]) -> None:
    """Say in numbers where one element is, as the maps tell it."""
    local = torch.tensor([ROW * trainer.width + COLUMN])
    outputs, flats = trainer.to_checkpoint(local)
    output, flat = int(outputs[0]), int(flats[0])
    name = deployment.tensors[trainer.outputs[output]].name
    lines = [
        f"trainer rank {RANK}, element ({ROW}, {COLUMN}), flat position {int(local[0])} of its shard",
        f"is position {flat} of {name}",
    ]
    for rank, row_map in enumerate(rollouts):
        number = row_map.outputs.index(trainer.outputs[output])
        held, where = row_map.to_local(number, flats)
        if bool(held[0]):
            lines.append(f"and flat position {int(where[0])} of rank {rank}'s shard on the rollout")
    top = TOP + 2 * (8 * TALL) + 62
    for row, line in enumerate(lines):
        canvas.text(WIDTH / 2, top + 18 * row, line, size=12.5, bold=row == 0)
