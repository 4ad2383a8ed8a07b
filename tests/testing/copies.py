"""The ways in which torch makes a tensor from a tensor, by whether Python attributes survive them.

A copy that is to be tested for lost attributes must really be a new object: ``tensor.to(device)`` on the device
where the tensor is returns its argument, so a move is tried here with ``meta`` or with ``copy=True``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import copy, deepcopy

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from weightsync.reference.params import carry

Route = Callable[[Tensor], Tensor]


def _module(tensor: Tensor) -> Module:
    """A module that holds ``tensor``, the same object if it is a parameter, under the name ``w``."""
    module = Module()
    module.w = tensor if isinstance(tensor, Parameter) else Parameter(tensor, requires_grad=False)
    return module


def _module_to_overwriting(tensor: Tensor) -> Tensor:
    """``Module.to`` as it is when torch puts new parameters in place of the old ones."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return _module(tensor).to(torch.float64).get_parameter("w")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _saved(tensor: Tensor, weights_only: bool) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=weights_only)
    return loaded


DROPPING: dict[str, Route] = {
    "empty_like and copy_": lambda t: torch.empty_like(t).copy_(t.detach()),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "to(meta)": lambda t: t.to("meta", copy=True),
    "to(device, copy)": lambda t: t.to(t.device, copy=True),
    "to(dtype)": lambda t: t.to(torch.float32 if t.dtype == torch.float64 else torch.float64),
    "float()": lambda t: t.double().float(),
    "view": lambda t: t.view(t.shape),
    "slice": lambda t: t[:],
    "cat": lambda t: torch.cat([t]),
    "Parameter(p)": lambda t: Parameter(t, requires_grad=False),
    "Parameter(data)": lambda t: Parameter(t.data),
    "deepcopy(Parameter)": lambda t: deepcopy(t if isinstance(t, Parameter) else Parameter(t.data)),
    "state_dict": lambda t: _module(t).state_dict()["w"],
    "Module.to, overwriting": _module_to_overwriting,
    "the fp32 master": lambda t: t.detach().clone().float(),
    "a view of the master's range": lambda t: t.detach().view(-1)[: t.numel()].view(t.shape),
}
"""New tensors without the attributes: each needs ``carry``. All take a contiguous floating tensor with a side."""

KEEPING: dict[str, Route] = {
    "to(same device)": lambda t: t.to(t.device),
    "cpu()": lambda t: t.cpu(),
    "contiguous()": lambda t: t.contiguous(),
    "requires_grad_": lambda t: t.requires_grad_(t.requires_grad),
    "copy.copy": copy,
    "torch.save": lambda t: _saved(t, weights_only=False),
    "torch.save, weights_only": lambda t: _saved(t, weights_only=True),
    "deepcopy of a plain tensor": lambda t: deepcopy(carry(t, t.detach())),
    "state_dict(keep_vars)": lambda t: _module(t).state_dict(keep_vars=True)["w"],
    "Module.to, in place": lambda t: _module(t).to(torch.float64).get_parameter("w"),
}
"""The attributes are still there, often because the object is the same: no proof that a copy carries them. All
take a ``Parameter``."""
