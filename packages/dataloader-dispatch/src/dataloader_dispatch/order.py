"""Orders that are computed instead of stored: shuffled documents, held-out parts, mixtures."""

from __future__ import annotations

import hashlib
import logging
import math
import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import (
    TYPE_CHECKING,
    NamedTuple,
    Protocol,
    SupportsFloat,
    SupportsIndex,
    overload,
    runtime_checkable,
)

import numpy as np
import torch

from dataloader_dispatch.documents import Document, DocumentSource, data_fingerprint, locate
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.read_ahead import ReadAhead, read_ahead_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    _Unsigned = NDArray[np.uint32 | np.uint64]

logger = logging.getLogger("dataloader_dispatch.stream")

MAX_LENGTH = 2**48
_MIN_BITS = 6  # fewer bits leave too few different orders for a handful of items
_MIN_ROUNDS = 3  # with two, the low bits of a value depend visibly on those of its position
_BLOCK = 2**16  # values whose cycles are followed together: the more, the less the last few of them cost
_CHUNK = 2**15  # values that go through the steps of a pass together: these stay in the innermost caches
_FEW = 16  # so few values are faster one by one
_LIST = 2**15  # most values that iteration computes ahead
_FIRST_LIST = 16  # iteration starts with this many, so that its first value comes at once
_NOTABLE = 0.2  # share by which a number of documents may be rounded without a word


class ShuffledIndex(Sequence[int]):
    """A pseudo-random order of ``range(n)``, a pure function of (n, seed, epoch).

    The order is a bijection on ``range(2**k)``, the smallest power of two that holds ``n`` (at least 64).
    It sends a position to a value in two steps, both modulo ``2**k``:

    1. A linear congruential walk, ``x -> a * x + c`` from a first state ``x0``: position ``i`` gets the state
       after ``i`` steps. ``c`` is odd, and ``a - 1`` is an odd multiple of ``2**ceil(k / 2)``. That meets the
       conditions of Hull and Dobell (SIAM Review 4(3), 1962), so the walk visits every value once before it
       returns. Because ``(a - 1)**2`` is 0, the binomial series of ``a**i`` ends after two terms, and no step
       has to be taken: the state is ``x0 + i * (d - d * h + d * h * i)`` with ``d = (a - 1) * x0 + c`` and
       ``h = (a - 1) / 2``.
    2. An output mix, because the low bits of such a walk are poor: ``x ^= x >> (k // 2 - 1)``, then rounds of
       ``x *= 2 * x + m`` and ``x ^= x >> (k // 2 - 1)``, each with its own ``m``, where ``m % 8 == 5``. There
       are 3 rounds, or ``17 - k`` if that is more. The quadratic can be inverted (Rivest, "Permutation
       Polynomials Modulo 2^w", Finite Fields and Their Applications 7, 2001; with ``m == 1`` it is the one of
       the cipher RC6). It makes the difference between two values depend on the values, and the shift brings
       the good high bits into the low ones.

    A result that is not below ``n`` goes through both steps again until it is ("cycle-walking", Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). This follows a cycle of the permutation
    from a start below ``n``, so it ends, and what remains is a bijection on ``range(n)``. For n > 32 the
    domain is less than twice as large as ``n``, so fewer than two passes are needed on average.

    ``x0``, ``c``, ``a`` and every ``m`` come from SHAKE-256 of the text ``n/seed/epoch``, so near seeds and
    near epochs have unrelated orders. All is done in integers, so the order is the same on every platform.
    Nothing but these constants is stored: the time and memory of a look-up do not grow with ``n`` or the
    position. All that has to be saved is ``n``, ``seed`` and ``epoch``.

    This is for shuffling data; it is not a cipher.

    Args:
        n: Number of items, 0 to 2**48.
        seed: Any integer.
        epoch: Epoch number, at least 0; each epoch has an order of its own.

    Raises:
        DataError: ``n`` or ``epoch`` is out of range.
        TypeError: An argument is not an integer.

    Example:
        >>> sorted(ShuffledIndex(5, seed=1)) == [0, 1, 2, 3, 4]
        True
    """

    __slots__ = ("_constants", "_n", "epoch", "seed")

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        for name, value in (("n", n), ("seed", seed), ("epoch", epoch)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"ShuffledIndex: {name} must be an int, not {value!r}.")
        if not 0 <= n <= MAX_LENGTH:
            raise DataError(f"ShuffledIndex: n={n} must be from 0 to 2**48.")
        if epoch < 0:
            raise DataError(f"ShuffledIndex: epoch={epoch} must be 0 or more, because epochs count from 0.")
        self._n = n
        self.seed = seed
        self.epoch = epoch
        self._constants = _constants_of(n, f"{n}/{seed}/{epoch}")

    def __len__(self) -> int:
        return self._n

    def __contains__(self, value: object) -> bool:
        return isinstance(value, SupportsIndex) and 0 <= operator.index(value) < self._n

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        """The item at a position, or the list of items at a slice of positions.

        Raises:
            IndexError: The position is outside ``range(-n, n)``.
        """
        if isinstance(index, slice):
            items: list[int] = self._items(range(*index.indices(self._n))).tolist()
            return items
        number = operator.index(index)  # numpy's integers would overflow on the way
        position = number + self._n if number < 0 else number
        if not 0 <= position < self._n:
            raise IndexError(f"position {number} is outside an order of {self._n} items.")
        return self._follow(position)

    def __iter__(self) -> Iterator[int]:
        """All items in order, computed in blocks, small ones first."""
        return chain.from_iterable(self._lists())

    def block(self, start: int, stop: int) -> torch.Tensor:
        """The items at positions ``start`` to ``stop - 1``, computed together.

        This is the fastest way to many items, best with 50,000 or more of them in one call.

        Args:
            start: First position.
            stop: Position after the last one, at most ``n``.

        Returns:
            int64 tensor of shape [stop - start].

        Raises:
            IndexError: The positions are not inside the order.
        """
        if not 0 <= start <= stop <= self._n:
            raise IndexError(f"positions {start} to {stop} are not inside an order of {self._n} items.")
        return torch.from_numpy(self._items(range(start, stop)))

    def __reduce__(self) -> tuple[type[ShuffledIndex], tuple[int, int, int]]:
        """A pickle holds no more than the arguments."""
        return ShuffledIndex, (self._n, self.seed, self.epoch)

    def __repr__(self) -> str:
        return f"ShuffledIndex(n={self._n}, seed={self.seed}, epoch={self.epoch})"

    def _lists(self) -> Iterator[list[int]]:
        start, size = 0, _FIRST_LIST
        while start < self._n:
            stop = min(start + size, self._n)
            yield self._items(range(start, stop)).tolist()
            start, size = stop, min(2 * size, _LIST)

    def _follow(self, value: int) -> int:
        """One pass, and more until the value is below ``n``."""
        bits, x0, linear, square, rounds = self._constants
        mask, shift, n = (1 << bits) - 1, bits // 2 - 1, self._n
        while True:
            value = x0 + value * (linear + square * value) & mask
            value ^= value >> shift
            for m in rounds:
                value = value * (2 * value + m) & mask
                value ^= value >> shift
            if value < n:
                return value

    def _items(self, positions: range) -> NDArray[np.int64]:
        """The items at some positions, as `_follow` would give them one by one."""
        # 32-bit operations take half the time. Both types wrap around, and the mask keeps what is the same.
        small = self._n < 2**32
        one_pass = _VectorPass(self._constants, np.uint32 if small else np.uint64, len(positions))
        items = np.empty(len(positions), np.int64)
        # The step of a range of one position may be any integer.
        step = positions.step if len(positions) > 1 else 1
        steps = np.arange(min(len(positions), _BLOCK), dtype=np.int64) * step
        for at in range(0, len(positions), _BLOCK):
            block = items[at : at + _BLOCK]
            np.add(steps[: len(block)], positions[at], out=block)
            values = block.astype(np.uint32) if small else block.view(np.uint64)
            self._follow_all(values, one_pass)
            if small:
                block[:] = values
        return items

    def _follow_all(self, values: _Unsigned, one_pass: _VectorPass) -> None:
        """`_follow` for every value of an array, in place."""
        one_pass(values)
        places = np.flatnonzero(values >= self._n)
        while len(places) > _FEW:
            walked = values.take(places)
            one_pass(walked)
            values[places] = walked
            places = places.take(np.flatnonzero(walked >= self._n))
        for place in places.tolist():
            values[place] = self._follow(int(values[place]))


class _Constants(NamedTuple):
    """The domain is ``range(2**bits)``; all the other numbers are in it."""

    bits: int
    x0: int
    linear: int
    square: int
    rounds: tuple[int, ...]


def _constants_of(n: int, key: str) -> _Constants:
    bits = max(_MIN_BITS, (n - 1).bit_length())
    mask = (1 << bits) - 1
    rounds = max(_MIN_ROUNDS, 17 - bits)  # the fewer the bits, the less a round mixes them
    digest = hashlib.shake_256(key.encode()).digest(8 * (3 + rounds))
    x0, c, a, *words = (int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))
    a_minus_1 = (a | 1) << (bits + 1) // 2 & mask
    step = a_minus_1 * x0 + (c | 1)
    square = step * (a_minus_1 >> 1)
    multipliers = tuple((word & ~7 | 5) & mask for word in words)
    return _Constants(bits, x0 & mask, step - square & mask, square & mask, multipliers)


class _VectorPass:
    """One pass over an array of unsigned integers of one kind, in place."""

    def __init__(self, constants: _Constants, kind: type[np.uint32 | np.uint64], longest: int) -> None:
        bits, *walk, rounds = constants
        # Arrays without dimensions: numpy takes them faster than numbers.
        self._shift, self._mask, self._x0, self._linear, self._square, *self._rounds = (
            np.array(word, kind) for word in (bits // 2 - 1, (1 << bits) - 1, *walk, *rounds)
        )
        self._scratch = np.empty(min(longest, _CHUNK), kind)

    def __call__(self, values: _Unsigned) -> None:
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            self._apply(chunk, self._scratch[: len(chunk)])

    def _apply(self, x: _Unsigned, scratch: _Unsigned) -> None:
        np.multiply(x, self._square, out=scratch)
        np.add(scratch, self._linear, out=scratch)
        np.multiply(x, scratch, out=x)
        np.add(x, self._x0, out=x)
        self._fold(x, scratch)
        for m in self._rounds:
            np.add(x, x, out=scratch)
            np.add(scratch, m, out=scratch)
            np.multiply(x, scratch, out=x)
            self._fold(x, scratch)

    def _fold(self, x: _Unsigned, scratch: _Unsigned) -> None:
        np.bitwise_and(x, self._mask, out=x)
        np.right_shift(x, self._shift, out=scratch)
        np.bitwise_xor(x, scratch, out=x)


class DocumentSubset:
    """A run of documents of another source, in the shuffled order of a seed. Nothing is copied or listed.

    Args:
        source: The documents to choose from.
        seed: Seed of the order.
        start: First position in the shuffled order.
        stop: Position after the last one.

    Raises:
        DataError: The source is a mixture, of whose passes a part would have none.
    """

    def __init__(self, source: DocumentSource, seed: int, start: int, stop: int) -> None:
        if isinstance(source, EpochOrdered):
            raise DataError(
                f"source is a {type(source).__name__}, which decides how often its documents come, and a "
                "part of it would have each of them once. Split each of its sources, and mix the parts."
            )
        self.source = source
        self._order = ShuffledIndex(len(source), seed)
        self._positions = range(len(source))[start:stop]

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int, /) -> Document:
        return self.source[self._order[self._positions[index]]]

    @property
    def will_read(self) -> ReadAhead | None:
        """Tells the source which documents are read soon; None if it need not know."""
        told = read_ahead_of(self.source)
        if told is None:
            return None
        return lambda indices: told([self._order[self._positions[index]] for index in indices])

    def where(self, index: int) -> str:
        """The place of a document in words, from the source if it can tell."""
        number = self._order[self._positions[index]]
        place = getattr(self.source, "where", None)
        return str(place(number)) if callable(place) else f"document {number} of {len(self._order)}"

    def fingerprint(self) -> str:
        """Digest of the source's fingerprint and of the choice made from it."""
        chosen = f"{data_fingerprint(self.source)} {self._order!r} {self._positions!r}"
        return hashlib.sha256(chosen.encode()).hexdigest()


def split_documents(
    source: DocumentSource, held_out: float, seed: int
) -> tuple[DocumentSubset, DocumentSubset]:
    """Set documents aside, for evaluation say. Every document falls on exactly one side.

    The choice depends on (number of documents, held_out, seed) only. Each part holds at least one document.
    Documents come in a shuffled order, so that neither part needs a list of its documents.

    Args:
        source: All documents.
        held_out: Share to hold out, between 0 and 1, both excluded. The count is rounded.
        seed: Seed of the choice.

    Returns:
        The documents that remain, and those held out.

    Raises:
        DataError: ``held_out`` is out of range, there are fewer than two documents, or ``source`` is a
            mixture.
    """
    if not 0.0 < held_out < 1.0:
        raise DataError(f"held_out={held_out!r} must be a share between 0 and 1, both excluded.")
    total = len(source)
    if total < 2:
        raise DataError(
            f"cannot hold out a share of {total} document(s), because both parts need one. Give at least "
            "two documents, or hold out nothing."
        )
    count = min(max(round(total * held_out), 1), total - 1)
    return DocumentSubset(source, seed, count, total), DocumentSubset(source, seed, 0, count)


class MixedDocuments:
    """The documents of several sources; made by `mix_documents`.

    As a plain source it holds every document of every source once. A `DocumentStream` reads it by
    `epoch_order`, in which the weights count.

    Attributes:
        names: Names of the sources.
        documents_per_epoch: Documents that each source gives in an epoch.
    """

    def __init__(self, sources: Mapping[str, DocumentSource], per_epoch: Mapping[str, int]) -> None:
        self.names = tuple(sources)
        self.documents_per_epoch = dict(per_epoch)
        self._sources = tuple(sources.values())
        self._starts = [0, *accumulate(len(source) for source in self._sources)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int, /) -> Document:
        number, within = locate(self._starts, index, "mixture")
        return self._sources[number][within]

    @property
    def will_read(self) -> ReadAhead | None:
        """Tells the sources which documents are read soon; None if none of them need know."""
        told = [read_ahead_of(source) for source in self._sources]
        return None if not any(told) else lambda indices: self._pass_on(told, indices)

    def _pass_on(self, told: Sequence[ReadAhead | None], indices: Sequence[int]) -> None:
        within: dict[int, list[int]] = {}
        for index in indices:
            number, place = locate(self._starts, index, "mixture")
            within.setdefault(number, []).append(place)
        for number, places in within.items():
            if (tell := told[number]) is not None:
                tell(places)

    def where(self, index: int) -> str:
        """The place of a document in words."""
        number, within = locate(self._starts, index, "mixture")
        place = getattr(self._sources[number], "where", None)
        text = place(within) if callable(place) else f"document {within}"
        return f"{self.names[number]}: {text}"

    def fingerprint(self) -> str:
        """Digest of the sources and of what each gives in an epoch."""
        digest = hashlib.sha256()
        for name, source in zip(self.names, self._sources, strict=True):
            digest.update(f"{name!r} {self.documents_per_epoch[name]} {data_fingerprint(source)}\n".encode())
        return digest.hexdigest()

    def epoch_order(self, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
        """Numbers of the documents of an epoch, computed when asked for.

        Each source goes through all of its documents pass by pass, in an order of its own for each; an epoch
        takes the next ``documents_per_epoch`` of them, and shuffles these among themselves too.
        """
        return _MixedOrder(self, seed, epoch, shuffle)

    def range_of(self, number: int) -> range:
        """Numbers of the documents of a source, by its number."""
        return range(self._starts[number], self._starts[number + 1])


class _MixedOrder(Sequence[int]):
    """Which source gives the document at a position is shuffled; so is the order within each source."""

    def __init__(self, mixture: MixedDocuments, seed: int, epoch: int, shuffle: bool) -> None:
        self._mixture = mixture
        self._seed = seed
        self._epoch = epoch
        self._shuffle = shuffle
        self._counts = [mixture.documents_per_epoch[name] for name in mixture.names]
        self._starts = [0, *accumulate(self._counts)]
        total = self._starts[-1]
        self._slots: Sequence[int] = ShuffledIndex(total, seed, epoch) if shuffle else range(total)
        self._passes: dict[tuple[int, int], Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        slot = self._slots[index]
        number = bisect_right(self._starts, slot) - 1
        taken = self._epoch * self._counts[number] + slot - self._starts[number]
        documents = self._mixture.range_of(number)
        turn, position = divmod(taken, len(documents))
        return documents[self._order(number, turn, len(documents))[position]]

    def _order(self, number: int, turn: int, count: int) -> Sequence[int]:
        """The order of a source in one of its passes; an epoch meets few of them."""
        if not self._shuffle:
            return range(count)
        key = (number, turn)
        if key not in self._passes:
            self._passes[key] = ShuffledIndex(count, self._seed + number + 1, turn)
        return self._passes[key]


def mix_documents(sources: Mapping[str, DocumentSource], passes: Mapping[str, float]) -> MixedDocuments:
    """Several sources as one, each read so many times in an epoch.

    With ``passes`` of 2.0 each document of a source comes twice in every epoch. With 0.5 each comes once in
    two epochs: half of them in the first, the other half in the second. After each epoch every document of
    a source has come equally often, or once more than another. Within an epoch the order is shuffled, so that
    with more than one pass a document may come again before others have come. `passes_for_shares` finds
    passes from shares.

    Args:
        sources: By names of your choice.
        passes: For each source, how often it is read in an epoch; positive.

    Returns:
        The mixture. Nothing is copied or listed.

    Raises:
        DataError: The names differ, a weight is not a number, zero, negative or not finite, a source is
            empty or a mixture itself, or an epoch would have more than 2**48 documents.
        TypeError: One of both is not a mapping.
    """
    _check_names(sources, passes, "passes")
    for name, source in sources.items():
        if isinstance(source, EpochOrdered):
            raise DataError(
                f"source {name!r} is a {type(source).__name__}, which decides how often its documents come, "
                "and would have each of them once here. Mix its sources themselves, each with the product of "
                "both passes."
            )
    counts = {name: _per_epoch(name, len(source), float(passes[name])) for name, source in sources.items()}
    if sum(counts.values()) > MAX_LENGTH:
        raise DataError(
            f"passes={dict(passes)} make an epoch of more than 2**48 documents. Give smaller ones."
        )
    return MixedDocuments(sources, counts)


def _per_epoch(name: str, documents: int, passes: float) -> int:
    """Documents that a source gives in an epoch: a whole number, at least one; says what that changes."""
    wanted = min(passes * documents, 2.0 * MAX_LENGTH)
    count = max(1, round(wanted))
    if abs(count - wanted) > _NOTABLE * wanted:
        logger.warning(
            "passes[%r]=%g of %d document(s) are %.3g in an epoch, and %d will be read; with other passes "
            "or more documents it can be more exact",
            name,
            passes,
            documents,
            wanted,
            count,
        )
    return count


def passes_for_shares(
    sources: Mapping[str, DocumentSource],
    shares: Mapping[str, float],
    mean_tokens: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The passes that give each source its share of what is read.

    They are the largest for which no source is read more than once in an epoch: the source that is
    scarce for its share is read once, the others in part.

    Args:
        sources: By names of your choice.
        shares: Positive weights of the sources; only their proportions count.
        mean_tokens: Mean number of tokens in a document of each source. With it the shares are of tokens,
            without it of documents.

    Returns:
        What `mix_documents` takes, in (0, 1].

    Raises:
        DataError: The names differ, or a number is zero, negative or not finite.
        TypeError: One of both is not a mapping.
    """
    _check_names(sources, shares, "shares")
    if mean_tokens is not None:
        _check_names(sources, mean_tokens, "mean_tokens")
    sizes = {name: len(source) * (mean_tokens or {}).get(name, 1.0) for name, source in sources.items()}
    shares = {name: float(share) for name, share in shares.items()}
    scarcest = min(sizes[name] / shares[name] for name in sources)
    return {name: shares[name] * scarcest / sizes[name] for name in sources}


def _is_positive(weight: object) -> bool:
    if isinstance(weight, str | bool) or not isinstance(weight, SupportsFloat | SupportsIndex):
        return False
    try:
        return 0 < float(weight) < math.inf
    except (TypeError, ValueError, OverflowError):
        return False


def _check_names(sources: Mapping[str, DocumentSource], weights: Mapping[str, float], setting: str) -> None:
    for name, table in {"sources": sources, setting: weights}.items():
        if not isinstance(table, Mapping):
            raise TypeError(f"{name} must be a dict by names, but is a {type(table).__name__}.")
    if not sources:
        raise DataError("sources is empty. Give at least one source.")
    if set(sources) != set(weights):
        raise DataError(
            f"{setting} names {sorted(weights)}, but sources names {sorted(sources)}. Name the same in both."
        )
    for name, source in sources.items():
        weight = weights[name]
        if not _is_positive(weight):
            raise DataError(
                f"{setting}[{name!r}]={weight!r} must be a positive number. Leave a source that is not to "
                "be read out of sources."
            )
        if len(source) == 0:
            raise DataError(f"source {name!r} has no documents. Leave it out.")


@runtime_checkable
class EpochOrdered(Protocol):
    """A source that decides itself which of its documents an epoch has, and in which order."""

    def epoch_order(self, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
        """Numbers of documents; computed when asked for, of the same length in every epoch."""
        ...


def epoch_order(source: DocumentSource, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """Numbers of the documents of an epoch, in order: a pure function of (source, seed, epoch, shuffle)."""
    if isinstance(source, EpochOrdered):
        return source.epoch_order(seed, epoch, shuffle)
    count = len(source)
    return ShuffledIndex(count, seed, epoch) if shuffle else range(count)
