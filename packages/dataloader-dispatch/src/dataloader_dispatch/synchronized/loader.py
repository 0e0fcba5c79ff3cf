"""Each rank reads its own data; all ranks stop together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloader_dispatch.batches import Uneven, masked_dummy, to_device
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import PassGenerator, end_workers, length_of, set_loader_epoch
from dataloader_dispatch.synchronized.epoch import Epoch, Exchange, Place, Settings, common_length
from dataloader_dispatch.torchdata_loaders import begin_pass, load_loader_state, loader_state
from dist_env import get_logger, tie_loader_workers

Batch = TypeVar("Batch")
_CLOSED = "the data loader was closed. Make a new one."


class _Parts(Protocol):
    """What a loader may have. To ask it for what it lacks raises its own AttributeError."""

    batch_size: int | None
    dataset: object
    sampler: object
    epoch: int
    epoch_progress: float
    state_dict: Callable[[], dict[str, object]]
    load_state_dict: Callable[[Mapping[str, object]], object]
    load_resharded: Callable[..., object]


class SynchronizedDataLoader(Generic[Batch]):
    """A loader for each rank's own data, with an end that all ranks agree on.

    A rank that has run out of data leaves the others waiting in their next collective for ever. Here the
    ranks agree before that step:

    * ``uneven="stop"``: the epoch ends on every rank when the first one has run out. Surplus batches of the
      others are left out, with one warning that says how many there are, and the next epoch begins at its
      start on every rank.
    * ``uneven="pad"``: ranks that have run out deliver dummy batches that count for nothing (see
      `masked_dummy`) until the last one has run out. `last_is_dummy` tells them.
    * ``uneven="error"``: `DataError` on every rank, before the step in question, naming who has how many.

    Each rank reads one batch ahead, and the ranks agree on whether there is another one while the caller
    computes: three bytes a step, over a gloo group of their own, which disturbs no other. Lengths are not
    relied on for that. Under "error" they are compared before the first batch, where every loader has an
    exact one (torch calls that of a loader of an iterable dataset a guess).

    If the loader of one rank raises, that rank raises the same error and every other one `RankFailedError`,
    before the step in which that rank would be missing. After an error make a new SynchronizedDataLoader.

    The ranks must have different data; if first batches are the same, one warning names the ranks. Those of
    one set of ``equal_batches`` must have the same, in each step.

    Making it, and getting a batch, are collective. A later pass may begin before the one before it has come
    to its end, if it does so on every rank behind the same batch: a torch ``DataLoader`` then begins anew,
    and another loader with ``state_dict`` continues behind the last batch delivered. With one rank, batches
    are only moved to the device.

    Args:
        loader: This rank's batches: any iterable that can be iterated anew.
        device: Where tensors go, without waiting where their memory is page-locked; see `to_device`.
        process_group: The ranks; None for all. One rank if there is no process group.
        uneven: What to do when some ranks run out before others; the same on all ranks.
        equal_batches: Sets of global ranks that must get the same batches, such as those that divide one
            model among them. One that differs raises `DataError` on every rank before it is used, naming the
            ranks. A batch is hashed where it was read, and each set takes 16 bytes more of the exchange.
        make_dummy: Under "pad": makes a dummy of a batch, both on ``device``; it leaves the batch as it is.
        timeout_seconds: How long a rank waits for the others in an exchange.

    Attributes:
        loader: The loader given. Its own position is up to one batch ahead.
        device: Where tensors go.

    Raises:
        DataError: A setting is out of range or differs between ranks.
        RankFailedError: A rank is lost.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device | str,
        process_group: dist.ProcessGroup | None = None,
        uneven: Uneven = "stop",
        *,
        equal_batches: Sequence[Sequence[int]] = (),
        make_dummy: Callable[[Batch], Batch] = masked_dummy,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.loader = tie_loader_workers(loader)
        self.device = torch.device(device)
        group = Exchange(_ranks_of(process_group), timeout_seconds)
        self._group = group
        self._settings = Settings(
            loader, self.device, group, uneven, make_dummy, tuple(map(tuple, equal_batches))
        )
        self._generator = PassGenerator(loader)
        self._latest: Epoch[Batch] | None = None
        self._is_loaded = False
        self._has_failed = False
        self._is_closed = False
        self._lengths: tuple[int | None, ...] = ()
        self._check_settings()

    def __iter__(self) -> Iterator[Batch]:
        """The batches of a pass, with tensors on the device.

        Raises:
            DataError: Ranks have different numbers of batches under ``uneven="error"``, batches cannot be
                masked under "pad", or an earlier pass ended with an error.
            RankFailedError: The loader of another rank failed, or a rank is lost.
            RuntimeError: It was closed.
        """
        if self._is_closed:
            raise RuntimeError(_CLOSED)
        if self._group.size == 1:
            return self._alone(begin_pass(self.loader))
        self._generator.draw()
        self._generator.renew()
        return self._pass()

    def __len__(self) -> int:
        """Number of batches of an epoch: the least of the ranks, the greatest under ``uneven="pad"``.

        Agreed on when the loader is made and at the first batch of each pass, so any rank may ask alone.

        Raises:
            TypeError: The loader of some rank has no length.
        """
        lengths = (self._latest and self._latest.lengths) or self._lengths
        if self._group.size == 1:
            lengths = (length_of(self.loader),)
        length = common_length(lengths, self._settings.uneven)
        if length is None:
            raise TypeError("the loader of at least one rank has no length.")
        return length

    @property
    def last_is_dummy(self) -> bool:
        """Whether the last batch delivered on this rank was a dummy that counts for nothing."""
        return self._latest is not None and self._latest.is_dummy

    @property
    def world_size(self) -> int:
        """Number of ranks that stop together."""
        return self._group.size

    @property
    def batch_size(self) -> int | None:
        """``batch_size`` of the loader, if it has one."""
        return self._inner.batch_size

    @property
    def dataset(self) -> object:
        """``dataset`` of the loader, if it has one."""
        return self._inner.dataset

    @property
    def sampler(self) -> object:
        """``sampler`` of the loader, if it has one."""
        return self._inner.sampler

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, if the loader has ``epoch``."""
        return self._inner.epoch if self._place.epoch is None else self._place.epoch

    @property
    def epoch_progress(self) -> float:
        """Share of the epoch that was delivered, if the loader has ``epoch_progress``."""
        progress = self._place.progress
        return self._inner.epoch_progress if progress is None else progress

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, between passes: ``set_epoch`` of the loader, or else of its dataset and samplers.

        Does nothing when the position is in that epoch already. Not collective, but all ranks must do it.
        """
        if self._place.epoch is not None:
            if self._place.epoch == epoch:
                return
            self._leave()
        set_loader_epoch(self.loader, epoch)

    @property
    def state_dict(self) -> Callable[[], dict[str, object]]:
        """A function that returns the position behind the last batch delivered; absent as in the loader.

        It is what this rank's loader returns, so each rank has its own. While other ranks still deliver, a
        rank that has run out stays behind its last batch. An empty dict is the start of an epoch: of a loader
        that does not count epochs, after other ranks have run out before it.
        """
        _ = self._inner.state_dict  # absent as in the loader

        def state_dict() -> dict[str, object]:
            state = self._place.state
            own: dict[str, object] = loader_state(self.loader) if state is None else state
            return own

        return state_dict

    @property
    def load_state_dict(self) -> Callable[[Mapping[str, object]], None]:
        """A function that takes what ``state_dict`` returned on this rank; absent as in the loader."""
        _ = self._inner.load_state_dict  # absent as in the loader

        def load_state_dict(state: Mapping[str, object]) -> None:
            self._leave()
            if state:  # an empty one is the start of an epoch, where any next pass begins
                load_loader_state(self.loader, state)
                self._is_loaded = True

        return load_state_dict

    @property
    def load_resharded(self) -> Callable[..., None]:
        """The loader's function for states of another number of ranks; absent as in the loader."""
        load = self._inner.load_resharded

        def load_resharded(*args: object, **kwargs: object) -> None:
            self._leave()
            equal, position = self._settings.equal, self._settings.position
            if equal and position is not None:
                kwargs |= {"rank": position, "world_size": len(equal)}  # as the loaders count their readers
            load(*args, **kwargs)
            self._is_loaded = True

        return load_resharded

    def close(self) -> None:
        """Close the connections between the ranks, on this rank; it cannot be iterated again."""
        left = self._leave()
        if left is not None:
            left.supersede(_CLOSED)
        self._is_closed = True
        self._group.close()

    @property
    def _inner(self) -> _Parts:
        return cast(_Parts, self.loader)

    @property
    def _place(self) -> Place:
        """Where the loader stands for the user, if that is not where it really stands."""
        return (self._latest and self._latest.place) or Place()

    def _leave(self) -> Epoch[Batch] | None:
        """Forget the latest pass; returned if it was broken off."""
        left, self._latest = self._latest, None
        if left is None or left.is_over:
            return None
        left.supersede()
        return left

    def _alone(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield to_device(batch, self.device)
            if self._is_closed:
                raise RuntimeError(_CLOSED)

    def _pass(self) -> Iterator[Batch]:
        """A new pass, which begins where the user stands."""
        if self._has_failed:
            raise DataError(
                "an error ended an earlier pass of this SynchronizedDataLoader, and the ranks may stand at "
                "different places. Make a new one on every rank."
            )
        if self._latest is not None:
            self._lengths = self._latest.lengths or self._lengths
        left, is_loaded = self._leave(), self._is_loaded
        epoch = self._latest = Epoch(self._settings)
        self._is_loaded = False

        def prepare() -> bool:
            return not is_loaded if left is None or is_loaded else self._go_back(left)

        try:
            yield from epoch.batches(prepare, None if left is None or self._is_put_back(left) else left)
        finally:
            self._has_failed = epoch.has_failed or self._has_failed

    def _is_put_back(self, left: Epoch[Batch]) -> bool:
        """Whether the loader reads again what a pass that was broken off has read ahead."""
        # A DataLoader with persistent workers has one iterator for all passes, which it sets back. Its class
        # is private to torch; another one's pass would begin with what was read ahead in the one before.
        if isinstance(left.iterator, _BaseDataLoaderIter):
            return True
        return left.place is not None and left.place.state is not None

    def end_workers(self) -> None:
        """Leave the pass on this rank, and end the worker processes of the loader; the position stays."""
        left = self._latest
        if left is None:
            end_workers(self.loader)
            return
        left.supersede()
        end_workers(self.loader, left.iterator)
        left.iterator = iter(())  # torch ends workers where it is collected
        state = None if left.place is None else left.place.state
        if state and not left.is_over and getattr(self.loader, "next_iter_state", None) is not None:
            self.load_state_dict(state)  # torchdata's loader keeps what was read ahead

    def _go_back(self, left: Epoch[Batch]) -> bool:
        """Give up what a pass that was broken off has read ahead; whether the next one is a whole epoch."""
        place, loader = left.place, self.loader
        if place is None:
            return False
        if isinstance(loader, DataLoader):
            # It begins anew, but perhaps in another epoch since its last batch was fetched.
            if place.epoch is not None and place.epoch != self._inner.epoch:
                set_loader_epoch(loader, place.epoch)
            return True
        if place.state is not None:
            load_loader_state(self.loader, place.state)
        return False

    def _check_settings(self) -> None:
        """Agree on the settings and on the first lengths. Collective."""
        settings = self._settings
        problem = None if settings.uneven in get_args(Uneven) else "must be 'stop', 'pad' or 'error'"
        own = (str(settings.uneven), problem, length_of(self.loader), settings.equal)
        doing = "opening a SynchronizedDataLoader"
        met = [own] if settings.group.size == 1 else settings.group.gather(doing, own)
        self._lengths = tuple(length for _, _, length, _ in met)
        if len({equal for *_, equal in met}) > 1:
            raise DataError("equal_batches must be the same on all ranks. Give each rank the same sets.")
        for uneven, problem, *_ in met:
            if problem is not None:
                raise DataError(f"uneven={uneven!r} {problem}.")
        if len({uneven for uneven, *_ in met}) > 1:
            told = ", ".join(f"{settings.group.name(i)} has {uneven!r}" for i, (uneven, *_) in enumerate(met))
            raise DataError(f"uneven must be the same on all ranks: {told}.")


def _ranks_of(process_group: dist.ProcessGroup | None) -> list[int]:
    if dist.is_available() and dist.is_initialized():
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise DataError(
                f"process_group does not contain rank {dist.get_rank()}. Make the loader on its ranks only."
            )
        return sorted(dist.get_process_group_ranks(process_group))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        get_logger("dataloader_dispatch").warning(
            "SynchronizedDataLoader: WORLD_SIZE=%s, but there is no process group, so every rank is alone; "
            "call torch.distributed.init_process_group, or open a dist_env.DistributedEnvironment, first",
            os.environ["WORLD_SIZE"],
        )
    return [0]
