"""Bits per change of real updates: AdamW steps of SmolLM2-135M on fp32 masters, each bf16 tensor a range.

Needs the checkpoint of ``docs/checkpoints.md`` in ``$WEIGHTSYNC_SMOLLM2``, and transformers; without them there are no
rows, and it says so. Text: the licence of this repository, byte for byte, in rows of 128 tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import Row
from wire_data import Update, entropy_bits

from weightsync.reference.buckets import DELTA, Heading, Range, RangeSpec, pack_bucket, unpack
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.wire.forms import Form, Values
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import coded, resolve

FOLDER = "WEIGHTSYNC_SMOLLM2"
STEPS = 3
RATES = (1e-6, 5e-6)
FORMS = ("gap8+step+zstd", "gap16+step+zstd")
PLAIN_BITS = 48.0
"""int32 positions and bf16 values."""


def rows() -> Iterator[Row]:
    folder = os.environ.get(FOLDER)
    if folder is None:
        print(f"smollm2: no rows, {FOLDER} names no checkpoint; docs/checkpoints.md makes one")
        return
    try:
        import transformers
    except ImportError:
        print("smollm2: no rows, transformers is not installed")
        return
    for lr in RATES:
        yield from trained(transformers, folder, lr)


def trained(transformers: Any, folder: str, lr: float) -> Iterator[Row]:
    """Rows of a few steps at one learning rate."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    batches = tokens[: tokens.numel() // 128 * 128].view(-1, 128)
    before = bits_of(model)
    for step in range(STEPS):
        batch = batches[step * 2 : step * 2 + 2]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = bits_of(model)
        yield measured(before, after, lr, step + 1)
        before = after


def bits_of(model: Any) -> dict[str, torch.Tensor]:
    """The bf16 bits of every parameter, tied ones once."""
    return {name: int_view(p.detach().to(torch.bfloat16)).clone() for name, p in model.named_parameters()}


def measured(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], lr: float, step: int) -> Row:
    metas = [ParamMeta(name, torch.bfloat16, (bits.numel(),)) for name, bits in after.items()]
    heading, zstd = Heading(DELTA, epoch=1, base=1, version=2), Zstd()
    sizes, floor = {}, 0.0
    for name in FORMS:
        form, ranges = Form.named(name), []
        for number, (new, old) in enumerate(zip(after.values(), before.values(), strict=True)):
            positions = (new != old).nonzero().flatten()
            if positions.numel():
                values = coded(Values.STEP, new[positions], old[positions], torch.bfloat16)
                spec = RangeSpec(
                    number, form.positions, 0, positions.numel(), values=form.values, packing=form.packing
                )
                ranges.append(Range(spec, positions.to(torch.int32), values))
        bucket = pack_bucket(heading, ranges, metas, zstd)
        state = {number: bits.clone() for number, bits in enumerate(before.values())}
        for one in unpack(bucket, metas, zstd):
            bits = state[one.spec.tensor]
            at = one.positions.to(torch.int64) if one.positions is not None else torch.arange(bits.numel())
            bits[at] = resolve(one.spec.values, one.bits, bits[at], torch.bfloat16)
        if not all(
            torch.equal(found, new) for found, new in zip(state.values(), after.values(), strict=True)
        ):
            raise AssertionError("the update does not lead to the new bits; fix that first")
        count = sum(one.spec.count for one in ranges)
        sizes[name] = 8 * bucket.nbytes / count
    numel = sum(bits.numel() for bits in after.values())
    conditions: dict[str, str | int | float] = {
        "lr": lr, "step": step, "changed_elements": count, "density": count / numel,
        "unchanged_tensors": len(metas) - len(ranges), **{f"bits {name}": bits for name, bits in sizes.items()},
    }  # fmt: skip
    for name, new in after.items():
        changed = (new != before[name]).nonzero().flatten()
        if changed.numel():
            one = Update(changed.to(torch.int32), new[changed], before[name][changed])
            floor += changed.numel() / count * entropy_bits([one], new.numel())
    label = f"bits SmolLM2 lr {lr:g} step {step}"
    return Row(
        label, "bits/change", min(sizes.values()), "int32 positions and values", PLAIN_BITS, conditions,
        floor, "entropy per tensor",
    )  # fmt: skip
