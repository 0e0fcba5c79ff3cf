"""Whether the copies of a component are equal on all ranks that hold one, and where they first differ.

Every rank reduces its copies to fingerprints, and all exchange one digest for each: when nothing is wrong,
that is the only message. Where digests differ, one rank of each of the two largest versions hands out its
fingerprint, from which every rank writes the same report.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from crc32c import crc32c

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.encoding import TAG, EncodedState, in_order
from checkpoint_core.errors import CheckpointError
from checkpoint_core.tensor_files import DTYPE_CODES, memory_of

PIECE_BYTES = 4 * 1024 * 1024
"""Largest piece of a tensor that is checksummed, copied from a device or sent at once, in bytes."""
_PAIRED = ("dict", "OrderedDict", "Counter")
_LONGEST = 80
_MOST_TOLD = 5
_MOST_RANKS = 8
_Entry = tuple[str, list[int]]
"""What a rank has at one place of a state, and of a tensor the CRC-32C of each piece of its values."""
_NOTHING: _Entry = ("nothing", [])


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

    level: str
    holders: str
    """Digest of the ranks that should hold a copy; the ranks themselves could be thousands."""
    digest: str
    size: int
    """Bytes of the fingerprint."""


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
    own = {replica.key: replica for replica in replicas if len(replica.ranks) > 1}
    fingerprints: dict[str, bytes] = {}

    def claim() -> dict[str, _Claim]:
        fingerprints.update({key: _fingerprint(replica) for key, replica in own.items()})
        return {
            key: _Claim(
                level=replica.level,
                holders=_digest(str(sorted(replica.ranks)).encode()),
                digest=_digest(fingerprints[key]),
                size=len(fingerprints[key]),
            )
            for key, replica in own.items()
        }

    groups: dict[tuple[str, str], dict[int, _Claim]] = {}
    for rank, claims in enumerate(ranks.run(phase, claim)):
        for key, each in claims.items():
            groups.setdefault((key, each["holders"]), {})[rank] = each
    messages = []
    for (key, holders), members in sorted(groups.items(), key=lambda item: (item[0][0], min(item[1]))):
        levels = sorted({each["level"] for each in members.values()})
        if len(levels) > 1 or _digest(str(sorted(members)).encode()) != holders:
            raise CheckpointError(
                f"{phase}: component {key!r} is declared on {_name(sorted(members))} with validation_level "
                f"{' and '.join(levels)}, but not alike on all ranks that should hold a replica. Declare "
                "the same validate_replication, validation_level and process group on each of them."
            )
        by_digest: dict[str, list[int]] = {}
        for rank, each in members.items():
            by_digest.setdefault(each["digest"], []).append(rank)
        if len(by_digest) > 1:
            sides = sorted(by_digest.values(), key=lambda side: (-len(side), side))
            parts = _explain(ranks, phase, sides, members, own.get(key), fingerprints.get(key, b""))
            messages.append(
                f"component {key!r} is not the same on all its ranks: {_who(sides)} ({'; '.join(parts)}). "
                f"Make the replicas equal, e.g. broadcast the state from rank {min(members)}, or declare the "
                "component PER_RANK"
            )
    return messages


def _explain(
    ranks: RankAgreement,
    phase: str,
    sides: Sequence[Sequence[int]],
    members: Mapping[int, _Claim],
    own: Replica | None,
    fingerprint: bytes,
) -> list[str]:
    """Say where the second side differs from the first. Collective."""
    found: list[dict[str, _Entry]] = []
    for speaker, *_ in sides[:2]:
        content = bytearray(members[speaker]["size"])
        if ranks.rank == speaker:
            content[:] = fingerprint
        ranks.broadcast(phase, torch.frombuffer(content, dtype=torch.uint8), speaker)
        found.append(json.loads(content))
    left, right = found
    places = [place for place in sorted({*left, *right}) if left.get(place) != right.get(place)]
    parts = []
    for place in places[:_MOST_TOLD]:
        (a, sums_a), (b, sums_b) = left.get(place, _NOTHING), right.get(place, _NOTHING)
        if a != b:
            told = f"{excerpt(a, b)} on {_name(sides[0])}, {excerpt(b, a)} on {_name(sides[1])}"
        else:
            told = "values differ"
            if members[sides[0][0]]["level"] == "exact":
                number = next(n for n, (x, y) in enumerate(zip(sums_a, sums_b, strict=True)) if x != y)
                tensors = {} if own is None else own.state.tensors
                mine = next((tensors[name] for name in tensors if _place(name) == place), None)
                told += _first_element(ranks, phase, sides, mine, number)
        parts.append(f"{place.replace(chr(10), '')}: {told}")
    return parts if len(places) == len(parts) else [*parts, f"and {len(places) - len(parts)} more"]


def _who(sides: Sequence[Sequence[int]]) -> str:
    """Who differs from whom, such as ``rank 1 differs from ranks 0, 2, 3``; the largest side first."""
    others = [_name(side) for side in sides[1 : _MOST_TOLD + 1]]
    if (more := len(sides) - 1 - len(others)) > 0:
        others.append(f"and {more} more versions")
    verb = "differs" if len(sides) == 2 and len(sides[1]) == 1 else "differ"
    return f"{'; '.join(others)} {verb} from {_name(sides[0])}"


def _name(ranks: Sequence[int]) -> str:
    """Ranks for a message: ``rank 1`` or ``ranks 0, 2, 3``."""
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_RANKS]))}{more}"


def _fingerprint(replica: Replica) -> bytes:
    """What is compared of a state, by place; the order of dictionaries is not part of it."""
    entries: dict[str, _Entry] = {
        place: (text, []) for place, text in leaves(replica.state.document, "state")
    }
    for name, tensor in replica.state.tensors.items():
        if tensor.dtype not in DTYPE_CODES:
            raise CheckpointError(
                f"component {replica.key!r}: tensor {name!r} has dtype {tensor.dtype}, which cannot be "
                f"stored. Convert it to one of {', '.join(str(dtype) for dtype in DTYPE_CODES)}."
            )
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        pieces = [] if replica.level == "structure" else torch.split(_flat(tensor), _piece_length(tensor))
        sums = []
        for piece in pieces:
            if piece.numel():
                host = _to_bytes(piece)
                sums.append(crc32c(memory_of(host)))
        entries[_place(name)] = (kind, sums)
    return json.dumps(entries, sort_keys=True).encode("ascii")


def leaves(node: object, place: str) -> Iterator[tuple[str, str]]:
    """Every place of a state document, or of any JSON, with a text that stands for one content only.

    Args:
        node: The document.
        place: Its name. The steps of a place are separated by a line feed, which no step holds, so that no
            two places have one name.

    Yields:
        Place and content: the value as JSON, or the kind of a container. Of dictionaries only an OrderedDict
        has an order, which is part of its content.
    """
    kind: object = type(node).__name__
    if isinstance(node, dict) and isinstance(node.get("items"), list) and TAG in node:
        kind, node = node[TAG], node["items"]
    pairs: list[tuple[object, object]]
    if isinstance(node, dict) and TAG not in node:
        pairs = list(node.items())
    elif isinstance(node, list):
        paired = kind in _PAIRED and all(isinstance(pair, list) and len(pair) == 2 for pair in node)
        pairs = [(pair[0], pair[1]) for pair in node] if paired else list(enumerate(node))
    elif isinstance(node, dict) and kind == "dict" and node[TAG] == "tensor":
        yield place, f"tensor {json.dumps(node.get('name'))}"
        return
    else:
        yield place, json.dumps(node, sort_keys=True)
        return
    steps = [
        f".{json.dumps(key)[1:-1]}" if isinstance(key, str) else f"[{json.dumps(key)}]" for key, _ in pairs
    ]
    contents = {"dict": "", "Counter": "", "OrderedDict": f" of keys {', '.join(steps)}"}
    yield place, f"{kind}{contents.get(str(kind), f' of {len(pairs)}')}"
    for step, (_, item) in zip(steps, pairs, strict=True):
        yield from leaves(item, f"{place}\n{step}")


def excerpt(text: str, other: str = "") -> str:
    """A long text from shortly before the place where it begins to differ from another one."""
    if len(text) <= _LONGEST:
        return text
    same = next(
        (i for i, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), len(other)
    )
    begin = max(0, same - _LONGEST // 4)
    end = begin + _LONGEST
    return "..." * (begin > 0) + text[begin:end] + "..." * (end < len(text))


def _place(name: str) -> str:
    return f"tensor {name!r}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _piece_length(tensor: torch.Tensor) -> int:
    return PIECE_BYTES // tensor.element_size()


def _to_bytes(piece: torch.Tensor) -> torch.Tensor:
    return in_order(piece.cpu()).view(torch.uint8)


def _first_element(
    ranks: RankAgreement,
    phase: str,
    sides: Sequence[Sequence[int]],
    tensor: torch.Tensor | None,
    number: int,
) -> str:
    """Say where a piece of a tensor differs: the second side gets the first one's, and looks. Collective."""
    source, target = sides[0][0], sides[1][0]
    pieces: list[torch.Tensor] = []

    def prepare() -> int:
        if ranks.rank in (source, target) and tensor is not None:
            begin = number * _piece_length(tensor)
            pieces.append(_to_bytes(_flat(tensor)[begin : begin + _piece_length(tensor)]))
        return sum(len(piece) for piece in pieces)

    size = ranks.run(phase, prepare)[source]
    sent = pieces[0] if ranks.rank == source else torch.empty(size, dtype=torch.uint8)
    ranks.broadcast(phase, sent, source)

    def search() -> str:
        if ranks.rank != target or tensor is None:
            return ""
        differs = sent != pieces[0]
        if not differs.any():
            return ", but are equal by now"
        width = tensor.element_size()
        offset = int(differs.view(torch.uint8).argmax()) // width
        told = []
        for piece in (sent, pieces[0]):
            bits = bytes(reversed(piece[offset * width : (offset + 1) * width].tolist())).hex()
            told.append(f"{piece.view(tensor.dtype)[offset].item()} (bits 0x{bits})")
        # torch.unravel_index() takes seconds when it is first called.
        index: list[int] = []
        flat = number * _piece_length(tensor) + offset
        for length in reversed(tensor.shape):
            flat, position = divmod(flat, length)
            index.insert(0, position)
        return f", first at {index}: {told[0]} on {_name(sides[0])}, {told[1]} on {_name(sides[1])}"

    return ranks.run(phase, search)[target]
