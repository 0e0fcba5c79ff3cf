"""Measure what people wait for before the first step: imports, the command, a resume, and compilation.

    python tests/benchmarks/start.py --json start.json

Every sample is a fresh process; the ways take turns, and medians are shown. Times are wall seconds from the
start of the process, and seconds of its processor time with that of its children, which a busy machine
disturbs less. ``--quick`` only shows that everything runs. Nothing is asserted about time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _timing import machine, print_table

DISTRIBUTIONS = ("torch", "accelerate", "transformers", "lightning")
PACKAGES = (
    "hardware_table",
    "dist_env",
    "perf_metrics",
    "checkpoint_core",
    "dataloader_dispatch",
    "model_parallel",
    "trainer_core",
    "trainer_ddp",
    "trainer_fsdp2",
    "trainer_pipeline",
    "llama_pretrain",
)
WORKER = Path(__file__).parent / "_start_worker.py"
WAYS = {
    "plain": "plain loop",
    "ours": "trainer-core",
    "accelerate": "Accelerate",
    "hf_trainer": "Hugging Face Trainer",
    "lightning": "Lightning",
}
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "llama-pretrain train": (),
    "llama-pretrain train --mesh dp=2": ("--mesh", "dp=2"),
}
SHORT = ("--eval-strategy", "no", "--held-out", "0", "--sample-tokens", "0", "--logging-steps", "1")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Sample:
    """Seconds until the first step had ended, of wall and of processor time."""

    wall: float
    cpu: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    rounds = 1 if options.quick else options.rounds
    parts = {"imports": _imports, "first_step": _first_step, "commands": _commands, "compiled": _compiled}
    results: dict[str, Any] = {"benchmark": "start", "machine": machine(Path.cwd(), DISTRIBUTIONS)}
    with tempfile.TemporaryDirectory(prefix="start-benchmark-") as folder:
        for name in options.only:
            # Compilation takes a minute a sample.
            results[name] = parts[name](min(rounds, 3) if name == "compiled" else rounds, Path(folder))
    results["load_average_at_the_end"] = os.getloadavg()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _imports(rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of processor time that a package, and all of its public names, take over `import torch`."""
    programs = {"torch": "import torch"}
    for package in PACKAGES:
        programs[package] = f"import {package}"
        programs[f"{package} *"] = f"import torch\nfrom {package} import *"
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, program in programs.items():
            before = _of_children()
            subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True)
            if number:  # the first reads files that are not in memory yet
                samples[name].append(_of_children() - before)
    torch = statistics.median(samples["torch"])
    shown = {
        package: {
            "alone": statistics.median(samples[package]),
            "all_names_over_torch": statistics.median(
                each - base for each, base in zip(samples[f"{package} *"], samples["torch"], strict=True)
            ),
        }
        for package in PACKAGES
    }
    print(f"\nImports, seconds of processor time; import torch: {torch:.2f}\n")
    cells = [
        [name, f"{each['alone']:.2f}", f"{each['all_names_over_torch']:+.2f}"] for name, each in shown.items()
    ]
    print_table([["package", "import", "all names, over torch"], *cells])
    return {"torch": torch, "packages": shown, "samples": samples}


def _first_step(rounds: int, folder: Path) -> dict[str, Any]:
    """A script of each way, from its start to its first step, and to the first after a resume."""
    samples: dict[str, list[Sample]] = {f"{way}{end}": [] for way in WAYS for end in ("", " resumed")}
    for number in range(rounds + 1):
        for way in WAYS:
            place = _empty(folder / way)
            for end, words in (("", ()), (" resumed", ("resume",))):
                sample = _until_first_step([sys.executable, str(WORKER), way, str(place), *words])
                if number:
                    samples[way + end].append(sample)
    print("\nFrom the command to the end of the first step, median of wall (processor) seconds\n")
    rows = [[label, _median(samples[way]), _median(samples[f"{way} resumed"])] for way, label in WAYS.items()]
    print_table([["script", "new", "resumed"], *rows])
    return {name: [asdict(each) for each in found] for name, found in samples.items()}


def _commands(rounds: int, folder: Path) -> dict[str, Any]:
    """The command `llama-pretrain train` on the standard library, to the first line of its log."""
    samples: dict[str, list[Sample]] = {f"{name}{end}": [] for name in COMMANDS for end in ("", " resumed")}
    for number in range(rounds + 1):
        for name, words in COMMANDS.items():
            place = _empty(folder / "command")
            for end, steps in (("", 1), (" resumed", 2)):
                command = [sys.executable, "-m", "llama_pretrain", "train", *SHORT, *words]
                command += ["--output-dir", str(place / "run"), "--max-steps", str(steps)]
                sample = _until_first_step(command, step=steps)
                if number:
                    samples[name + end].append(sample)
    print("\nFrom the command to the first log entry, median of wall (processor) seconds\n")
    rows = [[name, _median(samples[name]), _median(samples[f"{name} resumed"])] for name in COMMANDS]
    print_table([["command", "new", "resumed"], *rows])
    return {name: [asdict(each) for each in found] for name, found in samples.items()}


def _compiled(rounds: int, folder: Path) -> dict[str, Any]:
    """The first step of a compiled run, each in an empty cache of torch's, as in a fresh container."""
    cases = {
        "eager": "ours",
        "compiled, first start": "ours_cached",
        "compiled, restarted with the cache": "ours_cached",
        "compiled, restarted without": "ours_compiled",
    }
    samples: dict[str, list[Sample]] = {name: [] for name in cases}
    for _ in range(rounds):
        place = _empty(folder / "compiled")
        for number, (name, way) in enumerate(cases.items()):
            shutil.rmtree(place / "run", ignore_errors=True)
            torch = _empty(place / f"torch-{number}")
            command = [sys.executable, str(WORKER), way, str(place)]
            samples[name].append(_until_first_step(command, TORCHINDUCTOR_CACHE_DIR=str(torch)))
    print("\nFrom the command to the end of the first step, median of wall (processor) seconds\n")
    print_table([["trainer-core", "seconds"], *([name, _median(found)] for name, found in samples.items())])
    return {name: [asdict(each) for each in found] for name, found in samples.items()}


def _until_first_step(command: Sequence[str], *, step: int | None = None, **variables: str) -> Sample:
    """Run a command to its end, and tell when its first step had ended.

    Args:
        command: It prints a line that begins with FIRST, or the log entry of `step`, `step/steps loss ...`.
        step: The step that ends it.
        **variables: Of its environment.
    """
    before, began = _of_children(), time.perf_counter()
    process = subprocess.Popen(
        command, env=ENVIRONMENT | variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    wall, cpu = None, None
    for line in process.stdout:
        if step is None and line.startswith("FIRST "):
            wall, told = time.perf_counter() - began, json.loads(line[len("FIRST ") :])
            cpu = told["cpu"] + told["children"]
        elif step is not None and wall is None and line.split("/")[0].strip() == str(step):
            wall = time.perf_counter() - began
    if process.wait() or wall is None:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, and told no first step")
    # Of a command, to its end: it has ranks, whose time is known only when they have ended.
    return Sample(wall, _of_children() - before if cpu is None else cpu)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _median(samples: Sequence[Sample]) -> str:
    wall, cpu = (statistics.median(getattr(each, name) for each in samples) for name in ("wall", "cpu"))
    return f"{wall:.2f} ({cpu:.2f})"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("imports", "first_step", "commands", "compiled")
    parser.add_argument("--only", default=",".join(parts), help="comma-separated, of: %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=7, help="samples of each [7]; of compiled runs at most 3"
    )
    parser.add_argument("--quick", action="store_true", help="one round: does everything run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(parts):
        parser.error(f"--only names {sorted(unknown)}; choose among {list(parts)}")
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return options


if __name__ == "__main__":
    main()
