"""Measure what it costs to save a checkpoint to an S3 server and to load it, beside raw transfers and torch.

    python tests/benchmarks/checkpoint_store.py --json checkpoint-store.json

An fp32 model with AdamW state (300 MB by default) goes to a real server on this machine (SeaweedFS): by
checkpoint-core, by torch.distributed.checkpoint over fsspec and s3fs, and the same bytes as one object by
obstore, boto3 and s3fs. Each measurement has a process of its own; contenders take turns. A load that does
not give back what was saved is an error. Nothing is asserted about time. checkpoint-core compares checksums
of all bytes before it loads them, so it reads them twice; the others compare nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tools"))

from _timing import PeakMemory, Stopwatch, machine, print_table
from s3_servers import end, start_weed

LABELS = {
    "checkpoint-core": "checkpoint-core",
    "dcp": "torch DCP over fsspec (s3fs)",
    "obstore": "raw: obstore",
    "boto3": "raw: boto3",
    "s3fs": "raw: s3fs",
}
BUCKET = "tests"
LAYERS = 8
MODULES = {
    "checkpoint-core": ("checkpoint_core.manager", "checkpoint_core.store_saving", "obstore.store"),
    "dcp": ("s3fs", "torch.distributed.checkpoint._fsspec_filesystem"),
    "obstore": ("obstore.store",),
    "boto3": ("boto3",),
    "s3fs": ("s3fs",),
}
"""Imported before anything is timed."""


@dataclass(frozen=True)
class Job:
    """One measurement."""

    name: str
    prefix: str
    megabytes: float
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Sample:
    """What was measured, in seconds and MB above what the process had."""

    save_s: float
    save_mb: float
    blocked_s: float | None
    """How long a save in the background keeps the caller."""
    load_s: float
    load_mb: float


class State:
    """A model and its optimizer."""

    def __init__(self, megabytes: float, *, fill: bool) -> None:
        import torch

        width = int((megabytes * 1e6 / (12 * LAYERS)) ** 0.5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        generator = torch.Generator().manual_seed(1 if fill else 2)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for tensor in self.tensors():
            tensor.detach().uniform_(generator=generator)

    def tensors(self) -> list[Any]:
        """Weights and moments."""
        moments = [
            self.optimizer.state[p][k] for p in self.model.parameters() for k in ("exp_avg", "exp_avg_sq")
        ]
        return [*self.model.parameters(), *moments]

    def sums(self) -> list[int]:
        """Of the bits of each tensor."""
        import torch

        return [int(tensor.detach().view(torch.int32).sum(dtype=torch.int64)) for tensor in self.tensors()]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    with PeakMemory() as memory:
        watch = Stopwatch()
        action()
        seconds = watch.wall()
    return seconds, (memory.extra_bytes or 0) / 1e6


def save(job: Job) -> tuple[float, float, float | None, list[int]]:
    """Save, and save once more in the background."""
    _prepare(job)
    state = State(job.megabytes, fill=True)
    if job.name == "checkpoint-core":
        from checkpoint_core import CheckpointConfig, CheckpointManager

        objects = {"model": state.model, "optimizer": state.optimizer}
        with CheckpointManager(f"s3://{BUCKET}/{job.prefix}", objects) as manager:
            seconds, megabytes = _timed(lambda: manager.save(step=1))
        config = CheckpointConfig(f"s3://{BUCKET}/{job.prefix}-background", async_save=True)
        with CheckpointManager(config, objects) as manager:
            manager.save(step=1)  # the staging buffer is new, which is slow once
            manager.wait()
            blocked, _ = _timed(lambda: manager.save(step=2))
            manager.wait()
        return seconds, megabytes, blocked, state.sums()
    if job.name == "dcp":
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        _one_rank()
        seconds, megabytes = _timed(lambda: dcp.save(_dcp_state(state), storage_writer=_writer(job)))
        dcp.async_save(_dcp_state(state), storage_writer=_writer(job, "-background-1")).result()
        pending: list[Any] = []
        blocked, _ = _timed(
            lambda: pending.append(
                dcp.async_save(_dcp_state(state), storage_writer=_writer(job, "-background-2"))
            )
        )
        pending[0].result()
        dist.destroy_process_group()
        return seconds, megabytes, blocked, state.sums()
    content = os.urandom(1 << 20) * (state.nbytes >> 20)
    upload = {"obstore": _obstore_upload, "boto3": _boto3_upload, "s3fs": _s3fs_upload}[job.name]
    seconds, megabytes = _timed(lambda: upload(job, content))
    return seconds, megabytes, None, [hash(content[:1024])]


def load(job: Job, expected: list[int]) -> tuple[float, float]:
    """Load, and compare."""
    _prepare(job)
    state = State(job.megabytes, fill=False)
    if job.name == "checkpoint-core":
        from checkpoint_core import CheckpointManager

        with CheckpointManager(
            f"s3://{BUCKET}/{job.prefix}", {"model": state.model, "optimizer": state.optimizer}
        ) as manager:
            measured = _timed(manager.load)
        _compare(state.sums(), expected)
        return measured
    if job.name == "dcp":
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
        from torch.distributed.checkpoint.state_dict import set_state_dict

        _one_rank()

        def read() -> None:
            found = _dcp_state(state)
            dcp.load(found, storage_reader=FsspecReader(f"s3://{BUCKET}/{job.prefix}"))
            set_state_dict(
                state.model,
                state.optimizer,
                model_state_dict=found["model"],
                optim_state_dict=found["optimizer"],
            )

        measured = _timed(read)
        _compare(state.sums(), expected)
        dist.destroy_process_group()
        return measured
    read_all = {"obstore": _obstore_read, "boto3": _boto3_read, "s3fs": _s3fs_read}[job.name]
    found: list[Any] = []
    measured = _timed(lambda: found.append(read_all(job)))
    if len(found[0]) != (state.nbytes >> 20) << 20:
        raise RuntimeError(f"{job.name} read {len(found[0])} bytes")
    return measured


def _prepare(job: Job) -> None:
    os.environ.update(job.environment)
    for module in MODULES[job.name]:
        import_module(module)


def _compare(found: list[int], expected: list[int]) -> None:
    if found != expected:
        raise RuntimeError("what was loaded is not what was saved")


def _one_rank() -> None:
    import torch.distributed as dist

    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("cpu:gloo", rank=0, world_size=1, store=store)


def _dcp_state(state: State) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer}


def _writer(job: Job, more: str = "") -> Any:
    # Private, and the way that torch.distributed.checkpoint has to object stores.
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(f"s3://{BUCKET}/{job.prefix}{more}")


def _obstore() -> Any:
    from obstore.store import S3Store

    return S3Store(BUCKET, client_options={"allow_http": True})


def _obstore_upload(job: Job, content: bytes) -> None:
    import obstore

    # As checkpoint-core does: parts of 8 MiB, four at once.
    obstore.put(_obstore(), job.prefix, content, chunk_size=8 << 20, max_concurrency=4)


def _obstore_read(job: Job) -> Any:
    import obstore

    return obstore.get(_obstore(), job.prefix).bytes()


def _boto3_upload(job: Job, content: bytes) -> None:
    import boto3

    boto3.client("s3").upload_fileobj(BytesIO(content), BUCKET, job.prefix)


def _boto3_read(job: Job) -> Any:
    import boto3

    target = BytesIO()
    boto3.client("s3").download_fileobj(BUCKET, job.prefix, target)
    return target.getbuffer()


def _s3fs_upload(job: Job, content: bytes) -> None:
    import s3fs

    with s3fs.S3FileSystem().open(f"{BUCKET}/{job.prefix}", "wb") as file:
        file.write(content)


def _s3fs_read(job: Job) -> Any:
    import s3fs

    return s3fs.S3FileSystem().cat_file(f"{BUCKET}/{job.prefix}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each contender")
    parser.add_argument("--megabytes", type=float, default=300.0, help="of the state, in MB")
    parser.add_argument("--only", default=",".join(LABELS), help="comma-separated, of: %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all samples there")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="checkpoint-store-") as folder:
        server, process = start_weed(Path(folder))
        try:
            samples = _measure(options, names, server.environment())
        finally:
            end(process)
    header = machine(Path.cwd(), ["torch", "obstore", "boto3", "s3fs"])
    _print(options, samples)
    if options.json:
        told = {name: [asdict(one) for one in some] for name, some in samples.items()}
        settings = {"megabytes": options.megabytes, "rounds": options.rounds}
        options.json.write_text(
            json.dumps(
                {"benchmark": "checkpoint_store", "machine": header, "settings": settings, "samples": told},
                indent=1,
            )
        )


def _measure(
    options: argparse.Namespace, names: Sequence[str], environment: Mapping[str, str]
) -> dict[str, list[Sample]]:
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.checkpoint"])
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for number in range(options.rounds):
            shift = number % len(names)
            for name in [*names[shift:], *names[:shift]]:
                job = Job(name, f"{number}/{name}", options.megabytes, environment)
                save_s, save_mb, blocked_s, expected = pool.submit(save, job).result()
                load_s, load_mb = pool.submit(load, job, expected).result()
                samples[name].append(Sample(save_s, save_mb, blocked_s, load_s, load_mb))
                print(
                    f"round {number + 1}: {LABELS[name]}: save {save_s:.2f} s, load {load_s:.2f} s",
                    flush=True,
                )
    return dict(samples)


def _print(options: argparse.Namespace, samples: Mapping[str, Sequence[Sample]]) -> None:
    def middle(name: str, what: str) -> float | None:
        values = [getattr(one, what) for one in samples[name]]
        return None if values[0] is None else statistics.median(values)

    def text(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    base = {what: middle("obstore", what) if "obstore" in samples else None for what in ("save_s", "load_s")}
    rows = [["", "save s", "x raw obstore", "blocks s", "save MB", "load s", "x raw obstore", "load MB"]]
    for name in samples:
        times = {what: middle(name, what) for what in ("save_s", "load_s")}
        ratios = {what: "" if base[what] is None else f"{times[what] / base[what]:.2f}" for what in times}  # type: ignore[operator]
        rows.append(
            [
                LABELS[name],
                text(times["save_s"]),
                ratios["save_s"],
                text(middle(name, "blocked_s"), 3),
                text(middle(name, "save_mb"), 0),
                text(times["load_s"]),
                ratios["load_s"],
                text(middle(name, "load_mb"), 0),
            ]
        )
    print(f"\n{options.megabytes:.0f} MB of state, medians of {options.rounds} rounds")
    print_table(rows)


if __name__ == "__main__":
    main()
