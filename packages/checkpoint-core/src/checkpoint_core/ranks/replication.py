"""Whether the copies of a component are equal on all ranks that hold one.

Every rank reduces its copies to fingerprints, and all exchange one digest for each: when nothing is wrong,
that is the only message. Where digests differ, one rank of each version hands out its fingerprint, from which
every rank writes the same report.
"""

import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from crc32c import crc32c

from checkpoint_core.errors import CheckpointError
from checkpoint_core.ranks.agreement import RankAgreement
from checkpoint_core.ranks.replica_report import (
    Side,
    TensorEntry,
    ValueDifference,
    Version,
    canonical_document,
    canonical_text,
    describe,
    find_differences,
    largest_first,
    name_ranks,
)
from checkpoint_core.state.encoding import EncodedState
from checkpoint_core.storage.layout import DTYPE_CODES
from checkpoint_core.storage.memory import in_order

PIECE_BYTES = 4 * 1024 * 1024
"""Largest piece of a tensor that is checksummed, copied from a device or sent at once, in bytes."""
_MAX_VERSIONS = 4


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
                f"{' and '.join(levels)}, but not alike on all ranks that should hold a replica; declare the "
                "same validate_replication, validation_level and process group on each of them"
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
                f"stored; convert it to one of {', '.join(str(dtype) for dtype in DTYPE_CODES)}"
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
    values = [_show(piece, tensor.dtype, offset) for piece in (reference, own)]
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


def _show(piece: torch.Tensor, dtype: torch.dtype, offset: int) -> tuple[str, str]:
    """One element as a number and as bits."""
    width = dtype.itemsize
    bits = bytes(reversed(piece[offset * width : (offset + 1) * width].tolist())).hex()
    return str(piece.view(dtype)[offset].item()), f"0x{bits}"
