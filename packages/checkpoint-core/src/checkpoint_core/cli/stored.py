"""Tensors on the disk: what a file holds, from its header, and their values a piece at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import torch

from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.layout import Place, TensorSpec, read_layout

PIECE_ELEMENTS = 1024 * 1024
"""Elements held at once."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    path: Path
    """The file."""
    name: str
    """Its name in the file."""
    place: Place
    """Where it lies in the file."""

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return self.place.spec

    @property
    def dtype_name(self) -> str:
        """The dtype, such as ``bfloat16``."""
        return str(self.spec.dtype).removeprefix("torch.")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.spec.shape)

    def raw_pieces(self) -> Iterator[bytearray]:
        """The values as they lie in the file: little-endian, in row-major order.

        Yields:
            Bytes of at most :data:`PIECE_ELEMENTS` elements.

        Raises:
            CheckpointError: The file became shorter since its header was read.
        """
        rest = self.spec.nbytes
        with FileIO(self.path) as file:
            file.seek(self.place.start)
            while rest:
                buffer = bytearray(min(rest, PIECE_ELEMENTS * self.spec.dtype.itemsize))
                _fill(file, memoryview(buffer), self.path)
                rest -= len(buffer)
                yield buffer

    def pieces(self) -> Iterator[torch.Tensor]:
        """The values in row-major order.

        Yields:
            Flat CPU tensors of at most :data:`PIECE_ELEMENTS` elements, with memory of their own.

        Raises:
            CheckpointError: The file became shorter since its header was read.
        """
        for buffer in self.raw_pieces():
            yield torch.frombuffer(buffer, dtype=self.spec.dtype)


def stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, in its order. Only the header is read.

    Args:
        path: The file.

    Returns:
        The tensors.

    Raises:
        CheckpointError: The file is not in the safetensors format.
        OSError: The file cannot be read.
    """
    return [StoredTensor(path, name, place) for name, place in read_layout(path).places.items()]


def _fill(file: FileIO, buffer: memoryview, path: Path) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise CheckpointError(f"{path} became shorter while it was read; run the command again")
        buffer = buffer[count:]
