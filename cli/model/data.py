"""Next-token batches on the bytes of a shipped text, or on the tokens of a folder's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightsync.cli.model.config import CheckpointError


def shipped_text() -> str:
    """The text that comes with the package (CC0)."""
    return (resources.files("weightsync.cli") / "data" / "text.txt").read_text(encoding="utf-8")


def token_stream(folder: Path, vocab: int, text: str | None = None) -> Tensor:
    """The text as token numbers, (N,) int64: by the folder's ``tokenizer.json``, or its bytes without one.

    Args:
        folder: the checkpoint folder.
        vocab: rows of the embedding; every token number is below it.
        text: the text; the shipped one when left out.

    Raises:
        CheckpointError: the package ``tokenizers`` is not installed, or a token is outside of the vocabulary.
    """
    text = shipped_text() if text is None else text
    path = folder / "tokenizer.json"
    if path.is_file():
        ids = list(read_tokenizer(path).encode(text, add_special_tokens=False).ids)
        require_tokens(ids, vocab, f"{path} gives token")
    else:
        ids = list(text.encode("utf-8"))
        require_tokens(ids, vocab, f"{folder} has no tokenizer.json and the text has byte")
    return torch.tensor(ids, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Batches:
    """Seeded windows of one token stream; a pure function of the step.

    Attributes:
        stream: (N,) int64.
        batch: windows in a batch.
        tokens: tokens that each window predicts; a window holds one more.
        seed: draws where the windows start.
    """

    stream: Tensor
    batch: int
    tokens: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.stream) <= self.tokens:
            raise CheckpointError(
                f"the text has {len(self.stream)} tokens, expected more than the {self.tokens} of one "
                "window; "
                "lower workload.tokens or give a longer text"
            )

    def at(self, step: int) -> Tensor:
        """The batch of one step, (batch, tokens + 1) int64, new storage."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.stream) - self.tokens, (self.batch, 1), generator=generator)
        return self.stream[starts + torch.arange(self.tokens + 1)]


def read_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer`` in ``path``, a ``tokenizer.json``.

    Raises CheckpointError when the file is none, or the package ``tokenizers`` is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{path} needs the package 'tokenizers', which cannot be imported ({error}); install "
            "weightsync[cli]"
        ) from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"{path} is no tokenizer ({error}); download the folder again") from None


def require_tokens(ids: Sequence[int], vocab: int, source: str) -> None:
    """Raise CheckpointError when a token number is outside of the vocabulary; ``source`` begins the sentence."""
    if ids and max(ids) >= vocab:
        raise CheckpointError(
            f"{source} {max(ids)}, outside of key 'vocab_size' {vocab} of config.json; expected numbers "
            "below it, so add the tokenizer.json that belongs to this model"
        )
