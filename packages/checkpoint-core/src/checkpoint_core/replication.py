"""Whether the copies of a component are equal on all ranks that hold one, and where they differ.

Every rank reduces its copies to fingerprints, and all exchange one digest for each: when nothing is wrong,
that is the only message. Where digests differ, one rank of each version hands out its fingerprint, from which
every rank writes the same report, in words that name ranks, tensors and places.
"""

import ctypes
import hashlib
import json
import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypedDict, TypeVar

import torch
from crc32c import crc32c

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.encoding import TAG, EncodedState
from checkpoint_core.storage.tensor_files import DTYPE_CODES
from checkpoint_core.storage.tensors import in_order

MAX_TENSORS = 5
"""Tensors described in one message; the rest are counted."""
_MAX_SIDES = 4
_MAX_RANKS = 8
_MAX_TEXT = 80
_UNORDERED = ("dict", "Counter")
_NOTHING = "nothing"
_Place = tuple[str, ...]
_T = TypeVar("_T", bound=Hashable)
PIECE_BYTES = 4 * 1024 * 1024
"""Largest piece of a tensor that is checksummed, copied from a device or sent at once, in bytes."""
_MAX_VERSIONS = 4


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

    Only an ``OrderedDict`` keeps its order, which is part of its value.
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
        kinds = _group_sides({ranks: _show_entry(entry) for ranks, entry in entries.items()})
        checksums = _group_sides({ranks: entry.checksums for ranks, entry in entries.items() if entry})
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
    """Say who differs from whom, such as ``rank 1 differs from ranks 0, 2, 3``; the largest side first."""
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


def _group_sides(values: Mapping[tuple[int, ...], _T]) -> list[Side[_T]]:
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
        sides = _group_sides({ranks: tree.get(place, _NOTHING) for ranks, tree in trees.items()})
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


@dataclass(frozen=True)
class Replica:
    """One component of this rank that claims to be equal to other ranks' copies."""

    key: str
    """The component."""
    level: str
    """``structure`` compares the document and the names, dtypes and shapes of the tensors; ``tensor`` also
    the values, by checksum; ``exact`` also names the first differing element."""
    ranks: Sequence[int]
    """Global ranks that hold a copy, sorted, this one included."""
    state: EncodedState
    """The state, with plain dense tensors on any device."""


class _Claim(TypedDict):
    """What a rank tells all others of one replica."""

    key: str
    level: str
    holders: str
    """Digest of the ranks that should hold a copy; the ranks themselves could be thousands."""
    digest: str
    size: int
    """Bytes of the fingerprint."""


@dataclass(frozen=True)
class _ReplicaSet:
    """The replicas of one component that must be equal."""

    key: str
    level: str
    sides: Sequence[Side[str]]
    """Who has which digest, the largest side first."""
    sizes: Mapping[str, int]
    """Bytes of the fingerprint behind each digest."""


class _Element(TypedDict):
    """Where a rank's values first differ from the reference."""

    index: list[int]
    reference: str
    own: str


def find_mismatches(ranks: RankAgreement, phase: str, replicas: Sequence[Replica]) -> list[str]:
    """Compare the replicas of all ranks. Collective, also for ranks without replicas.

    Values are compared bit by bit: 0.0 and -0.0 differ, and so do two different NaNs.

    Args:
        ranks: All ranks of the job.
        phase: What the comparison is part of, for messages, such as ``saving checkpoint-10``.
        replicas: The replicas of this rank; at most one of each component.

    Returns:
        One message for each component (and group) whose replicas differ, the same on every rank; empty when
        all are equal. Messages name the component, the ranks, the tensors and the remedy.

    Raises:
        CheckpointError: On every rank, when a state cannot be compared on any of them, or the ranks do not
            declare a component alike.
    """
    own = {replica.key: replica for replica in replicas}
    fingerprints: dict[str, bytes] = {}

    def claim() -> list[_Claim]:
        claims = []
        for replica in replicas:
            if len(replica.ranks) > 1:
                fingerprints[replica.key] = _fingerprint(replica)
                claims.append(_claim(replica, fingerprints[replica.key]))
        return claims

    mismatches = [group for group in _join(phase, ranks.run(phase, claim)) if len(group.sides) > 1]
    return [_explain(ranks, phase, group, fingerprints, own) for group in mismatches]


def _claim(replica: Replica, fingerprint: bytes) -> _Claim:
    return _Claim(
        key=replica.key,
        level=replica.level,
        holders=_digest(canonical_text(sorted(replica.ranks)).encode()),
        digest=_digest(fingerprint),
        size=len(fingerprint),
    )


def _join(phase: str, reports: Sequence[Sequence[_Claim]]) -> Iterator[_ReplicaSet]:
    """Collect the claims of all ranks into sets of replicas, ordered by component."""
    claims: dict[tuple[str, str], list[tuple[int, _Claim]]] = {}
    for rank, report in enumerate(reports):
        for claim in report:
            claims.setdefault((claim["key"], claim["holders"]), []).append((rank, claim))
    for (key, holders), members in sorted(claims.items(), key=lambda item: (item[0][0], item[1][0][0])):
        holding = [rank for rank, _ in members]
        levels = sorted({claim["level"] for _, claim in members})
        if len(levels) > 1 or _digest(canonical_text(holding).encode()) != holders:
            raise CheckpointError(
                f"{phase}: component {key!r} is declared on {name_ranks(holding)} with validation_level "
                f"{' and '.join(levels)}, but not alike on all ranks that should hold a replica. Declare "
                "the same validate_replication, validation_level and process group on each of them."
            )
        ranks: dict[str, list[int]] = {}
        for rank, claim in members:
            ranks.setdefault(claim["digest"], []).append(rank)
        sides = largest_first([Side(tuple(same), digest) for digest, same in ranks.items()])
        yield _ReplicaSet(key, levels[0], sides, {claim["digest"]: claim["size"] for _, claim in members})


def _explain(
    ranks: RankAgreement,
    phase: str,
    group: _ReplicaSet,
    fingerprints: Mapping[str, bytes],
    own: Mapping[str, Replica],
) -> str:
    """Write the message about one mismatch. Collective."""
    versions = []
    for side in group.sides[:_MAX_VERSIONS]:
        content = bytearray(group.sizes[side.value])
        if ranks.rank == side.ranks[0]:
            content[:] = fingerprints[group.key]
        ranks.broadcast(phase, torch.frombuffer(content, dtype=torch.uint8), side.ranks[0])
        versions.append(_version(side.ranks, content))
    differences = find_differences(versions)
    elements = {}
    if group.level == "exact":
        state = own[group.key].state if group.key in own else EncodedState(None)
        for difference in differences.told_values:
            elements[difference.name] = _first_elements(ranks, phase, difference, state)
    return describe(group.key, [side.ranks for side in group.sides], differences, elements)


def _fingerprint(replica: Replica) -> bytes:
    tensors = {}
    for name, tensor in replica.state.tensors.items():
        if tensor.dtype not in DTYPE_CODES:
            raise CheckpointError(
                f"component {replica.key!r}: tensor {name!r} has dtype {tensor.dtype}, which cannot be "
                f"stored. Convert it to one of {', '.join(str(dtype) for dtype in DTYPE_CODES)}."
            )
        checksums = [] if replica.level == "structure" else _checksums(tensor)
        tensors[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), checksums]
    document = canonical_document(replica.state.document)
    return canonical_text({"document": document, "tensors": tensors}).encode("ascii")


def _version(ranks: tuple[int, ...], fingerprint: bytes | bytearray) -> Version:
    content = json.loads(fingerprint)
    tensors = {
        name: TensorEntry(dtype, tuple(shape), tuple(checksums))
        for name, (dtype, shape, checksums) in content["tensors"].items()
    }
    return Version(ranks, content["document"], tensors)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _checksums(tensor: torch.Tensor) -> list[int]:
    checksums = []
    for piece in torch.split(_flat(tensor), _piece_length(tensor)):
        if piece.numel():
            host = _to_bytes(piece)
            # ctypes instead of Tensor.numpy(), for places where numpy is not installed.
            memory = (ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())
            checksums.append(crc32c(memoryview(memory)))
    return checksums


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _piece_length(tensor: torch.Tensor) -> int:
    return PIECE_BYTES // tensor.element_size()


def _to_bytes(piece: torch.Tensor) -> torch.Tensor:
    return in_order(piece.cpu()).view(torch.uint8)


def _first_elements(
    ranks: RankAgreement, phase: str, difference: ValueDifference, state: EncodedState
) -> str:
    """Say where the values of each side first differ from those of the first side. Collective."""
    reference, *others = difference.sides
    sentences = []
    for side in others:
        pair = (reference.ranks[0], side.ranks[0])
        found = _first_element(
            ranks, phase, pair, state.tensors.get(difference.name), difference.first_piece(side)
        )
        if found is None:
            sentences.append(f"but changed on {name_ranks([*pair])} meanwhile")
            continue
        place = f"first at {found['index']}, where" if found["index"] else "where"
        sentences.append(
            f"{place} {name_ranks(reference.ranks)} {_have(reference)} {found['reference']} and "
            f"{name_ranks(side.ranks)} {_have(side)} {found['own']}"
        )
    return ", ".join(sentences)


def _first_element(
    ranks: RankAgreement, phase: str, pair: tuple[int, int], tensor: torch.Tensor | None, number: int
) -> _Element | None:
    """Send a piece of a tensor from the first of two ranks to the second, which searches it. Collective."""
    source, target = pair
    pieces: list[torch.Tensor] = []

    def prepare() -> int:
        if ranks.rank in pair and tensor is not None:
            begin = number * _piece_length(tensor)
            pieces.append(_to_bytes(_flat(tensor)[begin : begin + _piece_length(tensor)]))
        return sum(len(piece) for piece in pieces)

    size = ranks.run(phase, prepare)[source]
    sent = pieces[0] if ranks.rank == source else torch.empty(size, dtype=torch.uint8)
    ranks.broadcast(phase, sent, source)

    def search() -> _Element | None:
        if ranks.rank != target or tensor is None:
            return None
        return _search(tensor, number * _piece_length(tensor), sent, pieces[0])

    return ranks.run(phase, search)[target]


def _search(tensor: torch.Tensor, begin: int, reference: torch.Tensor, own: torch.Tensor) -> _Element | None:
    """Find the first byte that differs in a piece that begins at a flat index."""
    differs = reference != own
    if not differs.any():
        return None
    offset = int(differs.view(torch.uint8).argmax()) // tensor.element_size()
    values = [_show_element(piece, tensor.dtype, offset) for piece in (reference, own)]
    if values[0][0] == values[1][0] or "nan" in values[0][0] + values[1][0]:
        values = [(f"{text} (bits {bits})", bits) for text, bits in values]
    return _Element(index=_index(begin + offset, tensor.shape), reference=values[0][0], own=values[1][0])


def _index(flat: int, shape: Sequence[int]) -> list[int]:
    # torch.unravel_index() takes seconds when it is first called.
    index = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return index[::-1]


def _have(side: Side[tuple[int, ...]]) -> str:
    return "has" if len(side.ranks) == 1 else "have"


def _show_element(piece: torch.Tensor, dtype: torch.dtype, offset: int) -> tuple[str, str]:
    """One element as a number and as bits."""
    width = dtype.itemsize
    bits = bytes(reversed(piece[offset * width : (offset + 1) * width].tolist())).hex()
    return str(piece.view(dtype)[offset].item()), f"0x{bits}"
