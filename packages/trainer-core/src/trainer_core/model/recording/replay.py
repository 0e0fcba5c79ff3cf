"""Steps of a recorded computation, and how to carry them out again for one storage.

A version is the content of a storage after a step. Steps point to the versions that they started from, so
that what nobody can reach any more, such as an initialisation that was overwritten, is forgotten by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor


def generator_state(device: torch.device) -> Tensor:
    """The state of the default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator.get_state()
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Put the default generator of a device into a state."""
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    elif device.type == "mps":
        torch.get_device_module(device).set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def generators_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put the default generators of these devices back into their states."""
    before = {device: generator_state(device) for device in set(devices)}
    with ExitStack() as stack:
        for device, state in before.items():
            stack.callback(set_generator_state, device, state)
        yield


class View(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """The view that a strided tensor has of its storage."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view of another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = torch._conj(tensor) if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor


class Fresh(NamedTuple):
    """The content of a storage that a step does not look at."""

    nbytes: int
    device: torch.device


@dataclass(eq=False, slots=True)
class Constant:
    """The content of a storage that was not computed by recorded steps.

    Attributes:
        storage: The content; only to be read.
        nbytes: How many bytes of it are held.
    """

    storage: torch.UntypedStorage
    nbytes: int

    @classmethod
    def copy(cls, tensors: list[Tensor]) -> Constant:
        """Copy what these tensors, all of one storage, have in it."""
        storage = tensors[0].untyped_storage()
        extents = [_extent(tensor) for tensor in tensors if tensor.numel()]
        start = min((first for first, _ in extents), default=0)
        length = max((end for _, end in extents), default=0) - start
        copied = torch.UntypedStorage(storage.nbytes(), device=storage.device)
        part = View(torch.uint8, torch.Size([length]), (1,), start, False, False)
        part.on(copied).copy_(part.on(storage))
        return cls(copied, length)


class Version(NamedTuple):
    """The content of a storage: result number `result` of a step, or a constant."""

    source: Step | Constant
    result: int = 0


Content = Version | Fresh


class Held(NamedTuple):
    """Stands for a tensor among the arguments of a step."""

    slot: int
    view: View


class Drawing(NamedTuple):
    """Stands for a generator among the arguments of a step, as it was then."""

    state: Tensor
    device: torch.device

    def generator(self) -> torch.Generator:
        """A new generator in that state."""
        return torch.Generator(self.device).set_state(self.state)


@dataclass(eq=False, slots=True)
class Step:
    """One operator call.

    Its results are the storages of the slots in `written`, then those of its outputs.
    """

    serial: int
    operator: Callable[..., object]
    arguments: tuple[object, ...]
    keywords: dict[str, object]
    contents: tuple[Content, ...]
    written: tuple[int, ...]
    states: dict[torch.device, Tensor]
    default_dtype: torch.dtype

    def run(self, storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Carry the step out on these storages, one a slot, and return its results."""

        def filled(value: object) -> object:
            if isinstance(value, Held):
                return value.view.on(storages[value.slot])
            return value.generator() if isinstance(value, Drawing) else value

        arguments = mapped(self.arguments, filled)
        keywords = {name: mapped(value, filled) for name, value in self.keywords.items()}
        torch.set_default_dtype(self.default_dtype)
        for device, state in self.states.items():
            set_generator_state(device, state)
        outputs = self.operator(*arguments, **keywords)
        return [storages[slot] for slot in self.written] + [t.untyped_storage() for t in dense(outputs)]


def replay(version: Version) -> torch.UntypedStorage:
    """Compute the content of a storage again, on the device where it was; random numbers included.

    Generators and the default dtype are left as they were. The storage of a constant is returned as it is.
    """
    steps = _needed(version)
    uses = Counter(content for step in steps for content in step.contents if isinstance(content, Version))
    uses[version] += 1
    values: dict[Version, torch.UntypedStorage] = {}

    def take(content: Content, *, to_write: bool) -> torch.UntypedStorage:
        if isinstance(content, Fresh):
            return torch.UntypedStorage(content.nbytes, device=content.device)
        if isinstance(content.source, Constant):
            storage = content.source.storage
            return storage.clone() if to_write else storage
        uses[content] -= 1
        return values[content] if uses[content] else values.pop(content)

    with _recorded_settings(steps):
        for step in steps:
            storages = [take(c, to_write=slot in step.written) for slot, c in enumerate(step.contents)]
            for index, storage in enumerate(step.run(storages)):
                if uses[Version(step, index)]:
                    values[Version(step, index)] = storage
    return take(version, to_write=False)


def constants(version: Version) -> Iterator[Constant]:
    """The constants that a version is computed from."""
    if isinstance(version.source, Constant):
        yield version.source
    for step in _needed(version):
        for content in step.contents:
            if isinstance(content, Version) and isinstance(content.source, Constant):
                yield content.source


@overload
def mapped(value: tuple[object, ...], change: Callable[[object], object]) -> tuple[object, ...]: ...
@overload
def mapped(value: dict[str, object], change: Callable[[object], object]) -> dict[str, object]: ...
@overload
def mapped(value: object, change: Callable[[object], object]) -> object: ...
def mapped(value: object, change: Callable[[object], object]) -> object:
    """Apply a change to every value in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if type(value) is list:
        return [mapped(item, change) for item in value]
    if type(value) is tuple:
        return tuple(mapped(item, change) for item in value)
    return change(value)


def dense(value: object) -> list[Tensor]:
    """The tensors in it that have a storage with values."""
    found: list[Tensor] = []

    def look(item: object) -> object:
        if isinstance(item, Tensor) and has_storage(item):
            found.append(item)
        return item

    mapped(value, look)
    return found


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is a view of one storage with values."""
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor lies in, from first to behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    size = tensor.element_size()
    offset = int(tensor.storage_offset())
    return offset * size, (offset + last + 1) * size


def _needed(version: Version) -> list[Step]:
    """The steps that lead to a version, in their order."""
    found: set[Step] = set()
    waiting: list[Content] = [version]
    while waiting:
        content = waiting.pop()
        if isinstance(content, Version) and isinstance(content.source, Step) and content.source not in found:
            found.add(content.source)
            waiting.extend(content.source.contents)
    return sorted(found, key=lambda step: step.serial)


@contextmanager
def _recorded_settings(steps: list[Step]) -> Iterator[None]:
    """Compute as operators did when they were recorded, and leave no trace in torch's settings."""
    devices = {device for step in steps for device in step.states}
    default_dtype = torch.get_default_dtype()
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(generators_kept(devices))
        stack.callback(torch.set_default_dtype, default_dtype)
        yield
