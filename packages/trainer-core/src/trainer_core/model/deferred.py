"""Build a model without ever holding it whole, and compute each initial value when it is asked for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dist_env import get_logger

from ..errors import ConfigurationError
from .meta_construction import parameter_like
from .recording import Constant, Recording, Version, View, constants, is_plain, replay
from .ties import Place

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
