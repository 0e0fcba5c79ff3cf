"""Values: of tensors in memory, of the part that a rank holds, and of nested state as JSON and named tensors.

JSON's own values stand for themselves. Whatever JSON cannot hold is an object with the key ``"$"``, whose
value names the kind. Decoding builds only the kinds listed here, so no file can run code.
"""

import base64
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeGuard

import torch

from checkpoint_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a plain dense tensor in one dimension of stride 1, as the tensor shows them.

    Their bytes can be taken from ``data_ptr``. A copy only where it must be one.
    """
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # reshape(-1) keeps any stride of a single element, with which it has no view as bytes.
    return dense.as_strided((dense.numel(),), (1,))


def check_memory(tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor whose storage was freed or made smaller since: its elements lie in memory of others.

    Args:
        tensor: A plain dense tensor.
        where: Its place, for the message.

    Raises:
        CheckpointError: The storage does not hold all elements.
    """
    if not tensor.numel():
        return
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + steps + 1) * tensor.element_size()
    if (held := tensor.untyped_storage().nbytes()) < needed:
        raise CheckpointError(
            f"{where} has lost its memory: its storage has {held} bytes, and its values need {needed}. Save "
            "or load before the storage is resized, or once it has its size again."
        )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two plain tensors of one shape hold the same bits of the same dtype, also in NaNs."""
    first, second = (in_order(side.detach().cpu()).view(torch.uint8) for side in (left, right))
    return left.dtype == right.dtype and torch.equal(first, second)


def copy_values(target: torch.Tensor, values: torch.Tensor, where: str) -> None:
    """Copy values into a tensor whose elements may share memory with one another, as after ``expand``.

    Args:
        target: A plain tensor of any strides, dtype and device.
        values: A plain tensor of its shape.
        where: The name of the target, for messages.

    Raises:
        CheckpointError: Elements that share memory would get different values, or the dtype of the target
            cannot hold them; it may round.
    """
    with torch.no_grad():
        if _may_overlap(target):
            extent = 1 + sum((n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True))
            trial = torch.empty(extent, dtype=values.dtype).as_strided(target.shape, target.stride())
            _once(trial, target).copy_(_once(values, target))
            if not same_bits(trial, values):
                raise CheckpointError(
                    f"{where} is a view whose elements share memory (shape {list(target.shape)}, strides "
                    f"{list(target.stride())}), but other values are stored for some of them. Build the "
                    "object as it was when it was saved, or give it a contiguous() tensor."
                )
        _once(target, target).copy_(_once(_castable(values, target.dtype, where), target))


def _castable(values: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Values that a cast at most rounds, without an imaginary part that is zero; refuses others."""
    stored = values.dtype
    if dtype == stored or not values.numel():
        return values
    kept = True
    if stored.is_complex and not dtype.is_complex:
        values, kept = values.real, not bool(values.imag.any())
    parts = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if not kept or not _survive(parts, dtype.to_real()):
        raise CheckpointError(
            f"{where} is stored as {stored}, with values that {dtype} cannot hold, not even rounded. Build "
            f"the object with {stored} for it, and convert it once it is loaded."
        )
    return values


def _survive(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether real values keep their size in a real dtype, and integers all of their digits."""
    if not (values.is_floating_point() and dtype.is_floating_point):
        cast = values.to(dtype)
        same_sign = torch.equal(cast.float() < 0, values.float() < 0)  # Of 255 and -1, the bits are the same.
        return same_sign and torch.equal(cast.to(values.dtype), values)
    largest = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max <= largest:
        return True
    if values.dtype.itemsize == 1:
        values = values.float()  # What follows is not there for float8.
    if bool(torch.linalg.vector_norm(values, ord=torch.inf) <= largest):
        return True
    # Overflow makes some dtypes infinite and others their largest number. A NaN compares as in range.
    beyond = values[values.abs() > largest]
    cast = beyond.to(dtype).to(beyond.dtype)
    rounded = beyond.isfinite() & ((cast - beyond).abs() <= torch.finfo(dtype).eps * beyond.abs())
    return bool((rounded | (cast == beyond)).all())


def _once(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A tensor without what the target repeats: PyTorch refuses to write along a dimension of stride 0."""
    for dim, step in enumerate(target.stride()):
        if step == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory; False is certain."""
    if not tensor.numel():
        return False
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False


@dataclass(frozen=True)
class LocalPart:
    """What this rank holds of a tensor, which may be all of it."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the part begins, along each dimension of the whole."""
    data: torch.Tensor
    """The part; shares memory with the tensor."""
    holders: tuple[int, ...] | None
    """Global ranks that hold this same part of a DTensor, ascending; None for a plain tensor."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """The part as consecutive elements of the whole tensor in row-major order.

        Yields:
            First element in the whole, and number of elements; in the order of the part's own memory.
        """
        sizes = tuple(self.data.shape)
        if 0 in sizes:
            return
        inner = len(sizes)
        while inner and sizes[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        # Dimensions from `inner` on are complete, so one run spans a range of dimension inner - 1.
        outer = max(inner - 1, 0)
        length = prod(sizes[outer:])
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(sizes))]
        start = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        for index in product(*(range(size) for size in sizes[:outer])):
            yield start + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def is_sharded(tensor: torch.Tensor) -> TypeGuard["DTensor"]:
    """Whether a tensor is a DTensor. Asked by attribute, because importing the class is slow."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_part(tensor: torch.Tensor, where: str) -> LocalPart:
    """What this rank holds of a tensor.

    Args:
        tensor: A plain tensor or a DTensor.
        where: Its place, for messages.

    Returns:
        The part. For a DTensor the box is the one that ``torch.distributed.checkpoint`` would save.

    Raises:
        CheckpointError: The placement has no such box, such as partial sums, or the memory was freed.
    """
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return LocalPart(tuple(tensor.shape), (0,) * tensor.ndim, tensor, None)
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{where} holds partial sums ({tensor.placements}). Reduce it with redistribute() before saving."
        )
    ranges, local = local_ranges(tensor), tensor.to_local()
    sizes = tuple(sum(map(len, each)) for each in ranges)
    misfit = sizes != tuple(local.shape) and (any(sizes) or local.numel() > 0)
    if misfit or any(len(each) > 1 for each in ranges):
        raise CheckpointError(
            f"{where} is placed as {tensor.placements}, which gives a rank more than one box of it. Give it "
            "Shard and Replicate placements with redistribute() before saving."
        )
    check_memory(local, where)
    offsets = tuple(each[0].start if each else 0 for each in ranges)
    return LocalPart(tuple(tensor.shape), offsets, local, _holders(tensor))


def local_ranges(tensor: "DTensor") -> list[list[range]]:
    """Which indices of the whole tensor are those of this rank's part of a DTensor.

    The part is the one that ``distribute_tensor`` and ``fully_shard`` give a rank, uneven and empty shards
    included. There is no communication.

    Args:
        tensor: A DTensor of any shape and mesh, with Shard, _StridedShard and Replicate placements.

    Returns:
        For each dimension the ranges of indices, in the order in which the local tensor has them. It is one
        range as a rule, several where a strided shard is not sharded any further, and none where the part is
        empty.

    Raises:
        CheckpointError: A placement does not say which elements a rank holds, as Partial does not.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return [[] for _ in tensor.shape]
    ranges = [[range(size)] if size else [] for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise CheckpointError(
                f"a tensor of shape {list(tensor.shape)} is placed as {tensor.placements}, which does not "
                "say what each rank holds of it. Give it Shard and Replicate placements with "
                "redistribute()."
            )
        shards, place = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        # Private in torch 2.11 to 2.13: a _StridedShard divides `split_factor` pieces, each on its own, for a
        # dimension of the mesh further right has divided the tensor before. test_local_ranges.py compares.
        pieces = getattr(placement, "split_factor", 1)
        whole = range(sum(map(len, ranges[placement.dim])))
        held = [_chunk(_chunk(whole, pieces, piece), shards, place) for piece in range(pieces)]
        ranges[placement.dim] = _select(ranges[placement.dim], held)
    return ranges


def _chunk(indices: range, chunks: int, number: int) -> range:
    """One chunk of indices, as torch.chunk divides them; the last ones may be empty."""
    size = -(-len(indices) // chunks)
    return indices[number * size : (number + 1) * size]


def _select(ranges: list[range], positions: list[range]) -> list[range]:
    """The indices at some positions of others, neighbouring ranges joined."""
    found: list[range] = []
    for wanted in positions:
        passed = 0
        for indices in ranges:
            taken = indices[max(wanted.start - passed, 0) : max(wanted.stop - passed, 0)]
            passed += len(indices)
            if taken and found and found[-1].stop == taken.start:
                taken = range(found.pop().start, taken.stop)
            if taken:
                found.append(taken)
    return found


def _holders(tensor: "DTensor") -> tuple[int, ...]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(int(rank) for rank in mesh.mesh[index].flatten().tolist()))


TAG = "$"
MAX_DEPTH = 100
_JSON_INTEGER_BITS = 64
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SUPPORTED = "dict, OrderedDict, Counter, list, tuple, int, float, str, bool, None, bytes and tensors"
Path = tuple[str, ...]
_Container = dict[object, object] | list[object] | tuple[object, ...]


@dataclass(frozen=True)
class EncodedState:
    """State in the form that is stored or sent: a JSON document that refers to tensors by name."""

    document: object
    """A tree that the standard ``json`` module writes and reads back unchanged."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors by name, of any device; they share memory with the state that was encoded."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Of weights: name of the stored tensor, by alias."""


def join_path(path: Path) -> str:
    """The default tensor name: the keys on the way to the tensor, joined by dots."""
    return ".".join(path)


def encode_state(
    state: object, *, tensor_name: Callable[[Path], str] = join_path, sharded: bool = False
) -> EncodedState:
    """Encode nested state.

    Supported are dict (any supported hashable keys), OrderedDict, Counter, list, tuple, int, float
    (infinities and every NaN exactly), str, bool, None, bytes and dense tensors. A tensor that occurs
    twice is stored once, and decodes to one tensor again.

    Args:
        state: The state.
        tensor_name: Makes a tensor's name from the keys and indices that lead to it. Names that collide
            get a number.
        sharded: Whether DTensors are accepted.

    Returns:
        The document and the tensors. No tensor is copied.

    Raises:
        CheckpointError: A value of another type, a cycle, or nesting deeper than 100; the message names
            the place inside the state.
    """
    encoder = _Encoder(tensor_name, sharded)
    return EncodedState(encoder.encode(state, ()), encoder.tensors)


def decode_state(document: object, tensor: Callable[[str], torch.Tensor]) -> object:
    """Rebuild what :func:`encode_state` was given.

    Args:
        document: The JSON document.
        tensor: Returns the tensor of a name; called once per name.

    Returns:
        The state, with exactly the types that were encoded (parameters come back as plain tensors).

    Raises:
        CheckpointError: The document holds a kind that this version does not know, or is malformed.
    """
    return _Decoder(tensor).decode(document)


def tensor_identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """A key that is equal for two dense tensors exactly when they show the same memory in the same way.

    None for tensors without memory (empty, or on the meta device), which never match. A DTensor is only equal
    to itself: ranks whose part is empty must come to the same answer.
    """
    if is_sharded(tensor):
        return ("DTensor", id(tensor))
    if tensor.numel() == 0 or tensor.is_meta:
        return None
    storage = tensor.untyped_storage().data_ptr()
    return (
        tensor.device,
        storage,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def check_storable(tensor: torch.Tensor, where: str, *, sharded: bool) -> None:
    """Refuse tensors that have no plain bytes to store.

    Args:
        tensor: The tensor.
        where: Its place, for the message.
        sharded: Whether DTensors are accepted.

    Raises:
        CheckpointError: The tensor is sharded where that is not declared, sparse, quantized, nested, on the
            meta device, of a subclass, or without its memory.
    """
    if is_sharded(tensor):
        if not sharded:
            raise CheckpointError(
                f"{where} is a DTensor, of which each rank holds a part. Declare the component as "
                "SharingPattern.SHARDED, or gather the tensor with full_tensor()."
            )
    elif type(tensor) not in _PLAIN_TENSORS and not isinstance(tensor, torch.nn.Buffer):
        kind = type(tensor).__name__
        raise CheckpointError(f"{where} is a tensor subclass {kind}. Convert it to a plain tensor first.")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{where} is sparse or quantized. Convert it to a dense tensor first.")
    if tensor.is_nested:
        raise CheckpointError(f"{where} is a nested tensor. Store its parts, a list of plain tensors.")
    if tensor.is_meta:
        raise CheckpointError(f"{where} is on the meta device and has no values. Materialise it first.")
    # Of a DTensor, `local_part` asks for the part that this rank holds.
    if not is_sharded(tensor):
        check_memory(tensor, where)


class _Encoder:
    def __init__(self, tensor_name: Callable[[Path], str], sharded: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._tensor_name = tensor_name
        self._sharded = sharded
        self._names: dict[tuple[object, ...], str] = {}
        self._numbers: dict[str, int] = {}
        self._open: set[int] = set()

    def encode(self, value: object, path: Path) -> object:
        # Exact types: a subclass (numpy.float64, an enum) would come back as something else.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int and isinstance(value, int):
            return _encode_int(value)
        if kind is float and isinstance(value, float):
            return _encode_float(value)
        if kind is str and isinstance(value, str):
            return _encode_str(value)
        if kind is bytes and isinstance(value, bytes):
            return {TAG: "bytes", "base64": _to_base64(value)}
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "name": self._store(value, path)}
        if kind in (dict, OrderedDict, Counter, list, tuple) and isinstance(value, (dict, list, tuple)):
            return self._encode_container(value, path)
        raise CheckpointError(
            f"{_show(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored. Supported "
            f"are {_SUPPORTED}. Convert it in state_dict()."
        )

    def _encode_container(self, value: _Container, path: Path) -> object:
        if id(value) in self._open:
            raise CheckpointError(f"{_show(path)} contains itself, but a state must be a tree.")
        if len(path) >= MAX_DEPTH:
            raise CheckpointError(
                f"the state is nested deeper than {MAX_DEPTH} levels at {_show(path[:3])}..."
            )
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return self._encode_dict(value, path)
            return self._encode_sequence(value, path)
        finally:
            self._open.discard(id(value))

    def _encode_sequence(self, value: list[object] | tuple[object, ...], path: Path) -> object:
        items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {TAG: "tuple", "items": items}

    def _encode_dict(self, value: dict[object, object], path: Path) -> object:
        plain = type(value) is dict and all(_is_plain_key(key) for key in value)
        if plain:
            return {str(key): self.encode(item, (*path, str(key))) for key, item in value.items()}
        items = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                raise CheckpointError(f"{_show(path)} has a tensor as dictionary key. Use its name instead.")
            here = (*path, str(key))
            items.append([self.encode(key, (*here, "<key>")), self.encode(item, here)])
        return {TAG: type(value).__name__, "items": items}

    def _store(self, tensor: torch.Tensor, path: Path) -> str:
        check_storable(tensor, _show(path), sharded=self._sharded)
        identity = tensor_identity(tensor)
        if identity is not None and identity in self._names:
            return self._names[identity]
        base = name = self._tensor_name(path) or "tensor"
        if "\x00" in name or not _is_unicode(name) or name == "__metadata__":
            base = name = "tensor"
        number = self._numbers.get(base, 1)
        while name in self.tensors:
            number += 1
            name = f"{base}#{number}"
        # Where the next one begins, or many of one name would take the square of their number.
        self._numbers[base] = number
        self.tensors[name] = tensor.detach()
        if identity is not None:
            self._names[identity] = name
        return name


class _Decoder:
    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self._tensor = tensor
        self._loaded: dict[str, torch.Tensor] = {}

    def decode(self, node: object) -> object:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return {key: self.decode(item) for key, item in node.items()}
        try:
            return self._decode_tagged(node)
        except (KeyError, TypeError, ValueError, struct.error) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise CheckpointError(f"malformed {node[TAG]!r} entry in a state document: {reason}.") from error

    def _decode_tagged(self, node: dict[str, object]) -> object:
        match node[TAG]:
            case "tensor":
                return self._load(str(node["name"]))
            case "tuple":
                return tuple(self.decode(item) for item in _items(node))
            case "dict":
                return dict(self._pairs(node))
            case "OrderedDict":
                return OrderedDict(self._pairs(node))
            case "Counter":
                return Counter(dict(self._pairs(node)))
            case "bytes":
                return _from_base64(node)
            case "str":
                return _from_base64(node).decode("utf-8", "surrogatepass")
            case "int":
                return int(str(node["hex"]), 16)
            case "float":
                return struct.unpack(">d", bytes.fromhex(str(node["bits"])))[0]
        raise CheckpointError(
            f"a state document holds the unknown kind {node[TAG]!r}, so it was written by a newer version "
            "of checkpoint-core, or not by it."
        )

    def _pairs(self, node: dict[str, object]) -> list[tuple[object, object]]:
        pairs = []
        for pair in _items(node):
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"{pair!r} is not a pair of key and value")
            pairs.append((self.decode(pair[0]), self.decode(pair[1])))
        return pairs

    def _load(self, name: str) -> torch.Tensor:
        if name not in self._loaded:
            self._loaded[name] = self._tensor(name)
        return self._loaded[name]


def _encode_int(value: int) -> object:
    # Python refuses to read very long decimal numbers, and other JSON readers lose more than 64 bits.
    return value if value.bit_length() <= _JSON_INTEGER_BITS else {TAG: "int", "hex": hex(value)}


def _encode_float(value: float) -> object:
    if value - value == 0.0:
        return value
    return {TAG: "float", "bits": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> object:
    if _is_unicode(value):
        return value
    return {TAG: "str", "base64": _to_base64(value.encode("utf-8", "surrogatepass"))}


def _is_plain_key(key: object) -> bool:
    return type(key) is str and key != TAG and _is_unicode(key)


def _is_unicode(text: str) -> bool:
    return re.search("[\ud800-\udfff]", text) is None


def _items(node: dict[str, object]) -> list[object]:
    items = node["items"]
    if not isinstance(items, list):
        raise TypeError(f"items is a {type(items).__name__}, not a list")
    return items


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _from_base64(node: dict[str, object]) -> bytes:
    return base64.b64decode(str(node["base64"]), validate=True)


def _show(path: Path) -> str:
    return "the state at " + ".".join(path) if path else "the state"
