"""What differs between versions of one state, put into words that name ranks, tensors and places."""

import json
import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from checkpoint_core.state.encoding import TAG

MAX_TENSORS = 5
"""Tensors described in one message; the rest are counted."""
_MAX_SIDES = 4
_MAX_RANKS = 8
_MAX_TEXT = 80
_UNORDERED = ("dict", "Counter")
_NOTHING = "nothing"

_Place = tuple[str, ...]
_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True)
class TensorEntry:
    """What is compared of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    checksums: tuple[int, ...]
    """CRC32C of each piece of the values; empty where values are not compared."""


@dataclass(frozen=True)
class Version:
    """One form of a state, and the ranks that hold it."""

    ranks: tuple[int, ...]
    document: object
    """In canonical order."""
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True)
class Side(Generic[_T]):
    """The ranks that agree on one value."""

    ranks: tuple[int, ...]
    value: _T


@dataclass(frozen=True)
class ValueDifference:
    """A tensor of one dtype and shape whose values differ."""

    name: str
    sides: Sequence[Side[tuple[int, ...]]]
    """Who agrees on the values, by checksums; the largest side first."""

    def first_piece(self, side: Side[tuple[int, ...]]) -> int:
        """Number of the first piece in which a side differs from the first side."""
        pairs = zip(self.sides[0].value, side.value, strict=True)
        return next(number for number, (reference, other) in enumerate(pairs) if reference != other)


@dataclass(frozen=True)
class Differences:
    """All that differs between the versions of one state."""

    places: Sequence[str]
    """One sentence for each differing place of the document."""
    layouts: Sequence[str]
    """One sentence for each tensor that is missing somewhere, or differs in dtype or shape."""
    values: Sequence[ValueDifference]
    """Tensors that differ in their values only."""

    @property
    def told_values(self) -> Sequence[ValueDifference]:
        """Those that a message has room for."""
        return self.values[: max(0, MAX_TENSORS - len(self.layouts))]


def canonical_document(document: object) -> object:
    """Bring a state document into an order that does not depend on how dictionaries were filled.

    Args:
        document: A document of :func:`~checkpoint_core.state.encoding.encode_state`.

    Returns:
        A document that says the same. Only an ``OrderedDict`` keeps its order, which is part of its value.
    """
    if isinstance(document, list):
        return [canonical_document(item) for item in document]
    if not isinstance(document, dict):
        return document
    items = document.items()
    if document.get(TAG) in _UNORDERED:
        items = {**document, "items": sorted(document["items"], key=canonical_text)}.items()
    return {key: canonical_document(item) for key, item in items}


def canonical_text(document: object) -> str:
    """A document as compact JSON with sorted keys; 0.0, -0.0, 0 and false give four different texts."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def find_differences(versions: Sequence[Version]) -> Differences:
    """Compare versions of one state.

    Args:
        versions: Two or more.

    Returns:
        The differences, in the order of the document and of the tensors' names.
    """
    layouts, values = [], []
    for name in sorted({name for version in versions for name in version.tensors}):
        entries = {version.ranks: version.tensors.get(name) for version in versions}
        kinds = _sides({ranks: _show_entry(entry) for ranks, entry in entries.items()})
        checksums = _sides({ranks: entry.checksums for ranks, entry in entries.items() if entry})
        if len(kinds) > 1:
            layouts.append(f"tensor {name!r}: {_list_values(kinds)}")
        elif len(checksums) > 1:
            values.append(ValueDifference(name, checksums))
    return Differences(_differing_places(versions), layouts, values)


def describe(
    key: str, sides: Sequence[Sequence[int]], differences: Differences, elements: Mapping[str, str]
) -> str:
    """Put the mismatch of one component into words.

    Args:
        key: The component.
        sides: The ranks that agree with one another, the largest side first; two sides or more.
        differences: What differs between the versions that were looked into.
        elements: By tensor, more about its first differing element; may be empty.

    Returns:
        One message with the remedy.
    """
    told = [_tell_values(item, sides, elements.get(item.name)) for item in differences.told_values]
    tensors = [*differences.layouts[:MAX_TENSORS], *told]
    parts = [
        *_limit(differences.places[:1], len(differences.places), "place"),
        *_limit(tensors, len(differences.layouts) + len(differences.values), "tensor"),
    ]
    lowest = min(rank for side in sides for rank in side)
    return (
        f"component {key!r} is not the same on all its ranks: {name_sides(sides)} ({'; '.join(parts)}). Make "
        f"the replicas equal, e.g. broadcast the state from rank {lowest}, or declare the component PER_RANK"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message: ``rank 1`` or ``ranks 0, 2, 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - _MAX_RANKS
    return f"ranks {', '.join(map(str, ranks[:_MAX_RANKS]))}" + (f" and {more} more" if more > 0 else "")


def name_sides(sides: Sequence[Sequence[int]]) -> str:
    """Say who differs from whom.

    Args:
        sides: The ranks of each side, the largest first; two sides or more.

    Returns:
        Such as ``rank 1 differs from ranks 0, 2, 3``.
    """
    reference, *others = sides
    more = len(others) - _MAX_SIDES
    names = "; ".join(name_ranks(side) for side in others[:_MAX_SIDES])
    names += f"; and {more} more versions" if more > 0 else ""
    if len(others) > 1:
        return f"{names} differ from {name_ranks(reference)} and from one another"
    return f"{names} {'differs' if len(others[0]) == 1 else 'differ'} from {name_ranks(reference)}"


def largest_first(sides: Sequence[Side[_T]]) -> list[Side[_T]]:
    """The order in which sides are told; of equally large ones, that with the lowest rank first."""
    return sorted(sides, key=lambda side: (-len(side.ranks), min(side.ranks)))


def _sides(values: Mapping[tuple[int, ...], _T]) -> list[Side[_T]]:
    """Join the versions that have the same value."""
    ranks: dict[_T, list[int]] = {}
    for members, value in values.items():
        ranks.setdefault(value, []).extend(members)
    return largest_first([Side(tuple(sorted(members)), value) for value, members in ranks.items()])


def _tell_values(item: ValueDifference, sides: Sequence[Sequence[int]], element: str | None) -> str:
    own = [side.ranks for side in item.sides]
    # Ranks that the message has named already are not named again.
    who = "values differ" if own == [tuple(side) for side in sides] else f"{name_sides(own)} in values"
    return f"tensor {item.name!r}: {who}" + (f", {element}" if element else "")


def _list_values(sides: Sequence[Side[str]]) -> str:
    parts = []
    for side in sides:
        other = sides[1 if side is sides[0] else 0]
        have = "has" if len(side.ranks) == 1 else "have"
        parts.append(f"{name_ranks(side.ranks)} {have} {_excerpt(side.value, other.value)}")
    return ", ".join(parts)


def _excerpt(text: str, other: str) -> str:
    """The part of a long value where it begins to differ from another one."""
    if len(text) <= _MAX_TEXT:
        return text
    shortest = min(len(text), len(other))
    first = next((i for i in range(shortest) if text[i] != other[i]), shortest)
    begin = max(0, min(first - _MAX_TEXT // 4, len(text) - _MAX_TEXT))
    end = begin + _MAX_TEXT
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def _limit(told: Sequence[str], count: int, what: str) -> list[str]:
    more = count - len(told)
    return [*told, f"and {more} more {what}{'s' * (more > 1)}"] if more else [*told]


def _show_entry(entry: TensorEntry | None) -> str:
    return _NOTHING if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _differing_places(versions: Sequence[Version]) -> list[str]:
    trees = {version.ranks: dict(_leaves(version.document, ("state",))) for version in versions}
    found = []
    for place in dict.fromkeys(place for tree in trees.values() for place in tree):
        sides = _sides({ranks: tree.get(place, _NOTHING) for ranks, tree in trees.items()})
        if len(sides) > 1:
            found.append(f"{''.join(place)}: {_list_values(sides)}")
    return found


def _leaves(node: object, place: _Place) -> Iterator[tuple[_Place, str]]:
    """Every place of a document, with a text that stands for one content only."""
    kind = node.get(TAG) if isinstance(node, dict) else None
    if isinstance(node, list) or (isinstance(node, dict) and kind == "tuple"):
        items = node if isinstance(node, list) else node["items"]
        yield place, f"{kind or 'list'} of {len(items)}"
        for index, item in enumerate(items):
            yield from _leaves(item, (*place, f"[{index}]"))
    elif isinstance(node, dict) and kind in (None, "OrderedDict", *_UNORDERED):
        pairs = [(_show_key(key), item) for key, item in (node["items"] if kind else node.items())]
        keys = f" of keys {', '.join(key for key, _ in pairs)}" if kind == "OrderedDict" else ""
        yield place, (kind or "dict") + keys
        for key, item in pairs:
            yield from _leaves(item, (*place, key))
    else:
        yield place, _show_leaf(node)


def _show_key(key: object) -> str:
    # The keys 3 and "3" are different places.
    return f".{key}" if isinstance(key, str) else f"[{canonical_text(key)}]"


def _show_leaf(node: object) -> str:
    match node:
        case {"$": "float", "bits": str(bits)}:
            return f"{struct.unpack('>d', bytes.fromhex(bits))[0]} (bits {bits})"
        case {"$": "tensor", "name": str(name)}:
            return f"tensor {name!r}"
    return canonical_text(node)
