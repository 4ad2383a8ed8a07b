"""Which attention heads a tensor-parallel rank holds: one rule for both sides, also where no count divides.

Each rank takes a run of query heads, as even as possible, and every key/value head that one of them attends
to. A key/value head that several ranks hold is a replica, and the first of them speaks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weightsync.reference.errors import MissingTPAttributes, PlanMismatch
from weightsync.reference.params import TPAttributes
from weightsync.reference.shards import Interval

if TYPE_CHECKING:
    from weightsync.reference.model import ModelShape

HeadOrder = Literal["query", "kv", "stacked", "grouped"]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank, numbered as in the checkpoint; runs are half-open.

    Attributes:
        q: (first, end) of its query heads; never empty.
        kv: (first, end) of the key/value heads that those attend to.
        speaks: per held key/value head, whether this rank speaks for it; the others are replicas.
        group: query heads per key/value head in the whole model.
    """

    q: tuple[int, int]
    kv: tuple[int, int]
    speaks: tuple[bool, ...]
    group: int


def head_share(heads: int, kv_heads: int, rank: int, world: int) -> HeadShare:
    """The heads that ``rank`` of ``world`` holds; the earlier ranks have one query head more than the later.

    >>> head_share(9, 3, 0, 2)
    HeadShare(q=(0, 5), kv=(0, 2), speaks=(True, True), group=3)
    >>> head_share(9, 3, 1, 2)
    HeadShare(q=(5, 9), kv=(1, 3), speaks=(False, True), group=3)

    Raises:
        PlanMismatch: more ranks than query heads, a rank outside of the world, or ``kv_heads`` does not
            divide ``heads``.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise PlanMismatch(
            f"{heads} query heads share {kv_heads} key/value heads, expected a whole number of query heads "
            "per key/value head; correct the head counts"
        )
    if world < 1 or not 0 <= rank < world:
        raise PlanMismatch(f"rank {rank} is outside of a world of {world}; expected 0 <= rank < world")
    if world > heads:
        raise PlanMismatch(
            f"{heads} query heads cannot be cut for {world} ranks, expected one head per rank or more; "
            f"choose a tensor-parallel size of at most {heads}"
        )
    group, (each, more) = heads // kv_heads, divmod(heads, world)
    first = rank * each + min(rank, more)
    end = first + each + (rank < more)
    kv = (first // group, (end - 1) // group + 1)
    return HeadShare((first, end), kv, tuple(head * group >= first for head in range(*kv)), group)


def query_to_kv(share: HeadShare) -> tuple[int, ...]:
    """Per query head of a rank, in local order, the local key/value head that it attends to.

    >>> query_to_kv(head_share(9, 3, 1, 2))
    (0, 1, 1, 1)
    """
    return tuple(head // share.group - share.kv[0] for head in range(*share.q))


@dataclass(frozen=True, slots=True)
class HeadCut:
    """How one dimension of a whole, uncut parameter is made of heads of ``head_dim`` elements.

    Attributes:
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: elements of one head.
        dim: the dimension.
        order: ``query`` or ``kv``, those heads alone; ``stacked``, all query, key and value heads, as vLLM's
            ``qkv_proj``; ``grouped``, per key/value head its query heads, its key and its value, as
            Megatron's ``linear_qkv``. A rank's part has the same order.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    order: HeadOrder

    @classmethod
    def of(cls, model: ModelShape, order: HeadOrder, dim: int = 0) -> HeadCut:
        """The cut of one of the model's attention parameters."""
        return cls(model.heads, model.kv_heads, model.head_dim, dim, order)

    def held(self, rank: int, world: int) -> tuple[tuple[Interval, bool], ...]:
        """The intervals of ``dim`` that a rank holds, in local order, each with whether it speaks for them.

        Raises:
            PlanMismatch: as ``head_share``.
        """
        return tuple(
            ((first * self.head_dim, end * self.head_dim), speaks)
            for first, end, speaks in self._held_heads(head_share(self.heads, self.kv_heads, rank, world))
        )

    def length(self, rank: int, world: int) -> int:
        """Elements along ``dim`` that a rank holds, replicas included."""
        return sum(end - first for (first, end), _ in self.held(rank, world))

    def even(self, world: int) -> bool:
        """Whether Megatron itself cuts it: in equal parts of ``dim``, for which ``partition_dim`` is enough.

        It cuts ``grouped`` rows in whole groups, or, with more ranks than key/value heads, wherever equal
        parts end, and gathers activations; there are no replicas then.
        """
        if self.order == "query":
            return self.heads % world == 0
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        gathers = world % self.kv_heads == 0 and rows % world == 0
        return self.heads % world == 0 and (self.kv_heads % world == 0 or gathers)

    def attributes(self, world: int) -> dict[str, int]:
        """What a live parameter carries beside Megatron's attributes: nothing when ``even``, else the counts."""
        if self.even(world):
            return {}
        return {"num_attention_heads": self.heads, "num_query_groups": self.kv_heads}

    def declared(self, name: str, attributes: TPAttributes, world: int) -> bool:
        """True when the attributes of parameter ``name`` say that it is cut by these heads; False for equal parts.

        Raises:
            MissingTPAttributes: no head counts, although equal parts are not its cut.
            PlanMismatch: other head counts, or a dimension, stride or sizes that no cut by heads has.
        """
        found = {key: attributes.values.get(key) for key in ("num_attention_heads", "num_query_groups")}
        if set(found.values()) == {None}:
            if self.even(world):
                return False
            raise MissingTPAttributes(
                f"parameter {name!r} carries neither num_attention_heads nor num_query_groups, but its "
                f"{self.heads} query and {self.kv_heads} key/value heads are not cut in equal parts for "
                f"{world} ranks; carry the attributes from the live parameter"
            )
        found |= {"partition_dim": attributes.partition_dim, "partition_stride": attributes.partition_stride}
        expected = {"num_attention_heads": self.heads, "num_query_groups": self.kv_heads}
        expected |= {"partition_dim": self.dim, "partition_stride": 1}
        if found != expected or attributes.partition_sizes is not None:
            sizes = attributes.partition_sizes
            raise PlanMismatch(
                f"parameter {name!r} carries {found} and partition_sizes {sizes}, expected {expected} and no "
                "sizes; correct the layout table or the attributes"
            )
        return True

    def _held_heads(self, share: HeadShare) -> list[tuple[int, int, bool]]:
        """(first, end, speaks) in heads of the whole dimension."""
        (first, end), kv = share.q, list(zip(range(*share.kv), share.speaks, strict=True))
        if self.order == "grouped":
            held = []
            for head, speaks in kv:
                start, stop = head * share.group, (head + 1) * share.group
                before = 2 * head  # a key and a value head stand behind every earlier group
                held.append((max(first, start) + before, min(end, stop) + before, True))
                held.append((stop + before, stop + before + 2, speaks))
            return held
        starts = {"query": (), "kv": (0,), "stacked": (self.heads, self.heads + self.kv_heads)}[self.order]
        queries = [] if self.order == "kv" else [(first, end, True)]
        return queries + [(start + head, start + head + 1, speaks) for start in starts for head, speaks in kv]
