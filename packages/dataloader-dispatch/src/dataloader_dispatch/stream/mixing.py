"""Several sources as one, each with its weight."""

from __future__ import annotations

import hashlib
import logging
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import overload

from dataloader_dispatch.documents import Document, DocumentSource, data_fingerprint
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.shuffle import MAX_LENGTH, ShuffledIndex

logger = logging.getLogger("dataloader_dispatch.stream")

_NOTABLE = 0.2  # share by which a number of documents may be rounded without a word


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
        number, within = self._locate(index)
        return self._sources[number][within]

    def where(self, index: int) -> str:
        """The place of a document in words."""
        number, within = self._locate(index)
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

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} is outside a mixture of {len(self)} documents")
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]


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

    def __iter__(self) -> Iterator[int]:
        return (self[position] for position in range(len(self)))

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
            empty, or an epoch would have more than 2**48 documents.
    """
    _check_names(sources, passes, "passes")
    counts = {name: _per_epoch(name, len(source), float(passes[name])) for name, source in sources.items()}
    if sum(counts.values()) > MAX_LENGTH:
        raise DataError(
            f"passes={dict(passes)} make an epoch of more than 2**48 documents; give smaller ones"
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
    """
    _check_names(sources, shares, "shares")
    if mean_tokens is not None:
        _check_names(sources, mean_tokens, "mean_tokens")
    sizes = {name: len(source) * (mean_tokens or {}).get(name, 1.0) for name, source in sources.items()}
    shares = {name: float(share) for name, share in shares.items()}
    scarcest = min(sizes[name] / shares[name] for name in sources)
    return {name: shares[name] * scarcest / sizes[name] for name in sources}


def _is_positive(weight: object) -> bool:
    try:
        return not isinstance(weight, str | bool) and 0 < float(weight) < math.inf  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def _check_names(sources: Mapping[str, DocumentSource], weights: Mapping[str, float], setting: str) -> None:
    if not sources:
        raise DataError("sources is empty; give at least one source")
    if set(sources) != set(weights):
        raise DataError(
            f"{setting} names {sorted(weights)}, sources names {sorted(sources)}; name the same in both"
        )
    for name, source in sources.items():
        weight = weights[name]
        if not _is_positive(weight):
            raise DataError(
                f"{setting}[{name!r}]={weight!r} is out of range; it must be a positive number. A source "
                "that is not to be read is left out of sources"
            )
        if len(source) == 0:
            raise DataError(f"source {name!r} has no documents; leave it out")
