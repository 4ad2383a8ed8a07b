"""A loader that does more than move elements is refused, by name, and the parameters have their old bits back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from weightsync.reference.capture import capture
from weightsync.reference.errors import ProbeError
from weightsync.reference.params import ParamMeta, same_bits
from weightsync.testing.stacked_loader import load_into
from weightsync.testing.twosides import poison


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda w, t: w.copy_(t + 1), "element 0 of parameter 'w' holds no element of the checkpoint"),
        (lambda w, t: w.copy_(-t.exp()), "'w' holds no element"),
        (lambda w, t: w.copy_(t.abs()), "'w' holds no element"),
        (lambda w, t: w.copy_(t.float().mean().expand(2, 2)), "'w' holds no element"),
        (lambda w, t: w.copy_(t.clamp(max=1)), "'w' holds no element"),
        (lambda w, t: w.copy_(t[torch.randperm(2)]), "'w' holds no element"),
        (lambda w, t: setattr(w, "data", t), "load_weights replaces the storage of parameter 'w'"),
    ],
    ids=[
        "adds",
        "takes a function",
        "takes the absolute value",
        "averages",
        "clamps",
        "shuffles",
        "replaces",
    ],
)
def test_a_loader_is_refused_and_leaves_no_trace_that(
    load: Callable[[Tensor, Tensor], object], said: str
) -> None:
    params = {"w": poison((2, 2), torch.bfloat16), "v": poison((2,), torch.bfloat16)}
    storage = params["w"].data_ptr()

    def load_weights(pairs: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in pairs:
            load(params["w"], tensor)

    with pytest.raises(ProbeError, match=said):
        capture(load_weights, params, [ParamMeta("w", torch.bfloat16, (2, 2))])
    assert params["w"].data_ptr() == storage
    assert all(same_bits(one, poison(tuple(one.shape), torch.bfloat16)) for one in params.values())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float32])
def test_a_loader_that_quantises_or_casts_is_refused_by_name(dtype: torch.dtype) -> None:
    params = {"w": torch.zeros(2, dtype=torch.bfloat16), "q": torch.zeros(2, dtype=dtype)}
    metas = [ParamMeta(name, torch.bfloat16, (2,)) for name in "wq"]
    with pytest.raises(
        ProbeError, match=f"casts or quantises into parameter 'q' of {dtype} from tensors such as"
    ):
        capture(lambda pairs: load_into(params, pairs), params, metas)
    mixed = [metas[0], metas[1], ParamMeta("x", dtype, (1,))]
    params["x"] = torch.zeros(1, dtype=dtype)
    with pytest.raises(ProbeError, match="into parameter 'q'"):
        capture(lambda pairs: load_into(params, pairs), params, mixed)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([["w"], ["w"]], "'w' is in 2 groups, expected 1"),
        ([["w", "v"]], "'v' is in 1 groups, expected 0"),
        ([], "'w' is in 0"),
    ],
)
def test_groups_list_every_tensor_once(groups: list[list[str]], said: str) -> None:
    params = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(ProbeError, match=said):
        capture(
            lambda pairs: load_into(params, pairs),
            params,
            [ParamMeta("w", torch.bfloat16, (2,))],
            groups=groups,
        )
