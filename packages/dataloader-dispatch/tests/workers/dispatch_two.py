"""Two ranks: what arrives, in which order, and what becomes of positions, ends and errors."""

from __future__ import annotations

import gc
import multiprocessing
import random
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
from dispatch_loaders import (
    RANK,
    Labelled,
    Numbers,
    Opaque,
    marked_passes,
    mixed_batches,
    opaque_batches,
    open_group,
    same,
    tell,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch import build_loader, end_workers
from dataloader_dispatch.dispatch import source
from dataloader_dispatch.dispatch.dispatcher import DataloaderDispatcher
from dataloader_dispatch.dispatch.receiver import Receiver

open_group()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
notes: dict[str, Any] = {}


def dispatcher(loader: Any, **options: Any) -> DataloaderDispatcher[Any]:
    return DataloaderDispatcher(loader if RANK == 0 else None, mesh, "cpu", timeout_seconds=60, **options)


def numbers(batches: Any) -> list[int]:
    return [int(batch["x"]) for batch in batches]


class List:
    """A loader without state, of batches or of what makes them."""

    def __init__(self, batches: list[Any] | Callable[[], Iterator[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self.batches() if callable(self.batches) else iter(self.batches)


def contents() -> object:
    """Every kind of batch, three times over, with the memory of each kept until all have come."""
    every, opaque = mixed_batches(), opaque_batches()
    wrong = []
    for dim, unpickle in ((0, False), (None, True)):
        every += opaque * unpickle
        loader = dispatcher(List(every * 3), dp_mesh_dim=dim, prefetch=2, unpickle_batches=unpickle)
        expected = (every * 3)[RANK::2] if dim == 0 else every * 3
        received = list(loader)
        wrong += [i for i, pair in enumerate(zip(expected, received, strict=True)) if not same(*pair)]
        loader.close()
    return wrong


def texts() -> object:
    """Long texts, which lie beside the tensors: less than a first receive takes, and with these more."""
    wrong = []
    for length in (500_000, 850_000, 1_500_000):
        value = {"text": ["a" * (length // 4)] * 4, "x": torch.arange(30_000)}
        loader = dispatcher(List([value] * 8), prefetch=2)
        wrong += [length for batch in loader if not same(value, batch)]
        loader.close()
    return wrong


def independent() -> object:
    """Changing a batch changes no other, and what autograd saved of one tensor is not upset by another."""
    values = [{"x": torch.ones(3), "y": torch.ones(3), "list": [1], "set": {1}} for _ in range(8)]
    loader = dispatcher(List(values), prefetch=1)
    good = []
    for batch in loader:
        good.append(batch["list"] == [1] and batch["set"] == {1} and float(batch["x"].sum()) == 3)
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * batch["x"]).sum()
        batch["y"].fill_(7)
        batch["list"].append(2)
        batch["set"].add(2)
        loss.backward()
        good.append(float(weight.grad.sum()) == 3)
    loader.close()
    return all(good) and len(good) == 8


def order() -> object:
    loader = dispatcher(Numbers(6))
    first = [len(loader), loader.batch_size, loader.epoch, numbers(loader), loader.epoch]
    loader.set_epoch(5)
    second = [loader.epoch, numbers(loader), loader.epoch]
    loader.close()
    return [first, second]


def breaking() -> object:
    """Whatever is read ahead when a pass is given up comes again, in its order, and nothing stale comes."""
    loader = dispatcher(Numbers(40))
    dice, seen, progress = random.Random(7), [], []
    for _ in range(30):
        passes = iter(loader)
        taken = [int(batch["x"]) for batch in islice(passes, dice.randrange(8))]
        seen += taken
        progress.append(round(loader.epoch_progress, 3))
    expected = [e * 1000 + i for e in range(20) for i in range(RANK, 40, 2)]
    stale = iter(loader)
    iter(loader)
    try:
        next(stale)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    loader.close()
    return [seen == expected[: len(seen)], len(seen) > 60, progress, refused]


def together() -> object:
    """What a quick loader gives travels many rounds at a time; each keeps its place, and its own memory."""
    inner = Numbers(1200)
    loader = dispatcher(inner)
    passes, wrong, storages = iter(loader), [], set()
    for step in range(500):
        batch = next(passes)
        state = {"epoch": 0, "position": 2 * step + 2} if RANK == 0 else {}
        right = int(batch["x"]) == 2 * step + RANK and loader.epoch_progress == (2 * step + 2) / 1200
        if not right or loader.state_dict() != state:
            wrong.append(step)
        storages.add(batch["x"].untyped_storage().nbytes())
    rest = numbers(loader)
    loader.close()
    shapes = [torch.full((number // 90 + 1,), number) for number in range(400)]
    varied = dispatcher(List(shapes), dp_mesh_dim=None)
    received = list(varied)
    varied.close()
    same_shapes = all(map(torch.equal, received, shapes)) and len(received) == 400
    return [wrong, max(storages), rest == list(range(1000 + RANK, 1200, 2)), same_shapes, _held_up()]


def _held_up() -> int:
    """Messages for 200 rounds of a quick loader that is held up now and then, as a busy host does it."""
    source._QUICK_SECONDS = 0.05

    def batches() -> Iterator[torch.Tensor]:
        for number in range(200):
            if number % 40 == 39:
                time.sleep(0.2)
            yield torch.zeros(1)

    loader = dispatcher(List(batches), dp_mesh_dim=None)
    assert len(list(loader)) == 200
    messages = loader._role._inbox._sequence if isinstance(loader._role, Receiver) else 0
    loader.close()
    return int(messages)


def position() -> object:
    """The state counts what was received; others may load it; the epoch is set on all ranks."""
    inner = Numbers(20)
    loader = dispatcher(inner, prefetch=3)
    passes = iter(loader)
    for _ in range(2):
        next(passes)
    state = loader.state_dict()
    rest = numbers(passes)
    loader.load_state_dict(state)
    after_load = loader.state_dict()
    again = numbers(loader)
    end = loader.state_dict()
    loader.set_epoch(4)
    at_four = loader.state_dict()
    passes = iter(loader)
    next(passes)
    loader.set_epoch(
        4
    )  # it is in this epoch already: the loader keeps its place, without what was read ahead
    kept = loader.state_dict()
    following = numbers(loader)
    loader.close()
    return [state, rest == again, len(rest), after_load, end, at_four, kept, following[0], inner.made >= 20]


def torch_loaders() -> object:
    """A DataLoader begins each pass anew, in the caller's epoch; a loaded position counts once."""
    loader = dispatcher(build_loader([{"x": i} for i in range(12)], 1), prefetch=8)
    passes = iter(loader)
    first = [int(next(passes)["x"]) for _ in range(2)]
    state, epoch = loader.state_dict(), loader.epoch
    anew = numbers(loader)
    loader.load_state_dict(state)
    resumed = numbers(loader)
    loader.close()
    return [first, state.get("position"), epoch, anew, resumed, loader.epoch]


def random_numbers() -> object:
    """Rank 0 draws where a pass begins what a process alone draws for it, and its thread nothing."""

    def build(kind: str) -> Any:
        data: Any = range(12)
        if kind == "shuffled":
            return DataLoader(data, 1, shuffle=True)
        weighted = kind == "weighted"
        sampler = WeightedRandomSampler([1.0] * 12, 12) if weighted else SubsetRandomSampler(data)
        return DataLoader(data, 1, sampler=sampler)

    told = []
    for kind in ("shuffled", "subset", "weighted"):
        loader = dispatcher(build(kind))
        passes, as_alone, drawn = [], [], []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            batches = iter(loader)
            begun = torch.get_rng_state()
            passes.append([int(batch) for batch in batches])
            torch.manual_seed(seed)
            if RANK == 0:
                as_alone.append(passes[-1] == [int(batch) for batch in build(kind)][::2])
            drawn.append(torch.equal(begun, torch.get_rng_state()))
        loader.close()
        told.append([passes[0] == passes[1], passes[0] != passes[2], drawn, all(as_alone)])
    return told


class Told:
    """Rows that remember which epochs they were told of."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": 100 * self.epochs[-1] + index}

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def epochs_told() -> object:
    """The dataset behind a loader learns each epoch once, also when passes break off that were read ahead."""
    data = Told()
    loader = dispatcher(build_loader(data, 1), prefetch=8)
    seen = []
    for epoch, most in ((0, 2), (0, 3), (1, 1), (3, 3)):
        loader.set_epoch(epoch)
        seen.append([int(batch["x"]) for batch in islice(iter(loader), most)])
    loader.close()
    return [data.epochs, seen]


def ended_workers() -> object:
    """Loaders with workers whose pass is left in its middle while they are read ahead, and then continues."""
    kinds: dict[str, Callable[[], Any]] = {
        "torch": lambda: DataLoader(range(40), 1, num_workers=1),  # type: ignore[arg-type]
        "torchdata": lambda: StatefulDataLoader(range(40), 1, num_workers=1),
        "ours": lambda: build_loader(range(40), 1, num_workers=1, persistent_workers=True),  # type: ignore[type-var]
    }
    results = {}
    for name, make in kinds.items():
        loader = dispatcher(make(), prefetch=1)
        batches = iter(loader)
        first = [int(next(batches)) for _ in range(2)]
        end_workers(loader, batches)
        left, refused = len(multiprocessing.active_children()), caught(lambda b=batches: next(b))[1]
        results[name] = [first, left, refused, [int(batch) for batch in islice(loader, 2)]]
        end_workers(loader)
        loader.close()
        end_workers(loader)  # also where the dispatch is over
    return results


def lengths(uneven: str, length: int) -> list[Any]:
    loader = dispatcher(build_loader([{"labels": i, "w": 1.0} for i in range(length)], 1), uneven=uneven)
    received: list[Any] = [len(loader)]
    try:
        received += [batch["labels"].tolist() for batch in loader]
    except ValueError as error:
        received += [type(error).__name__, str(error), error.__notes__[0]]
    loader.close()
    return received


def uneven() -> object:
    cases = [
        ("stop", 5),
        ("stop", 4),
        ("stop", 1),
        ("stop", 2),
        ("pad", 5),
        ("pad", 4),
        ("pad", 1),
        ("error", 4),
    ]
    results = [lengths(*case) for case in cases]
    results.append(lengths("error", 5))
    custom = dispatcher(List([torch.ones(2)] * 3), uneven="pad", make_dummy=lambda batch: batch * 0)
    results.append([batch.tolist() for batch in custom])
    custom.close()
    unmasked = dispatcher(List([torch.ones(2)] * 3), uneven="pad")
    results.append(caught(lambda: list(unmasked)))
    unmasked.close()
    return results


def dummies() -> object:
    """Which batches are told to be dummies, also among many that travel together."""
    results: list[Any] = []
    cases = (("pad", 5, 0), ("pad", 1, 0), ("pad", 0, 0), ("stop", 0, 0), ("error", 0, 0), ("pad", 3, None))
    for uneven, length, dim in cases:
        loader = dispatcher(Labelled(length), uneven=uneven, dp_mesh_dim=dim)
        results.append(marked_passes(loader))
        loader.close()
    many = dispatcher(Labelled(1001), uneven="pad")
    results.append([many.last_is_dummy for _ in many])
    many.close()
    return results


class TwoArgumentsError(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")


class LockedError(RuntimeError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NoNumberError(ValueError):
    """Derived from one of Python's own."""


class Failing:
    batch_size = 4

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(20):
            if number == 11 and self.error is not None:
                error, self.error = self.error, None
                raise error
            yield {"x": torch.tensor([number])}


def caught(act: Callable[[], object]) -> list[Any]:
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - SystemExit is one of the errors to cross ranks
        trace = "".join(traceback.format_exception(error))
        return [type(error).__name__, str(error), getattr(error, "__notes__", []), "in __iter__" in trace]
    return ["nothing was raised"]


def in_step() -> object:
    """Ranks that wait for each other in every step, over batches that load quickly and are never alike."""
    ragged = [{"x": torch.full((1, 3 + number % 12), number)} for number in range(54)]
    loader = dispatcher(List(ragged), dp_mesh_dim="dp", uneven="pad", make_dummy=lambda batch: batch)
    steps = 0
    for _ in range(40):
        for _ in loader:
            torch.distributed.all_reduce(torch.ones(1))
            steps += 1
    loader.close()
    return steps


def collected() -> object:
    """A rank whose garbage is collected waits for no other, and what it has sent still arrives."""
    store = torch.distributed.group.WORLD.get_group_store()
    loader = dispatcher(Numbers(20), prefetch=12)
    passes = iter(loader)
    received = [int(next(passes)["x"])]
    if RANK == 0:
        received += numbers(passes)
        ended = weakref.ref(loader)
        del loader, passes
        gc.collect()
        store.set("rank 0 has collected its dispatcher", str(ended() is None))
    else:
        # Less than the first rank waits for others in closing.
        store.wait(["rank 0 has collected its dispatcher"], timedelta(seconds=15))
        received += numbers(passes)
        loader.close()
    return [store.get("rank 0 has collected its dispatcher").decode(), received]


def errors() -> object:
    """Errors of the loader come to every rank; the dispatcher continues working."""
    results = []
    known = [KeyError("known"), OSError(2, "No such file", "a.bin"), SystemExit(5)]
    for error in (*known, TwoArgumentsError(3, "why"), LockedError("locked"), NoNumberError("ten")):
        loader = dispatcher(Failing(error))
        taken: list[int] = []
        results.append(caught(lambda loader=loader, taken=taken: taken.extend(int(b["x"]) for b in loader)))
        results[-1].append(taken)
        results[-1].append(len(numbers(loader)))
        loader.close()
    results.append(refused({"x": threading.Lock()}))
    results.append(refused({"x": threading.Lock()}, unpickle_batches=True))
    results.append(refused([{"image": Opaque(1)}]))
    return results


def unsendable() -> object:
    """A tensor that no memory holds: nobody gets a part of its round, and what follows is not torn."""
    huge = torch.ones(1).expand(2**44)
    values = [torch.full((300,), number) for number in range(5)]
    inner = List([*values[:3], huge, *values[4:]])
    loader = dispatcher(inner, dp_mesh_dim=None)
    first: list[int] = []
    error = caught(lambda: first.extend(int(batch.sum()) for batch in loader))[0]
    inner.batches[3] = values[3]
    again = [int(batch.sum()) for batch in loader]
    loader.close()
    return [first, error, again]


def refused(batch: object, **options: Any) -> list[Any]:
    loader = dispatcher(List([batch] * 4), **options)
    result = caught(lambda: list(loader))
    loader.close()
    return result


def refusals() -> object:
    """Wrong or differing arguments are named on every rank."""
    results = [
        caught(lambda: DataloaderDispatcher(Numbers(4), mesh, "cpu", prefetch=2 + RANK)),
        caught(lambda: DataloaderDispatcher(Numbers(4), mesh, "cpu", uneven="pad" if RANK else "drop")),
        caught(lambda: DataloaderDispatcher(Numbers(4), mesh, "cpu", prefetch=0)),
        caught(lambda: DataloaderDispatcher(None, mesh, "cpu")),
        caught(lambda: DataloaderDispatcher(5, mesh, "cpu")),
        caught(lambda: DataloaderDispatcher(Numbers(4), mesh, "cpu", dp_mesh_dim="tp")),
        caught(lambda: DataloaderDispatcher(Numbers(4), mesh, "cpu", dp_mesh_dim=1)),
        caught(lambda: DataloaderDispatcher(Numbers(4), mesh, "cpu", timeout_seconds=0)),
        caught(lambda: DataloaderDispatcher(Numbers(4), mesh, "cpu", unpickle_batches=RANK == 0)),
    ]
    plain = dispatcher(List([1, 2]))
    results += [caught(lambda: len(plain)), caught(plain.state_dict), caught(lambda: plain.set_epoch(-1))]
    plain.close()
    results += [caught(lambda: iter(plain)), caught(lambda: plain.set_epoch(1))]
    return [result[:2] for result in results]


class Large:
    """Something that counts how often the main thread copies it."""

    copies = 0

    def __deepcopy__(self, memo: object) -> Large:
        Large.copies += threading.current_thread() is threading.main_thread()
        return Large()


class LargeState(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "large": Large()}


def copies() -> object:
    """How often the state is copied for the epoch, and for the state itself, which is one of its own."""
    loader = dispatcher(LargeState(20))
    next(iter(loader))
    before = Large.copies
    epochs = {loader.epoch for _ in range(5)} | {int(loader.epoch_progress)}
    for_epoch = Large.copies - before
    mine = loader.state_dict()
    mine["position"] = -1
    position = loader.state_dict().get("position")
    loader.close()
    return [sorted(epochs), for_epoch, Large.copies - before, position]


for check in sys.argv[1].split(","):
    notes[check] = globals()[check]()
# Neither closed nor read to its end, as many programs leave it.
left = dispatcher(Numbers(1000))
next(iter(left))
tell(notes)
