"""Pictures of Pillow through a processor of Transformers itself: once a group, pinned or not, the same bits."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import Qwen2VLImageProcessor

from weightsync.reference.multimodal import GroupPreprocessor, Inputs, Processed
from weightsync.reference.params import same_bits
from weightsync.reference.staging import HostStream, Staging
from weightsync.testing.streams import LateStream

KEYS = ("pixel_values", "image_grid_thw")


def picture(text: str, form: str, size: tuple[int, int] = (84, 56)) -> Image.Image:
    """A picture with ``text``, decoded from a file of that form."""
    drawn = Image.new("RGB", size, "white")
    ImageDraw.Draw(drawn).text((8, 8), text, fill="navy")
    file = io.BytesIO()
    drawn.save(file, form)
    return Image.open(io.BytesIO(file.getvalue()))


def samples(*texts: str, form: str = "PNG", sizes: Sequence[tuple[int, int]] = ((84, 56),)) -> list[Inputs]:
    return [Inputs("read it", {"images": [picture(text, form, size) for size in sizes]}) for text in texts]


@pytest.fixture(scope="module")
def processor() -> Any:
    reader = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=112 * 112)

    def process(prompt: str, media: Mapping[str, Sequence[Any]]) -> Mapping[str, Any]:
        found = reader(images=[image.convert("RGB") for image in media["images"]], return_tensors="pt")
        return {**found, "input_ids": [ord(letter) for letter in prompt]}

    return process


def equal(a: Sequence[Processed], b: Sequence[Processed]) -> bool:
    return all(
        same_bits(x.outputs[key], y.outputs[key]) for x, y in zip(a, b, strict=True) for key in KEYS
    ) and all(x.outputs["input_ids"] == y.outputs["input_ids"] for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_group_is_processed_once_to_the_same_bits(processor: Any, form: str) -> None:
    """Each sample decodes the file on its own, so that objects differ and contents do not."""
    once = GroupPreprocessor(processor, count().__next__, dedup=True)
    plain = GroupPreprocessor(processor, count().__next__)
    group = ["314"] * 4
    assert equal(once.group(samples(*group, form=form)), plain.group(samples(*group, form=form)))
    assert (once.calls, plain.calls) == (1, 4)


def test_other_pictures_are_other_calls(processor: Any) -> None:
    once = GroupPreprocessor(processor, count().__next__, dedup=True)
    found = once.group(samples("314", "315", "314"))
    assert once.calls == 2
    assert not same_bits(found[0].outputs["pixel_values"], found[1].outputs["pixel_values"])
    found[0].outputs["pixel_values"].zero_()
    assert found[2].outputs["pixel_values"].any()


def test_the_same_bytes_with_another_palette_are_another_picture(processor: Any) -> None:
    first, second = (picture("7", "PNG").convert("P") for _ in range(2))
    second.putpalette([255 - value for value in first.getpalette() or []])
    assert first.tobytes() == second.tobytes()
    once = GroupPreprocessor(processor, count().__next__, dedup=True)
    found = once.group([Inputs("read it", {"images": [one]}) for one in (first, second)])
    assert once.calls == 2
    assert not same_bits(found[0].outputs["pixel_values"], found[1].outputs["pixel_values"])


def test_what_it_gives_is_staged_to_the_same_bits(processor: Any) -> None:
    """Two pictures of two sizes, one, and a sample without."""
    plain = GroupPreprocessor(processor, count().__next__)
    group = [*samples("12", sizes=((84, 56), (56, 84))), *samples("3")]
    outputs = [{key: one.outputs[key] for key in KEYS} for one in plain.group(group)] + [{KEYS[0]: None}]
    stream = LateStream()
    pinned = Staging(stream, count().__next__, pin=True)
    late, now = pinned.stage(outputs), Staging(HostStream(), count().__next__).stage(outputs)
    pinned.close()
    assert late.rows == now.rows
    assert late.rows["image_grid_thw"] == (2, 1, 0)
    assert late.rows["pixel_values"] == tuple(
        0 if one.get("image_grid_thw") is None else int(torch.prod(one["image_grid_thw"], 1).sum())
        for one in outputs
    )
    assert all(same_bits(late.tensors[key], now.tensors[key]) for key in KEYS)
