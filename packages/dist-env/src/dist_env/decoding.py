"""Reading what `encoding` writes: whatever the bytes are, they make values or a ValueError."""

from __future__ import annotations

import math
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dist_env.encoding import (
    ARRAY_TYPE,
    C128,
    DTYPES,
    F64,
    FACTORIES,
    I64,
    MAPPINGS,
    MAX_DEPTH,
    SEQUENCES,
    U32,
    class_named,
)

Restore = Callable[[str, object], object]
"""The reverse of what ``extend`` of `encode_value` does; a ValueError refuses the name or the value."""


def decode_value(data: bytes, *, tensors: Sequence[object] = (), restore: Restore | None = None) -> object:
    """Read what `encode_value` wrote. No bytes run code, and the memory it takes is in proportion to them.

    Args:
        data: The bytes, from whomever.
        tensors: Those that were collected, or whatever is to stand in their places.
        restore: Called for what ``extend`` gave.

    Raises:
        ValueError: The bytes are not what `encode_value` writes, or hold a named tuple whose class is in none
            of the modules that are imported here.
    """
    decoder = _Decoder(data, tensors, restore)
    try:
        value = decoder.value(0)
    except (struct.error, TypeError, LookupError, OverflowError, RuntimeError, ImportError) as error:
        raise ValueError(f"malformed at byte {decoder.place}: {type(error).__name__}: {error}") from error
    if decoder.place != len(data):
        raise ValueError(f"{len(data) - decoder.place} bytes are left over behind the value")
    return value


class _Decoder:
    def __init__(self, data: bytes, tensors: Sequence[object], restore: Restore | None) -> None:
        self.place = 0
        self._data = data
        self._tensors = tensors
        self._restore = restore

    def value(self, depth: int) -> object:
        tag = self._tag()
        if tag == "s":
            return self._text()
        if tag == "y":
            return self._tensors[self._unpack(U32)]
        if tag == "{":
            return self._items(depth)
        if tag == "i":
            return self._unpack(I64)
        if tag == "f":
            return self._unpack(F64)
        if tag in SEQUENCES:
            return SEQUENCES[tag](self._sequence(depth))
        if tag == "N":
            return None
        if tag in "TF":
            return tag == "T"
        return self._rare(tag, depth)

    def _rare(self, tag: str, depth: int) -> object:
        match tag:
            case "b":
                return self._bytes()
            case "B":
                return bytearray(self._bytes())
            case "I":
                return int.from_bytes(self._bytes(), "little", signed=True)
            case "c":
                return complex(*C128.unpack(self._take(C128.size)))
            case "d":
                return DTYPES[self._text()]
            case "D":
                self._expect("s")
                factory = self._text()
                self._expect("{")
                return defaultdict(FACTORIES[factory] if factory else None, self._items(depth))
            case "n":
                return self._named_tuple(depth)
            case "a" | "h":
                return self._array(tag)
            case "p":
                return self._tensor()
        if tag in MAPPINGS:
            self._expect("{")
            return MAPPINGS[tag](self._items(depth))
        if tag == "x" and self._restore is not None:
            return self._restore(self._text(), self.value(self._deeper(depth)))
        raise ValueError(f"unknown type {tag!r} at byte {self.place - 1}")

    def _tag(self) -> str:
        self.place += 1
        return chr(self._data[self.place - 1])

    def _expect(self, tag: str) -> None:
        if self._tag() != tag:
            raise ValueError(f"no {tag!r} at byte {self.place - 1}")

    def _unpack(self, what: struct.Struct) -> Any:
        (value,) = what.unpack_from(self._data, self.place)
        self.place += what.size
        return value

    def _take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self.place:
            raise ValueError(
                f"{size} bytes at byte {self.place}, where {len(self._data) - self.place} are left"
            )
        self.place += size
        return self._data[self.place - size : self.place]

    def _bytes(self) -> bytes:
        return self._take(self._unpack(U32))

    def _text(self) -> str:
        return self._bytes().decode("utf-8", "surrogatepass")

    def _count(self, size: int = 1) -> int:
        """A number of items, of at least so many bytes each."""
        count = int(self._unpack(U32))
        if count * size > len(self._data) - self.place:
            raise ValueError(
                f"{count} items at byte {self.place}, where {len(self._data) - self.place} are left"
            )
        return count

    def _deeper(self, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels at byte {self.place}")
        return depth + 1

    def _items(self, depth: int) -> dict[object, object]:
        depth = self._deeper(depth)
        return {self.value(depth): self.value(depth) for _ in range(self._count(2))}

    def _sequence(self, depth: int) -> Iterable[object]:
        kind = self._tag()
        if kind == "*":
            return self._row(self._count(), depth)
        count = self._count(8)
        if kind in "if":
            return struct.unpack(f"<{count}{'q' if kind == 'i' else 'd'}", self._take(8 * count))
        if kind != "s":
            raise ValueError(f"unknown kind of items {kind!r} at byte {self.place - 1}")
        sizes = struct.unpack(f"<{count}Q", self._take(8 * count))
        return [self._take(size).decode("utf-8", "surrogatepass") for size in sizes]

    def _row(self, count: int, depth: int) -> list[object]:
        depth = self._deeper(depth)
        return [self.value(depth) for _ in range(count)]

    def _named_tuple(self, depth: int) -> object:
        module = self._text()
        self._expect("s")
        name = self._text()
        self._expect("t")
        fields = tuple(self._sequence(depth))
        items, kind = self._row(len(fields), depth), class_named(module, name)
        if kind is None or kind._fields != fields:
            raise ValueError(
                f"the named tuple {module[:80]}.{name[:80]} with the fields {fields!r:.200} is not known "
                "here; import its module on every rank, or send a dict"
            )
        # No code of the class runs, whichever class a stranger names.
        return tuple.__new__(kind, items)

    def _shape(self) -> tuple[int, ...]:
        (dims,) = self._take(1)
        shape = struct.unpack(f"<{dims}q", self._take(8 * dims))
        if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) >= 2**56:
            raise ValueError(f"impossible shape {shape}")
        return shape

    def _array(self, tag: str) -> object:
        import numpy

        described, shape = self._text(), self._shape()
        if not ARRAY_TYPE.fullmatch(described):
            raise ValueError(f"unknown type of array {described[:40]!r}")
        data, dtype = self._take(self._unpack(I64)), numpy.dtype(described)
        if len(data) != math.prod(shape) * dtype.itemsize or not dtype.itemsize:
            raise ValueError(f"an array of shape {shape} and type {described} in {len(data)} bytes")
        if dtype.kind == "U" and numpy.frombuffer(data, f"{described[0]}u4").max(initial=0) > sys.maxunicode:
            raise ValueError("text in an array that is none")
        array = numpy.ndarray(shape, dtype, bytearray(data) if data else None)
        return array[()] if tag == "h" else array

    def _tensor(self) -> torch.Tensor:
        dtype, shape = DTYPES[self._text()], self._shape()
        data = self._take(self._unpack(I64))
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"a tensor of shape {shape} and type {dtype} in {len(data)} bytes")
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
