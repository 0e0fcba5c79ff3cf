"""Files that one rank writes whole: which rank that is, and how the parts of other ranks get there.

Where ranks cannot write to ranges of one file, each file of a SHARDED state has an owner. Object stores are
such: S3 would take parts of one object from several processes, but obstore has no way to send them. Nothing
here knows of stores, so that it also serves file systems without coherent writes.

A tensor belongs to the rank that holds it, or where several hold parts of it to the one with the least to
write so far. What others hold of a file is sent to its owner in windows of at most :data:`WINDOW_BYTES`, so
no rank ever holds more of another one than that.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.encoding import LocalPart, in_order
from checkpoint_core.sharded import WholeState
from checkpoint_core.tensor_files import FileLayout, TensorSpec, divide_tensors, memory_of

WINDOW_BYTES = 8 * 1024 * 1024
_NEARLY_AS_MUCH = 0.9
"""Ranks that hold so much of the largest part count as equals: uneven shards must not all go to rank 0."""


@dataclass(frozen=True)
class Box:
    """What one rank writes of a tensor."""

    rank: int
    offsets: Sequence[int]
    """Where it begins, along each dimension of the whole tensor."""
    sizes: Sequence[int]

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def before(self, shape: Sequence[int], index: int) -> int:
        """How many of the elements have a lower place in the whole tensor, in row-major order, than one."""
        left = self.count
        if left == 0 or index >= prod(shape):
            return left
        done, stride = 0, prod(shape)
        for whole, offset, size in zip(shape, self.offsets, self.sizes, strict=True):
            stride //= whole
            left //= size
            place, index = divmod(index, stride)
            done += min(max(place - offset, 0), size) * left
            if not offset <= place < offset + size:
                break
        return done

    def runs(self, shape: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Some of the elements, as consecutive ones of the whole tensor.

        Args:
            shape: Shape of the whole tensor.
            first: Number of the first element, counted in the box.
            last: Number behind the last one.

        Yields:
            Place of the first element in the whole tensor, its number in the box, and how many there are.
        """
        if first >= last:
            return
        inner = len(shape)
        while inner and self.sizes[inner - 1] == shape[inner - 1]:
            inner -= 1
        outer = max(inner - 1, 0)
        length = prod(self.sizes[outer:])
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        origin = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        for number in range(first // length, -(-last // length)):
            rest, start = number, origin
            for dim in reversed(range(outer)):
                rest, place = divmod(rest, self.sizes[dim])
                start += place * strides[dim]
            begin, end = max(number * length, first), min((number + 1) * length, last)
            yield start + begin - number * length, begin, end - begin


@dataclass(frozen=True)
class WholeFiles:
    """How the tensors of one state are divided into files that one rank writes."""

    shards: Sequence[Mapping[str, TensorSpec]]
    """The tensors of each file."""
    owners: Sequence[int]
    """The rank that writes each."""
    boxes: Mapping[str, Sequence[Box]]
    """Who holds what of a tensor; empty parts are left out."""

    @property
    def need_exchange(self) -> bool:
        """Whether any rank holds a part of a file that another one writes."""
        return any(
            box.rank != owner
            for shard, owner in zip(self.shards, self.owners, strict=True)
            for name in shard
            for box in self.boxes[name]
        )


def assign_owners(
    ranks: RankAgreement,
    phase: str,
    states: Mapping[str, WholeState],
    max_shard_size: int,
    owners: Collection[int] | None = None,
) -> dict[str, WholeFiles]:
    """Decide which rank writes which tensors of SHARDED states, as evenly as their parts allow. Collective.

    Args:
        ranks: The ranks.
        phase: What is being done, for messages.
        states: The states by component key.
        max_shard_size: Bytes of tensor data per file.
        owners: The ranks that may write; None lets all.

    Returns:
        The files of each, equal on all ranks.
    """
    if not states:
        return {}
    tables = ranks.run(
        phase,
        lambda: {
            key: {name: [list(part.offsets), list(part.data.shape)] for name, part in state.parts.items()}
            for key, state in states.items()
        },
    )
    result = {}
    for key, state in states.items():
        boxes: dict[str, list[Box]] = {name: [] for name in state.specs}
        for rank, table in enumerate(tables):
            for name, (offsets, sizes) in table[key].items():
                if prod(sizes):
                    boxes[name].append(Box(rank, offsets, sizes))
        result[key] = _divide(state.specs, boxes, owners or range(ranks.world_size), max_shard_size)
    return result


def _divide(
    specs: Mapping[str, TensorSpec],
    boxes: Mapping[str, Sequence[Box]],
    owners: Collection[int],
    max_shard_size: int,
) -> WholeFiles:
    load = dict.fromkeys(owners, 0)
    owned: dict[int, dict[str, TensorSpec]] = {rank: {} for rank in owners}
    for name, spec in specs.items():
        held: dict[int, int] = {}
        for box in boxes[name]:
            if box.rank in owned:
                held[box.rank] = held.get(box.rank, 0) + box.count
        held = held or dict.fromkeys(owners, 0)
        most = max(held.values())
        equals = [rank for rank, count in held.items() if count >= _NEARLY_AS_MUCH * most]
        owner = min(equals, key=lambda rank: (load[rank], rank))
        load[owner] += spec.nbytes
        owned[owner][name] = spec
    pairs = [
        (shard, rank)
        for rank, mine in owned.items()
        for shard in divide_tensors(mine, max_shard_size)
        if shard
    ]
    shards, writers = [shard for shard, _ in pairs], [rank for _, rank in pairs]
    return WholeFiles(shards or [{}], writers or [min(load)], boxes)


@dataclass(frozen=True)
class _Span:
    """Consecutive elements of a tensor."""

    name: str
    begin: int
    end: int


def _windows(layout: FileLayout) -> Iterator[list[_Span]]:
    """A file's tensors in order, in pieces of at most :data:`WINDOW_BYTES`; at least one piece."""
    spans: list[_Span] = []
    room = WINDOW_BYTES
    for name, place in layout.places.items():
        width, count = place.spec.dtype.itemsize, prod(place.spec.shape)
        begin = 0
        while begin < count:
            if room < width:
                yield spans
                spans, room = [], WINDOW_BYTES
            end = min(count, begin + room // width)
            spans.append(_Span(name, begin, end))
            room -= (end - begin) * width
            begin = end
    yield spans


def send_to_owners(
    ranks: RankAgreement,
    phase: str,
    layouts: Mapping[str, FileLayout],
    files: WholeFiles,
    parts: Mapping[str, LocalPart],
    feed: Callable[[str, bytes], None],
) -> None:
    """Bring the content of every file to its owner, piece by piece in order. Collective.

    Args:
        ranks: The ranks.
        phase: What is being done, for messages.
        layouts: The files by name, in the order of ``files``.
        files: Who writes them, and who holds what.
        parts: What this rank holds, by tensor name.
        feed: Called on the owner with the name of a file and its next bytes. When it raises on any rank, all
            ranks stop.

    Raises:
        CheckpointError: On every rank: ``feed`` failed on one, or a rank was lost.
    """
    work: list[list[tuple[str, list[_Span], bool]]] = [[] for _ in range(ranks.world_size)]
    for (name, layout), owner in zip(layouts.items(), files.owners, strict=True):
        for number, spans in enumerate(_windows(layout)):
            work[owner].append((name, spans, number == 0))
    for turn in range(max(map(len, work))):
        now = {owner: mine[turn] for owner, mine in enumerate(work) if turn < len(mine)}
        received = _exchange(ranks, phase, layouts, files, parts, now)

        def pass_on(now: dict[int, tuple[str, list[_Span], bool]] = now, data: bytes = received) -> None:
            if ranks.rank in now:
                name, _, is_first = now[ranks.rank]
                feed(name, layouts[name].header + data if is_first else data)

        ranks.run(phase, pass_on)


def _exchange(
    ranks: RankAgreement,
    phase: str,
    layouts: Mapping[str, FileLayout],
    files: WholeFiles,
    parts: Mapping[str, LocalPart],
    now: Mapping[int, tuple[str, list[_Span], bool]],
) -> bytes:
    """Send what this rank holds of the windows of others, and return its own window, complete."""
    sends: dict[int, torch.Tensor] = {}
    for owner, (file, spans, _) in now.items():
        pieces = [
            _own_bytes(parts[span.name], *_share(layouts[file], span, box))
            for span in spans
            for box in files.boxes[span.name]
            if box.rank == ranks.rank
        ]
        if sum(map(len, pieces)):
            sends[owner] = torch.cat(pieces)
    mine = sends.pop(ranks.rank, torch.empty(0, dtype=torch.uint8))
    if ranks.rank not in now:
        ranks.exchange(phase, sends, {})
        return b""
    file, spans, _ = now[ranks.rank]
    sizes: dict[int, int] = {}
    for span in spans:
        for box in files.boxes[span.name]:
            first, last = _share(layouts[file], span, box)
            width = layouts[file].places[span.name].spec.dtype.itemsize
            sizes[box.rank] = sizes.get(box.rank, 0) + (last - first) * width
    receives = {
        rank: torch.empty(size, dtype=torch.uint8)
        for rank, size in sizes.items()
        if size and rank != ranks.rank
    }
    ranks.exchange(phase, sends, receives)
    return _assemble(layouts[file], spans, files, {**receives, ranks.rank: mine})


def _assemble(
    layout: FileLayout, spans: Sequence[_Span], files: WholeFiles, received: Mapping[int, torch.Tensor]
) -> bytes:
    widths = {span.name: layout.places[span.name].spec.dtype.itemsize for span in spans}
    buffer = bytearray(sum((span.end - span.begin) * widths[span.name] for span in spans))
    sources = {rank: memory_of(data) if len(data) else memoryview(b"") for rank, data in received.items()}
    taken = dict.fromkeys(received, 0)
    base = 0
    for span in spans:
        width, shape = widths[span.name], layout.places[span.name].spec.shape
        for box in files.boxes[span.name]:
            first, last = _share(layout, span, box)
            source, offset = sources.get(box.rank, memoryview(b"")), taken.get(box.rank, 0)
            for place, number, count in box.runs(shape, first, last):
                begin, origin = base + (place - span.begin) * width, offset + (number - first) * width
                buffer[begin : begin + count * width] = source[origin : origin + count * width]
            taken[box.rank] = offset + (last - first) * width
        base += (span.end - span.begin) * width
    return bytes(buffer)


def _share(layout: FileLayout, span: _Span, box: Box) -> tuple[int, int]:
    """Which elements of a box, by their numbers in it, lie in a span."""
    shape = layout.places[span.name].spec.shape
    return box.before(shape, span.begin), box.before(shape, span.end)


def _own_bytes(part: LocalPart, first: int, last: int) -> torch.Tensor:
    flat = in_order(part.data)
    return flat[first:last].cpu().view(torch.uint8)
