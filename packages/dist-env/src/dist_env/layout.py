"""How many ranks share the work along which dimension, and what follows from it for each rank.

Pure arithmetic: this module needs no torch and no process group.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from dist_env.errors import DistributedEnvironmentError

# Outermost first: neighbours in `tensor` are neighbours in rank and so share a host, for they talk the most.
MESH_DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
# What the expert dimension borrows its ranks from.
EXPERT_BLOCK = ("shard", "context", "tensor")
VIEWS: Mapping[str, tuple[str, ...]] = {
    "data": ("replicate", "shard"),
    "fsdp": ("shard", "context"),
    "loss": ("replicate", "shard", "context"),
    "replicate": ("replicate",),
    "tensor": ("tensor",),
    "context": ("context",),
    "pipeline": ("pipeline",),
}
EXPERT_VIEWS = ("expert_fsdp", "expert")
SHORT_NAMES: Mapping[str, str] = {
    "pipeline": "pp",
    "replicate": "dp",
    "shard": "shard",
    "context": "cp",
    "tensor": "tp",
    "expert": "ep",
}
# Names that other tools give to the dimensions; offered as hints, never taken.
_FOREIGN_NAMES = {"ddp": "dp", "data": "dp", "fsdp": "shard", "zero": "shard", "hsdp": "shard", "sp": "tp"}
_FOREIGN_NAMES |= {"mp": "tp", "model": "tp", "stages": "pp", "sequence": "cp", "moe": "ep"}
_MAX_RANKS = 2**24
_EXAMPLE = "shard=8,tp=4,pp=2"


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the dimensions of a job; the world size is their product, `expert` left out.

    Ranks are numbered with `tensor` innermost, then `context`, `shard`, `replicate`, and `pipeline`
    outermost. `expert` borrows: it divides the block of shard x context x tensor ranks, and is innermost in
    it; what remains, shard x context x tensor / expert ranks, shares out the weights of the same experts.

    Attributes:
        pipeline: Stages of the model.
        replicate: Replicas of the weights, each with batches of its own.
        shard: Ranks that share out the weights of a replica, each with batches of its own.
        context: Ranks that share out each sequence. They share out the weights, too.
        tensor: Ranks that share out each matrix.
        expert: Ranks that share out the experts.

    Raises:
        DistributedEnvironmentError: A size is not an integer of 1 or more, there are more than 16,777,216
            ranks, or `expert` does not divide shard x context x tensor.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise DistributedEnvironmentError(
                    f"{field.name}={_shorten(size)} is not a possible size. "
                    f"Sizes are integers of 1 or more, such as {field.name}=2."
                )
            _check_count(field.name, size)
        _check_count("The world size", self.world_size)
        block = math.prod(getattr(self, name) for name in EXPERT_BLOCK)
        if block % self.expert:
            raise DistributedEnvironmentError(
                f"expert={self.expert} does not divide shard x context x tensor = {block}, whose ranks it "
                f"borrows. Allowed values of expert are {_listed(block)}."
            )

    @classmethod
    def parse(cls, text: str, world_size: int | None = None) -> ParallelLayout:
        """Read a layout such as `"shard=8,tp=4,pp=2"`.

        Args:
            text: Sizes by long name or by the short ones `dp` (replicate), `shard`, `tp`, `cp`, `ep`, `pp`.
                One size other than `ep` may be `auto`.
            world_size: Number of ranks of the job. It gives the size that is `auto`, or that of `replicate`
                if none is `auto` and `replicate` is left out.

        Raises:
            DistributedEnvironmentError: The text is not such a list, a name is unknown or given twice, or the
                sizes do not fit the world size.
        """
        sizes, auto = _read(text)
        if world_size is None:
            if auto:
                raise DistributedEnvironmentError(
                    f"{auto}=auto needs the world size. Give the number of ranks, or a number for {auto}."
                )
            return cls(**sizes)
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise DistributedEnvironmentError(
                f"world_size={_shorten(world_size)} is not a number of ranks. Give an integer of 1 or more."
            )
        _check_count("The world size", world_size)
        free = auto or (None if "replicate" in sizes else "replicate")
        # Sizes that are wrong in themselves are told first.
        cls(**{name: size for name, size in sizes.items() if name != "expert"})
        taken = math.prod(size for name, size in sizes.items() if name != "expert")
        if world_size % taken if free else taken != world_size:
            raise DistributedEnvironmentError(_misfit(sizes, taken, world_size, free))
        return cls(**(sizes | ({free: world_size // taken} if free else {})))

    def __str__(self) -> str:
        sizes = {short: getattr(self, name) for name, short in SHORT_NAMES.items()}
        return ",".join(f"{short}={size}" for short, size in sizes.items() if size > 1) or "dp=1"

    @property
    def world_size(self) -> int:
        """Number of ranks: pipeline x replicate x shard x context x tensor."""
        return math.prod(self.mesh_shape)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of pipeline, replicate, shard, context and tensor, outermost first."""
        return tuple(getattr(self, name) for name in MESH_DIMENSIONS)

    @property
    def expert_fsdp(self) -> int:
        """Ranks that share out the weights of the same experts: shard x context x tensor / expert."""
        return self.shard * self.context * self.tensor // self.expert

    @property
    def shards_weights(self) -> bool:
        """Whether some weights are shared out: over shard x context, or among ranks with the same experts."""
        return self.shard * self.context > 1 or (self.expert > 1 and self.expert_fsdp > 1)

    @property
    def data_count(self) -> int:
        """Number of ranks that read different batches: replicate x shard."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is: its index in each dimension, `expert` and `expert_fsdp` included.

        Raises:
            DistributedEnvironmentError: `rank` is outside 0 to world_size - 1. Other methods refuse it, too.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise DistributedEnvironmentError(
                f"rank={_shorten(rank)} is not a rank of the layout {self}. "
                f"Allowed ranks are 0 to {self.world_size - 1}."
            )
        place, rest = {}, rank
        for name in reversed(MESH_DIMENSIONS):
            rest, place[name] = divmod(rest, getattr(self, name))
        found = {name: place[name] for name in MESH_DIMENSIONS}
        found["expert_fsdp"], found["expert"] = divmod(
            rank % (self.shard * self.context * self.tensor), self.expert
        )
        return found

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these indices of pipeline, replicate, shard, context and tensor; a missing one is 0.

        Raises:
            DistributedEnvironmentError: An index is not within its dimension, or a name is not one of these.
        """
        for name, index in coordinates.items():
            if name not in MESH_DIMENSIONS:
                raise DistributedEnvironmentError(
                    f"{name!r} does not place a rank. Use {', '.join(MESH_DIMENSIONS)}."
                )
            if not 0 <= index < getattr(self, name):
                raise DistributedEnvironmentError(
                    f"{name}={index} is outside the layout {self}. "
                    f"Allowed values of {name} are 0 to {getattr(self, name) - 1}."
                )
        rank = 0
        for name in MESH_DIMENSIONS:
            rank = rank * int(getattr(self, name)) + coordinates.get(name, 0)
        return rank

    def group(self, view: str, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` shares a view with, itself included, in ascending order.

        Args:
            view: `data`, `fsdp`, `loss`, `replicate`, `tensor`, `context`, `pipeline`, `expert` or
                `expert_fsdp`.
            rank: A global rank.

        Raises:
            DistributedEnvironmentError: `view` is unknown, or `rank` is outside 0 to world_size - 1.
        """
        place = self.coordinates(rank)
        if view in EXPERT_VIEWS:
            size = self.shard * self.context * self.tensor
            first = rank - rank % size
            if view == "expert":
                start = first + place["expert_fsdp"] * self.expert
                return tuple(range(start, start + self.expert))
            return tuple(range(first + place["expert"], first + size, self.expert))
        if view not in VIEWS:
            raise DistributedEnvironmentError(
                f"{view!r} is not a view of a layout. Use {', '.join([*VIEWS, *EXPERT_VIEWS])}."
            )
        # Strides, outermost first, so that the ranks come in ascending order.
        ranks = [self.rank_at({name: place[name] for name in MESH_DIMENSIONS if name not in VIEWS[view]})]
        for name in VIEWS[view]:
            stride = math.prod(self.mesh_shape[MESH_DIMENSIONS.index(name) + 1 :])
            ranks = [each + stride * index for each in ranks for index in range(getattr(self, name))]
        return tuple(ranks)

    def data_rank(self, rank: int) -> int:
        """Which of the `data_count` parts of the data a rank reads; equal numbers read the same."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    def data_readers(self, data_rank: int) -> tuple[int, ...]:
        """All ranks that read one part of the data, in ascending order.

        Raises:
            DistributedEnvironmentError: `data_rank` is outside 0 to data_count - 1.
        """
        if not 0 <= data_rank < self.data_count:
            raise DistributedEnvironmentError(
                f"data_rank={data_rank} is not one of the layout {self}. "
                f"Allowed values are 0 to {self.data_count - 1}."
            )
        inner = self.context * self.tensor
        starts = range(data_rank * inner, self.world_size, self.data_count * inner)
        return tuple(rank for start in starts for rank in range(start, start + inner))

    def counts_tokens(self, rank: int) -> bool:
        """Whether a rank adds its tokens and its loss to the job's sums.

        One `loss` group does: the one of the last stage, where the loss is known, with tensor index 0. Its
        ranks have different tokens, for each has a part of its own of the sequences.
        """
        place = self.coordinates(rank)
        return place["tensor"] == 0 and place["pipeline"] == self.pipeline - 1

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same weights as `rank`, itself included: only `replicate` differs."""
        return self.group("replicate", rank)

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that share out the same weights with `rank`, itself included: the `fsdp` group."""
        return self.group("fsdp", rank)


def _read(text: str) -> tuple[dict[str, int], str | None]:
    """Sizes by long name, and the name of the one that is `auto`."""
    if not text.strip():
        raise DistributedEnvironmentError(f"The layout is empty. Give sizes, such as {_EXAMPLE}.")
    long = {short: name for name, short in SHORT_NAMES.items()} | {name: name for name in SHORT_NAMES}
    sizes: dict[str, int] = {}
    auto: str | None = None
    for part in text.split(","):
        given, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not given or not value:
            raise DistributedEnvironmentError(
                f"{_shorten(part.strip())} in the layout is not NAME=SIZE. Write it such as {_EXAMPLE}."
            )
        if given not in long:
            raise DistributedEnvironmentError(
                f"{_shorten(given)} is not a dimension.{_hint(given)} Dimensions are "
                f"{', '.join(SHORT_NAMES.values())} or, in full, {', '.join(SHORT_NAMES)}."
            )
        name = long[given]
        if name in sizes or name == auto:
            raise DistributedEnvironmentError(f"{name} is given twice in the layout. Give each size once.")
        if value != "auto":
            # At most 9 digits: Python refuses to read very long numbers with a message of its own.
            if not (value.isascii() and value.isdecimal()) or len(value) > 9 or not int(value):
                raise DistributedEnvironmentError(
                    f"{name}={_shorten(value)} is not a possible size. Sizes are integers from 1 to "
                    f"{_MAX_RANKS}, such as {given}=2, and one may be auto."
                )
            sizes[name] = int(value)
        elif name == "expert":
            raise DistributedEnvironmentError(
                "expert=auto cannot be filled in, for expert borrows the ranks of the other dimensions. "
                "Give its size, such as ep=2."
            )
        elif auto:
            raise DistributedEnvironmentError(
                f"{auto} and {name} are both auto. Only one size can be filled in. Give the other one."
            )
        else:
            auto = name
    return sizes, auto


def _misfit(sizes: Mapping[str, int], taken: int, world_size: int, free: str | None) -> str:
    given = {name: size for name, size in sizes.items() if name != "expert"}
    told = " x ".join(f"{name}={size}" for name, size in given.items()) or "The layout"
    need = f"a multiple of {taken} ranks" if free else f"exactly {taken} ranks"
    text = f"{told} needs {need}, but there are {world_size}."
    for name, size in given.items():
        rest, over = divmod(world_size, taken // size)
        if not over:
            allowed = _listed(rest) if free else str(rest)
            return f"{text} With the other sizes kept, allowed values of {name} are {allowed}."
    return f"{text} Choose sizes whose product {'divides' if free else 'is'} {world_size}."


def _hint(given: str) -> str:
    known = [*SHORT_NAMES, *SHORT_NAMES.values()]
    close = _FOREIGN_NAMES.get(given.lower()) or next(
        iter(difflib.get_close_matches(given.lower(), known, 1, 0.6)), None
    )
    return f" Did you mean {close}?" if close else ""


def _check_count(what: str, count: int) -> None:
    if count > _MAX_RANKS:
        raise DistributedEnvironmentError(
            f"{what} is {_shorten(count)}, which is too large. At most {_MAX_RANKS} ranks are allowed."
        )


def _listed(number: int) -> str:
    """The divisors of a number, in words."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return ", ".join(map(str, sorted({*low, *(number // each for each in low)})))


def _shorten(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
