"""Build a model without ever holding it whole, and fill what this rank holds with its initial values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from checkpoint_core import local_ranges
from dist_env import get_logger

from ..errors import ConfigurationError
from .meta_model import Place, is_fake, parameter_like
from .recording import Constant, Recording, Version, View, constants, is_plain, replay

logger = get_logger(__name__)

HELD_UNMENTIONED = 64 * 2**20
"""A warning says so when more bytes of initial values than these have to be held."""


class InitialValues:
    """The values that a model's parameters begin with, computed one at a time.

    Names are those of `model.named_parameters()`, the first one of a tied parameter.
    """

    def __init__(self) -> None:
        self._recipes: dict[str, tuple[Version, View]] = {}
        self._held: dict[str, Tensor] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._recipes or name in self._held

    def __iter__(self) -> Iterator[str]:
        yield from self._recipes
        yield from self._held

    def __getitem__(self, name: str) -> Tensor:
        """Compute the initial value of a parameter.

        Asking again gives the same value again. The order of asking does not matter, and the random
        generators are left as they are.

        Args:
            name: The name of the parameter.

        Returns:
            The whole value, a tensor of its own, with the shape and dtype that the parameter was built
            with, on the device that it was built on.

        Raises:
            KeyError: If the model has no such parameter, or it has no value: it was built on the meta device.
        """
        if name in self._held:
            return self._held[name].detach().clone()
        version, view = self._recipes[name]
        value = view.on(replay(version))
        computed_here = not isinstance(version.source, Constant)
        if computed_here and value.untyped_storage().nbytes() == value.numel() * value.element_size():
            return value
        return value.clone()

    def _note(self, name: str, parameter: nn.Parameter, recording: Recording) -> None:
        if is_plain(parameter):
            self._recipes[name] = (recording.version(parameter), View.of(parameter))
        elif not parameter.is_meta:
            self._held[name] = parameter.detach()

    def _mention_held(self) -> None:
        """Warn when much is held instead of computed."""
        held = {id(value): value.nbytes for value in self._held.values()}
        names = list(self._held)
        for name, (version, _) in self._recipes.items():
            found = {id(constant): constant.nbytes for constant in constants(version)}
            held.update(found)
            names += [name] if found else []
        if sum(held.values()) > HELD_UNMENTIONED:
            logger.warning(
                "initial values are held in memory, %d MiB of them, since they were loaded or reached "
                "through a pointer instead of computed; among them those of %s",
                sum(held.values()) // 2**20,
                ", ".join(names[:3]),
            )


def construct_deferred(model_init: Callable[[], nn.Module]) -> tuple[nn.Module, InitialValues]:
    """Build a model whose parameters are on the meta device, and remember how to compute their values.

    Every operator runs as it would otherwise, on tensors with values; only the memory of a parameter is
    freed when the work goes on to another one, and taken again when it is looked at. All generators end in
    the state that `model_init` leaves them in. At most a few parameters are held at the same time.

    Values that are not computed while building, such as those of a loaded checkpoint, and parameters that
    somebody has taken a pointer to are held; a warning says so when they are many.

    Args:
        model_init: Builds the model, in the thread that calls it.

    Returns:
        The model: parameters on the meta device with their class, attributes and ties, buffers with their
        values. And the initial values of the parameters, bit for bit those that `model_init` gives them.
        Hooks that `model_init` puts on parameter tensors are lost, those on modules stay.

    Raises:
        ConfigurationError: If `model_init` builds something else than a module.
    """
    values = InitialValues()
    recording = Recording()
    with recording:
        model = model_init()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            "model_init", type(model).__name__, "must return a torch.nn.Module", "return the model"
        )
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter):
            values._note(name, parameter, recording)
    _put_on_meta(model)
    if recording.released():
        gc.collect()
        recording.restore()
    values._mention_held()
    return model, values


def _put_on_meta(model: nn.Module) -> None:
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.is_meta or is_lazy(parameter):
                continue
            if parameter not in moved:
                moved[parameter] = parameter_like(parameter, parameter.detach().to("meta"))
            Place(module, name).put(moved[parameter])


_PIECE = 2**18
"""Elements that are in float64 at a time."""


@torch.no_grad()
def fill_parameters(
    model: nn.Module,
    values: InitialValues | None,
    device: torch.device,
    *,
    also_in: Iterable[nn.Module] = (),
) -> dict[str, tuple[float, float]]:
    """Give every parameter on the meta device storage for what this rank holds of it, and fill it.

    Each whole value exists for a moment, one at a time, on the device that the model was built for.

    Args:
        model: The model, or the part of it that this rank holds; parameters may be DTensors. Changed in
            place, ties kept.
        values: What the parameters begin with; none to leave them to a checkpoint.
        device: Where the parameters go.
        also_in: Further modules with parameters of the model, which stay those of the model.

    Returns:
        By name, sum and sum of squares of each whole value, to compare between ranks.

    Raises:
        ConfigurationError: If a parameter has no value to begin with, or is a DTensor with a placement that
            does not say what a rank holds, as Partial does not.
    """
    # All shards first: between whole values, which come and go, they would tear the free memory to pieces
    # that no later value fits into, and what the process takes would grow to the size of the model.
    shards = _allocate(model, device, [model, *also_in])
    sums = {}
    for name, shard in shards.items():
        if values is not None and not is_fake():
            if name not in values:
                raise ConfigurationError(
                    "model_init",
                    name,
                    "is a parameter on the meta device, which has no values to begin with",
                    "build it with values, which are not kept, or load them with construct_model_on='meta'",
                )
            whole = values[name]
            sums[name] = _sums(whole)
            copy_own_part(shard, whole)
    return sums


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put every buffer on the device; one that stands at several places stays one."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


@torch.no_grad()
def copy_own_part(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole value into a parameter.

    Args:
        parameter: A plain tensor, or a DTensor of Shard, _StridedShard and Replicate placements on any mesh.
        whole: The whole value, on any device, in any dtype; it is the same on all ranks.
    """
    if type(parameter) in (Tensor, nn.Parameter):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    if not parameter._local_tensor.numel():
        return
    part = whole
    for dim, ranges in enumerate(local_ranges(parameter)):
        pieces = [part.narrow(dim, indices.start, len(indices)) for indices in ranges]
        part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    parameter._local_tensor.copy_(part)


def _allocate(model: nn.Module, device: torch.device, roots: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    places, shards = _places(roots), {}
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        _check_placements(name, parameter)
        shards[name] = _like(parameter, torch.empty_like(parameter, device=device))
        for module, attribute in places[id(parameter)]:
            setattr(module, attribute, shards[name])
    return shards


def _check_placements(name: str, parameter: Tensor) -> None:
    """Refuse a DTensor of which no part is this rank's, before anything is allocated."""
    if type(parameter) in (Tensor, nn.Parameter):
        return
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor) and any(placement.is_partial() for placement in parameter.placements):
        raise ConfigurationError(
            "parallel",
            name,
            f"has the placements {parameter.placements}, but no rank holds the values of a Partial parameter",
            "shard or replicate this parameter, or build the model with values",
        )


def _sums(whole: Tensor) -> tuple[float, float]:
    """Sum and sum of squares in float64, piece by piece: as a whole that would be twice the value's size."""
    pieces = (piece.double() for piece in torch.split(whole.reshape(-1), _PIECE))
    sums = [torch.stack([piece.sum(), piece.square().sum()]) for piece in pieces]
    total, squares = torch.stack(sums).sum(dim=0).tolist() if whole.numel() else (0.0, 0.0)
    return total, squares


def _places(roots: Iterable[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
