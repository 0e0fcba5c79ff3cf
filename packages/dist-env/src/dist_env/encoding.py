"""Python values as bytes that are read without running code, whoever has written them.

A value is a byte that tells its type, and its content in little-endian order. Types are kept exactly: a tuple
does not become a list, nor a key that is a number a string, and floats keep their bits.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch

_MAX_DEPTH = 100
"""Containers within containers; Python's own stack ends at about a thousand."""
_MAPPINGS: dict[str, Any] = {"o": OrderedDict, "C": Counter, "U": UserDict, "D": defaultdict}
_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "S": set, "Z": frozenset, "w": torch.Size}
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple, bool, bytes)
}
"""What a defaultdict may make."""
# Types of fewer than eight bits cannot be copied, and quantized ones are more than their elements.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not re.fullmatch(r"torch\.(u?int[1-7]|q.*)", str(dtype))
}
# Elements that are their bytes on every machine: no objects, no records.
_ARRAY_TYPE = re.compile(r"[<>|][biufcmMSU]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}(/\d{1,9})?\])?")
_U32, _I64, _F64, _C128 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<dd")

Extend = Callable[[object], tuple[str, object] | None]
"""Gives a value of another type as a name and a value that can be encoded; None if it cannot."""
T = TypeVar("T")
Restore = Callable[[str, object], object]
"""The reverse of `Extend`; a ValueError refuses the name or the value."""

_ENCODABLE = (
    "None, bool, int, float, complex, str, bytes, dense tensors, NumPy arrays and scalars, and lists, "
    "tuples, named tuples, dicts and sets of these"
)


def encode_value(
    value: object,
    *,
    name: str = "the value",
    tensors: list[torch.Tensor] | None = None,
    extend: Extend | None = None,
) -> bytes:
    """Write a value as bytes, for `decode_value`.

    Args:
        value: None, bool, int, float, complex, str, bytes, bytearray, dense tensors, torch.dtype, NumPy
            arrays and scalars, and lists, tuples, torch.Size, sets, dicts, OrderedDict, defaultdict, Counter,
            UserDict and named tuples of these. Types must be these exactly, as a subclass would come back as
            something else. The class of a named tuple must be found by its name in a module that whoever
            reads the bytes has imported. Tensors come back detached, contiguous and on the CPU, each with
            memory of its own.
        name: What the value is called in an error.
        tensors: Collects the dense tensors, detached, instead of writing them; give what became of them to
            `decode_value`.
        extend: Asked about values of other types.

    Raises:
        TypeError: A value has another type, contains itself or is nested deeper than 100 levels; the message
            says where it is.
    """
    encoder = _Encoder(tensors, extend)
    try:
        encoder.write(value)
    except _UnfitError as unfit:
        raise TypeError(f"{name}{''.join(reversed(unfit.path))} {unfit.why}.") from None
    return b"".join(encoder.out)


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


def decode_as(like: T, data: bytes) -> T:
    """Read what another rank wrote with `encode_value` where this one has, or would have, something like it.

    Its type is taken on trust, as that of what a collective of torch gathers.

    Args:
        like: What this rank has in its place.
        data: The bytes, from whomever.

    Raises:
        ValueError: As `decode_value`.
    """
    return cast(T, decode_value(data))


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a value is a tensor that is no more than its elements: not sparse, nor nested or quantized."""
    return (
        type(value) in _TENSORS
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_meta
        and _dtype_name(value.dtype) in _DTYPES
    )


def _dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in torch, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _class_named(module: str, name: str) -> Any:
    """A class of named tuples in a module that is imported; None if there is none.

    Looks at what namespaces hold: to ask a module or a class for an attribute could run code, or import more.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if found is None:
            return None
        found = object.__getattribute__(found, "__dict__").get(part)
        if not issubclass(type(found), type):
            return None
    return found if issubclass(found, tuple) and hasattr(found, "_fields") else None


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAPPING_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}
_SEQUENCE_TAGS = {kind: tag for tag, kind in _SEQUENCES.items()}


class _UnfitError(Exception):
    """A value that cannot be encoded; each container on the way out adds the step to it.

    Args:
        why: The rest of the sentence that begins with the place.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.path: list[str] = []


class _Encoder:
    def __init__(self, tensors: list[torch.Tensor] | None, extend: Extend | None) -> None:
        self.out: list[bytes | bytearray] = []
        self._tensors = tensors
        self._extend = extend
        self._open: set[int] = set()

    def write(self, value: Any) -> None:
        kind, out = type(value), self.out
        if kind is str:
            self._write_text(b"s", value)
        elif kind is int:
            self._write_int(value)
        elif kind in _TENSORS and _is_dense(value):
            self._write_tensor(value)
        elif kind is float:
            out.append(b"f" + _F64.pack(value))
        elif kind is bool:
            out.append(b"T" if value else b"F")
        elif value is None:
            out.append(b"N")
        elif kind is dict or kind in _MAPPING_TAGS:
            self._write_mapping(value, kind)
        elif kind in _SEQUENCE_TAGS:
            self._write_sequence(value, _SEQUENCE_TAGS[kind].encode())
        elif kind is bytes:
            self._write_bytes(b"b", value)
        else:
            self._write_rare(value, kind)

    def _write_rare(self, value: Any, kind: type) -> None:
        numpy = sys.modules.get("numpy")
        if kind is bytearray:
            self._write_bytes(b"B", value)
        elif kind is complex:
            self.out.append(b"c" + _C128.pack(value.real, value.imag))
        elif kind is torch.dtype:
            self._write_text(b"d", _dtype_name(value))
        elif isinstance(value, tuple) and _class_named(kind.__module__, kind.__qualname__) is kind:
            self._write_named_tuple(value, kind)
        # A map of a file is an array to whoever cannot see the file.
        elif numpy is not None and kind in (numpy.ndarray, numpy.memmap):
            self._write_array(b"a", value)
        elif numpy is not None and isinstance(value, numpy.generic):
            self._write_array(b"h", numpy.asarray(value))
        elif self._extend is not None and (extended := self._extend(value)) is not None:
            self._write_text(b"x", extended[0])
            self._enter(value)
            self.write(extended[1])
            self._open.discard(id(value))
        else:
            raise _UnfitError(f"is {_described(value)}, which cannot be sent. What can: {_ENCODABLE}")

    def _write_text(self, tag: bytes, text: str) -> None:
        # Halves of surrogate pairs occur in file names.
        self._write_bytes(tag, text.encode("utf-8", "surrogatepass"))

    def _write_bytes(self, tag: bytes, data: bytes | bytearray) -> None:
        self.out.append(tag + _length(data))
        self.out.append(data)

    def _write_int(self, value: int) -> None:
        if -(2**63) <= value < 2**63:
            self.out.append(b"i" + _I64.pack(value))
        else:
            self._write_bytes(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def _enter(self, container: object) -> None:
        if id(container) in self._open:
            raise _UnfitError("contains itself")
        if len(self._open) >= _MAX_DEPTH:
            raise _UnfitError(f"is nested deeper than {_MAX_DEPTH} levels")
        self._open.add(id(container))

    def _write_mapping(self, value: Any, kind: type) -> None:
        if kind is not dict:
            if getattr(value, "__dict__", {}).keys() - {"data"}:
                raise _UnfitError("has attributes beside its items, which would be lost")
            self.out.append(_MAPPING_TAGS[kind].encode())
            if kind is defaultdict:
                self._write_factory(value.default_factory)
        self._enter(value)
        self.out.append(b"{" + _length(value))
        key: object = None
        try:
            for key, item in value.items():
                if type(key) is str:
                    self._write_text(b"s", key)
                else:
                    self.write(key)
                self.write(item)
        except _UnfitError as unfit:
            unfit.path.append(f"[{key!r:.80}]")
            raise
        self._open.discard(id(value))

    def _write_factory(self, factory: Any) -> None:
        if factory is not None and factory not in _FACTORIES.values():
            raise _UnfitError(f"is a defaultdict of {factory!r}, which is code and cannot be sent")
        self._write_text(b"s", "" if factory is None else factory.__name__)

    def _write_sequence(self, value: Any, tag: bytes) -> None:
        # Long rows of one type take a few calls, not one for each element.
        kinds = set(map(type, value)) if len(value) > 3 else set()
        head, count = self.out.append, _length(value)
        if kinds == {float}:
            head(tag + b"f" + count + struct.pack(f"<{len(value)}d", *value))
        elif kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
            head(tag + b"i" + count + struct.pack(f"<{len(value)}q", *value))
        elif kinds == {str}:
            texts = [text.encode("utf-8", "surrogatepass") for text in value]
            head(tag + b"s" + count + struct.pack(f"<{len(texts)}Q", *map(len, texts)))
            self.out.extend(texts)
        else:
            head(tag + b"*" + count)
            self._write_items(value, value, "[{}]", range(len(value)))

    def _write_named_tuple(self, value: Any, kind: Any) -> None:
        if getattr(value, "__dict__", None):
            raise _UnfitError("has attributes beside its fields, which would be lost")
        self._write_text(b"n", kind.__module__)
        self._write_text(b"s", kind.__qualname__)
        self._write_sequence(kind._fields, b"t")
        self._write_items(value, value, ".{}", kind._fields)

    def _write_items(
        self, container: object, items: Iterable[object], step: str, names: Sequence[object]
    ) -> None:
        self._enter(container)
        left = iter(names)
        try:
            for item in items:
                self.write(item)
                next(left)
        except _UnfitError as unfit:
            unfit.path.append(step.format(next(left)))
            raise
        self._open.discard(id(container))

    def _write_array(self, tag: bytes, value: Any) -> None:
        if not _ARRAY_TYPE.fullmatch(value.dtype.str):
            raise _UnfitError(f"has the NumPy type {value.dtype}, which cannot be sent")
        self._write_text(tag, value.dtype.str)
        self._write_shape(value.shape)
        data = value.tobytes()
        self.out.append(_I64.pack(len(data)))
        self.out.append(data)

    def _write_tensor(self, value: torch.Tensor) -> None:
        value = value.detach()
        if self._tensors is not None:
            self.out.append(b"y" + _U32.pack(len(self._tensors)))
            self._tensors.append(value)
            return
        self._write_text(b"p", _dtype_name(value.dtype))
        self._write_shape(value.shape)
        data = bytearray(value.numel() * value.element_size())
        if data:
            # Into memory of its own: of a view, the memory is not the values.
            torch.frombuffer(data, dtype=torch.uint8).view(value.dtype).view(value.shape).copy_(value)
        self.out.append(_I64.pack(len(data)))
        self.out.append(data)

    def _write_shape(self, shape: Sequence[int]) -> None:
        self.out.append(struct.pack(f"<B{len(shape)}q", len(shape), *shape))


def _length(value: Any) -> bytes:
    if len(value) >= 2**32:
        raise _UnfitError(f"has {len(value)} items or bytes, and 2**32 are too many to be sent")
    return _U32.pack(len(value))


def _described(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"a named tuple {name}, whose class is not found by that name in its module"
    if kind in _TENSORS:
        if value.layout is not torch.strided:
            return f"a tensor of the layout {str(value.layout).removeprefix('torch.')}"
        if value.is_nested:
            return "a nested tensor"
        return "a tensor on the meta device" if value.is_meta else f"a tensor of the type {value.dtype}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


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
            return self._tensors[self._unpack(_U32)]
        if tag == "{":
            return self._items(depth)
        if tag == "i":
            return self._unpack(_I64)
        if tag == "f":
            return self._unpack(_F64)
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self._sequence(depth))
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
                return complex(*_C128.unpack(self._take(_C128.size)))
            case "d":
                return _DTYPES[self._text()]
            case "D":
                self._expect("s")
                factory = self._text()
                self._expect("{")
                return defaultdict(_FACTORIES[factory] if factory else None, self._items(depth))
            case "n":
                return self._named_tuple(depth)
            case "a" | "h":
                return self._array(tag)
            case "p":
                return self._tensor()
        if tag in _MAPPINGS:
            self._expect("{")
            return _MAPPINGS[tag](self._items(depth))
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
        return self._take(self._unpack(_U32))

    def _text(self) -> str:
        return self._bytes().decode("utf-8", "surrogatepass")

    def _count(self, size: int = 1) -> int:
        """A number of items, of at least so many bytes each."""
        count = int(self._unpack(_U32))
        if count * size > len(self._data) - self.place:
            raise ValueError(
                f"{count} items at byte {self.place}, where {len(self._data) - self.place} are left"
            )
        return count

    def _deeper(self, depth: int) -> int:
        if depth >= _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH} levels at byte {self.place}")
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
        items, kind = self._row(len(fields), depth), _class_named(module, name)
        if kind is None or kind._fields != fields:
            raise ValueError(
                f"the named tuple {module[:80]}.{name[:80]} with the fields {fields!r:.200} is not known "
                "here. Import its module on every rank, or send a dict"
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
        if not _ARRAY_TYPE.fullmatch(described):
            raise ValueError(f"unknown type of array {described[:40]!r}")
        data, dtype = self._take(self._unpack(_I64)), numpy.dtype(described)
        if len(data) != math.prod(shape) * dtype.itemsize or not dtype.itemsize:
            raise ValueError(f"an array of shape {shape} and type {described} in {len(data)} bytes")
        if dtype.kind == "U" and numpy.frombuffer(data, f"{described[0]}u4").max(initial=0) > sys.maxunicode:
            raise ValueError("text in an array that is none")
        array = numpy.ndarray(shape, dtype, bytearray(data) if data else None)
        return array[()] if tag == "h" else array

    def _tensor(self) -> torch.Tensor:
        dtype, shape = _DTYPES[self._text()], self._shape()
        data = self._take(self._unpack(_I64))
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"a tensor of shape {shape} and type {dtype} in {len(data)} bytes")
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
