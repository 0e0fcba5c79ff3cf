"""Safetensors files of which every rank writes and reads exactly its own bytes, straight from and to memory.

A file is an 8-byte header length, a JSON header and raw little-endian data. Its layout follows from the
names, dtypes and shapes alone, so every rank can compute it and write or read its own bytes without asking
the others. A save needs one chunk of extra memory, and its checksums cost no second pass over the file.
Weights are named and divided as in a Hugging Face directory: shards, and an index above a size limit.
"""

import ctypes
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from checkpoint_core.encoding import LocalPart, copy_values, in_order, local_part
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import (
    PartialDigest,
    combine,
    create_file,
    in_threads,
    json_bytes,
    parse_json,
    sync_descriptor,
    write_at,
)
from checkpoint_core.store_path import STORE_THREADS, RangeReader, StorePath

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
# Protocols 2 and up begin with PROTO and the number; torch.save writes zip files.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The safetensors name of each dtype that can be stored."""
DTYPES: Mapping[str, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}
"""The dtype of each safetensors name."""
JsonSpec = tuple[str, list[int]]
FORMAT_ENTRY = "format"
MODEL_STEM = "model"
_PIECE_BYTES = 8 * 1024 * 1024
_PIECES_AT_ONCE = 256
_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> JsonSpec:
        """Code of the dtype, or its name where the format has none, and shape."""
        return DTYPE_CODES.get(self.dtype, str(self.dtype)), list(self.shape)

    @classmethod
    def from_json(cls, spec: JsonSpec) -> Self:
        """The inverse, of a dtype that has a code."""
        return cls(DTYPES[spec[0]], tuple(spec[1]))

    def empty(self) -> torch.Tensor:
        """A CPU tensor for the values."""
        return torch.empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in a file."""

    spec: TensorSpec
    start: int
    """Offset of its first byte, from the beginning of the file."""


@dataclass(frozen=True)
class FileLayout:
    """A safetensors file, without its values."""

    header: bytes
    """The bytes before the first tensor."""
    places: Mapping[str, Place]
    """Every tensor by name, in order of offset."""
    metadata: Mapping[str, str]
    """The ``__metadata__`` entry of the header."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(place.spec.nbytes for place in self.places.values())


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Dtype and (for a DTensor, global) shape of a tensor."""
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def plan_file(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    """Lay out a file.

    Args:
        specs: The tensors by name.
        metadata: The ``__metadata__`` entry of the header.

    Returns:
        The layout. Wide types come first, which keeps every tensor aligned for readers that map the file.

    Raises:
        CheckpointError: A dtype that the format does not have.
    """
    names = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        spec = specs[name]
        if spec.dtype not in DTYPE_CODES:
            raise CheckpointError(
                f"tensor {name} has dtype {spec.dtype}, which safetensors cannot store. Convert it to one "
                f"of {', '.join(str(dtype) for dtype in DTYPE_CODES)}."
            )
        end = offset + spec.nbytes
        entry = {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        header[name] = entry
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return _with_places(text, {name: specs[name] for name in names}, dict(metadata))


def read_layout(path: Path) -> FileLayout:
    """Read the header of a safetensors file.

    Args:
        path: The file.

    Returns:
        Its layout.

    Raises:
        CheckpointError: The file is not in the safetensors format; a pickle is named as such.
        OSError: The file cannot be read.
    """
    size = path.stat().st_size
    with closing(RangeReader(path)) as file:
        start = file.read(0, min(_LENGTH_BYTES, size)) if size else b""
        length = int.from_bytes(start, "little")
        if size < _LENGTH_BYTES or not 2 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            # Only now: a header of 640 bytes begins like a pickle of protocol 2.
            if start.startswith(_PICKLES):
                raise CheckpointError(
                    f"{path} is a pickle or a torch.save file, not safetensors. Pickles can run code and "
                    "are never read. Convert it with the program that wrote it."
                )
            raise CheckpointError(
                f"{path} is not a readable safetensors file (no header). Restore it or convert what it is."
            )
        text = file.read(_LENGTH_BYTES, length)
    try:
        header = parse_json(text)
        if not isinstance(header, dict):
            raise TypeError("the header is not an object")
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError(f"{_METADATA} is not an object of texts")
        for name, entry in header.items():
            if not isinstance(entry, dict):
                raise TypeError(f"the entry of {name} is not an object")
            for field in ("shape", "data_offsets"):
                if type(entry[field]) is not list or not all(type(n) is int for n in entry[field]):
                    raise TypeError(f"{field} of {name} is not a list of integers")
            if not isinstance(entry["dtype"], str):
                raise TypeError(f"dtype of {name} is not text")
        entries = sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        if unknown := [name for name, entry in entries if entry["dtype"] not in DTYPES]:
            code = header[unknown[0]]["dtype"]
            raise ValueError(f"{unknown[0]} has the dtype {code!r}, which is not supported")
        specs = {name: TensorSpec(DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in entries}
        layout = _with_places(text, specs, metadata)
        for name, entry in entries:
            begin = layout.places[name].start - len(layout.header)
            if (
                entry["data_offsets"] != [begin, begin + specs[name].nbytes]
                or min(specs[name].shape, default=0) < 0
            ):
                raise ValueError(f"the offsets of {name} do not fit its shape")
        if layout.size != size:
            raise ValueError(f"the header describes {layout.size} bytes, the file has {size}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({_reason(error)}). Restore it."
        ) from error
    return layout


def _reason(error: Exception) -> str:
    return f"an entry has no {error}" if isinstance(error, KeyError) else str(error)


def _with_places(text: bytes, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    places = {}
    position = len(header)
    for name, spec in specs.items():
        places[name] = Place(spec, position)
        position += spec.nbytes
    return FileLayout(header, places, metadata)


def plan_weights(
    specs: Mapping[str, TensorSpec], stem: str, max_shard_size: int, tied: Mapping[str, str]
) -> tuple[dict[str, FileLayout], dict[str, bytes]]:
    """Divide weights into files of at most a size; a larger tensor gets a file for itself.

    Args:
        specs: The tensors by canonical name, each tied weight once.
        stem: Beginning of the file names.
        max_shard_size: Bytes of tensor data per file.
        tied: Name of the stored tensor, by alias; the metadata of its file holds it.

    Returns:
        The layout of each file, and the content of the index, by file name. One file has no index.
    """
    return plan_weight_shards(divide_tensors(specs, max_shard_size), stem, tied)


def divide_tensors(specs: Mapping[str, TensorSpec], max_shard_size: int) -> list[dict[str, TensorSpec]]:
    """Divide tensors, in their order, into groups of at most a size; a larger one is a group for itself.

    Args:
        specs: The tensors by name.
        max_shard_size: Bytes of a group.

    Returns:
        The groups; at least one, which may be empty.
    """
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > max_shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.nbytes
    return shards


def shard_names(stem: str, count: int) -> list[str]:
    """The names of the files of one state, as Hugging Face numbers them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def plan_weight_shards(
    shards: Sequence[Mapping[str, TensorSpec]], stem: str, tied: Mapping[str, str]
) -> tuple[dict[str, FileLayout], dict[str, bytes]]:
    """Lay out files of weights.

    Args:
        shards: The tensors of each file.
        stem: Beginning of the file names.
        tied: As for :func:`plan_weights`.

    Returns:
        As :func:`plan_weights`.
    """
    layouts: dict[str, FileLayout] = {}
    for file, shard in zip(shard_names(stem, len(shards)), shards, strict=True):
        aliases = {alias: name for alias, name in tied.items() if name in shard}
        layouts[file] = plan_file(shard, {**aliases, FORMAT_ENTRY: "pt"})
    if len(shards) == 1:
        return layouts, {}
    total = sum(spec.nbytes for shard in shards for spec in shard.values())
    places = {name: file for file, shard in zip(layouts, shards, strict=True) for name in shard}
    index = json_bytes({"metadata": {"total_size": total}, "weight_map": places})
    return layouts, {f"{stem}.safetensors.index.json": index}


@dataclass(frozen=True)
class _Piece:
    """Consecutive elements of a tensor and the place of their first byte in the file."""

    offset: int
    tensor: torch.Tensor
    begin: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements, of all elements of the tensor in one dimension."""
        return flat[self.begin : self.begin + self.count]


def create_tensor_file(path: Path, layout: FileLayout) -> int:
    """Make a safetensors file of its full size, with its header, and reserve the space. Nothing is synced:
    :func:`write_parts` does that, which the caller's rank therefore calls for every file it made.

    Args:
        path: The file; it must not exist.
        layout: What it will hold.

    Returns:
        The share of the header in the file's checksum.

    Raises:
        CheckpointError: Another writer already made the file.
        OSError: There is no room for it.
    """
    digest = PartialDigest()
    descriptor = create_file(path)
    try:
        _reserve(descriptor, layout.size, path)
        write_at(descriptor, layout.header, 0, path, digest)
    finally:
        os.close(descriptor)
    return digest.share(layout.size)


def file_content(layout: FileLayout, parts: Mapping[str, LocalPart]) -> Iterator[bytes]:
    """A whole safetensors file from memory, for a writer that takes it in order.

    Args:
        layout: Its layout.
        parts: Every tensor of it, whole.

    Yields:
        Its bytes in order, at most :data:`_PIECE_BYTES` and the header at a time, copied from the tensors.
    """
    _check_byte_order()
    yield layout.header
    source: torch.Tensor | None = None
    for name, place in layout.places.items():
        for piece in _pieces(place, parts[name]):
            if piece.tensor is not source:
                source, flat = piece.tensor, in_order(piece.tensor)
            host = piece.of(flat).cpu()
            yield bytes(memory_of(host))


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files hold little-endian values, but this machine is big-endian.")


def write_parts(path: Path, layout: FileLayout, parts: Mapping[str, LocalPart], threads: int = 1) -> int:
    """Write what this rank holds into an existing file, and sync it to the disk.

    Args:
        path: The file, made by :func:`create_tensor_file`.
        layout: Its layout.
        parts: Part of this rank, by tensor name.
        threads: How many threads write.

    Returns:
        The share of these bytes in the file's checksum.

    Raises:
        OSError: The disk is full or failed; the error carries the file's name.
    """
    _check_byte_order()
    pieces = [
        piece
        for name, place in layout.places.items()
        if name in parts
        for piece in _pieces(place, parts[name])
    ]
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        shares = in_threads(
            threads, pieces, lambda some: _write_pieces(descriptor, some, path).share(layout.size)
        )
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)
    return int(combine(shares), 16)


class TensorFileReader:
    """Reads tensors, or the parts of them that this rank holds, out of a safetensors file.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file is not in the safetensors format.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layout = read_layout(path)
        self.bytes_read = len(self.layout.header)
        self._file = RangeReader(path)
        self._descriptor = self._file.descriptor

    def __enter__(self) -> Self:
        """The reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor.

        Args:
            name: Its name.

        Returns:
            A new CPU tensor of the stored dtype and shape.
        """
        tensor = self.layout.places[name].spec.empty()
        self.fill([(name, tensor)])
        return tensor

    def fill(self, targets: Sequence[tuple[str, torch.Tensor]], threads: int = 1) -> None:
        """Read values into tensors.

        Only the bytes of the targets' own parts are read: straight into CPU memory of the stored dtype,
        through a buffer of one tensor's size into anything else.

        Args:
            targets: Names and tensors or DTensors of the stored shapes; any dtype and device.
            threads: How many threads read.

        Raises:
            CheckpointError: The file ends early, holds different values for elements of a target that share
                memory, or values that the dtype of a target cannot hold, not even rounded.
            OSError: The file cannot be read.
        """
        work = [(name, target) for name, target in targets if target.numel()]
        # In the order of the file, so that what one thread reads lies together.
        work.sort(key=lambda item: self.layout.places[item[0]].start)
        if isinstance(self.path, StorePath):
            self.bytes_read += self._fill_from_store(work)
            return
        counts = in_threads(
            threads, work, lambda some: sum(self._fill(name, target) for name, target in some)
        )
        self.bytes_read += sum(counts)

    def _fill_from_store(self, work: Sequence[tuple[str, torch.Tensor]]) -> int:
        """Only bytes are moved in threads: so many at once that PyTorch's own could meet in its first use of
        them, which fails in a process that was forked ("Invalid thread pool!", torch 2.13).
        """
        direct: list[tuple[Place, LocalPart]] = []
        others: list[tuple[str, torch.Tensor]] = []
        for name, target in work:
            place, part = self.layout.places[name], local_part(target, name)
            if _takes_bytes(part, place):
                direct.append((place, part))
            else:
                others.append((name, target))
        count = self._read_pieces((piece for each in direct for piece in _pieces(*each)), STORE_THREADS)
        return count + sum(self._fill(name, target, STORE_THREADS) for name, target in others)

    def _fill(self, name: str, target: torch.Tensor, threads: int = 1) -> int:
        place = self.layout.places[name]
        part = local_part(target, name)
        if _takes_bytes(part, place):
            return self._read_pieces(_pieces(place, part), threads)
        buffer = torch.empty(part.data.shape, dtype=place.spec.dtype)
        whole = LocalPart(part.shape, part.offsets, buffer, None)
        count = self._read_pieces(_pieces(place, whole), threads)
        copy_values(part.data, buffer, name)
        return count

    def _read_pieces(self, pieces: Iterator[_Piece], threads: int) -> int:
        """Read pieces of contiguous CPU tensors, which the caller keeps."""
        total = 0
        # Many at once: those that lie close together in a store are fetched by one request.
        while batch := list(islice(pieces, _PIECES_AT_ONCE * threads)):
            targets = [(piece.offset, memory_of(piece.of(piece.tensor.reshape(-1)))) for piece in batch]
            wanted = sum(len(buffer) for _, buffer in targets)
            if sum(in_threads(threads, targets, self._file.fill)) != wanted:
                raise CheckpointError(f"{self.path} is damaged: it ended while it was being read.")
            total += wanted
        return total


def _takes_bytes(part: LocalPart, place: Place) -> bool:
    """Whether the bytes of a file can go straight to the memory of a part."""
    direct = part.data.device.type == "cpu" and part.data.is_contiguous()
    # Memory under a pending conjugation or negation holds other values than the tensor shows.
    direct = direct and not part.data.is_conj() and not part.data.is_neg()
    return direct and part.data.dtype == place.spec.dtype


def _pieces(place: Place, part: LocalPart) -> Iterator[_Piece]:
    width = part.data.element_size()
    longest = _PIECE_BYTES // width
    done = 0
    for start, length in part.runs():
        for begin in range(0, length, longest):
            count = min(longest, length - begin)
            yield _Piece(place.start + (start + begin) * width, part.data, done + begin, count)
        done += length


def _write_pieces(descriptor: int, pieces: Sequence[_Piece], path: Path) -> PartialDigest:
    digest = PartialDigest()
    source: torch.Tensor | None = None
    for piece in pieces:
        # Once for all pieces of a tensor, because it may copy the whole of it.
        if piece.tensor is not source:
            source, flat = piece.tensor, in_order(piece.tensor)
        host = piece.of(flat).cpu()
        write_at(descriptor, memory_of(host), piece.offset, path, digest)
    return digest


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; the tensor must outlive them."""
    # ctypes instead of Tensor.numpy(): works for every dtype, and where numpy is not installed.
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _reserve(descriptor: int, size: int, path: Path) -> None:
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    # A full disk or an exhausted quota shows here, before anything is written. The C library's own
    # posix_fallocate() would write to every block where the file system cannot do it; this does not.
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    result = fallocate(ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size))
    number = ctypes.get_errno()
    if result != 0 and number not in _NO_PREALLOCATION:
        raise OSError(number, os.strerror(number), str(path))
