"""SHARDED state: the parts of all ranks put together by name, and which rank writes what of it."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Literal, TypedDict

import torch

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.encoding import TAG, EncodedState, LocalPart, in_order, is_sharded, local_part
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import digest
from checkpoint_core.tensor_files import DTYPE_CODES, DTYPES, JsonSpec, TensorSpec, spec_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_logger = logging.getLogger(__name__)
_SAMPLE = 512
"""Elements compared at each end of a tensor that several ranks hold."""


@dataclass(frozen=True)
class WholeState:
    """A component's state, complete, with the part that this rank writes."""

    specs: Mapping[str, TensorSpec]
    """Every tensor by name."""
    document: object
    tied: Mapping[str, str]
    """Name of the stored tensor, by alias."""
    parts: Mapping[str, LocalPart]
    """What this rank writes, by tensor name."""


class _Table(TypedDict):
    """What one rank tells of its part of a component."""

    tensors: dict[str, tuple[JsonSpec, str]]
    """Dtype and shape, and for plain tensors a digest of some values."""
    tied: dict[str, str]
    document: str


def join_states(
    ranks: RankAgreement,
    phase: str,
    captured: Mapping[str, EncodedState],
    on_mismatch: Literal["error", "warn"],
) -> dict[str, WholeState]:
    """Put the parts of all ranks together. Collective.

    Args:
        ranks: The ranks.
        phase: What is being done, for messages.
        captured: What this rank holds of every SHARDED component, by key.
        on_mismatch: Whether different values of one plain tensor are an error or a warning.

    Returns:
        The whole state of each.

    Raises:
        CheckpointError: On every rank: parts contradict one another, or a node that saves for itself does
            not hold all of the state.
    """
    if not captured:
        return {}
    tables = ranks.run(phase, lambda: {key: _table(key, state, ranks) for key, state in captured.items()})
    documents = _exchange_documents(ranks, phase, captured, tables)
    result: dict[str, WholeState] = {}

    def join() -> None:
        for key, state in captured.items():
            mine = [table[key] for table in tables]
            result[key] = _join(key, state, mine, documents[key], ranks)
            conflict = _sample_conflict(key, mine)
            if conflict is not None and on_mismatch == "error":
                raise CheckpointError(conflict)
            if conflict is not None and ranks.rank == 0:
                _logger.warning("%s: %s", phase, conflict)

    ranks.run(phase, join)
    return result


def _table(key: str, captured: EncodedState, ranks: RankAgreement) -> _Table:
    tensors: dict[str, tuple[JsonSpec, str]] = {}
    speakers = _speakers(captured.tensors.values(), ranks)
    counted: dict[tuple[DeviceMesh, object], tuple[int, int]] = {}
    several = len(ranks.sites()) > 1
    for name, tensor in captured.tensors.items():
        if is_sharded(tensor):
            placed = tensor.device_mesh, tensor.placements
            if several and placed not in counted:
                counted[placed] = _parts_among(tensor, ranks.site)
            held, needed = counted.get(placed, (1, 1))
            if held != needed:
                raise CheckpointError(
                    f"component {key!r}: save_on_each_node=True needs every node to hold all of {name}, but "
                    f"this node holds {held} of its {needed} parts. Shard within the nodes and replicate "
                    "across them, save to storage that all nodes share, or set remote_dir, with which each "
                    "node keeps a part."
                )
            if ranks.rank != speakers[tensor.device_mesh]:
                continue
        tensors[name] = spec_of(tensor).to_json(), _sample(tensor)
    text = json.dumps(captured.document, allow_nan=False)
    return _Table(tensors=tensors, tied=dict(captured.tied), document=digest(text.encode("ascii")))


def _exchange_documents(
    ranks: RankAgreement,
    phase: str,
    captured: Mapping[str, EncodedState],
    tables: Sequence[Mapping[str, _Table]],
) -> dict[str, list[object]]:
    """Documents of all ranks, for the components where they differ; one document for the others."""
    differing = [key for key in captured if len({table[key]["document"] for table in tables}) > 1]
    documents: dict[str, list[object]] = {key: [state.document] for key, state in captured.items()}
    if differing:
        sent = ranks.run(phase, lambda: {key: captured[key].document for key in differing})
        documents.update({key: [each[key] for each in sent] for key in differing})
    return documents


def _join(
    key: str,
    captured: EncodedState,
    tables: Sequence[_Table],
    documents: Sequence[object],
    ranks: RankAgreement,
) -> WholeState:
    specs: dict[str, TensorSpec] = {}
    first: dict[str, int] = {}
    tied: dict[str, str] = {}
    for rank, table in _different(tables):
        tied.update(table["tied"])
        for name, (described, _) in table["tensors"].items():
            if (code := described[0]) not in DTYPES:
                raise CheckpointError(
                    f"component {key!r}: {name} has dtype {code} on rank {rank}, which cannot be stored. "
                    f"Convert it to one of {', '.join(str(dtype) for dtype in DTYPE_CODES)}."
                )
            spec = TensorSpec.from_json(described)
            known = specs.setdefault(name, spec)
            if known != spec:
                raise CheckpointError(
                    f"component {key!r}: {name} is {_show(known)} on rank {first[name]} and {_show(spec)} "
                    f"on rank {rank}. Parts of one state must use one name for one tensor."
                )
            first.setdefault(name, rank)
    if lost := sorted(alias for alias, name in tied.items() if name not in specs):
        raise CheckpointError(
            f"component {key!r}: {lost[0]} is declared as tied to {tied[lost[0]]}, which no rank holds. Let "
            f"a rank hold it, or leave {lost[0]} out of tied."
        )
    for site in ranks.sites():
        held = {name for _, table in _different([tables[rank] for rank in site]) for name in table["tensors"]}
        if absent := sorted(set(specs) - held):
            raise CheckpointError(
                f"component {key!r}: save_on_each_node=True needs every node to hold all of the state, but "
                f"the node of rank {site.start} does not hold {absent[0]}. Save to storage that all nodes "
                "share."
            )
    return WholeState(
        specs=specs,
        document=documents[0] if len(documents) == 1 else _merge(key, documents),
        tied=tied,
        parts=_parts(key, captured.tensors, tables, ranks),
    )


def _different(tables: Sequence[_Table]) -> list[tuple[int, _Table]]:
    """Each table that is an object of its own, with the first rank that it is of.

    Ranks that report the same share one, and what a table says does not depend on how many say it: among
    thousands of ranks, each of thousands of names would be looked at for each of them.
    """
    first: dict[int, tuple[int, _Table]] = {}
    for rank, table in enumerate(tables):
        first.setdefault(id(table), (rank, table))
    return list(first.values())


def _sample_conflict(key: str, tables: Sequence[_Table]) -> str | None:
    """What is wrong when ranks hold different plain tensors under one name; None when they do not."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, table in _different(tables):
        for name, (_, sample) in table["tensors"].items():
            first, known = seen.setdefault(name, (rank, sample)) if sample else (rank, sample)
            if known != sample:
                return (
                    f"component {key!r}: ranks {first} and {rank} hold different values under the name "
                    f"{name}, of which only one can be stored; give each part the names of the whole model, "
                    "shard it as a DTensor, or make the copies equal"
                )
    return None


def _parts(
    key: str, tensors: Mapping[str, torch.Tensor], tables: Sequence[_Table], ranks: RankAgreement
) -> dict[str, LocalPart]:
    """What this rank writes: the lowest rank of each node, or of all, that holds a part."""
    parts = {}
    speakers = _speakers(tensors.values(), ranks)
    for name, tensor in tensors.items():
        part = local_part(tensor, f"component {key!r}: {name}")
        if part.holders == ():
            continue  # A DTensor of a mesh that this rank is not part of.
        # Two meshes may hold the same tensor, such as a tied weight at both ends of a pipeline.
        first = next(rank for rank in ranks.site if name in tables[rank]["tensors"])
        holders = (first,) if part.holders is None else part.holders
        speaker = speakers[tensor.device_mesh] if is_sharded(tensor) else first
        if speaker == first and ranks.rank == min(rank for rank in holders if rank in ranks.site):
            parts[name] = part
    return parts


def _sample(tensor: torch.Tensor) -> str:
    """A digest of the ends of a plain tensor: enough to notice different tensors under one name."""
    if is_sharded(tensor):
        return ""
    ends = (tensor,) if tensor.numel() <= 2 * _SAMPLE else _ends(tensor)
    hosts = (in_order(end.cpu()).view(torch.uint8) for end in ends)
    return digest(b"".join(bytes(host.tolist()) for host in hosts))


def _ends(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first = last = tensor
    while first.ndim > 1:
        first, last = first[0], last[-1]
    return first[:_SAMPLE], last[-_SAMPLE:]


def _speakers(tensors: Iterable[torch.Tensor], ranks: RankAgreement) -> dict["DeviceMesh", int]:
    """The rank that speaks for all of each mesh, so that the messages do not grow with the number of ranks.

    Looked for once for each mesh: a model has thousands of tensors, and a mesh may have thousands of ranks.
    """
    meshes = {tensor.device_mesh for tensor in tensors if is_sharded(tensor)}
    return {mesh: min(set(mesh.mesh.flatten().tolist()) & set(ranks.site), default=-1) for mesh in meshes}


def _parts_among(tensor: "DTensor", ranks: range) -> tuple[int, int]:
    """How much of a tensor a set of ranks holds together.

    Args:
        tensor: The tensor.
        ranks: Global ranks.

    Returns:
        Number of different parts on those ranks, and number of parts in all.
    """
    mesh = tensor.device_mesh.mesh
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    held = {
        tuple(place[dim] for dim in sharded)
        for place in product(*(range(size) for size in mesh.shape))
        if int(mesh[place]) in ranks
    }
    return len(held), prod(mesh.shape[dim] for dim in sharded)


def _merge(key: str, documents: Sequence[object]) -> object:
    merged = documents[0]
    for rank, document in enumerate(documents[1:], 1):
        merged = _merge_two(key, rank, merged, document, ())
    return merged


def _merge_two(key: str, rank: int, left: object, right: object, path: tuple[str, ...]) -> object:
    """What the ranks before one hold, and what it holds."""
    if isinstance(left, dict) and isinstance(right, dict) and TAG not in left and TAG not in right:
        both = {
            name: _merge_two(key, rank, left[name], right[name], (*path, name))
            for name in left
            if name in right
        }
        return {**left, **right, **both}
    if left != right:
        raise CheckpointError(
            f"component {key!r}: rank {rank} holds another value of {'.'.join(path) or 'the state'} than "
            "the ranks before it, but a SHARDED state is put together by name, so what several ranks hold "
            "must be equal. Declare what differs between ranks as a PER_RANK component of its own."
        )
    return left


def _show(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
