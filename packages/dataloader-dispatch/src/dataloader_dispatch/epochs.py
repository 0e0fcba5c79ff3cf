"""What the parts of a loader are given as a pass begins: its epoch, and random numbers of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from dist_env import get_logger

_logger = get_logger("dataloader_dispatch")

WRAPPED_LOADERS = ("loader", "dataloader", "base_dataloader")
"""Attributes under which loaders tell the loader that they wrap."""
_PARTS = (*WRAPPED_LOADERS, "batch_sampler", "sampler", "dataset", "datasets")
"""Also where `Subset`, `ConcatDataset`, `ChainDataset` and `StackDataset` keep what they are made of."""


def set_loader_epoch(loader: object, epoch: int) -> None:
    """Tell a loader which epoch begins, or, where it has no ``set_epoch``, its parts that have one.

    Parts are dataset, batch sampler and samplers, those of a loader that this one wraps, and what a dataset
    such as `torch.utils.data.Subset` is made of. Each object is told once. An object that has ``set_epoch``
    passes the epoch on itself, so nothing behind it is told.

    Worker processes have copies of the dataset: call this before ``iter(loader)``. Persistent workers keep
    the copies of the first pass, of which a warning tells; only the loaders of this package begin them anew.

    Args:
        loader: Any iterable.
        epoch: The epoch, from 0.
    """
    for listener in epoch_listeners(loader):
        listener.set_epoch(epoch)


def epoch_listeners(loader: object) -> list[Any]:
    """What `set_loader_epoch` tells: of a loader, or of a dataset; each object once."""
    found: list[Any] = []
    _collect(loader, found, set())
    return found


def _collect(part: object, found: list[Any], seen: set[int]) -> None:
    if part is None or id(part) in seen:
        return
    seen.add(id(part))
    if callable(getattr(part, "set_epoch", None)):
        found.append(part)
        return
    if isinstance(part, DataLoader):
        _warn_of_old_copies(part)
    for name in _PARTS:
        inner = getattr(part, name, None)
        several = inner.values() if isinstance(inner, Mapping) else inner
        for one in several if name == "datasets" and isinstance(several, Iterable) else (inner,):
            _collect(one, found, seen)


def _warn_of_old_copies(loader: DataLoader[Any]) -> None:
    """Say that the workers of a loader do not learn of the epoch, if they run and their dataset should."""
    # Private, in torch 2.11 to 2.13: the iterator that a loader with persistent workers keeps.
    if not loader.persistent_workers or getattr(loader, "_iterator", None) is None:
        return
    if epoch_listeners(loader.dataset):
        _logger.warning(
            "%s(persistent_workers=True): its workers keep the copies of %s that they began with, which are "
            "not told the epoch; set persistent_workers=False, or make the loader with build_loader, which "
            "starts workers anew where the epoch changes",
            type(loader).__name__,
            type(loader.dataset).__name__,
        )


class PassGenerator:
    """Random numbers for the passes over a torch loader that would draw them from the global ones of torch.

    A loader that is iterated behind its user's back, in a thread or at the first batch, would draw in between
    the numbers of a dropout. It gets a generator, whose seed is drawn where the user begins a pass.

    Args:
        loader: Any loader; one that is not a torch ``DataLoader``, or has a generator, is left alone.
    """

    def __init__(self, loader: object) -> None:
        parts: list[Any] = []
        if isinstance(loader, DataLoader):
            # A batch sampler of the user has a sampler of its own.
            parts = [loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
        self._parts = [part for part in parts if getattr(part, "generator", self) is None]
        self._seed = 0
        self.renew()

    def draw(self) -> None:
        """Draw the seed of the next pass from the global generator, which is used for nothing else."""
        if self._parts:
            self._seed = int(torch.empty((), dtype=torch.int64).random_())

    def renew(self) -> None:
        """Give the loader a generator with that seed, before it is iterated; a pass before keeps its own."""
        generator = torch.Generator().manual_seed(self._seed)
        for part in self._parts:
            part.generator = generator
