"""Random numbers of a divided model, such as masks of dropout: alike on all ranks, or apart.

What each rank computes as a whole has to be equal, and so have the masks in it: the generators of the ranks
are in one state. Where each rank computes its own heads, features or positions it draws from a stream of its
own, which begins anew each time. The seed of that stream follows from the common state and the rank, so that
nothing has to be saved: a checkpoint with the state of the generator has all of it, and activation
checkpointing, which restores that state before it computes a layer again, draws the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

_PHILOX_BYTES = 16
"""Size of the state of a generator on an accelerator: its seed and an offset (torch 2.13)."""


class Draws:
    """Switches the generator between the stream that all ranks have and this rank's own.

    Where nothing is drawn from a rank's own stream, the common one stays as it was.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._device_type = mesh.device_type
        self._rank = mesh.get_local_rank()
        self._depth = 0
        self._open: tuple[Tensor, Tensor] | None = None

    @property
    def is_apart(self) -> bool:
        """Whether this rank draws from its own stream."""
        return self._open is not None

    def begin(self, x: Tensor) -> None:
        """Draw from this rank's own stream, until `end`; `x` is what is computed with."""
        if self._open is not None or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
            return
        generator = generator_of(self._device_type)
        if generator is None:
            return
        before = generator.get_state()
        seed = _drawn(generator)
        # Other streams that begin at the same state are those of other ranks, and of a layer around a module.
        generator.manual_seed(_mixed(seed + 2 * self._rank + self._depth))
        self._open = before, generator.get_state()

    def end(self) -> bool:
        """Draw from the common stream again, which moves on if anything was drawn; whether it was."""
        if self._open is None:
            return False
        (before, begun), self._open = self._open, None
        generator = generator_of(self._device_type)
        if generator is None:
            return False
        drew = not torch.equal(generator.get_state(), begun)
        generator.set_state(before)
        if drew:
            _drawn(generator)
        return drew

    @contextmanager
    def alike(self) -> Iterator[None]:
        """A context in which the common stream is drawn from, within a layer that works on parts."""
        generator = generator_of(self._device_type)
        if self._open is None or generator is None:
            yield
            return
        own, (before, begun) = generator.get_state(), self._open
        generator.set_state(before)
        self._open, self._depth = None, self._depth + 1
        try:
            yield
        finally:
            self.end()
            self._open, self._depth = (generator.get_state(), begun), self._depth - 1
            generator.set_state(own)


def generator_of(device_type: str) -> torch.Generator | None:
    """The generator that layers on this process's device draw from; None if torch has none for it."""
    if device_type == "cpu":
        return torch.default_generator
    device = torch.get_device_module(device_type)
    generators = getattr(device, "default_generators", ())
    # A graph that is captured must not have its generator changed.
    if not generators or getattr(device, "is_current_stream_capturing", bool)():
        return None
    found: torch.Generator = generators[device.current_device()]
    return found


def share_generators(mesh: DeviceMesh) -> None:
    """Put the generators of torch on all ranks of a mesh into the state of the first rank; collective."""
    for device_type in dict.fromkeys(("cpu", mesh.device_type)):
        generator = generator_of(device_type)
        if generator is not None:
            state = generator.get_state().to(mesh.device_type)
            dist.broadcast(state, group=mesh.get_group(), group_src=0)
            generator.set_state(state.cpu())


def _drawn(generator: torch.Generator) -> int:
    """A number drawn from a generator, without waiting for a device."""
    state = generator.get_state()
    if state.numel() != _PHILOX_BYTES:
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    seed, offset = state.view(torch.int64).tolist()
    moved = state.clone()
    moved.view(torch.int64)[1] += 4  # what one draw takes at least; offsets are multiples of 4
    generator.set_state(moved)
    return _mixed(int(seed)) ^ int(offset)


def _mixed(seed: int) -> int:
    """Another seed, far from those of its neighbours (splitmix64, Steele et al. 2014)."""
    mask = 2**64 - 1
    mixed = (seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)
