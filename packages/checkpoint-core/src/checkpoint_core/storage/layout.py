"""Where each tensor lies in a safetensors file: 8-byte header length, JSON header, raw little-endian data.

A file's layout follows from the names, dtypes and shapes alone, so every rank can compute it and write or
read its own bytes without asking the others.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.files import parse_json

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


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


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
                f"tensor {name} has dtype {spec.dtype}, which safetensors cannot store; "
                f"convert it to one of {', '.join(str(dtype) for dtype in DTYPE_CODES)}"
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
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if size < _LENGTH_BYTES or not 2 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            # Only now: a header of 640 bytes begins like a pickle of protocol 2.
            if start.startswith(_PICKLES):
                raise CheckpointError(
                    f"{path} is a pickle or a torch.save file, not safetensors; pickles can run code and are "
                    "never read. Convert it with the program that wrote it"
                )
            raise CheckpointError(
                f"{path} is not a readable safetensors file (no header); restore it or convert what it is"
            )
        text = file.read(length)
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
            f"{path} is not a readable safetensors file ({_reason(error)}). Restore it"
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
