"""Fault case 028: dedup by identity never fires for copies, and returns another's image where an address is reused."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.multimodal import GroupPreprocessor, Inputs, content_key
from weightsync.reference.params import same_bits


def process(prompt: str, media: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Pixels as a model wants them, and token numbers."""
    images = [torch.as_tensor(image) for image in media.get("images", ())]
    pixels = torch.cat([image.flatten().float() for image in images]) / 255 if images else torch.zeros(0)
    return {"pixel_values": pixels, "input_ids": [ord(one) for one in prompt], "none": None}


def image(value: int) -> Tensor:
    return torch.full((2, 2), value, dtype=torch.uint8)


def inputs(value: int, prompt: str = "what?") -> Inputs:
    return Inputs(prompt, {"images": [image(value)]})


def check(samples: Sequence[Inputs], calls: int) -> None:
    """So many calls, and outputs that are those without dedup, bit for bit."""
    once = GroupPreprocessor(process, count().__next__, dedup=True)
    plain = GroupPreprocessor(process, count().__next__)
    found, expected = once.group(samples), plain.group(samples)
    assert (once.calls, plain.calls) == (calls, len(samples))
    assert (once.samples, once.elapsed_ns) == (len(samples), calls)
    assert sum(one.called for one in found) == sum(one.elapsed_ns for one in found) == calls
    for one, other in zip(found, expected, strict=True):
        assert one.outputs.keys() == other.outputs.keys()
        assert same_bits(one.outputs["pixel_values"], other.outputs["pixel_values"])
        assert one.outputs["input_ids"] == other.outputs["input_ids"]


def test_copies_of_one_prompt_are_one_call() -> None:
    """Fault case 028: four deep copies."""
    first = inputs(7)
    check([copy.deepcopy(first) for _ in range(4)], calls=1)


def test_two_images_are_two_calls() -> None:
    """Fault case 028: one group, two pictures, in any order."""
    check([inputs(7), inputs(8), inputs(7), inputs(8)], calls=2)


def test_short_lived_images_are_each_their_own() -> None:
    """Fault case 028: five images made and dropped in turn, whose addresses may be the same."""
    once = GroupPreprocessor(process, count().__next__, dedup=True)
    for value in range(5):
        (found, _) = once.group([inputs(value), inputs(value)])
        assert same_bits(found.outputs["pixel_values"], torch.full((4,), float(value)) / 255)
    assert once.calls == 5


def test_an_image_that_is_edited_between_two_samples_is_another_one() -> None:
    """Fault case 028: same object, same address, other content."""
    shared = image(1)

    class Editing(list[Inputs]):
        def __iter__(self) -> Any:
            for value in (1, 2):
                shared.fill_(value)
                yield Inputs("what?", {"images": [shared]})

    once = GroupPreprocessor(process, count().__next__, dedup=True)
    found = once.group(Editing([inputs(0), inputs(0)]))
    assert [float(one.outputs["pixel_values"][0] * 255) for one in found] == [1.0, 2.0]


def test_editing_one_output_leaves_the_others_alone() -> None:
    """Fault case 028: outputs share no storage, whichever is edited."""
    for edited in range(3):
        found = GroupPreprocessor(process, count().__next__, dedup=True).group([inputs(7)] * 3)
        found[edited].outputs["pixel_values"].zero_()
        found[edited].outputs["input_ids"].clear()
        for number, one in enumerate(found):
            assert (number == edited) == (not one.outputs["pixel_values"].any())
            assert (number == edited) == (one.outputs["input_ids"] == [])


@pytest.mark.parametrize(
    "other",
    [
        inputs(7, "who?"),
        Inputs("what?", {"videos": [image(7)]}),
        Inputs("what?", {"images": [image(7), image(7)]}),
        Inputs("what?", {"images": [image(7).view(1, 4)]}),
        Inputs("what?", {"images": [image(7).to(torch.int8)]}),
        Inputs("what?", {"images": [image(7).numpy()]}),
        Inputs("what?", {}),
    ],
)
def test_what_differs_in_anything_is_not_shared(other: Inputs) -> None:
    """Fault case 028: prompts, kinds, counts, shapes, dtypes."""
    check([inputs(7), other, inputs(7)], calls=2)


def test_bits_count_not_values() -> None:
    """Fault case 028: zeros of two signs, and NaN that equals itself."""
    zero, minus, nan = (torch.tensor([value]) for value in (0.0, -0.0, float("nan")))
    keys = [content_key(Inputs("", {"images": [one]})) for one in (zero, minus, nan, nan.clone())]
    assert len(set(keys)) == 3
    assert keys[2] == keys[3]


def test_unknown_media_are_never_shared() -> None:
    """Fault case 028: two objects of which nothing is known."""
    calls = []
    once = GroupPreprocessor(lambda prompt, media: calls.append(prompt) or {}, count().__next__, dedup=True)
    thing = object()
    once.group([Inputs("a", {"images": [thing]})] * 3)
    assert len(calls) == 3


@given(st.lists(st.tuples(st.text(max_size=2), st.lists(st.binary(max_size=2), max_size=2)), max_size=6))
def test_keys_are_equal_exactly_where_contents_are(samples: list[tuple[str, list[bytes]]]) -> None:
    """Fault case 028: no two contents are cut so that they look alike."""
    keys = {(prompt, tuple(media)): content_key(Inputs(prompt, {"a": media})) for prompt, media in samples}
    assert len(set(keys.values())) == len(keys)
    for (prompt, media), key in keys.items():
        again = [bytes(bytearray(one)) for one in media]
        assert content_key(Inputs(prompt, {"a": again})) == key


def test_arrays_of_any_order_have_their_own_content() -> None:
    """Fault case 028: a transposed view is another picture than the array it looks into."""
    array = np.arange(4, dtype=np.uint8).reshape(2, 2)
    keys = {content_key(Inputs("", {"images": [one]})) for one in (array, array.T, array.T.copy())}
    assert len(keys) == 2


def test_an_identity_key_never_fires() -> None:
    """Fault case 028: the fault itself."""
    samples = [copy.deepcopy(inputs(7)) for _ in range(4)]
    assert len({id(one.media["images"][0]) for one in samples}) == 4
    check(samples, calls=1)
