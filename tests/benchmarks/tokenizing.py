"""Measure `dataloader-dispatch tokenize`, beside `datasets.map`, datatrove and Megatron's indexed datasets.

    python tests/benchmarks/tokenizing.py --json tokenizing.json

All make token ids of the same JSON lines (the sources of Python's standard library) with the same byte-pair
tokenizer, in a process of their own with a number of worker processes; imports are in the time. Our command
also does it with the bytes of the text as ids, where reading and writing are all there is. The others run in
an environment that uv makes for them; ``--peers PYTHON`` names one that is there. Nothing is asserted about
time, but all must give the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _timing import Spread, machine, print_table

from dataloader_dispatch import TokenBinary

WORKER = Path(__file__).with_name("_tokenizing_worker.py")
PEERS = {
    "datasets": ["datasets", "transformers"],
    "datatrove": ["datatrove[io]", "tokenizers", "orjson"],
    "megatron": ["megatron-core", "torch", "transformers"],
}
NAMES = {
    "bytes": "dataloader-dispatch, bytes",
    "ours": "dataloader-dispatch",
    "datasets": "datasets.map",
    "datatrove": "datatrove",
    "megatron": "Megatron indexed dataset",
}
FILES = 8
VOCABULARY = 16_000
_SAMPLE_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        results: dict[str, Any] = {
            "benchmark": "tokenizing",
            "machine": machine(folder, ["torch", "numpy", "transformers", "tokenizers"]),
            "rounds": options.rounds,
            "bytes": _write(folder / "corpus", options.megabytes * 10**6),
        }
        _train(folder / "corpus", folder / "tokenizer")
        python, results["peers"] = _peers(options.peers, folder)
        results["runs"] = _measure(folder, python, results["peers"], options)
    counts = {run["tokens"] for run in results["runs"] if run["contender"] != "bytes"}
    if len(counts) > 1:
        raise RuntimeError(f"not all gave the same number of tokens: {sorted(counts)}")
    print()
    print_table(_rows(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _write(corpus: Path, size: int) -> int:
    """Write the sources of the standard library as JSON lines, again and again; the bytes of the text."""
    corpus.mkdir()
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    found = (path.read_text(encoding="utf-8", errors="replace") for path in cycle(sources))
    texts = filter(None, found)  # from a batch of empty ones `datasets` infers a type that no other has
    written = 0
    for number in range(FILES):
        with (corpus / f"{number}.jsonl").open("w") as stream:
            while written < size * (number + 1) // FILES:
                text = next(texts)
                stream.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
    return written


def _train(corpus: Path, place: Path) -> None:
    """A byte-pair tokenizer of the first documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    with (corpus / "0.jsonl").open() as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(200), lines, strict=False)]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(place)


def _peers(given: Path | None, folder: Path) -> tuple[str, dict[str, str]]:
    """The interpreter of the others, and for each its version, or why it is left out."""
    python = str(given or folder / "peers" / "bin" / "python")
    uv = ["uv"] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    found = {}
    for name, packages in PEERS.items():
        try:
            if given is None:
                if not Path(python).exists():
                    subprocess.run(
                        [*uv, "venv", "-q", "--python", sys.executable, str(folder / "peers")], check=True
                    )
                subprocess.run([*uv, "pip", "install", "-q", "--python", python, *packages], check=True)
            distribution = packages[0].partition("[")[0]
            program = f"import importlib.metadata as m; print(m.version({distribution!r}))"
            told = subprocess.run([python, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
            found[name] = told.stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{NAMES[name]} is left out, as it cannot be installed: {error}", file=sys.stderr)
            found[name] = f"left out: {error}"
    return python, found


def _measure(
    folder: Path, python: str, peers: dict[str, str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    # As many processors as workers: without this, a tokenizer takes all of them for itself.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "PYTHONSAFEPATH": "1"}
    corpus, tokenizer = str(folder / "corpus"), str(folder / "tokenizer")
    runs = []
    for _ in range(options.rounds):
        for contender in NAMES:
            if peers.get(contender, "").startswith("left out"):
                continue
            for workers in options.workers:
                out = folder / "out"
                out.mkdir()
                if contender in ("bytes", "ours"):
                    words = [sys.executable, "-m", "dataloader_dispatch", "tokenize", corpus, str(out)]
                    words += ["--tokenizer", "bytes" if contender == "bytes" else tokenizer]
                    words += ["--workers", str(workers)]
                else:
                    words = [python, str(WORKER), contender, corpus, str(out), tokenizer, str(workers)]
                run = _timed(words, environment, folder / "log")
                run |= {"contender": contender, "workers": workers, "tokens": COUNTS[contender](out)}
                runs.append(run)
                print(run, file=sys.stderr)
                shutil.rmtree(out)
    return runs


def _timed(words: Sequence[str], environment: dict[str, str], log: Path) -> dict[str, Any]:
    """Seconds, CPU seconds, and the highest sum of the memory of a process and those that it started."""
    peak, begin = 0, time.perf_counter()
    # The last that was seen of each process: some are never waited for, so that nobody inherits their time.
    used: dict[int, int] = {}
    with log.open("w") as said:
        process = subprocess.Popen(words, env=environment, stdout=said, stderr=said, start_new_session=True)
        while process.poll() is None:
            ticks = dict(_session(process.pid))
            used |= ticks
            peak = max(peak, sum(map(_memory, ticks)))
            time.sleep(_SAMPLE_SECONDS)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise RuntimeError(f"{words} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    cpu = sum(used.values()) / os.sysconf("SC_CLK_TCK")
    return {"seconds": seconds, "cpu": cpu, "peak_bytes": peak}


def _session(leader: int) -> Iterator[tuple[int, int]]:
    """Processes of a session, with the ticks of processor time that each has used."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if int(fields[3]) == leader:
                yield int(entry.name), int(fields[11]) + int(fields[12])


def _memory(process: int) -> int:
    """Bytes of a process; those that it shares with others count in part."""
    try:
        told = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("Pss:")), 0)


def _count_datasets(out: Path) -> int:
    import pyarrow as pa

    total = 0
    for path in out.rglob("cache-*.arrow"):
        with pa.memory_map(str(path)) as file:
            total += sum(len(batch.column("input_ids").flatten()) for batch in pa.ipc.open_stream(file))
    return total


COUNTS: dict[str, Callable[[Path], int]] = {
    "bytes": lambda out: TokenBinary(out).num_tokens,
    "ours": lambda out: TokenBinary(out).num_tokens,
    "datasets": _count_datasets,
    # Two bytes each, as the vocabulary is below 65,536.
    "datatrove": lambda out: sum(path.stat().st_size for path in out.rglob("*.ds")) // 2,
    "megatron": lambda out: (out / "text.bin").stat().st_size // 2,
}


def _rows(results: dict[str, Any]) -> list[list[str]]:
    print(f"{results['bytes'] / 1e6:.0f} MB of text; ratios are those of one round, median (low to high)")
    rows = [["", "workers", "MB/s", "seconds", "over ours", "CPU s", "CPU over ours", "peak MB"]]
    for contender, name in NAMES.items():
        for workers in sorted({run["workers"] for run in results["runs"]}):
            found, ours = (
                [run for run in results["runs"] if (run["contender"], run["workers"]) == (one, workers)]
                for one in (contender, "ours")
            )
            if not found:
                rows.append([name, str(workers), "left out", *[""] * 5])
                continue
            seconds = statistics.median(run["seconds"] for run in found)
            cells = [f"{results['bytes'] / seconds / 1e6:.1f}"]
            for key in ("seconds", "cpu"):
                values = [run[key] for run in found]
                ratio = Spread.of_ratios(values, [run[key] for run in ours])
                cells += [f"{statistics.median(values):.1f}"]
                cells += [f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"]
            peak = statistics.median(run["peak_bytes"] for run in found)
            rows.append([name, str(workers), *cells, f"{peak / 1e6:.0f}"])
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=100, metavar="N", help="of text (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", default="1,2", help="worker processes, comma-separated (default: 1,2)")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where all is written and removed again")
    parser.add_argument(
        "--peers", type=Path, metavar="PYTHON", help="interpreter that has the others installed"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    options = parser.parse_args(arguments)
    options.workers = [int(text) for text in options.workers.split(",")]
    return options


if __name__ == "__main__":
    main()
