"""Digit tasks with answers that can be checked: reversing a number, adding two. Seeded; pure functions of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from weightsync.cli.model.config import CheckpointError
from weightsync.cli.model.data import read_tokenizer, require_tokens
from weightsync.cli.scenario_tables import Rl

SYMBOLS = "0123456789+="
"""The vocabulary of a model without a tokenizer: its token numbers are places in this text."""

SHOTS = 3
"""Solved examples before each question to a pretrained model, which otherwise would not know the form."""

ONE_TOKEN = "expected one token per digit, so take a model whose tokenizer splits numbers"


class Codec(Protocol):
    """Text to token numbers and back."""

    def encode(self, text: str) -> list[int]:
        """Token numbers of a prompt."""

    def symbol(self, token: int) -> str:
        """The text of one token."""


class PlainCodec:
    """One token per symbol of ``SYMBOLS``."""

    def encode(self, text: str) -> list[int]:
        """Token numbers of a prompt."""
        return [SYMBOLS.index(symbol) for symbol in text]

    def symbol(self, token: int) -> str:
        """The text of one token; a token that is none of ours is a space."""
        return SYMBOLS[token] if token < len(SYMBOLS) else " "


class TokenizerCodec:
    """The tokenizer of a checkpoint folder.

    Args:
        path: ``tokenizer.json``.
        vocab: rows of the model's embedding.

    Raises:
        CheckpointError: the file is no tokenizer, or the package ``tokenizers`` is not installed.
    """

    def __init__(self, path: Path, vocab: int) -> None:
        self._path = path
        self._vocab = vocab
        self._tokenizer = read_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        """Token numbers of a prompt. Raises CheckpointError when one is outside of the model's vocabulary."""
        tokens = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        require_tokens(tokens, self._vocab, f"{self._path} gives token")
        return tokens

    def symbol(self, token: int) -> str:
        """The text of one token."""
        return str(self._tokenizer.decode([token]))


def codec(folder: Path, vocab: int) -> Codec:
    """The folder's own tokenizer, or ``SYMBOLS`` without one.

    Raises CheckpointError when the vocabulary is too small for the symbols, or the tokenizer cannot be read.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        return TokenizerCodec(path, vocab)
    if vocab < len(SYMBOLS):
        raise CheckpointError(
            f"{folder} has no tokenizer.json and key 'vocab_size' is {vocab}; expected at least {len(SYMBOLS)}, one "
            f"for each of {SYMBOLS!r}"
        )
    return PlainCodec()


@dataclass(frozen=True, eq=False)
class Questions:
    """The prompts of one step.

    Attributes:
        tokens: (prompts, P) int64.
        answers: per prompt its right answer, as text.
    """

    tokens: Tensor
    answers: tuple[str, ...]


class DigitTask:
    """Reverse a number of ``digits`` digits, or add two of them; the answer has a fixed number of digits.

    Args:
        settings: which task, of what size.
        codec: to and from tokens; a TokenizerCodec gets solved examples before each question.
        seed: draws the numbers.
    """

    def __init__(self, settings: Rl, codec: Codec, seed: int) -> None:
        self.settings = settings
        self.codec = codec
        self.seed = seed

    @property
    def answer_tokens(self) -> int:
        """Digits of every answer, each of which is one token."""
        return self.settings.digits + (self.settings.task == "add")

    def questions(self, step: int) -> Questions:
        """The prompts of one step, from 1; all of one length.

        Raises CheckpointError when the tokenizer does not make one token of each digit: one batch could not hold
        the prompts, or no answer of ``answer_tokens`` tokens could be right.
        """
        random = np.random.default_rng([self.seed, step])
        texts, answers = [], []
        for _ in range(self.settings.prompts):
            question, answer = self._draw(random)
            solved = ""
            if not isinstance(self.codec, PlainCodec):
                solved = "".join("".join(self._draw(random)) + "\n" for _ in range(SHOTS))
            texts.append(solved + question)
            answers.append(answer)
        rows = [self.codec.encode(text) for text in texts]
        if len({len(row) for row in rows}) > 1:
            raise CheckpointError(
                f"the tokenizer makes {min(map(len, rows))} to {max(map(len, rows))} tokens of prompts with equally "
                f"many digits; {ONE_TOKEN}"
            )
        for row, text, answer in zip(rows, texts, answers, strict=True):
            whole = self.codec.encode(text + answer)
            if whole[: len(row)] != row or [self.codec.symbol(token) for token in whole[len(row) :]] != [
                *answer
            ]:
                raise CheckpointError(
                    f"the tokenizer makes {len(whole) - len(row)} tokens of the answer {answer!r}; {ONE_TOKEN}"
                )
        return Questions(torch.tensor(rows, dtype=torch.int64), tuple(answers))

    def reward(self, answer: str, tokens: Sequence[int]) -> float:
        """Share of the digits that are right, 0 to 1."""
        said = [self.codec.symbol(token) for token in tokens]
        return sum(symbol == digit for symbol, digit in zip(said, answer, strict=True)) / len(answer)

    def _draw(self, random: np.random.Generator) -> tuple[str, str]:
        digits, base = self.settings.digits, self.settings.base
        numbers = ["".join(map(str, random.integers(0, base, digits))) for _ in range(2)]
        if self.settings.task == "reverse":
            return f"{numbers[0]}=", numbers[0][::-1]
        total = np.base_repr(int(numbers[0], base) + int(numbers[1], base), base)
        return f"{numbers[0]}+{numbers[1]}=", total.zfill(digits + 1)
