"""Context parallelism: the two chunks of a sample that each rank holds, and the loss tokens in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weightsync.reference.errors import BatchError


class Slice(NamedTuple):
    """A rank's loss tokens within one of its chunks; both ranges are equally long and may be empty.

    Attributes:
        logits: where their logits are in what the rank computed, which is its two chunks one after the other.
        tokens: their places in the whole sample, one behind the position whose logits predict them.
    """

    logits: range
    tokens: range


def chunk_size(tokens: int, cp: int) -> int:
    """Tokens of a chunk: the sample is padded at its end to ``2 * cp`` equal ones."""
    return -(-tokens // (2 * cp))


def zigzag(tokens: int, cp: int, rank: int) -> tuple[range, range]:
    """Positions of chunks ``rank`` and ``2 * cp - 1 - rank``, without padding: early and late, so equal causal work.

    Args:
        tokens: of the whole sample.
        cp: context-parallel ranks.
        rank: this one.

    Raises:
        BatchError: no such rank, or a negative number of tokens.

    >>> zigzag(8, 2, 0)
    (range(0, 2), range(6, 8))
    """
    if cp < 1 or not 0 <= rank < cp or tokens < 0:
        raise BatchError(
            f"rank {rank} of {cp} for {tokens} tokens; expected rank 0 to cp - 1 and 0 tokens or more"
        )
    size = chunk_size(tokens, cp)
    first, last = (
        range(min(tokens, number * size), min(tokens, (number + 1) * size))
        for number in (rank, 2 * cp - 1 - rank)
    )
    return first, last


def cut(whole: Tensor, cp: int, rank: int) -> Tensor:
    """This rank's positions of a sample, from (T, ...), without padding; new storage."""
    first, last = zigzag(len(whole), cp, rank)
    return torch.cat([whole[first.start : first.stop], whole[last.start : last.stop]])


def join(parts: Sequence[Tensor]) -> Tensor:
    """The whole sample, (T, ...), from what ``cut`` gave every rank, in rank order; new storage."""
    cp, tokens = len(parts), sum(len(part) for part in parts)
    whole = parts[0].new_empty(tokens, *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        first, last = zigzag(tokens, cp, rank)
        if len(part) != len(first) + len(last):
            raise BatchError(
                f"rank {rank} of {cp} gives {len(part)} of {tokens} positions; expected {len(first) + len(last)}, so "
                "join what cut gave"
            )
        whole[first.start : first.stop] = part[: len(first)]
        whole[last.start : last.stop] = part[len(first) :]
    return whole


def loss_slices(tokens: int, response: int, cp: int, rank: int) -> tuple[Slice, Slice]:
    """The loss tokens of a rank: of the last ``response`` tokens of a sample, those that its logits predict.

    Logits at a position predict the next token, so a token belongs to the rank of the position before it. Over all
    ranks each of the ``response`` tokens is in exactly one slice.

    Args:
        tokens: of the whole sample, prompt and response.
        response: those at its end that have a loss, fewer than all.
        cp: context-parallel ranks.
        rank: this one.

    Raises:
        BatchError: the first token would have a loss, which nothing predicts.
    """
    if not 0 <= response < max(1, tokens):
        raise BatchError(
            f"{response} of {tokens} tokens have a loss; expected fewer, as nothing predicts the first token"
        )
    found, place = [], 0
    for chunk in zigzag(tokens, cp, rank):
        start = min(chunk.stop, max(chunk.start, tokens - response - 1))
        stop = max(start, min(chunk.stop, tokens - 1))
        first = place + start - chunk.start
        found.append(Slice(range(first, first + stop - start), range(start + 1, stop + 1)))
        place += len(chunk)
    return found[0], found[1]


def taken(values: Tensor, slices: tuple[Slice, Slice]) -> Tensor:
    """The rows of a rank's loss tokens, (n, ...), out of what it computed.

    Also where there are none, the result hangs on ``values``: its gradient is zeros, and a backward pass goes all the
    way, with whatever collectives are in it.
    """
    return torch.cat([values[one.logits.start : one.logits.stop] for one in slices])
