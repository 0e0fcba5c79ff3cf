"""A reversible encoding of nested Python state as one JSON document plus named tensors.

JSON's own values stand for themselves. Whatever JSON cannot hold is an object with the key ``"$"``, whose
value names the kind. ReadPlan builds only the kinds listed here, so no file can run code.
"""

import base64
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.tensors import check_memory, is_sharded

TAG = "$"
MAX_DEPTH = 100
_JSON_INTEGER_BITS = 64
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SUPPORTED = "dict, OrderedDict, Counter, list, tuple, int, float, str, bool, None, bytes and tensors"
Path = tuple[str, ...]
_Container = dict[object, object] | list[object] | tuple[object, ...]
_SEPARATOR = "/"


@dataclass(frozen=True)
class EncodedState:
    """State in the form that is stored or sent: a JSON document that refers to tensors by name."""

    document: object
    """A tree that the standard ``json`` module writes and reads back unchanged."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors by name, of any device; they share memory with the state that was encoded."""


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
    """A key that is equal for two tensors exactly when they show the same memory in the same way.

    Args:
        tensor: Any dense tensor.

    Returns:
        The key, or None for tensors without memory (empty, or on the meta device), which never match.
        A DTensor is only equal to itself: ranks whose part is empty must come to the same answer.
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
        if kind is int:
            return _encode_int(value)  # type: ignore[arg-type]
        if kind is float:
            return _encode_float(value)  # type: ignore[arg-type]
        if kind is str:
            return _encode_str(value)  # type: ignore[arg-type]
        if kind is bytes:
            return {TAG: "bytes", "base64": _to_base64(value)}  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "name": self._store(value, path)}
        if kind in (dict, OrderedDict, Counter, list, tuple):
            return self._encode_container(value, path)  # type: ignore[arg-type]
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


def bundle(states: Sequence[EncodedState]) -> EncodedState:
    """Several states as one.

    Args:
        states: The states.

    Returns:
        Their documents in a list, and their tensors under names that begin with the number of the state.
    """
    tensors = {
        f"{number}{_SEPARATOR}{name}": tensor
        for number, state in enumerate(states)
        for name, tensor in state.tensors.items()
    }
    return EncodedState([state.document for state in states], tensors)


def unbundle(bundled: EncodedState) -> list[EncodedState]:
    """The states that :func:`bundle` was given, each with its tensors under their own names."""
    documents = cast(list[object], bundled.document)
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in documents]
    for name, tensor in bundled.tensors.items():
        number, _, own_name = name.partition(_SEPARATOR)
        tensors[int(number)][own_name] = tensor
    return [EncodedState(document, named) for document, named in zip(documents, tensors, strict=True)]
