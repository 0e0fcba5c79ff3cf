"""The dispatcher of one rank, and the parts that need no second one."""

from __future__ import annotations

import os
import threading
from collections import UserDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dataloader_dispatch import DataError, build_loader
from dataloader_dispatch.batches import Slot, masked_dummy, put_together
from dataloader_dispatch.connection import (
    ALIGNMENT,
    BatchCodec,
    Layout,
    decode_error,
    encode_error,
    spec_of,
    wait_for_finalizers,
)
from dataloader_dispatch.dispatch.dispatcher import DataloaderDispatcher
from dataloader_dispatch.dispatch.reader import Reader
from dist_env import RankFailedError, RankTimeoutError

Point = namedtuple("Point", "x y")


def alone(loader: Any, **options: Any) -> DataloaderDispatcher[Any]:
    return DataloaderDispatcher(loader, None, "cpu", **options)


def test_one_rank_needs_neither_group_nor_thread() -> None:
    threads = threading.active_count()
    loader = alone(build_loader([{"x": i} for i in range(5)], 2))
    assert [batch["x"].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert (len(loader), loader.batch_size, loader.epoch) == (3, 2, 1)
    assert loader.last_is_dummy is False
    assert loader.dataset is loader.loader.dataset
    assert threading.active_count() == threads


def test_one_rank_resumes_and_refuses_outdated_iterators() -> None:
    loader = alone(build_loader(list(range(10)), 2, shuffle=True))
    passes = iter(loader)
    next(passes)
    assert loader.epoch_progress == pytest.approx(0.2)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in passes]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest
    old = iter(loader)
    loader.set_epoch(3)
    assert loader.epoch == 3
    with pytest.raises(RuntimeError, match="set_epoch"):
        next(old)
    loader.close()


def test_a_forked_process_that_collects_a_dispatcher_closes_nothing() -> None:
    loader = alone([1, 2])
    batches = iter(loader)
    assert next(batches) == 1
    child = os.fork()
    if child == 0:
        code = 1
        try:
            loader._finalizer()
            wait_for_finalizers()
            code = 0 if next(batches) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


COLLECTED_WHILE_A_THREAD_STARTS = """
import threading
from dataloader_dispatch import DataloaderDispatcher
from dataloader_dispatch.connection import run_finalizer

# What a thread that starts, or its parent, holds for a moment, in which the garbage collector may strike.
names = ("_shutdown_locks_lock", "_active_limbo_lock")
locks = [getattr(threading, name) for name in names if hasattr(threading, name)]
assert locks
for lock in locks:
    lock.acquire()
run_finalizer(lambda: print("closed", flush=True), wait=False)
for lock in locks:
    lock.release()
"""


def run(launch: Callable[..., list[Any]], folder: Path, code: str) -> Any:
    """A process that runs some code, to its end."""
    script = folder / "script.py"
    script.write_text(code)
    return launch(str(script), 1)[0]


def test_collecting_a_dispatcher_while_a_thread_starts_does_not_wait_for_that_thread(
    launch: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """And what it has begun to close is closed before Python ends."""
    done = run(launch, tmp_path, COLLECTED_WHILE_A_THREAD_STARTS)
    assert (done.code, done.out) == (0, "closed\n"), done.err


HELD_BY_WHAT_CLOSES = """
import time
from dataloader_dispatch.connection import run_finalizer

class Connections:
    def close(self):
        print("closed", flush=True)

    def __del__(self):
        time.sleep(0.5)
        print("gone", flush=True)

run_finalizer(Connections().close, wait=False)
"""


def test_what_a_collected_dispatcher_held_is_gone_before_python_ends(
    launch: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Connections that go in a thread of their own while Python ends abort the process."""
    done = run(launch, tmp_path, HELD_BY_WHAT_CLOSES)
    assert (done.code, done.out) == (0, "closed\ngone\n"), done.err


def test_set_epoch_reaches_the_sampler_of_a_plain_loader() -> None:
    data = list(range(8))
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    loader = alone(DataLoader(data, batch_size=8, sampler=sampler))  # type: ignore[arg-type]
    loader.set_epoch(7)
    assert sampler.epoch == 7
    with pytest.raises(TypeError, match="build_loader"):
        loader.state_dict()
    with pytest.raises(DataError, match="epoch=-2"):
        loader.set_epoch(-2)


@pytest.mark.parametrize(
    ("loader", "options", "error", "text"),
    [
        ([1], {"uneven": "keep"}, DataError, "uneven='keep'.*'stop', 'pad', 'error'"),
        ([1], {"prefetch": True}, DataError, "prefetch=True"),
        ([1], {"timeout_seconds": -1}, DataError, "timeout_seconds=-1"),
        (None, {}, DataError, "loader=None"),
        (7, {}, TypeError, "cannot be iterated"),
    ],
)
def test_bad_arguments(loader: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        alone(loader, **options)


def test_batches_move_to_the_device_detached_with_their_types_kept() -> None:
    batch = UserDict(
        p=Point(torch.ones(2, requires_grad=True), "text"), q=[torch.nn.Parameter(torch.ones(1))]
    )
    (received,) = DataloaderDispatcher([batch], None, "meta")
    assert isinstance(received, UserDict)
    assert received["p"].x.device.type == received["q"][0].device.type == "meta"
    assert received["p"].y == "text"
    assert not received["p"].x.requires_grad
    assert not received["q"][0].requires_grad
    assert batch["p"].x.requires_grad


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex128]
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6), st.integers(0, 3))
def test_layout_keeps_values_and_alignment(specs: list[Any], blocks: int) -> None:
    tensors = [(torch.rand(shape) * 3).to(dtype) for dtype, shape in specs]
    layout = Layout(spec_of(tensors))
    start = blocks * ALIGNMENT
    buffer = torch.empty(start + layout.num_bytes, dtype=torch.uint8)
    places = layout.tensors_in(buffer, start)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    for again, tensor in zip(layout.tensors_in(buffer, start), tensors, strict=True):
        assert again.dtype == tensor.dtype
        assert torch.equal(again, tensor)
        assert again.is_contiguous()
        assert (again.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0 or again.numel() == 0


LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.integers(0, 9).map(torch.tensor))
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Point, inner, inner),
    ),
    max_leaves=8,
)


@given(BATCHES)
def test_taking_apart_and_putting_together(batch: Any) -> None:
    codec, tensors = BatchCodec(), []
    skeleton = codec.decode(codec.encode(batch, tensors), [Slot(number) for number in range(len(tensors))])
    assert repr(put_together(skeleton, tensors)) == repr(batch)
    assert "tensor" not in repr(skeleton)


def test_errors_cross_ranks() -> None:
    failed = decode_error(encode_error(RankFailedError("gone", 3), "rank 0"))
    assert (type(failed), str(failed), failed.rank) == (RankFailedError, "gone", 3)  # type: ignore[attr-defined]
    late = decode_error(encode_error(RankTimeoutError("late", {2: "host"}), "rank 0"))
    assert (type(late), late.missing) == (RankTimeoutError, {2: "host"})  # type: ignore[attr-defined]
    noted = ValueError("wrong")
    noted.add_note("a hint of the loader")
    again = decode_error(encode_error(noted, "rank 0 (host)"))
    assert (type(again), str(again)) == (ValueError, "wrong")
    assert again.__notes__[:2] == ["a hint of the loader", "Raised by the data loader of rank 0 (host)"]


def test_a_reader_stops_reading_as_soon_as_its_pass_is_over() -> None:
    reader = Reader(range(100), 4, "stop", None)
    asked = iter([True, True, False])
    assert reader.read(1, lambda: next(asked)) is None
    read = reader.read(2, lambda: True)
    assert read is not None
    assert read.batches == [0, 1, 2, 3]
    assert reader.snapshot(2).progress == 0.0
    reader.consumed(read)
    assert reader.snapshot(2).progress == pytest.approx(0.04)


def test_a_masked_dummy_counts_for_nothing_and_shares_nothing() -> None:
    batch = {
        "input_ids": torch.arange(6).view(2, 3),
        "labels": torch.arange(6).view(2, 3),
        "weight": torch.ones(2),
        "nested": {"weights": torch.ones(2, dtype=torch.float16), "labels": [torch.ones(2).long()]},
        "weights": torch.ones(2, dtype=torch.int64),
        "names": ["a", "b"],
        "point": Point(torch.ones(1, requires_grad=True), 3),
    }
    dummy = masked_dummy(batch)
    assert dummy["labels"].tolist() == [[-100] * 3] * 2
    assert dummy["weight"].tolist() == dummy["nested"]["weights"].tolist() == [0.0, 0.0]
    assert dummy["nested"]["labels"][0].tolist() == [-100, -100]
    assert dummy["weights"].tolist() == [1, 1]
    assert torch.equal(dummy["input_ids"], batch["input_ids"])
    assert dummy["input_ids"].data_ptr() != batch["input_ids"].data_ptr()
    assert isinstance(dummy["point"], Point)
    assert not dummy["point"].x.requires_grad
    dummy["names"].append("c")
    assert batch["names"] == ["a", "b"]
    logits = torch.randn(6, 10, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, dummy["labels"].view(-1), reduction="sum")
    assert loss.item() == 0
    assert masked_dummy({"labels": torch.ones(2)})["labels"].isnan().all()
    kept = masked_dummy(UserDict(labels=torch.ones(2).long()))
    assert isinstance(kept, UserDict)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([torch.ones(2)], "type list, which is not a mapping"),
        ({"x": torch.ones(2)}, r"keys \['x'\], without 'labels'"),
        ({"labels": torch.ones(2, dtype=torch.bool)}, "torch.bool, which cannot hold -100"),
        ({"labels": torch.ones(2, dtype=torch.uint8)}, "torch.uint8"),
        ({"labels": "positive"}, "type str, which is not a tensor"),
    ],
)
def test_batches_that_cannot_be_masked(batch: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        masked_dummy(batch)
