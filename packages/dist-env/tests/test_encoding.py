"""Values as bytes: each comes back as it was or is refused by its place, and hostile bytes make an error."""

from __future__ import annotations

import collections
import datetime
import enum
import math
import os
import pathlib
import pickle
import random
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from dist_env import decode_value, encode_value

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))
DTYPES = [
    dtype
    for dtype in dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
    if not str(dtype).startswith(("torch.q", "torch.bits")) and str(dtype)[-1] not in "1234567"
] + [torch.float64, torch.int64, torch.bfloat16]
NUMPY_TYPES = ["?", "i1", "u2", ">i4", "i8", "f2", ">f4", "f8", "c16", "M8[ns]", "m8[3D]", "U3", "S5"]


class Point(NamedTuple):
    x: Any
    y: Any = None


class Line(NamedTuple):
    """As long as another class."""

    start: Any
    end: Any


class Color(enum.IntEnum):
    RED = 1


class Words(str):
    __slots__ = ()


def same(one: Any, other: Any) -> bool:
    """Whether two values are alike to the last bit, of the same types everywhere and in the same order."""
    if isinstance(one, torch.Tensor):
        if type(other) is not torch.Tensor or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        assert other.is_contiguous()
        assert not other.requires_grad
        plain = one.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        flat, its_flat = (tensor.reshape(-1).view(torch.uint8) for tensor in (plain, other))
        return flat.equal(its_flat)
    if type(one) is not type(other):
        return type(one) is numpy.memmap and same(numpy.array(one), other)
    if isinstance(one, (numpy.ndarray, numpy.generic)):
        return (one.dtype.str, one.shape, one.tobytes()) == (other.dtype.str, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, (dict, collections.UserDict)):
        factories = getattr(one, "default_factory", None), getattr(other, "default_factory", None)
        return factories[0] is factories[1] and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return same(sorted(one, key=repr), sorted(other, key=repr))
    return bool(one == other)


class Draw:
    """Values at random, of every type that is sent."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def value(self, depth: int = 0) -> Any:
        if depth < 4 and self.dice.random() < 0.5:
            return self.container(depth + 1)
        return self.dice.choice([self.plain, self.plain, self.tensor, self.array])()

    def hashable(self) -> Any:
        return self.dice.choice([self.plain, lambda: (self.plain(), self.plain())])()

    def plain(self) -> Any:
        dice = self.dice
        bits = struct.unpack("<d", dice.randbytes(8))[0]
        return dice.choice(
            [
                None, True, False, 0, -1, dice.randrange(-(2**63), 2**63), -(2**63), 2**63, 10**400,
                -(1 << dice.randrange(200)), 0.0, -0.0, math.inf, math.nan, bits, 5e-324, complex(bits, -0.0),
                "", "text", "h\xe9\u4e16\U0001f600\x00", "\udcff lone", dice.randbytes(dice.randrange(9)),
                torch.float8_e4m3fn, torch.Size([2, 3]), frozenset([1, "a"]),
            ]
        )  # fmt: skip

    def container(self, depth: int) -> Any:
        dice = self.dice
        items = [self.value(depth) for _ in range(dice.randrange(6))]
        run = [dice.choice([dice.random, lambda: dice.randrange(99), lambda: "s"])] * dice.randrange(20)
        pairs = [(self.hashable(), item) for item in items]
        return dice.choice(
            [
                lambda: items, lambda: tuple(items), lambda: dict(pairs), lambda: Point(items, Line(1, 2)),
                lambda: [make() for make in run], lambda: tuple(make() for make in run),
                lambda: {key for key, _ in pairs}, lambda: collections.OrderedDict(pairs),
                lambda: collections.UserDict({str(key): item for key, item in pairs}),
                lambda: collections.Counter("abca"), lambda: collections.defaultdict(list, pairs),
                lambda: collections.defaultdict(None, pairs), lambda: bytearray(b"bytes"),
            ]
        )()  # fmt: skip

    def tensor(self) -> torch.Tensor:
        """Any type and any way to lie in memory."""
        dice, dtype = self.dice, self.dice.choice(DTYPES)
        shape = [dice.randrange(4) for _ in range(dice.randrange(4))]
        size = math.prod(shape) * dtype.itemsize
        held = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.generator)
        if dtype is torch.bool:
            held &= 1
        whole = held.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
        views: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: t,
            lambda t: t.mT if t.dim() > 1 else t,
            lambda t: t[::2] if t.dim() else t,
            lambda t: t[1:] if t.dim() else t,
            lambda t: t.unsqueeze(0).expand(3, *t.shape),
            lambda t: t.conj() if t.is_complex() else t,
            lambda t: t.conj().imag if t.dtype in (torch.complex64, torch.complex128) else t,
            lambda t: t.requires_grad_() if t.is_floating_point() else t,
            lambda t: torch.nn.Parameter(t, requires_grad=False),
        ]
        return dice.choice(views)(dice.choice(views[:7])(whole))

    def array(self) -> Any:
        dice, kind = self.dice, numpy.dtype(self.dice.choice(NUMPY_TYPES))
        shape = tuple(dice.randrange(4) for _ in range(dice.randrange(3)))
        numbers = numpy.array([dice.randrange(2) for _ in range(math.prod(shape))]).reshape(shape)
        array = numbers.astype(kind)
        scalar: list[Any] = [
            numpy.float64(dice.random()),
            numpy.str_(""),
            numpy.bytes_(b"a"),
            numpy.bool_(True),
        ]
        scalar += [array.T, array[::-1] if shape else array, array.reshape(-1)[0] if array.size else array]
        return dice.choice(scalar)


def test_any_value_comes_back_as_it_was() -> None:
    for seed in range(400 * EXAMPLES):
        value = Draw(seed).value()
        inside = decode_value(encode_value(value))
        assert same(value, inside), (seed, value, inside)
        tensors: list[torch.Tensor] = []
        body = encode_value(value, tensors=tensors)
        kept = decode_value(
            body, tensors=[tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        )
        assert same(value, kept), (seed, value, kept)


def itself() -> list[Any]:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    return loop


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def local_point() -> Any:
    return collections.namedtuple("Local", "x")(1)


class Bag(dict):  # type: ignore[type-arg]
    pass


UNFIT = {
    "object": ({"a": [1, object()]}, r"the value\['a'\]\[1\] is an object, which cannot be sent"),
    "named tuple": ({"p": Point(1, object())}, r"the value\['p'\]\.y is an object"),
    "local class": (local_point(), r"is a named tuple \S*test_encoding.Local, whose class is not found"),
    "structure": (torch.ones(2).max(0), "is a torch.return_types.max"),
    "enum": ({3: Color.RED}, r"the value\[3\] is a \S*test_encoding.Color"),
    "str": ([Words("x")], r"the value\[0\] is a \S*test_encoding.Words"),
    "dict": (Bag(a=1), r"is a \S*test_encoding.Bag"),
    "key": ({Color.RED: 1}, r"\[<Color.RED: 1>\] is a \S*test_encoding.Color"),
    "date": ([datetime.date(2020, 1, 1)], r"is a datetime.date"),
    "path": ([pathlib.PurePosixPath("a")], "PurePosixPath"),
    "function": ([print], "is a builtin_function_or_method"),
    "class": ([int], "is a type"),
    "factory": (collections.defaultdict(lambda: 1), "is a defaultdict of .*which is code"),
    "sparse": ([torch.eye(2).to_sparse()], "is a tensor of the layout sparse_coo"),
    "nested": ([torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])], "is a nested tensor"),
    "meta": ([torch.empty(2, device="meta")], "is a tensor on the meta device"),
    "small": ([torch.empty(2, dtype=torch.uint4)], "is a tensor of the type torch.uint4"),
    "objects": (numpy.array([object()]), "has the NumPy type object"),
    "records": (numpy.zeros(2, dtype=[("a", "i4")]), "has the NumPy type"),
    "matrix": (numpy.ma.masked_array([1]), "MaskedArray"),
    "loop": (itself(), r"\[1\]\['again'\] contains itself"),
    "deep": (deep(101), r"(\[0\]){100} is nested deeper than 100 levels"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_by_its_place(name: str) -> None:
    value, text = UNFIT[name]
    with pytest.raises(TypeError, match=text):
        encode_value(value)


def test_what_others_add_travels_under_a_name() -> None:
    def extend(value: object) -> tuple[str, object] | None:
        return ("colour", int(value)) if isinstance(value, Color) else None

    def restore(name: str, value: object) -> object:
        if name != "colour":
            raise ValueError(name)
        return Color(value)

    data = encode_value([Color.RED, 1], extend=extend)
    assert decode_value(data, restore=restore) == [Color.RED, 1]
    with pytest.raises(ValueError, match="unknown type 'x'"):
        decode_value(data)


def test_a_class_is_only_taken_from_what_is_imported_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_value(Point(1, 2))
    with pytest.raises(ValueError, match=r"Line with the fields \('x', 'y'\) is not known here"):
        decode_value(data.replace(b"\x05\x00\x00\x00Point", b"\x04\x00\x00\x00Line"))
    for module, name in (("antigravity", "Point"), ("os", "environ"), (__name__, "Point.__class__")):
        forged = b"n" + b"s".join(struct.pack("<I", len(t)) + t.encode() for t in (module, name))
        forged += encode_value(("x", "y")) + encode_value(1) * 2
        with pytest.raises(ValueError, match="is not known here"):
            decode_value(forged)
    assert "antigravity" not in sys.modules
    monkeypatch.delattr(sys.modules[__name__], "Point")
    with pytest.raises(ValueError, match=r"is not known here\. Import its module on every rank"):
        decode_value(data)


class Bomb:
    """Unpickling it would show."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code of the bytes ran",)


class Loud(Point):
    """Making one as its class does would show."""

    def __new__(cls, *items: object) -> Loud:
        pytest.fail("code of the class ran")


def test_a_class_that_a_stranger_names_runs_no_code() -> None:
    named = b"n" + b"s".join(struct.pack("<I", len(text)) + text.encode() for text in (__name__, "Loud"))
    made = decode_value(named + encode_value(("x", "y")) + encode_value(1) + encode_value(2))
    assert type(made) is Loud
    assert (made.x, made.y) == (1, 2)


U = struct.Struct("<I").pack
HOSTILE = {
    "nothing": b"",
    "a pickle": pickle.dumps(Bomb()),
    "an old pickle": pickle.dumps(Bomb(), protocol=0),
    "huge text": b"s" + U(2**32 - 1) + b"a",
    "huge list": b"l*" + U(2**32 - 1) + b"N" * 100,
    "huge run": b"lf" + U(2**31) + b"N" * 100,
    "huge text in a run": b"ls" + U(1) + struct.pack("<Q", 2**63) + b"abc",
    "huge dict": b"{" + U(2**31) + b"N" * 100,
    "deep": b"l*\x01\x00\x00\x00" * 100_000 + b"N",
    "deep dict": b"{\x01\x00\x00\x00N" * 100_000 + b"N",
    "deep addition": b"x\x00\x00\x00\x00" * 100_000 + b"N",
    "huge tensor": b"p" + U(7) + b"float32" + b"\x01" + struct.pack("<qq", 2**40, 2**42),
    "huge tensor of nothing": b"p" + U(7) + b"float32" + b"\x02" + struct.pack("<qqq", 2**62, 0, 0),
    "negative tensor": b"p" + U(7) + b"float32" + b"\x02" + struct.pack("<qqq", -1, -4, 16) + b"a" * 16,
    "negative length": b"p" + U(7) + b"float32" + b"\x00" + struct.pack("<q", -4),
    "huge array": b"a" + U(3) + b"<f8" + b"\x01" + struct.pack("<qq", 2**40, 2**43),
    "array of nothing": b"a" + U(3) + b"<U0" + b"\x01" + struct.pack("<qq", 2**40, 0),
    "objects": b"a" + U(2) + b"|O" + b"\x01" + struct.pack("<qq", 1, 8) + b"a" * 8,
    "records": b"a" + U(5) + b"i4,i4" + b"\x01" + struct.pack("<qq", 1, 8) + b"a" * 8,
    "quantized": b"p" + U(6) + b"quint8" + b"\x00" + struct.pack("<q", 1) + b"a",
    "no tensor of that number": b"y" + U(3),
    "unhashable": b"{" + U(1) + b"l*" + U(0) + b"N",
    "not text": b"s" + U(1) + b"\xff",
    "factory": b"Ds" + U(4) + b"exec" + b"{" + U(0),
    "left over": b"NN",
    "size of texts": b"ws" + U(1) + struct.pack("<Q", 1) + b"a",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_an_error_of_one_kind(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"\w"):
        decode_value(HOSTILE[name], restore=lambda name, value: value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "kibibytes"


def test_damaged_bytes_make_values_or_an_error() -> None:
    for seed in range(300 * EXAMPLES):
        dice, data = random.Random(seed), bytearray(encode_value(Draw(seed).value()))
        for _ in range(dice.randrange(1, 5)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        damaged = bytes(data[: dice.randrange(1, len(data) + 1)])
        try:
            decode_value(damaged, tensors=[torch.ones(1)])
        except ValueError:
            continue
