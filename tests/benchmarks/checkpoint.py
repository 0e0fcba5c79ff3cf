"""Measure what it costs to save and to load a checkpoint, beside a raw write and read of the same bytes.

Full size is an fp32 model of 410 MB with AdamW state, 1.23 GB in all::

    python tests/benchmarks/checkpoint.py --json checkpoint.json --plot checkpoint.png

``--scale 0.1`` gives a quick look, ``--smoke`` only shows that everything runs. Nothing is asserted about
time. A load that does not give back what was saved is an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _checkpoint_report import Results, method, plot, print_results, write_json
from _checkpoint_samples import (
    ASYNC_LABELS,
    BYTES_PER_PARAMETER,
    FULL_PARAMETERS,
    LABELS,
    MODULES,
    AsyncSample,
    Job,
    LoadSample,
    SaveSample,
)
from _timing import can_drop_caches, machine

if TYPE_CHECKING:
    from collections.abc import Iterator

SMOKE_SCALE = 0.002
DISTRIBUTIONS = {
    "checkpoint_core": "checkpoint-core",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "safetensors": "safetensors",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=options.directory) as folder:
        directory = Path(folder)
        header = _header(options, directory)
        print(_title(header, options), flush=True)
        results = _run(options, directory)
    print_results(results)
    if options.json:
        write_json(options.json, results, header)
    if options.plot:
        plot(options.plot, results, _title(header, options))


def _run(options: argparse.Namespace, directory: Path) -> Results:
    """Measure all contenders once in each round, in an order that moves on by one each round."""
    results = Results.of(options.only)
    began = time.monotonic()
    with _processes(options) as pool:
        for number in range(options.rounds):
            shift = number % len(options.only)
            for name in options.only[shift:] + options.only[:shift]:
                told = _measure(pool, _job(options, directory, name, number), results)
                minutes = (time.monotonic() - began) / 60
                print(f"[{minutes:5.1f} min] round {number + 1}/{options.rounds} {told}", flush=True)
    return results


def _measure(pool: ProcessPoolExecutor, job: Job, results: Results) -> str:
    """Measure one contender once, remove its checkpoint, and return a line for the reader."""
    job.directory.mkdir()
    try:
        if job.name in ASYNC_LABELS:
            background = pool.submit(_measure_async, job).result()
            results.asyncs[job.name].append(background)
            blocked = ", ".join(f"{seconds:.3f}" for seconds in background.blocking_seconds)
            return f"{LABELS[job.name]}: blocks {blocked} s"
        save, digest = pool.submit(_measure_save, job).result()
        load = pool.submit(_measure_load, job, digest).result()
        results.saves[job.name].append(save)
        results.loads[job.name].append(load)
        return (
            f"{LABELS[job.name]}: durable save {save.durable_seconds:.3f} s, raw "
            f"{save.raw_durable_seconds:.3f} s; load {load.seconds:.3f} s, raw {load.raw_seconds:.3f} s"
        )
    finally:
        shutil.rmtree(job.directory)


# A process that measures imports torch; this one does not.
def _measure_save(job: Job) -> tuple[SaveSample, dict[str, int]]:
    from _checkpoint_worker import measure_save

    return measure_save(job)


def _measure_load(job: Job, expected: dict[str, int]) -> LoadSample:
    from _checkpoint_worker import measure_load

    return measure_load(job, expected)


def _measure_async(job: Job) -> AsyncSample:
    from _checkpoint_worker import measure_async

    return measure_async(job)


def _job(options: argparse.Namespace, directory: Path, name: str, number: int) -> Job:
    return Job(
        name=name,
        directory=directory / f"{number}-{name}",
        scale=options.scale,
        number=number,
        threads=options.threads,
        drop_caches=options.drop_caches,
    )


@contextmanager
def _processes(options: argparse.Namespace) -> Iterator[ProcessPoolExecutor]:
    """A fresh process for every task, forked from one that has imported everything and done nothing else."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    context = get_context("forkserver")
    # The first step of an optimizer imports torch._dynamo, which takes seconds.
    context.set_forkserver_preload(["torch", "torch._dynamo", *_modules(options.only)])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        yield pool


def _modules(names: Sequence[str]) -> list[str]:
    return sorted({module for name in names for module in MODULES.get(name, ())})


def _header(options: argparse.Namespace, directory: Path) -> dict[str, object]:
    packages = {module.partition(".")[0] for module in _modules(options.only)}
    imported = [name for package, name in DISTRIBUTIONS.items() if package in packages]
    return {
        "benchmark": "checkpoint",
        "machine": machine(directory, ["torch", *imported]),
        "settings": {
            "scale": options.scale,
            "state_mb": round(options.scale * FULL_PARAMETERS * BYTES_PER_PARAMETER / 1e6, 1),
            "rounds": options.rounds,
            "threads": options.threads,
            "contenders": options.only,
            "drop_caches": options.drop_caches,
        },
        "method": method(drop_caches=options.drop_caches),
    }


def _title(header: dict[str, object], options: argparse.Namespace) -> str:
    state = options.scale * FULL_PARAMETERS * BYTES_PER_PARAMETER / 1e6
    where = header["machine"]
    if not isinstance(where, dict):
        raise TypeError(f"the header's machine is a {type(where).__name__}, not a dictionary")
    return (
        f"{state:.4g} MB of model and AdamW state, rounds {options.rounds}, threads {options.threads}, "
        f"{where['cpu']} x{where['cpu_count']}, {where['file_system']}"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contender")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the model; 1 is 410 MB")
    parser.add_argument("--only", default=",".join(LABELS), help="comma-separated, of: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of torch, within one operation")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny model, one round; no page cache is emptied"
    )
    parser.add_argument(
        "--directory", type=Path, help="on the file system to measure; default: a temporary one"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all samples there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the ratios into this picture")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if options.smoke:
        options.scale, options.rounds = SMOKE_SCALE, 1
    options.drop_caches = can_drop_caches() and not options.smoke
    if unknown := [name for name in options.only if name not in LABELS]:
        parser.error(f"--only {unknown[0]!r} is not a contender; there are {', '.join(LABELS)}")
    if options.rounds < 1 or options.threads < 1 or not 0 < options.scale <= 10:
        parser.error("--rounds and --threads must be 1 or more, --scale above 0 and at most 10")
    _check_installed(parser, options)
    return options


def _check_installed(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in options.only:
        for module in _modules([name]):
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                parser.error(f"contender {name!r} needs {module}; install it, or leave it out with --only")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; install it, or leave the option out")


if __name__ == "__main__":
    main()
