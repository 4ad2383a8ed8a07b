"""Wrong backends, each of which must turn a named test of the conformance kit red: the kit can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from weightsync.reference.deployment import Deployment
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.plan import TransferPlan
from weightsync.reference.rank import Verbs
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.testing.conformance import BackendConformance, HostMemory, World
from weightsync.testing.worlds import InprocessRanks
from weightsync.testing.wrong_backends import (
    BelievesTheHeader,
    CarriesAttributesOnce,
    ComparesValues,
    CopiesThroughFloats,
    CountsReplicas,
    CutsToSize,
    Direct,
    DropsAttributes,
    ForgetsTheDead,
    ForgetsToRollBack,
    Groups,
    HandsOutTheSendersMemory,
    KeepsTheLiveTensor,
    KeepsTheShareOfWhatIsUndone,
    KeepsTheUndoLog,
    NamesNobody,
    OffByOne,
    ProvesWhileItWrites,
    SendsWhatDidNotChange,
    SkipsEmptyTurns,
    SkipsTheChecksum,
    SumsBits,
    SwapsBuckets,
    TakesOldBitsForZeros,
    UndoesHalf,
)

RED = (AssertionError, WeightSyncError)
"""How a test of the kit goes red; any other error would be a fault of the mutant."""


class Right(HostMemory, BackendConformance):
    """The in-process backend; a mutant replaces one of its parts.

    Attributes:
        source: a trainer rank's bytes.
        target: a rollout rank's bytes.
        fabric: wraps each rank's data groups.
        transport: wraps each rank's way out for control messages.
    """

    source: type[Source] = Source
    target: type[Target] = Target
    fabric: type[Groups] | None = None
    transport: type[Direct] | None = None

    def make_source(self, plan: TransferPlan, rank: int, params: Mapping[str, Tensor]) -> Source:
        return self.source(plan, rank, params)

    def make_target(
        self, deployment: Deployment, rank: RankId, weights: Mapping[str, Tensor], route: Any = "all"
    ) -> Target:
        maps, aliases = deployment.rollout_maps(rank), deployment.aliases(rank)
        return self.target(deployment.tensors, maps, weights, aliases, route)

    def make_world(self) -> World:
        def change(verbs: Verbs) -> None:
            if self.fabric is not None:
                verbs.fabric = self.fabric(verbs.fabric)
            if self.transport is not None:
                verbs.control.transport = self.transport(verbs.control.transport)

        return InprocessRanks(change)


@dataclass(frozen=True)
class Mutant:
    """A part that is wrong, and the test, with its parameters, that must see it."""

    part: str
    test: str
    given: tuple[Any, ...] = ()


BF16 = "bfloat16"
FOLLOWS = "test_a_digest_follows_a_delta_and_its_rollback"
REFUSED = "test_a_refused_bucket_writes_nothing"
MUTANTS: Mapping[type[Any], Mutant] = {
    DropsAttributes: Mutant("source", "test_a_snapshot_carries_every_attribute"),
    CarriesAttributesOnce: Mutant(
        "source", "test_attributes_are_carried_at_every_snapshot_not_at_the_first_alone"
    ),
    CopiesThroughFloats: Mutant("source", "test_a_snapshot_has_every_bit", (BF16,)),
    KeepsTheLiveTensor: Mutant("source", "test_a_snapshot_is_independent_of_later_training_steps"),
    ComparesValues: Mutant("source", "test_a_diff_counts_exactly_the_elements_whose_bits_changed", (BF16,)),
    OffByOne: Mutant("source", "test_buckets_are_byte_for_byte_those_of_the_reference", (BF16, "delta")),
    SendsWhatDidNotChange: Mutant("source", "test_an_update_without_a_change_is_free", ("stage",)),
    ProvesWhileItWrites: Mutant("target", REFUSED, ("a position beyond the tensor",)),
    BelievesTheHeader: Mutant("target", REFUSED, ("another version",)),
    SkipsTheChecksum: Mutant("target", "test_the_backend_refuses_damage_in_every_bucket", ("delta",)),
    ForgetsToRollBack: Mutant("target", "test_a_rollback_restores_every_bit", (BF16,)),
    UndoesHalf: Mutant("target", "test_a_rollback_half_way_through_an_update_restores_every_bit"),
    KeepsTheUndoLog: Mutant("target", "test_a_commit_is_for_good_and_may_be_repeated", ("delta",)),
    CountsReplicas: Mutant("target", FOLLOWS, (BF16,)),
    TakesOldBitsForZeros: Mutant("target", FOLLOWS, (BF16,)),
    KeepsTheShareOfWhatIsUndone: Mutant("target", FOLLOWS, (BF16,)),
    SumsBits: Mutant("target", "test_a_digest_sees_where_bits_are"),
    SwapsBuckets: Mutant("fabric", "test_buckets_arrive_in_order_and_bit_for_bit"),
    HandsOutTheSendersMemory: Mutant("fabric", "test_what_was_received_belongs_to_the_receiver"),
    CutsToSize: Mutant("fabric", "test_a_bucket_that_is_not_what_its_header_says_never_counts_as_received"),
    SkipsEmptyTurns: Mutant(
        "fabric", "test_a_gather_gives_the_root_every_part_in_member_order", ((0, 16, 0),)
    ),
    ForgetsTheDead: Mutant("fabric", "test_a_group_is_dead_after_a_timeout_and_a_new_epoch_works"),
    NamesNobody: Mutant("fabric", "test_a_verb_names_by_its_deadline_whom_it_waited_for", ("exchange",)),
    Direct: Mutant("transport", "test_a_message_owns_its_memory"),
}


@pytest.mark.parametrize("wrong", MUTANTS, ids=lambda wrong: wrong.__name__)
def test_a_wrong_backend_turns_its_test_red(wrong: type[Any]) -> None:
    mutant = MUTANTS[wrong]
    getattr(Right(), mutant.test)(*mutant.given)
    kit = type(wrong.__name__, (Right,), {mutant.part: wrong, "limit_ns": Right.patience_ns})
    with pytest.raises(RED):
        getattr(kit(), mutant.test)(*mutant.given)
