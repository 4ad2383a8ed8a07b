"""``policy.route``: what ``plan`` says of every route, what a run of it sends and receives, and that both agree."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.cli import result as results
from weightsync.cli.dry_run import dry_run
from weightsync.cli.run import run
from weightsync.cli.scenario_files import load

OWNED = ("policy.route=owned",)


def made(*overrides: str, backend: str = "sim") -> results.Result:
    scenario = load("tiny-sync", overrides)
    record = run(scenario, backend)
    assert record is not None
    return results.make_result(scenario, record)


def updates(result: results.Result) -> list[tuple[Any, ...]]:
    return [(u["kind"], u["changed"], u["full_bytes"] + u["delta_bytes"]) for u in result["updates"]]


@pytest.mark.parametrize("backend", ["sim", "inprocess", "gloo"])
def test_a_routed_run_is_right_and_its_ranks_receive_less(backend: str) -> None:
    routed, whole = made(*OWNED, backend=backend), made()
    assert routed["verdict"]["ok"], routed["verdict"]
    assert [u["digests"] for u in routed["updates"]] == [u["digests"] for u in whole["updates"]]
    assert set(routed["received_bytes"]) == set(whole["received_bytes"])
    assert len(set(whole["received_bytes"].values())) == 1
    cut = [
        rank
        for rank in whole["received_bytes"]
        if routed["received_bytes"][rank] < whole["received_bytes"][rank]
    ]
    assert cut
    assert all(routed["received_bytes"][rank] <= nbytes for rank, nbytes in whole["received_bytes"].items())


def test_the_full_update_is_planned_to_the_byte_route_by_route() -> None:
    one = ("workload.steps=1",)
    dry, result = dry_run(load("tiny-sync", (*OWNED, *one))), made(*OWNED, *one)
    assert dry.exact
    assert [(u.kind, u.changed, u.nbytes) for u in dry.updates] == updates(result)
    routes = [route for route in dry.routes if route.does == "broadcasts to"]
    assert len(routes) > 1
    assert sum(route.nbytes for route in routes) == dry.nbytes
    planned = {rank: route.nbytes for route in routes for rank in route.others}
    assert planned == result["received_bytes"]


def test_deltas_are_estimates_unless_nothing_but_counts_is_run() -> None:
    dry = dry_run(load("tiny-sync", OWNED))
    assert not dry.exact
    assert "spread evenly" in dry.note
    counted = dry_run(load("tiny-sync", (*OWNED, "values=false")))
    result = made(*OWNED, "values=false")
    assert counted.exact
    assert [(u.kind, u.changed, u.nbytes) for u in counted.updates] == updates(result)
    planned = {rank: r.nbytes for r in counted.routes if r.does == "broadcasts to" for rank in r.others}
    assert planned == result["received_bytes"]


def test_a_rank_stages_no_more_than_it_is_sent() -> None:
    routed = {one.rank: one.staged for one in dry_run(load("tiny-sync", OWNED)).memory}
    whole = {one.rank: one.staged for one in dry_run(load("tiny-sync")).memory}
    assert all(routed[rank] <= nbytes for rank, nbytes in whole.items())
    assert any(routed[rank] < nbytes for rank, nbytes in whole.items())
