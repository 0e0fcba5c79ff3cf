"""What one process of the checkpoint benchmark does: one save, one load, or a few asynchronous saves.

Every measurement has a process of its own, and in it the raw write or read of the same bytes stands beside
the contender; which of the two goes first alternates from round to round.
"""

from __future__ import annotations

import gc
import mmap
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from _checkpoint_contenders import ASYNC, SYNC, write_tensors
from _checkpoint_model import Decoder, build, digest, num_bytes, state_tensors, take_step
from _checkpoint_samples import (
    ASYNC_SAVES,
    BLOCK_FACTOR,
    LABELS,
    AsyncSample,
    Job,
    LoadSample,
    SaveSample,
)
from _timing import (
    PeakMemory,
    Stopwatch,
    files_below,
    fill,
    normalise_pages,
    private_memory,
    resident_bytes,
    sync_tree,
)

WARM_UP_SCALE = 0.0005


def measure_save(job: Job) -> tuple[SaveSample, dict[str, int]]:
    """Save once, and write the same bytes once. The checkpoint stays for :func:`measure_load`.

    Returns:
        The measurements and a digest of what was saved.
    """
    _set_up(job)
    model, optimizer = _trained(job.scale, job.number)
    tensors = state_tensors(model, optimizer)
    contender = SYNC[job.name](model, optimizer, job.checkpoints)
    sample = SaveSample(state_bytes=num_bytes(tensors))
    raw = job.directory / "baseline"

    def save() -> None:
        _normalise(job, sample.state_bytes)
        with PeakMemory() as peak:
            watch = Stopwatch()
            contender.save(1)
            sample.seconds = watch.wall()
            sync_tree(job.checkpoints)
            sample.durable_seconds, sample.cpu_seconds = watch.wall(), watch.cpu()
        sample.peak_extra_bytes = peak.extra_bytes
        sample.disk_bytes = sum(path.stat().st_size for path in files_below(job.checkpoints))

    def write() -> None:
        raw.mkdir()
        _normalise(job, sample.state_bytes)
        watch = Stopwatch()
        write_tensors(raw / "raw", tensors)
        sample.raw_seconds = watch.wall()
        sync_tree(raw)
        sample.raw_durable_seconds = watch.wall()
        shutil.rmtree(raw)

    job.in_order(save, write)
    return sample, digest(model, optimizer)


def measure_load(job: Job, expected: dict[str, int]) -> LoadSample:
    """Load once into a fresh model and optimizer, and read the same files into memory.

    Args:
        job: The one that :func:`measure_save` had.
        expected: The digest of what was saved.

    Raises:
        ValueError: What was loaded is not what was saved.
    """
    _set_up(job)
    model, optimizer = build(job.scale, seed=1_000_000 + job.number)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    contender = SYNC[job.name](model, optimizer, job.checkpoints)
    sample = LoadSample()
    files = files_below(job.checkpoints)

    def load() -> None:
        _warm(files)
        watch = Stopwatch()
        contender.load()
        sample.seconds, sample.cpu_seconds = watch.wall(), watch.cpu()

    def read() -> None:
        total = sum(path.stat().st_size for path in files)
        _warm(files)
        with private_memory(total) as memory:
            sample.raw_fresh_seconds = _read(files, memory)
            sample.raw_touched_seconds = _read(files, memory)
        # The pages that this gave back are the ones that come next: nothing to normalise.
        with private_memory(total) as memory:
            fill(memory, min(weight_bytes, total))
            sample.raw_seconds = _read(files, memory)

    job.in_order(load, read)
    loaded = digest(model, optimizer)
    if loaded != expected:
        differing = sorted(name for name in expected if loaded.get(name) != expected[name])
        raise ValueError(
            f"{LABELS[job.name]} loaded other values than it saved in {len(differing)} of "
            f"{len(expected)} tensors, such as {differing[:3]}. The times of a wrong load mean nothing; mend "
            "the contender"
        )
    return sample


def measure_async(job: Job) -> AsyncSample:
    """Save a few times asynchronously, waiting for each to be committed and deleting it."""
    _set_up(job)
    model, optimizer = _trained(job.scale, job.number)
    tensors = state_tensors(model, optimizer)
    size = num_bytes(tensors)
    contender = ASYNC[job.name](model, optimizer, job.checkpoints)
    sample = AsyncSample(blocking_seconds=[], committed_seconds=[])
    _normalise(job, size)
    sample.cold_copy_seconds, sample.warm_copy_seconds = _copy_twice(list(tensors.values()), size)
    _normalise(job, size)
    before = resident_bytes()
    for step in range(1, ASYNC_SAVES + 1):
        _normalise(job, size)
        with PeakMemory(above=before) as peak:
            watch = Stopwatch()
            contender.save(step)
            sample.blocking_seconds.append(watch.wall())
            contender.wait()
            sync_tree(job.checkpoints)
            sample.committed_seconds.append(watch.wall())
        if peak.extra_bytes is not None:
            sample.peak_extra_bytes = max(sample.peak_extra_bytes or 0, peak.extra_bytes)
        _empty(job.checkpoints)
    contender.close()
    return sample


def _set_up(job: Job) -> None:
    """Fix the threads, and let the contender do once, on a tiny model, whatever only its first save does."""
    gc.freeze()  # What was imported stays; searching all of it for garbage, again and again, takes long.
    torch.set_num_threads(job.threads)
    warm_up = job.directory / "warm-up"
    warm_up.mkdir(parents=True)
    model, optimizer = _trained(WARM_UP_SCALE, seed=0)
    if job.name in SYNC:
        contender = SYNC[job.name](model, optimizer, warm_up)
        contender.save(1)
        contender.load()
    else:
        background = ASYNC[job.name](model, optimizer, warm_up)
        background.save(1)
        background.wait()
        background.close()
    shutil.rmtree(warm_up)
    job.checkpoints.mkdir(exist_ok=True)


def _trained(scale: float, seed: int) -> tuple[Decoder, torch.optim.AdamW]:
    model, optimizer = build(scale, seed)
    take_step(model, optimizer)
    return model, optimizer


def _normalise(job: Job, state_bytes: int) -> None:
    normalise_pages(BLOCK_FACTOR * state_bytes, drop_caches=job.drop_caches)


def _warm(files: Sequence[Path]) -> None:
    """Normalise memory without touching the page cache, then make sure that it holds the files."""
    normalise_pages(BLOCK_FACTOR * sum(path.stat().st_size for path in files), drop_caches=False)
    buffer = memoryview(bytearray(1 << 20))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _read(files: Sequence[Path], memory: mmap.mmap) -> float:
    """Read all files into memory, one after another. Returns seconds."""
    watch = Stopwatch()
    with memoryview(memory) as rest:
        position = 0
        for path in files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(rest[position:]):
                    position += count
    return watch.wall()


def _copy_twice(tensors: Sequence[torch.Tensor], size: int) -> tuple[float, float]:
    """Copy all tensors into one buffer, untouched at first, then again. Returns the seconds of both."""
    buffer = torch.empty(size, dtype=torch.uint8)
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    places = torch.split(buffer, [tensor.nbytes for tensor in flat])
    seconds = []
    for _ in range(2):
        watch = Stopwatch()
        for place, tensor in zip(places, flat, strict=True):
            place.copy_(tensor)
        seconds.append(watch.wall())
    return seconds[0], seconds[1]


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
