"""One pass of several ranks over their loaders, each one batch ahead of its user."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from dataloader_dispatch.batches import Uneven, copy_of, to_device
from dataloader_dispatch.connection import BatchCodec, data_errors, one_line
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import exact_length, has_epochs, length_of
from dataloader_dispatch.synchronized.digests import (
    END,
    digest,
    digests_differ,
    encoded_digests,
    rank_list,
    same_first_batches,
    unlike_batches,
)
from dataloader_dispatch.torchdata_loaders import begin_pass, loader_state
from dist_env import ControlGroup, RankFailedError, Transfer, get_logger

Batch = TypeVar("Batch")
_logger = get_logger("dataloader_dispatch")


class Flags(NamedTuple):
    """What is true of some rank.

    Attributes:
        has: It has another batch.
        ended: It has none.
        failed: Its loader raised.
    """

    has: bool
    ended: bool
    failed: bool


class Exchange(ControlGroup):
    """Exchanges among the ranks of a group, one after another, the same on every rank.

    torch's loaders raise where they learn of a worker's death: in the main thread, wherever it is. Here it
    is mostly waiting for other ranks, who would miss this rank then. So such an error is kept for
    `take_interruption` while the exchange continues.

    Args:
        ranks: Global ranks, this one among them.
        timeout_seconds: How long an exchange may take.
    """

    _interruption: Exception | None = None
    _work: dist.Work | None = None
    digests: bytes = b""

    def __init__(self, ranks: Sequence[int], timeout_seconds: float) -> None:
        with data_errors():
            super().__init__(ranks, timeout_seconds, doing="opening the data loader")
        self._warned: set[str] = set()

    def wait(self, doing: str, work: Transfer) -> None:
        """Wait for an exchange to end; what else is raised meanwhile is kept.

        Raises:
            RankFailedError: A rank is lost, or the exchange took longer than the timeout.
        """
        while True:
            try:
                return super().wait(doing, work)
            except RankFailedError:
                raise
            except RuntimeError as error:  # raised by a signal handler: the exchange is still under way
                self._interruption = error

    def take_interruption(self) -> Exception | None:
        """What was raised during an exchange, if anything was."""
        error, self._interruption = self._interruption, None
        return error

    def start_flags(self, *, has: bool, failed: bool, digests: bytes = b"") -> None:
        """Say whether this rank has another batch, or its loader has failed; `wait_flags` waits for it.

        Args:
            has: Whether it has a batch.
            failed: Whether its loader raised.
            digests: Further bytes, as many on each rank, of which the largest are in `digests` afterwards.
        """
        own = Flags(has and not failed, not has and not failed, failed)
        self._flags = torch.tensor([*own, *digests], dtype=torch.uint8)
        # Among many ranks they pass through a tree, when they are waited for: through all ranks, one after
        # another, would take longer than a step in which it could hide.
        self._work = self.all_reduce_max(self._flags) if self.is_mesh else None

    def wait_flags(self) -> Flags:
        """What the ranks have said.

        Raises:
            RankFailedError: A rank is lost.
        """
        doing = "agreeing on the end of data"
        if self._work is not None:
            self.wait(doing, self._work)
        self._work = None
        flags = bytes(self._flags.tolist())
        has, ended, failed, *digests = flags if self.is_mesh else self.largest(doing, flags)
        self.digests = bytes(digests)
        return Flags(bool(has), bool(ended), bool(failed))

    def send_batch(self, doing: str, batch: Batch | None, source: int) -> Batch:
        """The batch of one rank, on every rank.

        Args:
            doing: What the ranks are doing, for the message.
            batch: A batch on the CPU; that of the source counts, and others may have None.
            source: Position of that rank among those of the group.

        Raises:
            DataError: The batch cannot be sent; on every rank.
            RankFailedError: A rank is lost, or its message cannot be read.
        """
        codec, message, problem = BatchCodec(), b"", ""
        if self.index == source:
            try:
                message = codec.encode(batch)
            except DataError as error:
                problem = str(error)
        problem, size = self.gather(doing, (problem, len(message)))[source]
        if problem:
            raise DataError(f"{doing}: {problem}")
        try:
            data = torch.empty(size, dtype=torch.uint8)
            if message:
                data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        except (RuntimeError, TypeError) as error:
            raise self.unreadable(doing, source, error) from error
        self.wait(doing, self.broadcast(data, source))
        try:
            return cast(Batch, codec.decode(data.numpy().tobytes()))
        except ValueError as error:
            raise self.unreadable(doing, source, error) from error

    def was_warned(self, kind: str) -> bool:
        """Whether a warning of this kind was given."""
        return kind in self._warned

    def warn_once(self, kind: str, message: str) -> None:
        """Give a warning, on the first rank, unless one of its kind was given; all ranks come here."""
        if self.index == 0 and kind not in self._warned:
            _logger.warning(message)
        self._warned.add(kind)


class EpochFacts(NamedTuple):
    """What a rank tells of its loader before a pass.

    Attributes:
        epoch: Its epoch, if it has one.
        length: Its length, if it has one.
        batches: How many batches it will give in this pass, as far as can be known.
    """

    epoch: int | None
    length: int | None
    batches: int | None


def common_length(lengths: Sequence[int | None], uneven: Uneven) -> int | None:
    """Number of batches of an epoch on every rank; None if some loader has no length."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    return max(known) if uneven == "pad" else min(known)


def common_epoch(
    facts: Sequence[EpochFacts], uneven: Uneven, group: ControlGroup
) -> tuple[int | None, frozenset[int]]:
    """The epoch of a pass, and the positions of the ranks that are through with it already.

    Positions that were saved together may be in two epochs, as some ranks were through with the first one and
    others were not. Under "stop" that epoch is over for all; otherwise the others still have to finish it.

    Raises:
        DataError: Epochs do not fit together, or there are unequal numbers of batches under
            ``uneven="error"``.
    """
    epochs = {each.epoch for each in facts if each.epoch is not None}
    if epochs and max(epochs) - min(epochs) > 1:
        told = ", ".join(f"{group.name(index)} in {each.epoch}" for index, each in enumerate(facts))
        raise DataError(
            f"the loaders of the ranks are in epochs that do not fit together: {told}. Load the states that "
            "were saved together, and call set_epoch with the same epoch on every rank."
        )
    if len(epochs) > 1 and uneven != "stop":
        done = (index for index, each in enumerate(facts) if each.epoch == max(epochs))
        return min(epochs), frozenset(done)
    counts = [each.batches for each in facts]
    if uneven == "error" and len(epochs) < 2 and None not in counts and len(set(counts)) > 1:
        raise DataError(unequal([f"{count} batches" for count in counts], group))
    return max(epochs, default=None), frozenset()


def unequal(has: Sequence[str], group: ControlGroup) -> str:
    """The words of ``uneven="error"`` about what each rank has."""
    return (
        f"uneven='error' needs equal numbers of batches, but {_each(has, group)}. Divide the data evenly, "
        "or choose uneven='stop' or uneven='pad'."
    )


def left_out(batches: int, has: Sequence[str], group: ControlGroup) -> str:
    """The words of ``uneven="stop"`` about what each rank has."""
    return (
        f"uneven='stop': a pass ends after {batches} batches on every rank, the surplus is left out: "
        f"{_each(has, group)}. To use it, divide the data evenly or choose uneven='pad'"
    )


def _each(has: Sequence[str], group: ControlGroup) -> str:
    return ", ".join(f"{group.name(index)} has {what}" for index, what in enumerate(has))


Result = TypeVar("Result")


class Place(NamedTuple):
    """Where a loader stands; None for what it does not tell.

    Attributes:
        state: A copy of its ``state_dict``.
        epoch: Its ``epoch``.
        progress: Its ``epoch_progress``.
    """

    state: dict[str, object] | None = None
    epoch: int | None = None
    progress: float | None = None

    @classmethod
    def of(cls, loader: object) -> Place:
        """Where a loader stands now."""
        # A copy, because the loader may go on to change what it returned.
        has_state = callable(getattr(loader, "state_dict", None))
        copied = copy.deepcopy(loader_state(loader)) if has_state else None
        progress = getattr(loader, "epoch_progress", None)
        return cls(copied, epoch_of(loader), None if progress is None else float(progress))


def epoch_of(loader: object) -> int | None:
    """The epoch that a loader says it stands in."""
    epoch = getattr(loader, "epoch", None)
    return int(epoch) if isinstance(epoch, int) else None


@dataclass(frozen=True)
class Settings(Generic[Batch]):
    """What stays the same in every pass.

    Attributes:
        loader: This rank's loader.
        device: Where batches go.
        group: The ranks.
        uneven: What to do when ranks run out.
        make_dummy: Makes a batch that stands in for a missing one, under ``uneven="pad"``.
        equal: Sets of global ranks that must have the same batches.
    """

    loader: Iterable[Batch]
    device: torch.device
    group: Exchange
    uneven: Uneven
    make_dummy: Callable[[Batch], Batch]
    equal: tuple[tuple[int, ...], ...] = ()

    @property
    def position(self) -> int | None:
        """Which of the sets of `equal` this rank is in, if it is in one."""
        rank = self.group.ranks[self.group.index]
        return next((number for number, members in enumerate(self.equal) if rank in members), None)


class Epoch(Generic[Batch]):
    """One pass of this rank over its loader, to an end that all ranks agree on.

    Each rank fetches a batch before its user asks for it, and says whether it has one while the user computes
    with the batch before. What a loader raises is kept until the other ranks know of it.

    Args:
        settings: What stays the same in every pass.

    Attributes:
        place: Where the loader stands for the user; None if that is where it really stands. It does not while
            it is read ahead, nor when it was left in the middle because other ranks ran out.
        lengths: Lengths of the loaders, None for those without; empty until the ranks have met.
        is_dummy: Whether the last batch delivered stands in for a missing one.
        is_over: Whether the pass came to its end.
        has_failed: Whether an error ended it.
    """

    def __init__(self, settings: Settings[Batch]) -> None:
        self.place: Place | None = None
        self.lengths: tuple[int | None, ...] = ()
        self.is_dummy = self.is_over = self.has_failed = False
        self._settings = settings
        self._group = settings.group
        self._batches: int | None = None
        self._taken = 0
        self._digest = END
        self._has = False
        self._held: list[Batch] = []
        self._dummy: list[Batch] = []
        self._error: Exception | None = None
        self.iterator: Iterator[Batch] = iter(())
        self._is_superseded = False
        self._reason = ""

    def batches(self, prepare: Callable[[], bool], before: Epoch[Batch] | None) -> Iterator[Batch]:
        """The batches.

        Args:
            prepare: Puts this rank's loader where the pass is to begin, and tells whether an epoch starts
                there.
            before: The pass before, if it was broken off. A loader that is its own iterator continues with
                the batch that was fetched for it.

        Raises:
            DataError: Epochs do not fit together, or ranks run out before others under ``uneven="error"``.
            RankFailedError: The loader of another rank failed, or a rank is lost.
            RuntimeError: A newer iterator was made.
        """
        settings, group = self._settings, self._group
        try:
            epoch, flags = self._begin(prepare, before)
            while flags.has and (settings.uneven == "pad" or not flags.ended):
                batch = self._next()
                failed = self._error is not None
                own = encoded_digests("" if failed else self._digest, settings.position, len(settings.equal))
                group.start_flags(has=self._has, failed=failed, digests=own)
                yield batch
                del batch  # its memory is the caller's to free while the next one is waited for
                if self._is_superseded:
                    raise RuntimeError(self._reason)
                flags = group.wait_flags()
                if flags.failed:
                    self._gather("telling what failed", lambda: None)
                if digests_differ(group.digests):
                    self._check_equal(self._gather("comparing batches", lambda: self._digest))
            if flags.has:
                self._tell_surplus()
            self._finish(epoch)
        except GeneratorExit:
            raise
        except BaseException:
            self.has_failed = not self._is_superseded
            raise

    def supersede(
        self, reason: str = "a newer iterator of this SynchronizedDataLoader was made. Use that one."
    ) -> None:
        """Give no more batches, and the reason to who asks for one."""
        self._is_superseded, self._reason = True, reason

    def _begin(self, prepare: Callable[[], bool], before: Epoch[Batch] | None) -> tuple[int | None, Flags]:
        """Meet the other ranks, and fetch and compare the first batches. Collective.

        Returns:
            The epoch that the ranks are in, if they count epochs, and what is true before the first batch.
        """
        settings, group = self._settings, self._group
        facts = self._gather("opening an epoch", lambda: self._facts(prepare()))
        self.lengths = tuple(each.length for each in facts)
        epoch, done = common_epoch(facts, settings.uneven, group)

        def first() -> tuple[bool, str | None, str]:
            if group.index in done:
                self.place = Place.of(settings.loader)
                return False, None, self._digest
            self._open(epoch, before)
            if self._has and settings.uneven == "pad":
                # So that batches which cannot be masked are refused before a rank runs out.
                self._prepare_dummy(self._first)
            return self._has, digest(self._first) if self._has else None, self._digest

        firsts = self._gather("comparing first batches", first)
        has = [has for has, _, _ in firsts]
        self._check_equal([fingerprint for _, _, fingerprint in firsts])
        repeated = {rank for members in settings.equal for rank in members[1:]}
        apart = [
            None if rank in repeated else fingerprint
            for rank, (_, fingerprint, _) in zip(group.ranks, firsts, strict=True)
        ]
        if same := same_first_batches(apart, group.ranks):
            group.warn_once("same first batch", same)
        if settings.uneven == "pad" and any(has) and not all(has):
            self._share_first(has)
        return epoch, Flags(any(has), not all(has), False)

    def _facts(self, is_whole: bool) -> EpochFacts:
        loader = self._settings.loader
        self._batches = exact_length(loader) if is_whole else None
        return EpochFacts(epoch_of(loader), length_of(loader), self._batches)

    def _open(self, epoch: int | None, before: Epoch[Batch] | None) -> None:
        """Begin the pass over the loader, and fetch its first batch."""
        loader = self._settings.loader
        if epoch is not None and epoch_of(loader) not in (None, epoch):
            if not has_epochs(loader):
                raise DataError(
                    f"the loader, a {type(loader).__name__}, is in epoch {epoch_of(loader)}, and those of "
                    f"other ranks in {epoch}, but it has no set_epoch(epoch). Add it."
                )
            loader.set_epoch(epoch)
        self.iterator = begin_pass(loader)
        if before is None or before.iterator is not self.iterator:
            self._fetch()
            return
        # Read ahead and not delivered: of a loader that cannot be put back.
        self._held, self._has, self.place = before._held, before._has, before.place
        self._digest = before._digest
        if before._error is not None:
            raise before._error

    def _fetch(self) -> None:
        """Fetch the next batch, if there is one."""
        self._has, self._digest = False, END
        interruption = self._group.take_interruption()
        self.place = Place.of(self._settings.loader)
        if interruption is not None:
            raise interruption
        try:
            batch = next(self.iterator)
        except StopIteration:
            return
        if self._settings.equal:  # before it is on a device, where to look would wait
            found = digest(batch)
            if found is None:
                BatchCodec().encode(batch, [])  # raises where a value is of a type that cannot be compared
            self._digest = found or ""
        self._held = [to_device(batch, self._settings.device)]
        self._has = True

    def _check_equal(self, found: Sequence[str]) -> None:
        """Refuse unlike batches of ranks that must have the same; on all ranks, with fingerprints of all.

        Raises:
            DataError: Naming the ranks.
        """
        settings = self._settings
        problem = unlike_batches(found, settings.equal, settings.group.ranks, self._taken + 1)
        if problem is not None:
            raise DataError(problem)

    def _next(self) -> Batch:
        """The batch held, or one that stands in for it; the batch after it is fetched."""
        self.is_dummy = not self._has
        if self.is_dummy:
            return copy_of(self._dummy[0])
        batch = self._held.pop()
        self._taken += 1
        self._attempt(self._fetch)
        if self._settings.uneven == "pad" and not self._has and self._error is None:
            self._attempt(lambda: self._prepare_dummy(batch))
        return batch

    @property
    def _first(self) -> Batch:
        return self._held[0]

    def _prepare_dummy(self, batch: Batch) -> None:
        # A copy, as users may change what they receive.
        self._dummy = [copy_of(self._settings.make_dummy(batch))]

    def _share_first(self, has: Sequence[bool]) -> None:
        """Give ranks without a single batch one to make dummies of: the first of the lowest rank with one."""
        group = self._group
        empty = [rank for rank, has_one in zip(group.ranks, has, strict=True) if not has_one]
        group.warn_once(
            f"empty {empty}",
            f"{rank_list(empty)} of {group.size} ranks without a single batch in this pass; batches that do "
            "not count stand in",
        )
        source = has.index(True)
        shared = to_device(self._first, torch.device("cpu")) if group.index == source else None
        received = group.send_batch("sending a batch to ranks without one", shared, source)

        def prepare() -> None:
            if not self._has:
                self._prepare_dummy(to_device(received, self._settings.device))

        self._gather("making a batch that stands in", prepare)

    def _tell_surplus(self) -> None:
        """Say which ranks had more batches than others; an error under ``uneven="error"``. Collective."""
        group, uneven = self._group, self._settings.uneven
        if uneven == "stop" and group.was_warned("uneven"):
            return
        mine = (self._taken, self._has, self._batches or 0)
        counts = group.gather("comparing the ends of the data", mine)
        has = [
            f"{max(taken, batches)} batches" if batches > taken or not more else f"more than {taken} batches"
            for taken, more, batches in counts
        ]
        if uneven == "error":
            raise DataError(unequal(has, group))
        group.warn_once("uneven", left_out(self._taken, has, group))

    def _finish(self, epoch: int | None) -> None:
        """Continue with the next epoch where the loader was left before its end, as ranks do that ran out."""
        loader = self._settings.loader
        self.place, self.is_over = None, True
        if not self._has:
            return
        if epoch is None or not has_epochs(loader):
            self.place = Place(state={})
        elif epoch_of(loader) == epoch:
            loader.set_epoch(epoch + 1)

    def _attempt(self, action: Callable[[], Result]) -> Result | None:
        """What an action returns; None, and its error in ``_error``, if it fails."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001  # raised as soon as the other ranks know of it
            self._error = error
            return None

    def _gather(self, doing: str, action: Callable[[], Result]) -> list[Result]:
        """What an action returns on each rank. Collective.

        Raises:
            Exception: What this rank's loader raised, now or before.
            RankFailedError: The loader of another rank failed, or a rank is lost.
        """
        own, group = self._attempt(lambda: [action()]) or [], self._group
        try:
            told = group.gather(doing, (own, None if self._error is None else one_line(self._error)))
        except RankFailedError:
            if self._error is None:
                raise
            raise self._error from None  # another rank is lost as well, but this is what happened here
        failed = {index: error for index, (_, error) in enumerate(told) if error is not None}
        if self._error is not None:
            raise self._error
        if failed:
            texts = "; ".join(f"{group.name(index)} failed: {text}" for index, text in failed.items())
            raise RankFailedError(
                f"loading data: {texts}. Look at the log of that rank.", group.ranks[min(failed)]
            )
        return [result for results, _ in told for result in results]
