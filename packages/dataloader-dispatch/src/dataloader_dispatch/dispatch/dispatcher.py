"""One rank loads, all ranks receive."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, NamedTuple, SupportsIndex, TypeVar, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from dataloader_dispatch.batches import Uneven
from dataloader_dispatch.connection import BatchCodec, data_errors, run_finalizer
from dataloader_dispatch.dispatch.reader import Position, Reader, Single
from dataloader_dispatch.dispatch.receiver import Inbox, Receiver
from dataloader_dispatch.dispatch.sender import DataDimension, Outbox, Placement
from dataloader_dispatch.dispatch.source import Source
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import length_of
from dist_env import ControlGroup, tie_loader_workers

Batch = TypeVar("Batch")

Role = Source | Receiver | Single
"""One rank's part. Passes are numbered from 1; only the last one gives batches."""

_OPENING = "opening the data loader"
_MOST_SHOWN = 400
"""Characters of a setting that ranks send one another, to compare them and for messages."""
_GRACE_SECONDS = 5.0
"""How much longer the others wait than the first rank, which knows better who is late."""


class DataloaderDispatcher(Generic[Batch]):
    """Batches from the loader of one rank for all ranks of a mesh, on their devices.

    Only the first rank of the mesh iterates its ``loader``: no sharding, and one position to save. Iterating
    is a matter of all ranks: each calls ``iter()`` equally often, and gets a batch in every round:

    * ``dp_mesh_dim`` is a dimension: batch i of a round goes to position i along it, so a round is W
      consecutive batches of the loader, W being the size of the dimension. Ranks that differ only along
      other dimensions get the same batch.
    * ``dp_mesh_dim=None``: every rank gets the same batch.

    Batches are structures of mappings, lists, tuples and named tuples. Their dense tensors, of any type and
    shape, travel in one packed message to each rank and arrive detached; the tensors of one batch may share
    one block of memory, none shares it with another batch. Beside them travel None, bool, int, float,
    complex, str, bytes, NumPy arrays and scalars, sets, and the mappings of tokenizers, without a fast
    tokenizer's own encodings; all of that should be small. The class of a named tuple must be found in a
    module that every rank has imported. Other values are refused by the name of their field. A background
    thread of the first rank loads, packs and sends ahead; every rank of an accelerator receives into
    page-locked memory. The first rank sends to every rank itself.

    An exception of the loader is raised on every rank: one of Python's own as itself, another one on the
    other ranks as the nearest of these that it is derived from, or a RuntimeError, with its text. A rank that
    is lost is named on all others that ask for a batch.

    The state is that of the first rank's loader behind the last batch received, whatever was read ahead, and
    may be loaded into that loader alone; where that loader has `load_resharded`, so has the dispatcher.
    Breaking out of a pass and calling ``iter()`` again does what it does with the loader alone: a torch
    ``DataLoader`` begins anew, a loader with a state of its own continues behind the last batch received.

    Args:
        loader: Batches, with ``batch_size``, and where possible a length, ``state_dict``,
            ``load_state_dict``, ``set_epoch``, ``epoch`` and ``epoch_progress``. Ranks other than the first
            may give None, or anything; it is not iterated.
        mesh: The ranks; None for this process alone, which needs no process group.
        device: Where the tensors go.
        dp_mesh_dim: Index or name of the data-parallel dimension, or a tuple of several, outermost first;
            None for the same batches everywhere.
        uneven: What becomes of a last round that is not complete: "stop" leaves it out, "pad" fills it with
            dummies that no loss counts (`last_is_dummy` tells them), "error" raises.
        prefetch: Rounds to have under way to each rank, each in a buffer of its own there; at least 1.
        timeout_seconds: How long a rank waits for a batch, once it asks for one, before an error names who is
            waited for. Time between batches, such as that of an evaluation, does not count.
        make_dummy: For ``uneven="pad"``: makes a dummy of the last real batch. By default the batch must be a
            mapping with ``labels``: these become -100, floating-point ``weight`` or ``weights`` zero.
        unpickle_batches: Let values of all other types travel as pickles, and unpickle what the first rank
            sends. Then whoever can reach the connections between the ranks can run code in them: only for
            networks that no stranger can reach.

    Attributes:
        loader: The argument ``loader``.

    Raises:
        DataError: A setting is out of range or differs between ranks; the first rank has no loader; there
            are several ranks and no process group.
        TypeError: The first rank's loader is not iterable.
        RankFailedError: A rank did not take part.
    """

    def __init__(
        self,
        loader: Iterable[Batch] | None,
        mesh: DeviceMesh | None,
        device: torch.device | str,
        dp_mesh_dim: DataDimension = 0,
        *,
        uneven: Uneven = "stop",
        prefetch: int = 4,
        timeout_seconds: float = 600.0,
        make_dummy: Callable[[Batch], Batch] | None = None,
        unpickle_batches: bool = False,
    ) -> None:
        self.loader = tie_loader_workers(loader)
        self._uneven = uneven
        place = Placement.of(mesh, dp_mesh_dim)
        self._width = place.width
        with data_errors():
            group = ControlGroup(place.ranks, timeout_seconds, doing=_OPENING)
            group.connect(_OPENING, [0] if group.index else range(group.size))
        self._group = group
        settings = {
            "mesh": place.ranks,
            "dp_mesh_dim": place.shares,
            "uneven": uneven,
            "prefetch": prefetch,
            "timeout_seconds": float(timeout_seconds),
            "unpickle_batches": unpickle_batches,
        }
        try:
            facts, problem = _facts(loader) if group.index == 0 else (None, None)
            problem = _problem(uneven, prefetch, unpickle_batches) or problem
            self._facts = check_same_on_all_ranks(group, settings, facts, problem)
            self._role: Role
            device, codec = torch.device(device), BatchCodec(unpickle_batches)
            if group.index != 0 or loader is None:
                patience = timeout_seconds + min(_GRACE_SECONDS, timeout_seconds / 2)
                inbox = Inbox(group, prefetch, device, patience)
                self._role = Receiver(inbox, device, self._facts.epoch, codec)
            elif group.size == 1:
                self._role = Single(loader, device)
            else:
                reader = Reader(loader, place.width, uneven, make_dummy)
                outbox = Outbox(group, place, prefetch, codec)
                self._role = Source(reader, outbox, group, prefetch, timeout_seconds, place.shares[0], device)
        except BaseException:
            group.close()
            raise
        # At exit too: a thread that outlived the interpreter would run in what is left of it.
        self._finalizer = weakref.finalize(self, _close_unused, self._role, group, os.getpid())

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass. All ranks do so equally often; iterators made before give no more batches.

        Raises:
            RankFailedError: A rank was lost.
            RuntimeError: The dispatcher was closed.
        """
        return _Pass(self, self._role)

    def __len__(self) -> int:
        """Number of rounds in an epoch, on every rank.

        Raises:
            TypeError: The first rank's loader has no length.
        """
        if self._facts.length is None:
            raise TypeError("the loader of the first rank has no length, so neither has its dispatcher.")
        more = self._width - 1 if self._uneven == "pad" else 0
        return (self._facts.length + more) // self._width

    @property
    def batch_size(self) -> int | None:
        """``batch_size`` of the first rank's loader, on every rank; None if it has no whole number."""
        return self._facts.batch_size

    @property
    def dataset(self) -> object:
        """``dataset`` of this rank's loader; None if it has none."""
        return getattr(self.loader, "dataset", None)

    @property
    def has_state(self) -> bool:
        """Whether the first rank's loader has `state_dict` and `load_state_dict`, on every rank."""
        return self._facts.has_state

    @property
    def last_is_dummy(self) -> bool:
        """Whether the last batch of this pass on this rank was a dummy, which ``uneven="pad"`` filled up a
        round with and which counts for nothing. Never for ``dp_mesh_dim=None``."""
        return self._role.is_dummy

    @property
    def epoch(self) -> int:
        """Epoch of the next batch. After `load_state_dict`, other ranks than the first know it from the
        first batch on."""
        return self._role.epoch()

    @property
    def epoch_progress(self) -> float:
        """Share of the epoch that was received, from 0 to 1: the loader's own, or by its length; 0 if it has
        neither."""
        return self._role.progress()

    def set_epoch(self, epoch: int) -> None:
        """Tell the first rank's loader the epoch, or, if it cannot be told, its samplers and its dataset.

        All ranks do so before they call ``iter()``; nothing is exchanged. Iterators made before give no more
        batches.

        Raises:
            DataError: ``epoch`` is negative.
        """
        if epoch < 0:
            raise DataError(f"epoch={epoch} must be 0 or more, because epochs count from 0.")
        self._role.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """The first rank's loader's state behind the last batch received; empty on other ranks.

        Raises:
            TypeError: The loader has no state.
        """
        self._check_state()
        return self._role.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position. Other ranks than the first take anything, but must call it too.

        Iterators made before give no more batches.

        Raises:
            TypeError: The loader has no state.
            DataError: The loader refuses the state.
        """
        self._check_state()
        self._role.move(lambda position: position.load_state_dict(state))

    @property
    def load_resharded(self) -> Callable[..., None]:
        """A function that goes to the position that ranks with data of their own saved together.

        It takes the states of all of them, and ``rank`` and ``world_size``, which do not matter here: the
        first rank's loader reads for all, and gets the states with ``rank=0, world_size=1``. Empty states,
        which other ranks of a dispatcher save, are left out. Other ranks than the first take anything, but
        must call it too. Absent, on every rank, where that loader has no ``load_resharded``.
        """
        if not self._facts.has_resharding:
            raise AttributeError("the loader of the first rank has no load_resharded")
        return self._load_resharded

    def _load_resharded(
        self, states: Sequence[Mapping[str, object]], /, *, rank: int, world_size: int
    ) -> None:
        self._role.move(lambda position: position.load_resharded(states))

    def paused(self) -> AbstractContextManager[object]:
        """A context in which nothing is loaded ahead on this rank; it begins when a batch under way is there.

        For what must not mix its random numbers with those of a loader: threads of a process share torch's
        generator of the CPU.
        """
        return self._role.paused() if isinstance(self._role, Source) else nullcontext()

    def end_workers(self) -> None:
        """Leave the pass, and end the worker processes of the first rank's loader; the position stays.

        All ranks do so; nothing is exchanged. Iterators made before give no more batches. A batch that is
        being loaded is waited for, 5 seconds at most; one that takes longer keeps the workers until the next
        pass or `close`.
        """
        self._role.end_workers()

    def close(self) -> None:
        """End the background thread and the connections of this rank. Happens by itself when Python ends.

        The first rank waits up to 30 seconds for others that are behind, 5 in the middle of a pass.
        """
        if self._finalizer.detach() is not None:
            _close(self._role, self._group)

    def _check_state(self) -> None:
        if not self._facts.has_state:
            raise TypeError(
                "the loader of the first rank has no state_dict and load_state_dict, so that its position "
                "cannot be saved. Make it with build_loader, or give a torchdata StatefulDataLoader."
            )


class _Pass(Iterator[Batch]):
    """One pass over the data of a dispatcher, which it keeps alive."""

    def __init__(self, dispatcher: DataloaderDispatcher[Batch], role: Role) -> None:
        self._dispatcher = dispatcher
        self._role = role
        self._number = role.start_pass()

    def __next__(self) -> Batch:
        batch: Batch = self._role.take(self._number)
        return batch


def _close(role: Role, group: ControlGroup) -> None:
    try:
        role.close()
    finally:
        group.close()


def _close_unused(role: Role, group: ControlGroup, process: int) -> None:
    """Close what the garbage collector found, or what is left when Python ends.

    Ranks collect garbage at different moments. The first rank waits for the others in closing, while they may
    wait for this very thread in a collective: so a collected dispatcher closes in a thread of its own, which
    Python joins before it ends. When it is ending, nothing would join the thread, and closing is done here.
    """
    # A worker process, a copy of this one, may collect it too: its connections are not its own.
    if os.getpid() == process:
        run_finalizer(partial(_close, role, group), wait=not threading.main_thread().is_alive())


def _facts(loader: object) -> tuple[Facts | None, Exception | None]:
    if loader is None:
        return None, DataError("loader=None on the first rank of the mesh, which loads. Give it one there.")
    if not isinstance(loader, Iterable):
        return None, TypeError(f"loader is a {type(loader).__name__}, which cannot be iterated.")
    position = Position(loader)
    size = getattr(loader, "batch_size", None)
    batch_size = int(size) if isinstance(size, SupportsIndex) else None
    has_state, has_resharding = position.has_state, position.has_resharding
    return Facts(length_of(loader), batch_size, has_state, has_resharding, position.epoch), None


def _problem(uneven: object, prefetch: object, unpickle: object) -> Exception | None:
    if uneven not in get_args(Uneven):
        choices = ", ".join(map(repr, get_args(Uneven)))
        return DataError(f"uneven={uneven!r} is not one of {choices}.")
    if type(unpickle) is not bool:
        return DataError(f"unpickle_batches={unpickle!r} must be True or False.")
    if type(prefetch) is not int or prefetch < 1:
        return DataError(f"prefetch={prefetch!r} must be an integer of at least 1.")
    return None


class Facts(NamedTuple):
    """What the root knows about its loader.

    Attributes:
        length: Number of batches; None if the loader has no length.
        batch_size: Its ``batch_size``; None if it has none.
        has_state: Whether it can be saved.
        has_resharding: Whether it takes states of another number of ranks.
        epoch: Epoch of its next batch.
    """

    length: int | None
    batch_size: int | None
    has_state: bool
    has_resharding: bool
    epoch: int


def _shown(value: object) -> str:
    """A value as text; of a long one its beginning, and what tells it from others."""
    text = repr(value)
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def check_same_on_all_ranks(
    group: ControlGroup, settings: Mapping[str, object], facts: Facts | None, problem: Exception | None
) -> Facts:
    """Compare the arguments of all ranks. Collective.

    Args:
        group: The ranks.
        settings: What must be the same everywhere.
        facts: Those of the root; None on other ranks.
        problem: What is wrong with this rank's arguments; None if nothing is.

    Returns:
        What the root knows.

    Raises:
        DataError: A setting differs, or is wrong on some rank.
        TypeError: An argument of some rank has the wrong type.
        RankFailedError: A rank is lost.
    """
    text = None if problem is None else str(problem)
    shown = {name: _shown(value) for name, value in settings.items()}
    told = group.gather(_OPENING, (shown, facts, text, isinstance(problem, TypeError)))
    for index, (_, _, text, is_type) in enumerate(told):
        if text is not None:
            if problem is not None and index == group.index:
                raise problem
            raise (TypeError if is_type else DataError)(f"on {group.name(index)}: {text}")
    first, root, _, _ = told[0]
    for name, value in first.items():
        for index, (own, _, _, _) in enumerate(told):
            if own[name] != value:
                raise DataError(
                    f"{name} must be the same on every rank, but it is {value} on {group.name(0)} and "
                    f"{own[name]} on {group.name(index)}."
                )
    if root is None:
        raise DataError(f"{group.name(0)} says nothing about its loader. Do all ranks run the same release?")
    return root
