"""Watch a model being built: write down how each tensor is computed, and free parameters meanwhile.

What the model's code sees are ordinary tensors with their values. The storage of a parameter is freed when
the work goes on to another parameter, and filled again, by replaying its steps, as soon as an operator is
about to look at it. So whatever the code does works as always, only slower where it comes back often.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .replay import (
    Constant,
    Content,
    Drawing,
    Fresh,
    Held,
    Step,
    Version,
    View,
    dense,
    generator_state,
    has_storage,
    mapped,
)
from .storage_cache import StorageCache, Tracked

_READING = frozenset({"tolist", "__deepcopy__"})
_EXPOSING = frozenset(
    {
        "data_ptr",
        "numpy",
        "share_memory_",
        "storage",
        "untyped_storage",
        "__array__",
        "__dlpack__",
        "__reduce_ex__",
    }
)
"""Functions that look at the memory of a tensor, and those that give others the means to."""


class OperatorMode(TorchDispatchMode):
    """Hands every operator on plain tensors over; tensor subclasses take theirs apart first."""

    def __init__(self, run: Callable[[Any, tuple[object, ...], dict[str, object]], object]) -> None:
        TorchDispatchMode.__init__(self)
        self._run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not needed, since nothing is compiled here, and it would take seconds to import."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if any(_is_composed(kind) for kind in types):
            return NotImplemented
        return self._run(func, args, kwargs or {})


class RawAccessMode(TorchFunctionMode):
    """Tells of functions that look at the memory of a tensor without an operator."""

    def __init__(self, reach: Callable[..., None]) -> None:
        super().__init__()
        self._reach = reach

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _READING or name in _EXPOSING:
            for tensor in args:
                if isinstance(tensor, Tensor):
                    self._reach(tensor, exposed=name in _EXPOSING)
        return func(*args, **(kwargs or {}))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has values of its own, in a storage."""
    return not is_lazy(tensor) and not _is_composed(type(tensor)) and has_storage(tensor)


def _is_composed(kind: type[Tensor]) -> bool:
    """Whether tensors of this class consist of others."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


_OVERWRITING = frozenset(
    {
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)
"""Operators that set every element of their first argument, whatever it was."""
_BLIND = frozenset(
    {
        "aten::empty_like",
        "aten::full_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::new_full",
        "aten::new_ones",
        "aten::new_zeros",
        "aten::ones_like",
        "aten::rand_like",
        "aten::randint_like",
        "aten::randn_like",
        "aten::zeros_like",
    }
)
"""Operators that look at the shape of their argument only."""


@cache
def changes_geometry_only(operator: Any) -> bool:
    """Whether an operator changes how a tensor lies in its storage and nothing else."""
    return torch.Tag.inplace_view in operator.tags and operator._schema.name != "aten::resize_"


@cache
def _written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to."""
    places = enumerate(operator._schema.arguments)
    return tuple((k, a.name) for k, a in places if a.alias_info is not None and a.alias_info.is_write)


def written_tensors(operator: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    return dense([args[k] if k < len(args) else kwargs.get(name) for k, name in _written_places(operator)])


def looks_at_shapes_only(operator: Any) -> bool:
    """Whether the values of the operator's arguments have no influence."""
    return operator._schema.name in _BLIND


def overwrites(operator: Any, args: tuple[object, ...], tensors: list[Tensor], nbytes: int) -> bool:
    """Whether an operator sets the whole storage of its first tensor without looking at it.

    Args:
        operator: The operator.
        args: Its positional arguments.
        tensors: All tensors with a storage among its arguments.
        nbytes: The size of the first one's storage.
    """
    if operator._schema.name not in _OVERWRITING or tensors[0] is not args[0]:
        return False
    first, *others = tensors
    whole = first.numel() * first.element_size() == nbytes
    address = first.untyped_storage()._cdata
    return whole and _is_dense(first) and all(other.untyped_storage()._cdata != address for other in others)


def devices_used(tensors: list[Tensor], kwargs: Mapping[str, object]) -> set[torch.device]:
    """The devices whose default generators an operator may use."""
    asked = kwargs.get("device")
    found = {torch.device("cpu"), *(tensor.device for tensor in tensors)}
    return found | {asked} if isinstance(asked, torch.device) and asked.type != "meta" else found


def _is_dense(tensor: Tensor) -> bool:
    """Whether each place between the first and the last element belongs to one element."""
    dense_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != dense_stride:
            return False
        dense_stride *= size
    return True


_SWEEP_EVERY = 512


class Recording:
    """Records all operators that run in its context, in the thread that opened it.

    The work of other threads is not seen; they may make tensors, but not work on parameters.
    """

    def __init__(self) -> None:
        self._tracked: dict[int, Tracked] = {}
        self._storage_cache = StorageCache()
        self._serial = 0
        self._busy = False
        self._opened = ExitStack()
        self._thread = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            for handle in (
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_buffer_registration_hook(self._on_buffer),
            ):
                stack.callback(handle.remove)
            stack.enter_context(OperatorMode(self.run))
            stack.enter_context(RawAccessMode(self.reach))
            self._opened = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._opened.close()
        if kind is not None:
            for tracked in self._tracked.values():  # so that a debugger may look, though not at the values
                tracked.restore(content=False)

    def version(self, tensor: Tensor) -> Version:
        """How the present content of the tensor's storage is computed."""
        version = self._track(tensor).version
        return version or Version(Constant(tensor.untyped_storage(), tensor.untyped_storage().nbytes()))

    def restore(self) -> None:
        """Give every storage that is still used its content."""
        for tracked in self._tracked.values():
            tracked.restore()

    def released(self) -> bool:
        """Whether a storage that is still used is without its content."""
        return any(tracked.released and tracked.alive for tracked in self._tracked.values())

    def reach(self, tensor: Tensor, *, exposed: bool) -> None:
        """Give a tensor its content, before something other than an operator looks at it.

        Args:
            tensor: The tensor.
            exposed: Whether a pointer to the content gets out, so that nobody knows what happens to it. From
                then on it stays where it is, and what others set from it is copied.
        """
        if is_plain(tensor):
            with self._unseen():
                tracked = self._track(tensor)
                tracked.restore()
                if exposed:
                    self._keep(tensor)
                    tracked.version = None

    def run(self, operator: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run an operator, with the content that it needs, and record it."""
        if self._busy:
            return operator(*args, **kwargs)
        with self._unseen():
            return self._record(operator, args, kwargs)

    def _record(self, operator: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        tensors = dense([args, kwargs])
        if operator.is_view or changes_geometry_only(operator):
            with ExitStack() as stack:
                for tensor in tensors:
                    stack.enter_context(self._track(tensor).without_content())
                return operator(*args, **kwargs)
        slots = {t.untyped_storage()._cdata: self._track(t) for t in tensors}
        written = {t.untyped_storage()._cdata for t in written_tensors(operator, args, kwargs)}
        contents = self._contents(slots, tensors, _unread(operator, args, tensors, slots))
        emptied = self._prepare(slots, written, contents)
        order = list(slots)

        def held(value: object) -> object:
            if isinstance(value, torch.Generator):
                return Drawing(value.get_state(), value.device)
            if isinstance(value, Tensor) and has_storage(value):
                return Held(order.index(value.untyped_storage()._cdata), View.of(value))
            return value

        arguments, keywords = mapped(args, held), mapped(kwargs, held)
        before = {device: generator_state(device) for device in devices_used(tensors, kwargs)}
        try:
            outputs = operator(*args, **kwargs)
        except BaseException:
            for tracked in emptied:
                tracked.release()
            raise
        self._serial += 1
        step = Step(
            serial=self._serial,
            operator=operator,
            arguments=arguments,
            keywords=keywords,
            contents=tuple(contents),
            written=tuple(order.index(key) for key in order if key in written),
            states={d: state for d, state in before.items() if not torch.equal(state, generator_state(d))},
            default_dtype=torch.get_default_dtype(),
        )
        self._note_results(step, slots, dense(outputs))
        return outputs

    @staticmethod
    def _prepare(slots: Mapping[int, Tracked], written: set[int], contents: list[Content]) -> list[Tracked]:
        """Bring in what the operator looks at; returns the storages that have their memory only."""
        emptied = []
        for content, (key, tracked) in zip(contents, slots.items(), strict=True):
            if isinstance(content, Version):
                tracked.restore()
            elif key in written and tracked.released:
                tracked.restore(content=False)
                emptied.append(tracked)
        return emptied

    @staticmethod
    def _contents(slots: Mapping[int, Tracked], tensors: list[Tensor], unread: set[int]) -> list[Content]:
        """What the operator starts from."""
        contents: list[Content] = []
        for key, tracked in slots.items():
            if key in unread:
                contents.append(Fresh(tracked.nbytes, tracked.device))
            elif tracked.version is not None:
                contents.append(tracked.version)
            else:
                uses = [tensor for tensor in tensors if tensor.untyped_storage()._cdata == key]
                contents.append(Version(Constant.copy(uses)))
        return contents

    def _note_results(self, step: Step, slots: dict[int, Tracked], outputs: list[Tensor]) -> None:
        tracked = list(slots.values())
        for index, slot in enumerate(step.written):
            if tracked[slot].version is not None:
                tracked[slot].version = Version(step, index)
        used = dict(slots)
        for index, tensor in enumerate(outputs, len(step.written)):
            storage = tensor.untyped_storage()
            if storage._cdata in used or storage._cdata in self._tracked:
                continue
            made = Tracked(storage, Version(step, index))
            self._tracked[storage._cdata] = used[storage._cdata] = made
        for changed in slots.values():
            changed.measure()
        self._storage_cache.use(used)
        if step.serial % _SWEEP_EVERY == 0:
            self._tracked = {key: kept for key, kept in self._tracked.items() if kept.alive}

    def _track(self, tensor: Tensor) -> Tracked:
        """What is known of the tensor's storage; nothing, if no recorded step has made it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._tracked:
            self._tracked[storage._cdata] = Tracked(storage, None)
        tracked = self._tracked[storage._cdata]
        tracked.is_parameter |= isinstance(tensor, nn.Parameter)
        return tracked

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and self._is_mine(parameter):
            with self._unseen():
                tracked = self._track(parameter)
                self._storage_cache.use({parameter.untyped_storage()._cdata: tracked})

    def _on_buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if buffer is not None and self._is_mine(buffer):
            with self._unseen():
                self._track(buffer).restore()
                self._keep(buffer)

    def _is_mine(self, tensor: Tensor) -> bool:
        return threading.get_ident() == self._thread and is_plain(tensor)

    def _keep(self, tensor: Tensor) -> None:
        """Never free this storage."""
        self._track(tensor).releasable = False
        self._storage_cache.forget(tensor.untyped_storage()._cdata)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Work on tensors without recording it."""
        with torch._C.DisableTorchFunction():
            self._busy, before = True, self._busy
            try:
                yield
            finally:
                self._busy = before


def _unread(
    operator: Any, args: tuple[object, ...], tensors: list[Tensor], slots: Mapping[int, Tracked]
) -> set[int]:
    """The storages whose content does not matter to the operator."""
    if looks_at_shapes_only(operator):
        return set(slots)
    first = next(iter(slots), 0)
    return {first} if slots and overwrites(operator, args, tensors, slots[first].nbytes) else set()
