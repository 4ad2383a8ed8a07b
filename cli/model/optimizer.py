"""AdamW as mixed-precision training runs it: fp32 masters behind low-precision weights, one rank's shards."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from weightsync.reference.dirty import DirtyBits
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import fresh_copy


class AdamW:
    """AdamW with decoupled weight decay over one rank's parameters.

    The masters start as the exact values of the weights and carry their tensor-parallel attributes. A step
    updates the masters and rounds them into the weights in place, so that the weights keep their storage and
    attributes. Element-wise throughout: any cut of a tensor gives the same bits as the whole.

    Args:
        params: runtime name -> live weight; borrowed, changed by ``step`` only.
        lr: step size.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of a matrix that decays per unit of ``lr``; norms and biases (1-D) do not decay.
        dirty: marks what a step changes, if a push is to tell changes by it.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        dirty: DirtyBits | None = None,
    ) -> None:
        self.dirty = dirty
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.steps = 0
        self.masters = {name: fresh_copy(param, dtype=torch.float32) for name, param in params.items()}
        self._params = dict(params)
        self._first = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self._second = {name: torch.zeros_like(master) for name, master in self.masters.items()}

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """One step along ``grads``: runtime name -> float32 gradient of the weight's shape; only read."""
        for name, master in self.masters.items():
            if name not in grads or grads[name].shape != master.shape:
                found = "none" if name not in grads else str(list(grads[name].shape))
                raise PlanMismatch(
                    f"gradient of {name!r} is {found}, expected shape {list(master.shape)}; cut it as "
                    "the weight is"
                )
        self.steps += 1
        beta1, beta2 = self.betas
        size = self.lr / (1 - beta1**self.steps)
        root = math.sqrt(1 - beta2**self.steps)
        with torch.no_grad():
            for name, master in self.masters.items():
                grad, first, second = grads[name], self._first[name], self._second[name]
                if master.dim() > 1:
                    master.mul_(1 - self.lr * self.weight_decay)
                first.lerp_(grad, 1 - beta1)
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                master.addcdiv_(first, second.sqrt().div_(root).add_(self.eps), value=-size)
                if self.dirty is None:
                    self._params[name].copy_(master)
                else:
                    self.dirty.write(name, master)
