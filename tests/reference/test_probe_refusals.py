"""An export that does more or less than move elements is refused, with the name and the way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.errors import ProbeError
from weightsync.reference.params import ParamMeta
from weightsync.reference.probe import Probe

Given = Mapping[str, Tensor]


def live() -> dict[str, Tensor]:
    return {"norm": torch.zeros(4, dtype=torch.bfloat16), "w": torch.zeros(3, 4, dtype=torch.bfloat16)}


def changing(change: Callable[[Tensor, int], Tensor]) -> Callable[[Given], dict[str, Tensor]]:
    """An export whose ``w`` depends on how often it was called."""
    calls: list[int] = []

    def export(params: Given) -> dict[str, Tensor]:
        calls.append(len(calls))
        return {"norm": params["norm"], "w": change(params["w"], len(calls))}

    return export


def writing(params: Given) -> Given:
    params["norm"].add_(1)
    return params


WRONG: dict[str, tuple[Callable[[Given], object], str]] = {
    "adds one to a norm": (
        lambda p: {"norm": p["norm"] + 1, "w": p["w"]},
        "element 0 of exported tensor 'norm' is no element of any parameter: the export computes it",
    ),
    "takes the absolute value": (
        lambda p: {"norm": p["norm"].abs(), "w": p["w"]},
        "exported tensor 'norm' has other bits than the elements it is made of",
    ),
    "clamps large values": (
        lambda p: {"norm": p["norm"], "w": p["w"].clamp(max=1e4)},
        "exported tensor 'w' has other bits",
    ),
    "averages": (lambda p: {"norm": p["norm"], "w": (p["w"] + p["w"].flip(0)) / 2}, "the export computes it"),
    "fills in rows": (
        lambda p: {"norm": p["norm"], "w": torch.cat([p["w"], p["w"].new_zeros(1, 4)])},
        "element 12 of exported tensor 'w' is no element",
    ),
    "drops a row": (
        lambda p: {"norm": p["norm"], "w": p["w"][:2]},
        "export drops 4 of 12 elements of parameter 'w' of rank 0, the first is 8",
    ),
    "drops a parameter": (lambda p: {"w": p["w"]}, "export drops 4 of 4 elements of parameter 'norm'"),
    "repeats a row": (
        lambda p: {"norm": p["norm"], "w": torch.cat([p["w"], p["w"][:1]])},
        "export repeats an element of parameter 'w' of rank 0",
    ),
    "gives one row under two names": (
        lambda p: {"norm": p["norm"], "w": p["w"], "first": p["w"][0]},
        "export repeats an element of parameter 'w' of rank 0 at element 0 of 'first'",
    ),
    "casts": (
        lambda p: {"norm": p["norm"], "w": p["w"].float()},
        r"export gave 'w' torch.float32 \[3, 4\] from 'norm' torch.bfloat16 \[4\], expected the same dtype",
    ),
    "casts to few bits": (
        lambda p: {"norm": p["norm"], "w": p["w"].to(torch.float8_e4m3fn)},
        "export gave 'w' torch.float8_e4m3fn",
    ),
    "goes through fewer bits": (
        lambda p: {"norm": p["norm"], "w": p["w"].to(torch.float8_e4m3fn).to(torch.bfloat16)},
        "'w' is no element of any parameter",
    ),
    "goes through another exponent": (
        lambda p: {"norm": p["norm"], "w": p["w"].to(torch.float16).to(torch.bfloat16)},
        "exported tensor 'w' has other bits",
    ),
    "moves otherwise at the second call": (
        changing(lambda w, call: w.flip(0) if call == 2 else w),
        "export gave another 'w' at a second call",
    ),
    "moves otherwise at the fourth call": (
        changing(lambda w, call: w.flip(0) if call == 4 else w),
        "'w' is no element of any parameter",
    ),
    "has another shape at the third call": (
        changing(lambda w, call: w[:2] if call == 3 else w),
        "export gave another 'w' at a second call",
    ),
    "draws random numbers": (
        lambda p: {"norm": p["norm"], "w": p["w"][torch.randperm(3)] + torch.rand(3, 4).to(torch.bfloat16)},
        "export gave another 'w' at a second call",
    ),
    "writes to its input": (writing, "export writes to its input 'norm'"),
    "gives a name twice": (
        lambda p: [("norm", p["norm"]), ("w", p["w"]), ("w", p["w"])],
        "export gave two tensors as 'w'",
    ),
    "gives no tensor": (lambda p: {"norm": p["norm"], "w": 3}, "export gave int as 'w'"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=list(WRONG))
def test_an_export_is_refused_that(wrong: str) -> None:
    export, said = WRONG[wrong]
    with pytest.raises(ProbeError, match=said):
        Probe(export).of(live())


def test_what_is_refused_elsewhere_is_no_fault_of_a_plain_export() -> None:
    assert len(Probe(lambda params: params).of(live()).tensors) == 2


DECLARED = (ParamMeta("norm", torch.bfloat16, (4,)), ParamMeta("w", torch.bfloat16, (3, 4)))


@pytest.mark.parametrize(
    ("export", "said"),
    [
        (
            lambda p: {"norm": p["norm"], "w": p["w"][:2]},
            r"gave 'w' torch.bfloat16 \[2, 4\], expected .* \[3, 4\]",
        ),
        (lambda p: {"norm": p["norm"], "v": p["w"]}, r"gave 'v' .* which is not declared"),
        (lambda p: {"w": p["w"]}, "export gave no 'norm', which is declared"),
        (lambda p: {"norm": p["norm"], "w": p["w"].float()}, "gave 'w' torch.float32"),
    ],
    ids=["shape", "name", "absent", "dtype"],
)
def test_other_tensors_than_declared_are_refused(export: Callable[[Given], object], said: str) -> None:
    """Also where the parameter may drop elements."""
    with pytest.raises(ProbeError, match=said):
        Probe(export, padded=("norm", "w"), tensors=DECLARED).of(live())


def test_a_tied_name_that_is_declared_is_refused() -> None:
    def export(p: Any) -> Any:
        return {"norm": p["norm"], "a": p["w"], "w": p["w"]}

    declared = (*DECLARED, ParamMeta("a", torch.bfloat16, (3, 4)))
    with pytest.raises(ProbeError, match="'w' as a second name of 'a', expected a tensor of its own"):
        Probe(export, tensors=declared).of(live())


def two_ranks() -> list[dict[str, Tensor]]:
    return [live(), live()]


def test_a_shard_that_is_never_gathered_is_no_replica() -> None:
    """A lost attribute makes a gather take rank 0's shard for the whole."""

    def export(ranks: Any) -> Any:
        return {"norm": ranks[0]["norm"], "w": ranks[0]["w"]}

    with pytest.raises(
        ProbeError, match=r"drops 12 of 12 elements of parameter 'w' of rank 1.* in replicated if"
    ):
        Probe(export, replicated=["norm"]).of(two_ranks())


def test_a_replica_has_one_shape() -> None:
    ranks = two_ranks()
    ranks[1]["norm"] = torch.zeros(5, dtype=torch.bfloat16)

    def export(ranks: Any) -> Any:
        return {"norm": ranks[0]["norm"], "w": torch.cat([one["w"] for one in ranks])}

    with pytest.raises(
        ProbeError, match=r"'norm' is declared replicated, but has the shapes \[\(4,\), \(5,\)\]"
    ):
        Probe(export, replicated=["norm"]).of(ranks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"padded": ["v"]}, "'v' is declared, but no parameter has that name"),
        ({"groups": [["w", "v"]]}, "'v' is declared, but no parameter has that name"),
        ({"groups": [["w"]]}, "'norm' is in 0 groups, expected one"),
        ({"groups": [["w"], ["norm", "w"]]}, "'w' is in 2 groups, expected one"),
    ],
)
def test_declarations_that_fit_nothing_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ProbeError, match=said):
        Probe(lambda params: params, **options).of(live())  # type: ignore[arg-type]


def test_a_tensor_made_of_two_groups_is_refused() -> None:
    def export(params: Any) -> Any:
        return {"stacked": next(iter(params.values()))}

    with pytest.raises(ProbeError, match="gave 'stacked' for two groups of parameters"):
        Probe(export, groups=[["w"], ["norm"]]).of(live())
