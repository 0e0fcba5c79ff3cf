"""Models and tensors without storage or values: construction on meta, tied tensors, and fake tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigurationError


class Place(NamedTuple):
    """Where a module holds a tensor."""

    module: nn.Module
    name: str

    def get(self) -> Tensor:
        """The tensor that is there now."""
        tensor: Tensor = getattr(self.module, self.name)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Put another tensor there; by setattr, since modules such as nn.LSTM keep track of it."""
        setattr(self.module, self.name, tensor)


class Ties:
    """The shared parameters and buffers of a model, as they are now.

    Moving a model to another device breaks shared buffers, and allocating its parameters anew breaks tied
    parameters.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        places: dict[int, list[Place]] = defaultdict(list)
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    places[id(tensor)].append(Place(module, name))
        self._shared = [group for group in places.values() if len(group) > 1]

    def restore(self) -> None:
        """Put the tensor of the first place of each group at all its places."""
        for first, *others in self._shared:
            for other in others:
                if other.get() is not first.get():
                    other.put(first.get())


SETTING = "construct_model_on"
_OTHER_SEED = 0x5EED


@contextmanager
def parameters_without_storage() -> Iterator[None]:
    """Put each parameter on the meta device as soon as a module takes it.

    Buffers and other tensors are computed as always, so that tables such as rotary frequencies have their
    values without any help of the model. The initialisation of parameters costs nothing, and ties survive.
    """
    moved = WeakTensorKeyDictionary()

    def without_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        if parameter not in moved:
            moved[parameter] = parameter_like(parameter, parameter.detach().to("meta"))
        return moved[parameter]

    handle = register_module_parameter_registration_hook(without_storage)
    try:
        yield
    finally:
        handle.remove()


def build_without_storage(model_init: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with parameters on the meta device and every buffer with its value.

    Raises:
        ConfigurationError: If a buffer that no checkpoint holds depends on parameters or on random numbers,
            so that its value cannot be known without them.
    """
    before = torch.get_rng_state()
    with parameters_without_storage():
        model = model_init()
    unsaved = dict(_unsaved_buffers(model))
    for name, buffer in unsaved.items():
        if buffer.is_meta:
            raise _unknown(name, "is computed from parameters")
    if unsaved and not torch.equal(before, torch.get_rng_state()):
        _refuse_random_buffers(model_init, unsaved)
    return model


def materialise(
    model: nn.Module, device: torch.device, lacks: Callable[[Tensor], bool] = lambda tensor: tensor.is_meta
) -> None:
    """Give parameters and buffers storage on `device`, uninitialised, and keep ties.

    Args:
        model: A model from `build_without_storage`, or in `fake_tensors`; changed in place.
        device: Where they go.
        lacks: Which tensors; the others stay where they are.
    """
    ties = Ties(model)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and lacks(parameter):
                    Place(module, name).put(
                        parameter_like(parameter, torch.empty_like(parameter, device=device))
                    )
            for name, buffer in module._buffers.items():
                if buffer is not None and lacks(buffer):
                    Place(module, name).put(torch.empty_like(buffer, device=device))
    ties.restore()


def verify_initialised(model: nn.Module, loaded_names: Iterable[str]) -> None:
    """Require that a checkpoint has filled every parameter and every saved buffer.

    A tied tensor is filled when one of its names was loaded.

    Args:
        model: The model after loading, unsharded or sharded.
        loaded_names: Names of the tensors that the checkpoint filled, as in the model's state dict.

    Raises:
        ConfigurationError: Naming every tensor that nobody filled.
    """
    loaded = set(loaded_names)
    filled: dict[int, bool] = {}
    names: dict[int, str] = {}
    for name, tensor in _saved_tensors(model):
        names.setdefault(id(tensor), name)
        filled[id(tensor)] = filled.get(id(tensor), False) or name in loaded
    empty = [name for key, name in names.items() if not filled[key]]
    still_meta = [name for name, tensor in _all_tensors(model) if tensor.is_meta and name not in empty]
    if empty or still_meta:
        raise ConfigurationError(
            SETTING,
            "meta",
            f"leaves {', '.join([*empty, *still_meta])} without a value, because nothing was loaded for it",
            f"load a checkpoint that holds them, or set {SETTING}='default'",
        )


def parameter_like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter of the same class and attributes with other data."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    if type(parameter) is not nn.Parameter and type(data) is Tensor:
        made = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    for name, value in parameter.__dict__.items():
        made.__dict__.setdefault(name, value)  # a tensor subclass has put its own there
    return made


def _refuse_random_buffers(model_init: Callable[[], nn.Module], values: dict[str, Tensor]) -> None:
    """Something drew random numbers: build once more with others, and see whether a buffer changes."""
    with torch.random.fork_rng(devices=[]), parameters_without_storage():
        torch.manual_seed(_OTHER_SEED)
        again = dict(_unsaved_buffers(model_init()))
    for name, value in values.items():
        if name in again and not torch.equal(value, again[name]):
            raise _unknown(name, "holds random numbers")


def _unknown(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        SETTING,
        "meta",
        f"would lose the value of the buffer {name}, which is in no checkpoint and {reason}",
        f"register it as persistent, or set {SETTING}='default'",
    )


def _unsaved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                yield _joined(prefix, name), buffer


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield _joined(prefix, name), tensor


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


_ACTIVE: ContextVar[bool] = ContextVar("without_values", default=False)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A context in which every tensor that is made has a shape, a dtype and a device, and no value.

    Operators check and compute shapes only, on torch's fake tensors. Tensors from outside may take part; what
    they give has no values. Whatever asks for a value fails.
    """
    # Takes a second to import, and only a dry run needs it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    token = _ACTIVE.set(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        _ACTIVE.reset(token)


def is_fake() -> bool:
    """Whether `fake_tensors` is open."""
    return _ACTIVE.get()


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """A context within `fake_tensors` in which tensors are what they are otherwise."""
    if not is_fake():
        yield
        return
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def build_meta_model(source: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with all parameters and buffers on the meta device."""
    # Ordinary tensors of that device: torch moves and copies modules of these as always.
    with ordinary_tensors(), torch.device("meta"):
        return source()
