"""``check_weight_sync`` lets right pushes pass, of trainers of any shape, and refuses to check nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.params import int_view
from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.changes import KINDS
from weightsync.testing.check_weight_sync import check_weight_sync
from weightsync.testing.inprocess_run import InprocessRun
from weightsync.testing.plain_calls import random_checkpoint
from weightsync.testing.strategies import DTYPES
from weightsync.testing.tiny import tiny_deployment

State = dict[str, Tensor]


def trainer(dtype: torch.dtype = torch.bfloat16) -> State:
    """Three tensors, the second one strided; with attributes."""
    stream = torch.Generator().manual_seed(1)
    made = {
        "first": torch.rand(7, generator=stream).to(dtype),
        "strided": torch.rand(4, 6, generator=stream).to(dtype).t()[1:4],
        "scalar": torch.rand((), generator=stream).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "last": torch.rand(2, 5, generator=stream).to(dtype),
    }
    made["last"].partition_dim = 1  # type: ignore[attr-defined]
    return made


class Rollout:
    """A rollout and a right push to it: what changed in any bit is copied."""

    def __init__(self) -> None:
        self.weights: State = {}

    def __call__(self, live: State) -> None:
        for name, tensor in live.items():
            self.weights.setdefault(name, torch.zeros(tensor.shape, dtype=tensor.dtype))
            self.move(name, tensor, self.weights[name])

    def move(self, name: str, new: Tensor, held: Tensor) -> None:
        bits, old = int_view(new), int_view(held)
        changed = self.changed(new.contiguous().reshape(-1), held.reshape(-1))
        old[changed] = bits[changed]

    def changed(self, new: Tensor, held: Tensor) -> Tensor:
        return int_view(new) != int_view(held)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_push_passes(dtype: torch.dtype) -> None:
    rollout = Rollout()
    steps = [step for steps in KINDS.values() for step in steps if dtype.is_floating_point or not step.floats]
    pushes = check_weight_sync(lambda: trainer(dtype), rollout, lambda: rollout.weights, rounds=2, seed=3)
    assert pushes == 1 + 2 * len(steps)


class Holder:
    def __init__(self, params: State) -> None:
        self.params = params


@pytest.mark.parametrize("wrap", [Holder, lambda state: [state]], ids=["params", "one shard"])
def test_trainers_of_other_shapes(wrap: Callable[[State], Any]) -> None:
    rollout, state = Rollout(), trainer()
    check_weight_sync(lambda: wrap(state), lambda _: rollout(state), lambda: rollout.weights)


def test_a_module_is_a_trainer() -> None:
    module, rollout = torch.nn.Linear(3, 2), Rollout()
    check_weight_sync(
        lambda: module, lambda one: rollout(dict(one.named_parameters())), lambda: rollout.weights
    )


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (dict, {}, "gave no tensors"),
        (lambda: {"w": torch.zeros(0)}, {}, "no tensor with elements"),
        (lambda: 3, {}, "make_trainer.* gave int"),
        (lambda: [trainer(), trainer()], {}, "no export"),
        (trainer, {"kinds": ["sign"]}, "kinds are .'sign'."),
        (trainer, {"rounds": 0}, "rounds 0"),
        (
            trainer,
            {"export": lambda _: {"first": torch.zeros(7, dtype=torch.bfloat16)}},
            "must read the live",
        ),
    ],
)
def test_a_check_that_could_not_fail_is_refused(make: Callable[[], Any], options: Any, says: str) -> None:
    rollout = Rollout()

    def push(live: Any) -> None:
        if "export" in options:
            rollout(options["export"](live))
        elif isinstance(live, dict):
            rollout(live)

    with pytest.raises(ValueError, match=says):
        check_weight_sync(make, push, lambda: rollout.weights, **options)


def test_a_rollout_that_nobody_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="no rollout"):
        check_weight_sync(trainer, lambda _: None, list)


def test_replicas_stay_equal_and_cut_shards_do_not() -> None:
    seen: list[tuple[bool, bool]] = []

    def make() -> list[State]:
        shards = [{"norm": torch.ones(3), "cut": torch.ones(3)} for _ in range(2)]
        for shard in shards:
            shard["cut"].tensor_model_parallel, shard["cut"].partition_dim = True, 0  # type: ignore[attr-defined]
        return shards

    def export(shards: list[State]) -> State:
        return {"norm": shards[0]["norm"], "cut": torch.cat([shard["cut"] for shard in shards])}

    rollout = Rollout()

    def push(shards: list[State]) -> None:
        seen.append(
            tuple(torch.equal(int_view(shards[0][n]), int_view(shards[1][n])) for n in ("norm", "cut"))
        )  # type: ignore[arg-type]
        rollout(export(shards))

    check_weight_sync(make, push, lambda: rollout.weights, export=export)
    assert all(norm for norm, _ in seen)
    assert not all(cut for _, cut in seen)


@pytest.mark.parametrize("receive", ["stage", "stream"])
def test_the_protocol_passes_from_shards_with_an_export(receive: Any) -> None:
    """The trainer is cut in two, Megatron's way; the rollout that is read holds the checkpoint's names."""
    deployment = tiny_deployment()
    run = InprocessRun(deployment, settings=ProtocolSettings(receive=receive))
    leader = deployment.rollouts[0].leader
    with asyncio.Runner() as runner:
        runner.run(run.__aenter__())

        def push(shards: Any) -> None:
            outcome = runner.run(run.push())
            assert outcome.committed, outcome.reason

        run.set(random_checkpoint(deployment, 5))
        check_weight_sync(
            lambda: run.params, push, lambda: run.targets[leader].weights, export=deployment.export
        )
        runner.run(run.__aexit__(None, None, None))
    assert run.violations == []
