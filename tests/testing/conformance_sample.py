"""A sample to move: two states of a small sharded decoder, and what the reference makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import cycle, permutations

import torch
from torch import Tensor

from weightsync.reference.buckets import FULL, NO_BASE, Bucket, Heading, end_bucket
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.digest import dtype_name, state_digest
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.params import int_view
from weightsync.reference.plan import TransferPlan
from weightsync.reference.rowmap import RowMap
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.inprocess_run import WholeTensors
from weightsync.testing.memory import overwrite
from weightsync.testing.strategies import DTYPES, special_bits

EPOCH, BASE, VERSION = 3, 1, 2
"""Group epoch, base version and version of the sample's update."""


ODD_SHAPES = "odd shapes"
SAMPLES = (*(dtype_name(dtype) for dtype in DTYPES), ODD_SHAPES)
"""Names of the samples: the decoder in every dtype that weights travel in, and tensors of odd shapes."""


class KeptMaps(Deployment):
    """A deployment that makes each rollout rank's maps once: the kit asks for them in every test."""

    @cached_property
    def _kept(self) -> dict[RankId, dict[str, RowMap]]:
        return {rank: Deployment.rollout_maps(self, rank) for ref in self.rollouts for rank in ref.ranks}

    def rollout_maps(self, rank: RankId) -> dict[str, RowMap]:
        """Runtime name -> map of one rollout rank."""
        return self._kept[rank]


class Sample:
    """Two states of one model, and who holds what of it.

    Attributes:
        deployment: its buckets are small, so that every update has several.
        before: the first state, checkpoint name -> tensor; never to be written.
        after: the second, likewise. Changed elements run through every pair of the dtype's special patterns,
            among them both zeros and NaNs with payloads; the elements that stay hold them too.
    """

    def __init__(self, deployment: Deployment, every: Callable[[int], int]) -> None:
        self.deployment = deployment
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}
        self._encoded: dict[str, list[Bucket]] = {}
        patterns = tuple(dict.fromkeys(special_bits(deployment.tensors[0].dtype)))
        held, pairs = cycle(patterns), cycle(permutations(patterns, 2))
        for number, meta in enumerate(deployment.tensors):
            step, bits = every(number), int_view(torch.zeros(0, dtype=meta.dtype)).dtype
            both = [
                next(pairs) if step and position % step == 0 else (next(held),) * 2
                for position in range(meta.numel)
            ]
            for column, state in enumerate((self.before, self.after)):
                raw = torch.tensor([pair[column] for pair in both], dtype=bits)
                state[meta.name] = raw.view(meta.dtype).reshape(meta.shape)

    @classmethod
    def decoder(cls, dtype: torch.dtype) -> Sample:
        """A small decoder, TP 2 on the trainer, with an unfused TP 1 and a fused TP 2 rollout.

        One tensor in three keeps every bit, one changes throughout and one in a few elements, so that a delta
        has tensors left out, dense ones and sparse ones.
        """
        model = ModelShape(
            vocab=13, hidden=8, intermediate=8, layers=1, heads=4, kv_heads=2, head_dim=2, dtype=dtype
        )
        layouts = (RolloutLayout(1, fused=False), RolloutLayout(2, fused=True))
        deployment = KeptMaps(model, 2, layouts, 256, trainer_multiple=8, rollout_multiple=4)
        return cls(deployment, lambda number: (7, 1, 0)[number % 3])

    @classmethod
    def odd_shapes(cls) -> Sample:
        """Tensors of no dimensions, of three, and with sides of length zero, whole on every rank."""
        shapes = {
            "scalar": (),
            "empty": (0, 3),
            "narrow": (3, 0),
            "cube": (3, 5, 2),
            "single": (1,),
            "row": (1, 9),
        }
        tensors = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
        return cls(WholeTensors.of(tensors, rollouts=2, bucket_bytes=160), lambda number: (1, 4)[number % 2])

    @property
    def plan(self) -> TransferPlan:
        """The transfer plan."""
        return self.deployment.plan

    @property
    def trainers(self) -> tuple[RankId, ...]:
        """The trainer's ranks."""
        return self.deployment.trainers

    @property
    def rollout_ranks(self) -> tuple[RankId, ...]:
        """The ranks of all rollouts."""
        return tuple(rank for ref in self.deployment.rollouts for rank in ref.ranks)

    def changed(self) -> tuple[int, ...]:
        """Elements per checkpoint tensor whose bits differ between the states."""
        return tuple(int((int_view(self.before[n]) != int_view(self.after[n])).sum()) for n in self.before)

    def digest(self, state: Mapping[str, Tensor]) -> int:
        """The reference digest of a whole state."""
        return state_digest((meta, state[meta.name]) for meta in self.deployment.tensors)

    def heading(self, kind: str) -> Heading:
        """The heading of an update of this kind."""
        return Heading(kind, EPOCH, NO_BASE if kind == FULL else BASE, VERSION)

    def numbers(self, kind: str) -> dict[str, int]:
        """What ``validate`` is told of an update of this kind, but the sequence."""
        return {"version": VERSION, "base": NO_BASE if kind == FULL else BASE, "epoch": EPOCH}

    def reference_buckets(self, kind: str, state: Mapping[str, Tensor] | None = None) -> list[Bucket]:
        """The update to ``state`` (``after``) as the reference encodes it, trailer included: new memory."""
        if state is None:
            if kind not in self._encoded:
                self._encoded[kind] = self.reference_buckets(kind, self.after)
            return [bucket.copy() for bucket in self._encoded[kind]]
        params = [self.deployment.shards(rank, self.before) for rank in range(len(self.trainers))]
        sources = [Source(self.plan, rank, live) for rank, live in enumerate(params)]
        for source in sources:
            run(source.snapshot(0))
            overwrite(params[source.rank], self.deployment.shards(source.rank, state))
            run(source.snapshot(1))
        changes = [run(source.diff(1, 0)) for source in sources]
        counts = [sum(column) for column in zip(*(one.counts for one in changes), strict=True)]
        matrix, head = [one.counts for one in changes], self.heading(kind)
        buckets: list[Bucket] = []
        for group in self.plan.groups(None if kind == FULL else counts):
            given = [None if kind == FULL else one for one in changes]
            parts = [run(source.part(1, one, group)) for source, one in zip(sources, given, strict=True)]
            merged = run(sources[0].merge(parts, group, matrix))
            for spec in group.buckets:
                buckets.append(run(sources[0].encode(merged, spec, head.at(len(buckets)))))
        nbytes = sum(bucket.nbytes for bucket in buckets)
        return [*buckets, end_bucket(head.at(len(buckets)), self.digest(state), len(buckets), nbytes)]

    def reference_apply(
        self, state: Mapping[str, Tensor], kind: str, buckets: Sequence[Bucket]
    ) -> dict[tuple[RankId, str], Tensor]:
        """(rank, name) -> what rollout ranks that held ``state`` hold once the reference took buckets in."""
        found = {}
        for rank in self.rollout_ranks:
            weights = self.deployment.weights(rank, state)
            target = Target(self.deployment.tensors, self.deployment.rollout_maps(rank), weights, {})
            for sequence, bucket in enumerate(buckets):
                decoded = run(target.decode(bucket))
                run(target.validate(decoded, **self.numbers(kind), sequence=sequence))
                run(target.apply(decoded, undo=False))
            found.update({(rank, name): tensor for name, tensor in weights.items()})
        return found


@lru_cache(maxsize=len(SAMPLES))
def make_sample(name: str = "bfloat16") -> Sample:
    """The sample with this name; always the same one, so nobody may write to its states."""
    return Sample.odd_shapes() if name == ODD_SHAPES else Sample.decoder(getattr(torch, name))
