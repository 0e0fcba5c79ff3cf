"""Safetensors files of which every rank writes and reads exactly its own bytes, straight from and to memory.

A save needs one chunk of extra memory, and its checksums cost no second pass over the file.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.checksum import PartialDigest, combine
from checkpoint_core.storage.files import FileRecord, create_file, sync_descriptor, write_at
from checkpoint_core.storage.layout import FileLayout, Place, plan_file, read_layout, spec_of
from checkpoint_core.storage.memory import copy_values, in_order
from checkpoint_core.storage.parallel import in_threads
from checkpoint_core.storage.sharding import LocalPart, local_part

_PIECE_BYTES = 8 * 1024 * 1024
_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


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
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files hold little-endian values; this machine is big-endian")
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


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], threads: int = 1
) -> FileRecord:
    """Write a whole safetensors file durably.

    Args:
        path: Where; the file must not exist.
        tensors: Dense tensors by name, on any device.
        metadata: The ``__metadata__`` entry of the header.
        threads: How many threads write.

    Returns:
        Size and checksum.

    Raises:
        CheckpointError: A dtype that the format does not have.
    """
    layout = plan_file({name: spec_of(tensor) for name, tensor in tensors.items()}, metadata)
    parts = {name: local_part(tensor, name) for name, tensor in tensors.items()}
    shares = [create_tensor_file(path, layout), write_parts(path, layout, parts, threads)]
    return FileRecord(layout.size, combine(shares))


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
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        """The reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor.

        Args:
            name: Its name.

        Returns:
            A new CPU tensor of the stored dtype and shape.
        """
        spec = self.layout.places[name].spec
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
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
        counts = in_threads(
            threads, work, lambda some: sum(self._fill(name, target) for name, target in some)
        )
        self.bytes_read += sum(counts)

    def _fill(self, name: str, target: torch.Tensor) -> int:
        place = self.layout.places[name]
        part = local_part(target, name)
        direct = part.data.device.type == "cpu" and part.data.is_contiguous()
        # Memory under a pending conjugation or negation holds other values than the tensor shows.
        direct = direct and not part.data.is_conj() and not part.data.is_neg()
        if direct and part.data.dtype == place.spec.dtype:
            return self._read_part(place, part)
        buffer = torch.empty(part.data.shape, dtype=place.spec.dtype)
        count = self._read_part(place, LocalPart(part.shape, part.offsets, buffer, None))
        copy_values(part.data, buffer, name)
        return count

    def _read_part(self, place: Place, part: LocalPart) -> int:
        total = 0
        flat = part.data.reshape(-1)
        for piece in _pieces(place, part):
            offset, rest = piece.offset, _memory(piece.of(flat))
            total += len(rest)
            while rest:
                count = os.preadv(self._descriptor, [rest], offset)
                if count == 0:
                    raise CheckpointError(f"{self.path} is damaged: it ended while it was being read")
                offset += count
                rest = rest[count:]
        return total


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
        write_at(descriptor, _memory(host), piece.offset, path, digest)
    return digest


def _memory(tensor: torch.Tensor) -> memoryview:
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
