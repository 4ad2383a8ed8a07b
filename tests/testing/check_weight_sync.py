"""``check_weight_sync``: does your own push bring every bit to the rollout? A plain function, no pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightsync.reference.params import fresh_copy, int_view, read, same_bits
from weightsync.testing.changes import leaves, make_change, schedule

Named = Mapping[str, Tensor]


def check_weight_sync(
    make_trainer: Callable[[], Any],
    push: Callable[[Any], object],
    read_rollout: Callable[[], Named | Sequence[Named]],
    *,
    export: Callable[[Any], Named] | None = None,
    rounds: int = 1,
    seed: int = 0,
    kinds: Sequence[str] | None = None,
) -> int:
    """Push after every kind of change and compare bits; returns how many pushes were checked.

    Between two pushes it edits the trainer's live tensors in place, bit by bit: no change, one element, the
    lowest bit, 0.0 and -0.0, NaNs and their payloads, first and last elements, first and last tensors, every
    third element, everything, and back to the first state. It also checks that the rollout does not change
    before a push, and that a push leaves the trainer's bits and tensor-parallel attributes alone.

    Args:
        make_trainer: called once; gives live tensors by name as a mapping, as ``.params`` of an object or as
            a module, or a sequence of these, one per shard.
        push: your code. It gets what ``make_trainer`` gave, and returns when the rollout may be read.
        read_rollout: the rollout's tensors by name, or a sequence of such mappings, one per rollout. They
            are copied at once. Names beyond the trainer's are ignored.
        export: from what ``make_trainer`` gave to the tensors by the rollout's names, read from the live
            tensors at each call; for trainers that are cut, fused, renamed or cast. Left out, the trainer's
            own names and tensors are expected.
        rounds: times through all kinds of change; drawn elements differ from round to round.
        seed: equal seeds make equal changes.
        kinds: names of the kinds to make, all of ``changes.KINDS`` if left out; how known failures are left
            out.

    Raises:
        AssertionError: bits are wrong; it names the tensor, the position, expected and found bits, and the
            kind of change that was lost.
        ValueError: the functions given cannot show a loss: no tensors, or an export that never changes.
    """
    trainer = make_trainer()
    wanted = _exported(trainer, export)
    first = {(leaf.name, leaf.shard): leaf.bits() for leaf in leaves(trainer)}
    if not any(bits.numel() for bits in first.values()):
        raise ValueError(
            "make_trainer() gave no tensor with elements, expected at least one; nothing can be lost"
        )
    pushes = 1
    moment = _Moment(f"push 1 (seed {seed}, the first)", wanted)
    _push(trainer, push, moment)
    _compare(_read(read_rollout), moment)
    for kind, step, draws in schedule(kinds, rounds, seed):
        if not make_change(leaves(trainer), step, first, draws):
            continue
        pushes += 1
        before, wanted = wanted, _exported(trainer, export)
        if kind == "all elements" and not _changed(wanted, before):
            raise ValueError(
                "export(trainer) gave the same bits after every element of the trainer changed, expected "
                "others; it must read the live tensors at each call"
            )
        moment = _Moment(f"push {pushes} (seed {seed}, kind {kind!r}: {step.says})", wanted, before)
        _compare(_read(read_rollout), _Moment(moment.push, before, pushed=False))
        _push(trainer, push, moment)
        _compare(_read(read_rollout), moment)
    return pushes


@dataclass(frozen=True)
class _Moment:
    """What the rollout must hold around one push.

    Attributes:
        push: names the push.
        wanted: the exported tensors that it must hold.
        before: what it held before the change that is pushed, or None.
        pushed: False before the push, when the trainer has changed already.
    """

    push: str
    wanted: dict[str, Tensor]
    before: dict[str, Tensor] | None = None
    pushed: bool = True


def _exported(trainer: Any, export: Callable[[Any], Named] | None) -> dict[str, Tensor]:
    if export is not None:
        found: Named = export(trainer)
    else:
        live = leaves(trainer)
        found = {leaf.name: leaf.tensor for leaf in live}
        if len(found) != len(live):
            raise ValueError(
                "make_trainer() gave several shards and there is no export, expected one; say with export= "
                "how the shards make the rollout's tensors"
            )
    if not found:
        raise ValueError("export(trainer) gave no tensors, expected the rollout's; nothing can be lost")
    return {name: fresh_copy(tensor, device="cpu") for name, tensor in found.items()}


def _read(read_rollout: Callable[[], Named | Sequence[Named]]) -> list[dict[str, Tensor]]:
    found = read_rollout()
    several = [found] if isinstance(found, Mapping) else list(found)
    if not several:
        raise ValueError("read_rollout() gave no rollout, expected at least one; nothing can be lost")
    return [{name: fresh_copy(tensor, device="cpu") for name, tensor in one.items()} for one in several]


def _push(trainer: Any, push: Callable[[Any], object], moment: _Moment) -> None:
    """Push, and see that the trainer is what it was."""
    before = [
        (leaf.name, leaf.shard, fresh_copy(leaf.tensor, device="cpu"), read(leaf.tensor))
        for leaf in leaves(trainer)
    ]
    push(trainer)
    after = {(leaf.name, leaf.shard): leaf.tensor for leaf in leaves(trainer)}
    for name, shard, bits, attributes in before:
        tensor = after.get((name, shard))
        if tensor is None or tensor.dtype != bits.dtype or tensor.shape != bits.shape:
            found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise AssertionError(
                f"{moment.push} left the trainer {found} in place of its tensor {name!r}, expected "
                f"{bits.dtype} {list(bits.shape)}; a push only reads it"
            )
        changed = _differing(tensor.cpu(), bits)
        if changed.numel():
            raise AssertionError(
                f"{moment.push} changed the trainer's own tensor {name!r}, first at position "
                f"{int(changed[0])}, expected no change; a push only reads it"
            )
        if read(tensor) != attributes:
            raise AssertionError(
                f"{moment.push} left the trainer's tensor {name!r} with the attributes "
                f"{dict(read(tensor).values)}, expected {dict(attributes.values)}; carry them to what takes "
                "its place"
            )


def _compare(rollouts: list[dict[str, Tensor]], moment: _Moment) -> None:
    for number, found in enumerate(rollouts):
        where = f"rollout {number}, tensor" if len(rollouts) > 1 else "tensor"
        wrong = {
            name: said
            for name in moment.wanted
            if (said := _fault(f"{where} {name!r}", found.get(name), name, moment)) is not None
        }
        if wrong:
            when = "after" if moment.pushed else "before"
            clauses = [f"{when} {moment.push}: {next(iter(wrong.values()))}"]
            changed = [] if moment.before is None else _changed(moment.wanted, moment.before)
            if len(changed) > 1 and set(changed) == set(wrong) and not _changed(found, moment.before or {}):
                clauses.append("no changed tensor arrived: the rollout holds the state of the push before")
            if len(wrong) > 1:
                clauses.append(f"wrong are {', '.join(wrong)}")
            raise AssertionError("; ".join(clauses))


def _fault(label: str, found: Tensor | None, name: str, moment: _Moment) -> str | None:
    """A sentence when a tensor is not what it must be, or None."""
    wanted = moment.wanted[name]
    if found is None or found.dtype != wanted.dtype or found.shape != wanted.shape:
        what = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
        return f"{label} is {what}, expected {wanted.dtype} {list(wanted.shape)}"
    wrong = _differing(found, wanted)
    if not wrong.numel():
        return None
    at = int(wrong[0])
    index = tuple(int(side) for side in torch.unravel_index(wrong[0], found.shape)) if found.ndim else ()
    return (
        f"{label} has {_show(found, at)} at position {at} (index {index}), expected {_show(wanted, at)}; "
        f"{wrong.numel()} of {wanted.numel()} elements differ: {_meaning(found, wrong, name, moment)}"
    )


def _meaning(found: Tensor, wrong: Tensor, name: str, moment: _Moment) -> str:
    """What the differing positions of a tensor tell."""
    if not moment.pushed:
        return "it changed without a push, so it shares memory with the trainer or with a snapshot of it"
    if moment.before is None:
        return "the first push did not bring it whole"
    before = moment.before[name]
    changed = _differing(moment.wanted[name], before)
    known = torch.isin(wrong, changed)
    if not known.any():
        return "nothing changed there, and the push overwrote it"
    if known.all() and torch.equal(int_view(found)[wrong], int_view(before)[wrong]):
        return f"{wrong.numel()} of its {changed.numel()} changes were lost, the rollout kept the old bits"
    return "bits arrived that are neither the trainer's new ones nor the old ones"


def _changed(now: Named, before: Named) -> list[str]:
    return [name for name, tensor in before.items() if name in now and not same_bits(now[name], tensor)]


def _differing(a: Tensor, b: Tensor) -> Tensor:
    return (int_view(a) != int_view(b)).nonzero().reshape(-1)


def _show(tensor: Tensor, at: int) -> str:
    """Bits in hexadecimal, with the value."""
    width = tensor.dtype.itemsize
    raw = int(int_view(tensor)[at]) & ((1 << (8 * width)) - 1)
    return f"0x{raw:0{2 * width}x} ({tensor.reshape(-1)[at].item()})"
