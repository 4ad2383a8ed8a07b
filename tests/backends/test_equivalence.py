"""One scenario, every backend: the same outcomes, bits, bytes and verbs as in process.

A device's runner runs this same file with ``--weightsync-backend NAME``; a missing device is a failure then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.backends.registry import Registry
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.errors import BackendUnavailable
from weightsync.reference.families import DeepSeek
from weightsync.reference.model import ModelShape
from weightsync.reference.parallel import TrainerLayout
from weightsync.reference.params import int_view
from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.scenario import RunResult, run_scenario
from weightsync.testing.strategies import deployments
from weightsync.testing.tiny import tiny_deployment
from weightsync.testing.worlds import world_names, world_of

UNTIED = ModelShape(
    vocab=7, hidden=4, intermediate=6, layers=2, heads=4, kv_heads=1, head_dim=2, tied=False, qkv_bias=True
)
NORMED = ModelShape(
    vocab=11, hidden=6, intermediate=4, layers=1, heads=2, kv_heads=2, head_dim=4, qk_norm=True,
    dtype=torch.float8_e4m3fn,
)  # fmt: skip
NINE_TO_THREE = ModelShape(vocab=6, hidden=3, intermediate=6, layers=1, heads=9, kv_heads=3, head_dim=2)
LATENT = DeepSeek(
    vocab=5, hidden=2, intermediate=4, expert_intermediate=2, experts=4, layers=2, heads=2, kv_rank=2, nope=1,
    rope=1, value=2, q_rank=2,
)  # fmt: skip
DEPLOYMENTS: Mapping[str, Deployment] = {
    "tiny-fault": tiny_deployment(),
    "from one rank to two and one": Deployment(
        UNTIED, 1, (RolloutLayout(2, True), RolloutLayout(1, False)), 256, 2, 4
    ),
    "float8, from two ranks to two": Deployment(NORMED, 2, (RolloutLayout(2, False),), 192, 4, 8),
    "nine query and three key heads, two ranks to two": Deployment(
        NINE_TO_THREE, 2, (RolloutLayout(2, True), RolloutLayout(1, False)), 256, 3, 4
    ),
    "experts and fp32 buffers, two stages of two ranks to experts of other ranks": Deployment(
        LATENT,
        TrainerLayout(2, pp=2, ep=2, etp=1),
        (RolloutLayout(2, True, 2), RolloutLayout(2, False)),
        512,
        2,
        4,
    ),
}
RECEIVE = pytest.mark.parametrize("receive", ["stage", "stream"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--weightsync-backend")
        known = dict.fromkeys((*Registry().names(), *world_names()))
        metafunc.parametrize("backend", wanted or list(known))


@pytest.fixture
def here(backend: str, pytestconfig: pytest.Config) -> str:
    """The backend, if this machine has it."""
    return available(backend, asked_for=backend in pytestconfig.getoption("--weightsync-backend"))


def available(backend: str, *, asked_for: bool) -> str:
    try:
        world_of(backend)
    except BackendUnavailable as missing:
        if asked_for:
            pytest.fail(f"{backend} was asked for: {missing}")
        pytest.skip(str(missing))
    return backend


@lru_cache
def expected(deployment: str, receive: str) -> RunResult:
    return run_scenario("inprocess", DEPLOYMENTS[deployment], ProtocolSettings(receive=receive))


def differences(found: RunResult, wanted: RunResult) -> list[str]:
    """What differs between two runs of one scenario, sentence by sentence."""
    said = [
        f"update {one.update} came to {one}, expected {other}"
        for one, other in zip(found.updates, wanted.updates, strict=True)
        if one != other
    ]
    said += [
        f"{rank} ended as {end}, expected {wanted.ends[rank]}"
        for rank, end in found.ends.items()
        if end != wanted.ends[rank]
    ]
    for rank, weights in found.weights.items():
        for name, tensor in weights.items():
            if not torch.equal(int_view(tensor), int_view(wanted.weights[rank][name])):
                said.append(f"{name} on {rank} has other bits")
    for rank, verbs in found.verbs().items():
        more, less = verbs - wanted.verbs()[rank], wanted.verbs()[rank] - verbs
        if more or less:
            said.append(f"{rank} has verbs too many {dict(more)} and too few {dict(less)}")
    return said


@RECEIVE
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_a_run_is_the_same_on_every_backend(here: str, deployment: str, receive: str) -> None:
    found = run_scenario(here, DEPLOYMENTS[deployment], ProtocolSettings(receive=receive))
    assert found.problems() == []
    assert differences(found, expected(deployment, receive)) == []
    agreed = {
        tuple((one.update, one.version, one.committed, one.changed, one.digest) for one in outcomes)
        for outcomes in found.outcomes.values()
    }
    assert len(agreed) == 1, "the trainer's ranks remember different updates"


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    deployment=deployments(max_tp=2),
    densities=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_model_arrives_bit_for_bit(
    here: str, deployment: Deployment, densities: list[float], seed: int
) -> None:
    found = run_scenario(here, deployment, densities=densities, seed=seed)
    assert found.problems() == []
    for outcome in found.updates:
        counts = None if outcome.full else outcome.counts
        assert outcome.nbytes == deployment.plan.update_bytes(counts)


def test_a_backend_that_is_not_here_is_skipped_unless_it_was_asked_for() -> None:
    with pytest.raises(pytest.skip.Exception, match="'abacus' has no world"):
        available("abacus", asked_for=False)
    with pytest.raises(pytest.fail.Exception, match="abacus was asked for"):
        available("abacus", asked_for=True)


def test_a_difference_between_two_runs_is_seen() -> None:
    one, other = expected("tiny-fault", "stage"), run_scenario("inprocess", tiny_deployment(), seed=1)
    said = " ".join(differences(other, one))
    for part in ("update 4 came to", "has other bits"):
        assert part in said
