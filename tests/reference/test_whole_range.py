"""Every family over the whole range of layouts: updates by hand, probes and captures, bit for bit.

Trainer and rollout TP 1 to 8, PP 1 to 3 with stages of any lengths, EP 1 to 4, expert-TP, DP and CP; rollouts
fused or not, with EP. What shards and exports are is in ``test_families``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.attribute_ledger import AttributeLedger
from weightsync.reference.capture import capture
from weightsync.reference.delta import diff
from weightsync.reference.deployment import Deployment
from weightsync.reference.digest import combine, state_digest
from weightsync.reference.params import fresh_copy, int_view, same_bits
from weightsync.reference.plan import TransferPlan
from weightsync.reference.probe import Probe, Probed, plan_of
from weightsync.reference.rowfind import Elements, speak_once
from weightsync.reference.rowmap import RowMap
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.byhand import Update, deliver, make_update
from weightsync.testing.families import whole_range
from weightsync.testing.states import examples, overwrite, state_changes
from weightsync.testing.twosides import poison

State = Mapping[str, Tensor]


class Trained:
    """All ranks of a trainer, with the full update of ``before`` and the delta to ``after``.

    The ledgers recorded what the live parameters carried before anything was copied.
    """

    def __init__(self, deployment: Deployment, plan: TransferPlan, before: State, after: State) -> None:
        ranks = [rank.rank for rank in deployment.trainers]
        self.live = [deployment.shards(rank, before) for rank in ranks]
        self.ledgers = [AttributeLedger(params) for params in self.live]
        self.sources = [Source(plan, rank, params) for rank, params in enumerate(self.live)]
        self.full = make_update(plan, self.sources, slot=0, version=1)
        for rank, params in enumerate(self.live):
            overwrite(params, deployment.shards(rank, after))
        self.delta = make_update(plan, self.sources, slot=1, version=2, base_slot=0, base=1)


@examples(0.4)
@given(data=st.data(), deployment=whole_range())
def test_a_changed_shard_reaches_every_rollout_rank_and_attributes_survive_every_hop(
    data: st.DataObject, deployment: Deployment
) -> None:
    states = data.draw(state_changes(metas=deployment.tensors))
    trained = Trained(deployment, deployment.plan, *states)
    differing = [int((int_view(states[0][name]) != int_view(states[1][name])).sum()) for name in states[0]]
    assert trained.delta.counts is not None
    assert deployment.plan.tensor_counts(trained.delta.counts) == tuple(differing)  # a replica's travels once
    for ref in deployment.rollouts:
        targets = {
            rank: Target(
                deployment.tensors,
                deployment.rollout_maps(rank),
                deployment.blank(rank),
                deployment.aliases(rank),
            )
            for rank in ref.ranks
        }
        for update, state in zip((trained.full, trained.delta), states, strict=True):
            for rank, target in targets.items():
                deliver(target, update, stage=data.draw(st.booleans()))
                run(target.commit())
                for name, expected in deployment.weights(rank, state).items():
                    assert same_bits(target.weights[name], expected), (rank, name)
            dense = state_digest((meta, state[meta.name]) for meta in deployment.tensors)
            assert combine(run(target.digest()) for target in targets.values()) == update.digest == dense
    for ledger, source, params in zip(trained.ledgers, trained.sources, trained.live, strict=True):
        ledger.check("two snapshots later", params)
        for slot in (0, 1):
            ledger.check("snapshot", source.held(slot), moved_from=params)
        held = source.held(1)
        for hop, made in (("send", {"device": "meta"}), ("fp32 master", {"dtype": torch.float32})):
            ledger.check(hop, {name: fresh_copy(one, **made) for name, one in held.items()}, moved_from=held)  # type: ignore[arg-type]


def probed(deployment: Deployment) -> Probed:
    """What a probe of the dense export finds, knowing names, shapes and attributes only."""
    shards = [
        {name: torch.empty(one.local_shape, dtype=one.dtype, device="meta") for name, one in maps.items()}
        for maps in deployment.trainer_maps
    ]
    silent = {
        name
        for maps in deployment.trainer_maps
        for name, one in maps.items()
        if not bool(one.owned.all())  # padding, and what another rank tells
    }
    return Probe(deployment.export, silent, (), deployment.tensors).of(shards)


@examples(0.16)
@given(data=st.data(), deployment=whole_range(max_ranks=12))
def test_direct_maps_and_a_probe_and_the_diff_of_the_dense_export_agree(
    data: st.DataObject, deployment: Deployment
) -> None:
    found = probed(deployment)
    telling = {
        name for maps in deployment.trainer_maps for name, one in maps.items() if bool(one.owned.any())
    }
    for maps, expected in zip(found.maps, deployment.trainer_maps, strict=True):
        assert list(maps) == [name for name in expected if name in telling]  # no tied copy
        for name, one in maps.items():
            check_same_told(Elements.of(expected[name]), Elements.of(one), name)
    states = data.draw(state_changes(metas=deployment.tensors))
    direct = Trained(deployment, deployment.plan, *states)
    read = Trained(deployment, plan_of(found, deployment.bucket_bytes), *states)
    exported = [deployment.export([source.held(slot) for source in direct.sources]) for slot in (0, 1)]
    for trained in (direct, read):
        check_patches(deployment, trained.sources, *exported)
    check_same_bytes(direct.full, read.full)
    check_same_bytes(direct.delta, read.delta)


def check_same_told(direct: Elements, read: Elements, name: str) -> None:
    """The same rank tells the same elements."""
    assert torch.equal(direct.owned, read.owned), name
    assert torch.equal(direct.number[direct.owned], read.number[read.owned]), name
    assert torch.equal(direct.flat[direct.owned], read.flat[read.owned]), name


def check_patches(deployment: Deployment, sources: Iterable[Source], old: State, new: State) -> None:
    """What the ranks tell of a change is, together, the diff of the dense exports; no element is told twice."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for source in sources:
        for piece, (positions, bits, _) in run(source.diff(1, 0)).patches.items():
            found.setdefault(deployment.plan.pieces[piece].tensor, []).append((positions, bits))
    for number, meta in enumerate(deployment.tensors):
        expected = diff(meta, new[meta.name], old[meta.name])
        if number not in found:
            assert expected.nnz == 0, meta.name
            continue
        positions, bits = (torch.cat(column) for column in zip(*found[number], strict=True))
        positions, order = positions.sort()
        assert torch.equal(positions, expected.positions), meta.name
        assert torch.equal(bits[order], int_view(expected.values)), meta.name


def check_same_bytes(direct: Update, read: Update) -> None:
    """Two updates are the same bytes on the wire."""
    assert direct.digest == read.digest
    for one, other in zip(direct.buckets, read.buckets, strict=True):
        assert one.header == other.header
        assert torch.equal(one.payload, other.payload)


class ByRows:
    """A loader of one rollout rank that copies rows of whole checkpoint tensors into parameters full of poison."""

    def __init__(self, maps: Mapping[str, RowMap], names: list[str]) -> None:
        self.params = {name: poison(one.local_shape, one.dtype) for name, one in maps.items()}
        self.places: dict[str, list[tuple[str, RowMap, int]]] = {}
        for name, one in maps.items():
            for output, number in enumerate(one.outputs):
                self.places.setdefault(names[number], []).append((name, one, output))

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for checkpoint, tensor in pairs:
            for name, one, output in self.places.get(checkpoint, ()):
                local, rows = one.local_rows(output, owned_only=False)
                lines = tensor.reshape(-1, one.full_widths[output])[:, one.column : one.column + one.width]
                self.params[name].view(-1, one.width)[local] = lines[rows]


@examples(0.2)
@given(deployment=whole_range(max_ranks=4))
def test_a_captured_loader_is_the_placement(deployment: Deployment) -> None:
    names = [meta.name for meta in deployment.tensors]
    for ref in deployment.rollouts[:1]:
        placed = [deployment.rollout_maps(rank) for rank in ref.ranks]
        loaders = [ByRows(maps, names) for maps in placed]
        found = [capture(one.load_weights, one.params, deployment.tensors) for one in loaders]
        maps = speak_once([one.maps for one in found], deployment.tensors)
        for rank, expected in enumerate(placed):
            for name, one in expected.items():
                direct = Elements.of(one)
                if bool((direct.number < 0).all()):
                    assert name in found[rank].untouched  # nothing, or nothing but padding
                    continue
                read = Elements.of(maps[rank][name])
                check_same_told(direct, read, name)
                assert torch.equal(direct.number, read.number), name
                assert torch.equal(direct.flat, read.flat), name
