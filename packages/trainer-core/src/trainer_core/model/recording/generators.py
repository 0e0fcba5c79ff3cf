"""The states of random generators, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

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
