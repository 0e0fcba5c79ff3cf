"""Where a loader that is read ahead stands for its user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar, cast

from torch.utils.data import DataLoader

from dataloader_dispatch.epochs import set_loader_epoch
from dataloader_dispatch.synchronized.epoch import Epoch

Batch = TypeVar("Batch")


class Standpoint(Generic[Batch]):
    """Position of a loader as its user sees it: behind the last batch delivered.

    Args:
        loader: The loader.

    Attributes:
        latest: The latest pass of several ranks over it.
    """

    def __init__(self, loader: object) -> None:
        self.latest: Epoch[Batch] | None = None
        self._loader = loader
        self._is_loaded = False

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        place = self.latest and self.latest.place
        return place.epoch if place and place.epoch is not None else cast(int, self.inner("epoch"))

    @property
    def progress(self) -> float:
        """Share of the epoch that was delivered."""
        place = self.latest and self.latest.place
        if place and place.progress is not None:
            return place.progress
        return cast(float, self.inner("epoch_progress"))

    def inner(self, name: str) -> object:
        """An attribute of the loader.

        Raises:
            AttributeError: It has none of that name.
        """
        return cast(object, getattr(self._loader, name))

    def state_dict(self) -> dict[str, object]:
        """The loader's state."""
        place = self.latest and self.latest.place
        if place and place.state is not None:
            return cast(dict[str, object], place.state)
        return cast(Callable[[], dict[str, object]], self.inner("state_dict"))()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position. An empty one is the start of an epoch, where any next pass begins."""
        self.leave()
        if state:
            cast(Callable[[Mapping[str, object]], None], self.inner("load_state_dict"))(state)
            self._is_loaded = True

    def load_resharded(self, *args: object, **kwargs: object) -> None:
        """Go to a position that another number of ranks saved."""
        self.leave()
        cast(Callable[..., None], self.inner("load_resharded"))(*args, **kwargs)
        self._is_loaded = True

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, unless the user is in it already."""
        place = self.latest and self.latest.place
        if place and place.epoch is not None:
            if place.epoch == epoch:
                return
            self.leave()
        set_loader_epoch(self._loader, epoch)

    def leave(self) -> Epoch[Batch] | None:
        """Forget the latest pass; returned if it was broken off."""
        left, self.latest = self.latest, None
        if left is None or left.is_over:
            return None
        left.supersede()
        return left

    def begin(self, epoch: Epoch[Batch]) -> Iterator[Batch]:
        """The batches of a new pass, which begins where the user stands."""
        left, is_loaded = self.leave(), self._is_loaded
        self.latest, self._is_loaded = epoch, False

        def prepare() -> bool:
            if left is not None and not is_loaded:
                return self._go_back(left)
            return not is_loaded

        return epoch.batches(prepare, None if left is None else left.delivery.ahead)

    def _go_back(self, left: Epoch[Batch]) -> bool:
        """Give up what a pass that was broken off has read ahead; whether the next one is a whole epoch."""
        place = left.place
        if place is None:
            return False
        if isinstance(self._loader, DataLoader):
            # It begins anew, but perhaps in another epoch since its last batch was fetched.
            if place.epoch is not None and place.epoch != self.inner("epoch"):
                cast(Callable[[int], None], self.inner("set_epoch"))(place.epoch)
            return True
        if place.state is not None:
            cast(Callable[[object], None], self.inner("load_state_dict"))(place.state)
        return False
