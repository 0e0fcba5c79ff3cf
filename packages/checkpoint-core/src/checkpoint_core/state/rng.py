"""The states of all random number generators, as plain numbers and tensors."""

import logging
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checkpoint_core.errors import CheckpointError

_logger = logging.getLogger(__name__)


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
                "the random number generator state is malformed; restore its files, or delete them to begin "
                "with fresh generators"
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
