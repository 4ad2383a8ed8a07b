"""How ranks share a model out: a trainer over TP, CP, DP, PP, and EP for its experts; a rollout over TP and EP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from weightsync.reference.errors import PlanMismatch


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """Megatron's parallel sizes. Ranks are numbered as there: TP runs fastest, then CP, DP and PP.

    Within a pipeline stage the same ranks are numbered a second time for the experts: expert-TP fastest, then EP,
    then the replicas of the experts.

    Attributes:
        tp: tensor-parallel ranks of everything but the routed experts.
        pp: pipeline stages.
        ep: ranks that share the routed experts out.
        etp: tensor-parallel ranks of one routed expert; left out it is ``tp``, as in Megatron.
        dp: data-parallel replicas; left out, the fewest that make room for ``etp`` * ``ep``.
        cp: context-parallel ranks; they hold equal parameters.
        stages: decoder layers per stage, where they are not equal (Megatron's
            ``num_layers_in_first_pipeline_stage`` and its like); left out, equal.

    Raises:
        PlanMismatch: a size below 1, or ranks of a stage that the experts' sizes do not divide.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int | None = None
    cp: int = 1
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp", "dp", "cp"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise PlanMismatch(f"trainer {name} is {size}, expected 1 or more; correct it")
        if self.stage_ranks % (self.expert_tp * self.ep):
            raise PlanMismatch(
                f"trainer tp {self.tp} * cp {self.cp} * dp {self.replicas} is {self.stage_ranks} ranks a stage, "
                f"expected a multiple of etp {self.expert_tp} * ep {self.ep}; raise dp, or lower etp or ep"
            )
        if self.stages is not None and (len(self.stages) != self.pp or min(self.stages) < 0):
            raise PlanMismatch(
                f"trainer stages are {list(self.stages)}, expected {self.pp} numbers of layers, one per pipeline "
                "stage; correct pp or stages"
            )

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of one routed expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        if self.dp is not None:
            return self.dp
        return math.lcm(self.tp * self.cp, self.expert_tp * self.ep) // (self.tp * self.cp)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.replicas

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.stage_ranks * self.pp

    @property
    def pure_tp(self) -> bool:
        """Whether nothing but TP cuts the model, and nothing is held twice."""
        return self.world == self.tp and self.ep == 1 and self.expert_tp == self.tp

    def layers(self, count: int) -> tuple[int, ...]:
        """Decoder layers of each stage, ``count`` in all.

        Raises:
            PlanMismatch: ``count`` does not divide, or is not the sum of ``stages``.
        """
        if self.stages is None and count % self.pp:
            raise PlanMismatch(
                f"{count} decoder layers do not divide in {self.pp} pipeline stages; choose a pp that divides "
                "them, or give the layers of each stage as stages"
            )
        found = self.stages if self.stages is not None else (count // self.pp,) * self.pp
        if sum(found) != count:
            raise PlanMismatch(
                f"trainer stages {list(found)} hold {sum(found)} decoder layers, the model has {count}; "
                "correct stages"
            )
        return found

    def at(self, rank: int, vocab_multiple: int) -> TrainerRank:
        """The place of a rank; see ``TrainerRank`` for ``vocab_multiple``.

        Raises:
            PlanMismatch: the rank is outside.
        """
        if not 0 <= rank < self.world:
            raise PlanMismatch(f"trainer rank {rank} is outside of a world of {self.world}")
        stage, inside = divmod(rank, self.stage_ranks)
        replica, tp = divmod(inside, self.tp)
        expert_replica, expert = divmod(inside, self.expert_tp * self.ep)
        ep, etp = divmod(expert, self.expert_tp)
        return TrainerRank(self, rank, tp, stage, ep, etp, replica == 0, expert_replica == 0, vocab_multiple)


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """The place of one trainer rank.

    Attributes:
        layout: the whole trainer's.
        rank: its number.
        tp_rank: which tensor-parallel part it holds.
        stage: its pipeline stage.
        ep_rank: which part of the experts it holds.
        etp_rank: which tensor-parallel part of each of those.
        speaks: whether it speaks for its dense parameters: it is the first of its DP and CP replicas.
        expert_speaks: whether it speaks for its experts: it is the first of their replicas.
        vocab_multiple: rows per TP rank that the padded vocabulary is a multiple of.
    """

    layout: TrainerLayout
    rank: int
    tp_rank: int
    stage: int
    ep_rank: int
    etp_rank: int
    speaks: bool
    expert_speaks: bool
    vocab_multiple: int

    def experts(self, count: int) -> range:
        """Which of ``count`` experts it holds.

        Raises:
            PlanMismatch: they do not divide by EP.
        """
        if count % self.layout.ep:
            raise PlanMismatch(
                f"{count} experts do not divide in {self.layout.ep} expert-parallel ranks; choose an ep that "
                "divides them"
            )
        each = count // self.layout.ep
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)


class RolloutLayout(NamedTuple):
    """How one rollout cuts the model.

    Attributes:
        tp: its tensor-parallel ranks, which are all of its ranks.
        fused: vLLM's and SGLang's names and fused parameters; else the checkpoint's own.
        ep: ranks that share the routed experts out, a divisor of ``tp``. Each expert is cut for tp // ep ranks:
            1 for experts cut by TP alone, ``tp`` for vLLM's ``enable_expert_parallel``.
    """

    tp: int
    fused: bool
    ep: int = 1

    def at(self, rank: int, vocab_multiple: int) -> RolloutRank:
        """The place of a rank; see ``RolloutRank`` for ``vocab_multiple``.

        Raises:
            PlanMismatch: ``ep`` does not divide ``tp``, or the rank is outside.
        """
        if self.ep < 1 or self.tp % self.ep:
            raise PlanMismatch(
                f"rollout ep {self.ep} does not divide tp {self.tp}; expected each expert on tp // ep ranks"
            )
        if not 0 <= rank < self.tp:
            raise PlanMismatch(f"rollout rank {rank} is outside of a world of {self.tp}")
        return RolloutRank(self, rank, *divmod(rank, self.tp // self.ep), vocab_multiple)


@dataclass(frozen=True, slots=True)
class RolloutRank:
    """The place of one rollout rank.

    Attributes:
        layout: the whole rollout's.
        tp_rank: which tensor-parallel part it holds.
        ep_rank: which part of the experts it holds.
        etp_rank: which tensor-parallel part of each of those.
        vocab_multiple: rows that the padded vocabulary of a fused rollout is a multiple of.
    """

    layout: RolloutLayout
    tp_rank: int
    ep_rank: int
    etp_rank: int
    vocab_multiple: int

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of one routed expert."""
        return self.layout.tp // self.layout.ep

    def experts(self, count: int) -> range:
        """Which of ``count`` experts it holds: a run, the earlier ranks one more where they do not divide."""
        each, more = divmod(count, self.layout.ep)
        first = self.ep_rank * each + min(self.ep_rank, more)
        return range(first, first + each + (self.ep_rank < more))
