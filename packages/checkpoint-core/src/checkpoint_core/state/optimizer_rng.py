"""The state of an optimizer, by parameter name, and of all random number generators."""

import logging
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.encoding import TAG, Path, join_path
from checkpoint_core.state.weights import CanonicalNames

# Positions and a copy of the names, which PyTorch keeps in its parameter groups; names replace both.
_NOT_HYPERPARAMETERS = ("params", "param_names")
_SECTIONS = ("parameters", "state")
# How a step is computed, not what: the live optimizer was built for it, and its step functions rely on it.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay")
_logger = logging.getLogger(__name__)


class OptimizerState:
    """An optimizer as a state component.

    ``state_dict()`` holds ``parameters`` (shape and hyperparameters of every parameter, by name) and
    ``state`` (by parameter name, then by state name, such as ``exp_avg``). Nothing in it depends on the order
    or the grouping of the parameters, or on how many ranks hold them.

    Args:
        optimizer: Any optimizer with PyTorch's ``state_dict`` protocol.
        model: The model that owns the optimizer's parameters, wrapped or not; or the parts of it that this
            rank holds.
        tied: As in :class:`ModelState`: weights that are copies of another one, by name. Their optimizer
            state is a copy too, stored once.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | Sequence[nn.Module],
        *,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.parts: tuple[nn.Module, ...] = (model,) if isinstance(model, nn.Module) else tuple(model)
        self.tied: Mapping[str, str] = dict(tied or {})

    @staticmethod
    def tensor_name(path: Path) -> str:
        """The name of a state tensor in the file: ``<parameter name>.<state name>``."""
        return join_path(path[1:] if path[0] == "state" else path)

    def state_dict(self) -> dict[str, object]:
        """The state by parameter name.

        Returns:
            The live tensors, not copies.

        Raises:
            CheckpointError: The optimizer has a parameter that is not the model's.
        """
        names = self.names()
        packed = self.optimizer.state_dict()
        parameters: dict[str, object] = {}
        for name, (parameter, group) in zip(names, self._parameters(), strict=True):
            values = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
            parameters[name] = {"shape": list(parameter.shape), "hyperparameters": values}
        state = {names[index]: values for index, values in packed["state"].items()}
        return {"parameters": parameters, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore hyperparameters and per-parameter state by name.

        The optimizer may hold its parameters in another order and in other groups than when it was saved, as
        long as the parameters of each group were saved with the same hyperparameters. Options that choose an
        implementation, such as ``fused``, stay those of the live optimizer. Tensors keep the dtype they were
        saved with.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            CheckpointError: Parameters are missing, unexpected, of another shape or grouped differently.
        """
        names = self.names()
        check_nothing_left(self.match(state))
        position = {name: index for index, name in enumerate(names)}
        groups = []
        begin = 0
        grouped = zip(self.optimizer.param_groups, self._grouped_names(), strict=True)
        for number, (group, members) in enumerate(grouped):
            values = _hyperparameters(number, members, state["parameters"])
            # A group without parameters has no saved counterpart and keeps what it has.
            kept = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    # PyTorch leaves these where they are, but a captured graph reads them on the device.
                    values[key] = value.to(group[key].device)
            # The live group's values come first for the order of its keys, which stays as it is.
            own = {key: kept[key] for key in _IMPLEMENTATION if key in kept}
            # PyTorch 2 looks every parameter up in here, which takes a list the square of its length.
            numbers = range(begin, begin + len(members))
            begin += len(members)
            groups.append({**kept, **values, **own, "params": numbers})
        packed = {position[name]: values for name, values in state["state"].items()}
        self.optimizer.load_state_dict({"state": packed, "param_groups": groups})
        self._restore_kinds(packed)

    def names(self) -> list[str]:
        """Stored names of the optimizer's parameters, in PyTorch's numbering.

        Raises:
            CheckpointError: A parameter is not the model's, or two have one name.
        """
        by_id: dict[int, str] = {}
        for part in self.parts:
            canonical = CanonicalNames(part)
            by_id |= {id(parameter): canonical(name) for name, parameter in part.named_parameters()}
        names: list[str] = []
        seen: set[str] = set()
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                where = f"parameter {index} of optimizer group {number}, shape {list(parameter.shape)},"
                if id(parameter) not in by_id:
                    kinds = ", ".join(type(part).__name__ for part in self.parts) or "nothing"
                    raise CheckpointError(f"{where} does not belong to the {kinds} given to OptimizerState.")
                own = by_id[id(parameter)]
                names.append(self.tied.get(own, own))
                if names[-1] in seen:
                    raise CheckpointError(
                        f"{where} goes by the name {names[-1]} of another parameter. Let tied weights on "
                        "one rank be one parameter."
                    )
                seen.add(names[-1])
        return names

    def by_name(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters by stored name."""
        parameters = (parameter for parameter, _ in self._parameters())
        return dict(zip(self.names(), parameters, strict=True))

    def match(self, state: Mapping[str, Any]) -> list[str]:
        """Compare with stored state.

        Args:
            state: What :meth:`state_dict` returned, with or without the values of tensors.

        Returns:
            Names of stored parameters that this optimizer does not have.

        Raises:
            CheckpointError: Parameters are missing, of another shape or grouped differently; each is named.
        """
        if absent := [key for key in _SECTIONS if key not in state]:
            raise CheckpointError(
                f"the optimizer state has no entry {absent[0]!r}, so it is not an OptimizerState."
            )
        _check_sections(state)
        saved: Mapping[str, Mapping[str, Any]] = state["parameters"]
        live = self.by_name()
        unclaimed = [name for name in saved if name not in live]
        if missing := [name for name in live if name not in saved]:
            raise CheckpointError(_mismatch(missing, unclaimed))
        for name, parameter in live.items():
            if saved[name]["shape"] != list(parameter.shape):
                raise CheckpointError(
                    f"optimizer state of {name} has shape {saved[name]['shape']}, but the parameter has "
                    f"{list(parameter.shape)}."
                )
        for number, members in enumerate(self._grouped_names()):
            _hyperparameters(number, members, {name: _without_tensors(saved[name]) for name in members})
        return unclaimed

    def _grouped_names(self) -> list[list[str]]:
        """Stored names of the parameters of each group."""
        rest = iter(self.names())
        return [[next(rest) for _ in group["params"]] for group in self.optimizer.param_groups]

    def _restore_kinds(self, packed: Mapping[int, Mapping[str, object]]) -> None:
        # PyTorch casts floating point state to the parameter's dtype, which rounds fp32 moments of bf16
        # weights.
        parameters = [parameter for parameter, _ in self._parameters()]
        for index, values in packed.items():
            current = self.optimizer.state[parameters[index]]
            for key, saved in values.items():
                if key in current:
                    current[key] = _as_saved(saved, current[key])

    def _parameters(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Every parameter with its group, in PyTorch's numbering."""
        return [(p, group) for group in self.optimizer.param_groups for p in group["params"]]


def _check_sections(state: Mapping[str, Any]) -> None:
    """Refuse what :meth:`OptimizerState.state_dict` never returns."""
    for section in _SECTIONS:
        if not isinstance(state[section], Mapping):
            raise CheckpointError(f"the optimizer state has no table under {section!r}. Restore its file.")
        for name, entry in state[section].items():
            good = isinstance(entry, Mapping)
            if good and section == "parameters":
                good = isinstance(entry.get("shape"), list) and isinstance(
                    entry.get("hyperparameters"), Mapping
                )
            if not good:
                raise CheckpointError(f"the optimizer state of {name} is malformed. Restore its file.")


def _as_saved(saved: object, loaded: object) -> Any:
    """What was loaded, without PyTorch's changes to dtypes, kinds of dict, and texts.

    ``Optimizer.load_state_dict`` makes a text the name of a generator, as of torch 2.13.
    """
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, str):
        return saved
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return type(saved)({key: _as_saved(saved[key], value) for key, value in loaded.items()})
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(loaded)(_as_saved(*pair) for pair in zip(saved, loaded, strict=True))
    return loaded


def check_nothing_left(unexpected: Sequence[str]) -> None:
    """Refuse state of parameters that no optimizer took.

    Args:
        unexpected: Their names.

    Raises:
        CheckpointError: There are any.
    """
    if unexpected:
        raise CheckpointError(_mismatch([], unexpected))


def _mismatch(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    return (
        "the optimizer's parameters are not those of the checkpoint; not in the checkpoint: "
        f"{sorted(missing)[:10]}, only in the checkpoint: {sorted(unexpected)[:10]}. Build the optimizer "
        "over the same parameters, or delete the optimizer files of the checkpoint to begin with fresh state"
    )


def _hyperparameters(
    number: int, members: Sequence[str], saved: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What all members of one group were saved with; empty without members."""
    values: dict[str, Any] = {}
    for name in members:
        stored = saved[name]["hyperparameters"].items()
        here = {key: value for key, value in stored if key not in _IMPLEMENTATION}
        values = values or here
        if different := sorted(key for key in {*values, *here} if not _equal(values.get(key), here.get(key))):
            raise CheckpointError(
                f"parameter group {number} of the optimizer holds {members[0]} and {name}, which were saved "
                f"with different {different[0]}. Group the parameters as when the checkpoint was saved."
            )
    return values


def _without_tensors(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What can be compared before any tensor is read: the rest may be equal under different names."""

    def is_tensor(value: object) -> bool:
        return isinstance(value, torch.Tensor) or (isinstance(value, dict) and value.get(TAG) == "tensor")

    values = saved["hyperparameters"].items()
    return {"hyperparameters": {key: value for key, value in values if not is_tensor(value)}}


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left is right or (left.dtype == right.dtype and torch.equal(left, right))
    return bool(left == right)


class RNGState:
    """Python's, numpy's and PyTorch's global random number generators as a state component.

    Saved are Python's ``random``, numpy's global generator when numpy is in use, PyTorch's CPU generator, and
    the generator of the current accelerator device (one device a rank). Declare it PER_RANK.
    """

    def state_dict(self) -> dict[str, object]:
        """The current states.

        Returns:
            ``python`` (a tuple), ``numpy`` (a dict or None), ``torch`` (a uint8 tensor), ``device_type`` (a
            string, or None where no accelerator is in use) and ``device`` (a uint8 tensor or None).
        """
        device_type = _accelerator()
        if device_type is not None and not _in_use(device_type):
            device_type = None
        return {
            "python": random.getstate(),
            "numpy": _numpy_state(),
            "torch": torch.get_rng_state(),
            "device_type": device_type,
            "device": torch.get_device_module(device_type).get_rng_state() if device_type else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states. A device generator is restored only on the same kind of device.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            CheckpointError: The state is malformed; all generators are as they were.
        """
        before = self.state_dict()
        try:
            _restore(state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            _restore(before)
            raise CheckpointError(
                "the random number generator state is malformed. Restore its files, or delete them to "
                "begin with fresh generators."
            ) from error

    def load_resharded(self, states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int) -> None:
        """Take up the states of a job with another number of ranks.

        Every rank takes the state of the saved rank with its number, counted round. Ranks beyond the saved
        ones would repeat the numbers of others, so their generators are seeded anew from that state and their
        own rank. Random numbers are then reproducible, but not those of the uninterrupted run.

        Args:
            states: The states by saved rank.
            rank: This rank.
            world_size: Number of ranks now.
        """
        if rank == 0:
            _logger.warning(
                "random numbers will differ from an uninterrupted run: saved by %d ranks, loaded by %d",
                len(states),
                world_size,
            )
        self.load_state_dict(states[rank % len(states)])
        if rank >= len(states):
            _seed_anew(rank)


def _restore(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["numpy"] is not None:
        _restore_numpy(state["numpy"])
    _restore_device(state["device_type"], state["device"])


def _seed_anew(rank: int) -> None:
    random.seed(f"{random.getrandbits(64)} {rank}")
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64)) ^ rank
    torch.manual_seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


def _restore_device(saved_type: str | None, state: torch.Tensor | None) -> None:
    here = _accelerator()
    if saved_type is not None and saved_type == here:
        torch.get_device_module(saved_type).set_rng_state(state)
    elif saved_type is not None or (here is not None and _in_use(here)):
        _logger.warning(
            "random numbers on the device will differ: saved on %s, this process runs on %s",
            saved_type or "the CPU alone",
            here or "the CPU alone",
        )


def _in_use(device_type: str) -> bool:
    # Asking an idle device for its state would create a context on it, which costs memory and breaks forks.
    is_initialized = getattr(torch.get_device_module(device_type), "is_initialized", None)
    return bool(is_initialized()) if is_initialized is not None else True


def _accelerator() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def _numpy_state() -> dict[str, object] | None:
    # A process that has not imported numpy has no numpy numbers to reproduce.
    numpy = sys.modules.get("numpy")
    if numpy is None or "numpy.random" not in sys.modules:
        return None
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    return _plain(state)


def _plain(state: Mapping[str, Any]) -> dict[str, object]:
    """Generator state with arrays as lists and scalars as Python numbers."""
    plain: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            plain[key] = _plain(value)
        elif hasattr(value, "dtype") and getattr(value, "ndim", 0) > 0:
            plain[key] = {"dtype": str(value.dtype), "values": value.tolist()}
        else:
            plain[key] = value.item() if hasattr(value, "item") else value
    return plain


def _restore_numpy(state: Mapping[str, Any]) -> None:
    try:
        import numpy
    except ImportError:
        _logger.warning("numpy is not installed here, so its saved random state is left out")
        return
    numpy.random.set_state(_with_arrays(state, numpy))


def _with_arrays(state: Mapping[str, Any], numpy: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict) and set(value) == {"dtype", "values"}:
            result[key] = numpy.asarray(value["values"], dtype=value["dtype"])
        else:
            result[key] = _with_arrays(value, numpy) if isinstance(value, dict) else value
    return result
