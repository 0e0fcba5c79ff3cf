"""Durable files: written once, checksummed on the way, synced to the disk, and verified by reading back.

Tensors go to disk in the safetensors format (8-byte header length, JSON header, raw little-endian data). The
bytes are written straight from the tensors' memory, so a save needs one chunk of extra memory, and the
checksum costs no second pass over the file. Reading is the ``safetensors`` library's.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from checkpoint_core.errors import CheckpointError

CHUNK_BYTES = 16 * 1024 * 1024
"""Largest piece moved at once, in bytes; bounds the extra memory of reading and writing."""

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


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of one file."""

    size: int
    """Bytes."""
    checksum: str
    """XXH3 64-bit digest of the content, 16 hexadecimal digits."""


class DurableFile(AbstractContextManager["DurableFile"]):
    """A new file that is on the disk, not only in the page cache, once the ``with`` block ends well.

    Args:
        path: Where to write. The file must not exist.

    Raises:
        CheckpointError: Another writer already made the file.
        OSError: The operating system refused; the error carries the file's name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = xxhash.xxh3_64()
        self._size = 0
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError as error:
            raise CheckpointError(
                f"two parts of the checkpoint want to write {path.name}; rename the component key that "
                "clashes with another component or with a file of the preprocessor"
            ) from error

    @property
    def record(self) -> FileRecord:
        """Size and checksum of what was written so far."""
        return FileRecord(self._size, self._digest.hexdigest())

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Args:
            data: The bytes.

        Raises:
            OSError: The disk is full or failed; the error carries the file's name.
        """
        rest = memoryview(data)
        while rest:
            # One chunk is hashed while it is still in the processor's cache from the write.
            count = self._write_some(rest[:CHUNK_BYTES])
            self._digest.update(rest[:count])
            self._size += count
            rest = rest[count:]

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sync (unless the block failed) and close."""
        try:
            if kind is None:
                os.fsync(self._descriptor)
        except OSError as failure:
            raise OSError(failure.errno, failure.strerror, str(self._path)) from failure
        finally:
            os.close(self._descriptor)


def json_bytes(document: object) -> bytes:
    """A JSON document as the bytes of a file: UTF-8, indented, strict (no NaN tokens).

    Args:
        document: A tree of dict, list, str, int, finite float, bool and None.

    Returns:
        The bytes, ending in a newline.
    """
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode("ascii")


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a small file durably.

    Args:
        path: Where; the file must not exist.
        data: Its content.

    Returns:
        Size and checksum.
    """
    with DurableFile(path) as file:
        file.write(data)
    return file.record


def read_json(path: Path) -> object:
    """Read a JSON file.

    Args:
        path: The file.

    Returns:
        The document.

    Raises:
        CheckpointError: The file is not JSON.
        OSError: The file cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Size of a tensor's values in bytes."""
    return tensor.numel() * tensor.element_size()


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> FileRecord:
    """Write tensors durably in the safetensors format.

    Args:
        path: Where; the file must not exist.
        tensors: Dense tensors by name, on any device.
        metadata: The ``__metadata__`` entry of the header.

    Returns:
        Size and checksum.

    Raises:
        CheckpointError: A dtype that the format does not have.
    """
    # Wide types first keeps every tensor aligned for readers that map the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    with DurableFile(path) as file:
        file.write(_header(names, tensors, metadata))
        for name in names:
            for chunk in _raw_chunks(tensors[name]):
                file.write(chunk)
    return file.record


def read_safetensors(path: Path, *, copy: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file into CPU tensors.

    Args:
        path: The file.
        copy: True gives tensors with memory of their own. False gives tensors backed by the mapped file,
            whose pages are read when touched; use them at once and let go of them.

    Returns:
        The tensors by name, and the header's metadata.

    Raises:
        CheckpointError: The file is not in the safetensors format.
        OSError: The file cannot be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error})") from error
    return ({name: tensor.clone() for name, tensor in tensors.items()} if copy else tensors), metadata


def checksum_file(path: Path) -> FileRecord:
    """Read a file from end to end.

    Args:
        path: The file.

    Returns:
        Its size and checksum.
    """
    digest = xxhash.xxh3_64()
    size = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def sync_file(path: Path) -> None:
    """Force a file or directory that something else wrote to the disk.

    Args:
        path: The file or directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(names: list[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPE_CODES:
            raise CheckpointError(
                f"tensor {name} has dtype {tensor.dtype}, which safetensors cannot store; "
                f"convert it to one of {', '.join(str(dtype) for dtype in DTYPE_CODES)}"
            )
        end = offset + tensor_bytes(tensor)
        code = DTYPE_CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The values as little-endian bytes in row-major order, a bounded piece at a time."""
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files hold little-endian values; this machine is big-endian")
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    for piece in torch.split(flat, CHUNK_BYTES // tensor.element_size()):
        host = piece.cpu()
        if host.numel():
            # ctypes instead of Tensor.numpy(): works for every dtype, and where numpy is not installed.
            yield memoryview((ctypes.c_ubyte * tensor_bytes(host)).from_address(host.data_ptr()))
