"""Fault case 020: after sleep and wake the live model is not the actor any more, and the wrong weights are pushed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from weightsync.reference.devices import TorchDevice
from weightsync.reference.errors import TagError
from weightsync.reference.tags import TaggedSnapshots


def states(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"actor": torch.tensor([1, 1], dtype=dtype), "ref": torch.tensor([5, 5], dtype=dtype)}


class Model:
    """A live model whose memory is gone while it sleeps."""

    def __init__(self, dtype: torch.dtype, kind: type[TaggedSnapshots] = TaggedSnapshots) -> None:
        self.live = {"w": states(dtype)["actor"].clone()}
        tags = dict.fromkeys(("actor", "ref"), "host")
        self.tags = kind(lambda: self.live, tags, TorchDevice("cpu"), "actor", [].append)  # type: ignore[arg-type]
        self.tags.backup("actor")
        self.tags.load("ref", lambda: self.live["w"].copy_(states(dtype)["ref"]))
        self.tags.switch("actor")

    def sleep(self) -> None:
        self.tags.sleep()
        self.live["w"] = torch.full_like(self.live["w"], 99)  # other memory, of any content

    def pushed(self, tag: str) -> list[float]:
        with self.tags.reading(tag, "the push") as held:
            return [float(value) for value in held["w"].tolist()]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])


@DTYPES
@pytest.mark.parametrize("forward", ["actor", "ref"])
def test_after_wake_the_actor_is_live_and_pushed(dtype: torch.dtype, forward: str) -> None:
    """Fault case 020: a forward under either tag, sleep, wake, push."""
    model = Model(dtype)
    model.tags.switch(forward)
    model.sleep()
    assert model.tags.active is None
    model.tags.wake("actor")
    assert model.tags.active == "actor"
    assert model.live["w"].tolist() == [1, 1]
    assert model.pushed("actor") == [1.0, 1.0]


@DTYPES
def test_a_background_push_sends_the_tag_named_at_submit(dtype: torch.dtype) -> None:
    """Fault case 020: the live model is switched, slept and woken while the push has read nothing yet."""
    model, go, sent = Model(dtype), threading.Event(), []

    def push() -> None:
        with model.tags.reading("actor", "the push") as held:
            entered.set()
            assert go.wait(30)
            sent.append([float(value) for value in held["w"].tolist()])

    entered = threading.Event()
    thread = threading.Thread(target=push)
    thread.start()
    assert entered.wait(30)
    model.tags.switch("ref")
    model.sleep()
    model.tags.wake("actor")
    with pytest.raises(TagError, match="'actor' is to be written while the push reads it"):
        model.tags.backup("actor")
    go.set()
    thread.join()
    assert sent == [[1.0, 1.0]]
    model.tags.backup("actor")


@pytest.mark.parametrize("use", ["backup", "restore", "switch"])
def test_a_sleeping_model_takes_part_in_nothing(use: str) -> None:
    """Fault case 020: what is there before wake is of no tag."""
    model = Model(torch.float32)
    model.sleep()
    with pytest.raises(TagError, match="asleep"):
        getattr(model.tags, use)("actor")
    assert model.pushed("actor") == [1.0, 1.0]


def test_weights_that_no_tag_holds_are_not_slept_away() -> None:
    """Fault case 020: a step without a backup is an error before the memory is given up."""
    model = Model(torch.float32)
    model.live["w"].add_(1)
    with pytest.raises(TagError, match="cannot sleep"):
        model.tags.sleep()
    model.tags.backup("actor")
    model.sleep()
    model.tags.wake("actor")
    assert model.live["w"].tolist() == [2, 2]


class ForgetsTheTag(TaggedSnapshots):
    """The fault: memory is back, and whatever it holds counts as the tag that was active."""

    def sleep(self) -> None:
        self.before = self.active
        super().sleep()

    def wake(self, tag: str) -> None:
        self.active = self.before


def test_the_fault_itself_is_seen() -> None:
    """Fault case 020: the next step works on other weights, under another name."""
    model = Model(torch.float32, ForgetsTheTag)
    model.tags.switch("ref")
    model.sleep()
    model.tags.wake("actor")
    assert (model.tags.active, model.live["w"].tolist()) != ("actor", [1.0, 1.0])
