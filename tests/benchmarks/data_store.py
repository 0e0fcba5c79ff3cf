"""Measure reading documents from an object store, beside MosaicML Streaming and Hugging Face `datasets`.

    python tests/benchmarks/data_store.py --json data_store.json

All read the same documents from one real S3 server (SeaweedFS) on this machine: one epoch, in a shuffled
order, as token ids in batches of 8, in a process of its own, with an empty cache (cold) and again (cached).
The others run in an environment that uv makes for them, as MosaicML Streaming needs transformers below 5;
``--peers PYTHON`` names one that is there. Nothing is asserted about time, but every reader must give every
token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import numpy as np
from _timing import machine, print_table
from s3_servers import Server, end, start_weed

from dataloader_dispatch.sources.part_writer import PartWriter
from dataloader_dispatch.sources.token_binary import TokenManifest
from dist_env import ObjectStore

WORKER = Path(__file__).with_name("_data_store_worker.py")
PEERS = ["mosaicml-streaming", "transformers<5", "datasets>=4", "s3fs", "torch"]
NAMES = {
    "tokens": "dataloader-dispatch, token directory",
    "parquet": "dataloader-dispatch, Parquet",
    "mosaic": "MosaicML Streaming, MDS",
    "datasets": "datasets streaming, Parquet",
}
PARTS = 8
VOCABULARY = 50_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    results: dict[str, Any] = {
        "benchmark": "data_store",
        "machine": machine(Path.cwd(), ["torch", "obstore", "pyarrow", "numpy"]),
        "documents": options.documents,
        "rounds": options.rounds,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        python, results["peers"] = _peers(options.peers, folder)
        (folder / "weed").mkdir()
        server, process = start_weed(folder / "weed")
        try:
            results["expected"] = _write(folder, server, options.documents, python)
            results["runs"] = _measure(folder, server, python, options)
        finally:
            end(process)
    for run in results["runs"]:
        if (run["documents"], run["sum"]) != (options.documents, results["expected"]["sum"]):
            raise RuntimeError(f"not every token came: {run}, expected {results['expected']}")
    print()
    print_table(_rows(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _peers(given: Path | None, folder: Path) -> tuple[str | None, dict[str, str]]:
    """The interpreter of the others, and the versions there; None and why, if it cannot be made."""
    python = str(given or folder / "peers" / "bin" / "python")
    if given is None:
        uv = ["uv"] if shutil.which("uv") else [sys.executable, "-m", "uv"]
        try:
            subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(folder / "peers")], check=True)
            subprocess.run([*uv, "pip", "install", "-q", "--python", python, *PEERS], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"the others are left out, as their environment cannot be made: {error}", file=sys.stderr)
            return None, {"left out": str(error)}
    program = (
        "import json, importlib.metadata as m; "
        "print(json.dumps({n: m.version(n) for n in ('mosaicml-streaming', 'datasets', 's3fs', 'torch')}))"
    )
    told = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout
    versions: dict[str, str] = json.loads(told)
    return python, versions


def _write(folder: Path, server: Server, documents: int, peers: str | None) -> dict[str, int]:
    """Upload the same documents in each format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chance = np.random.default_rng(0)
    ends = np.concatenate(([0], np.cumsum(chance.integers(200, 1800, documents))))
    tokens = chance.integers(0, VOCABULARY, int(ends[-1]), dtype=np.uint16)
    bounds = np.linspace(0, documents, PARTS + 1).astype(int)
    for name in ("tokens", "parquet", "mosaic"):
        (folder / name).mkdir()
    (folder / "scratch").mkdir()
    parts = []
    for number, (first, last) in enumerate(pairwise(bounds)):
        values, lengths = tokens[ends[first] : ends[last]], np.diff(ends[first : last + 1])
        name = f"part-{number:05d}"
        with PartWriter(folder / "tokens", name, "uint16", VOCABULARY, folder / "scratch") as writer:
            writer.append(values, lengths.tolist())
            parts.append(writer.finish())
        offsets = pa.array(ends[first : last + 1] - ends[first], type=pa.int32())
        table = pa.table({"tokens": pa.ListArray.from_arrays(offsets, pa.array(values))})
        pq.write_table(table, folder / "parquet" / f"{name}.parquet", row_group_size=1000)
    manifest = TokenManifest("uint16", "none", VOCABULARY, None, documents, int(ends[-1]), tuple(parts), {})
    (folder / "tokens" / "manifest.json").write_text(manifest.to_json())
    if peers is not None:
        np.savez(folder / "tokens.npz", tokens=tokens, ends=ends)
        words = [peers, str(WORKER), "write-mosaic", str(folder / "mds"), str(folder / "tokens.npz"), "0"]
        subprocess.run(words, check=True)
        shutil.copytree(folder / "mds", folder / "mosaic", dirs_exist_ok=True)
    os.environ.update(server.environment())
    store = ObjectStore("s3://tests", 60.0)
    for name in ("tokens", "parquet", "mosaic"):
        for path in (folder / name).iterdir():
            store.put(f"{name}/{path.name}", path.read_bytes())
    return {"sum": int(tokens.sum(dtype=np.int64)), "tokens": int(ends[-1]), "bytes": tokens.nbytes}


def _measure(
    folder: Path, server: Server, peers: str | None, options: argparse.Namespace
) -> list[dict[str, Any]]:
    environment = {**os.environ, **server.environment(), "OMP_NUM_THREADS": "1"}
    environment |= {
        "S3_ENDPOINT_URL": server.endpoint,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    runs = []
    for turn in range(options.rounds):
        for contender in NAMES:
            python = sys.executable if contender in ("tokens", "parquet") else peers
            if python is None:
                continue
            address = "s3://tests/" + {"datasets": "parquet"}.get(contender, contender)
            for workers in options.workers:
                cache = folder / f"cache {turn} {contender} {workers}"
                for state in ("cold", "cached"):
                    words = [python, str(WORKER), contender, address, str(cache), str(workers)]
                    before = os.times()
                    told = subprocess.run(
                        words, check=True, stdout=subprocess.PIPE, text=True, env=environment
                    )
                    run = json.loads(told.stdout.splitlines()[-1])
                    after = os.times()
                    # Of the process and all that it started, imports included.
                    run["cpu"] = sum(after[2:4]) - sum(before[2:4])
                    run |= {"contender": contender, "workers": workers, "state": state}
                    runs.append(run)
                    print(run, file=sys.stderr)
                shutil.rmtree(cache, ignore_errors=True)
    return runs


def _rows(results: dict[str, Any]) -> list[list[str]]:
    tokens, size = results["expected"]["tokens"], results["expected"]["bytes"]
    print(f"{results['documents']} documents, {tokens / 1e6:.0f} M tokens, {size / 1e6:.0f} MB as uint16")
    rows = [["reader", "workers", "cache", "first batch s", "documents/s", "M tokens/s", "CPU s in all"]]
    for contender, name in NAMES.items():
        found = [run for run in results["runs"] if run["contender"] == contender]
        for workers, state in dict.fromkeys((run["workers"], run["state"]) for run in found):
            same = [run for run in found if (run["workers"], run["state"]) == (workers, state)]
            first = statistics.median(run["first"] for run in same)
            # Imports, listing and opening are in the time to the first batch, and not in the speed.
            seconds = statistics.median(run["seconds"] - run["first"] for run in same)
            speed = [f"{results['documents'] / seconds:.0f}", f"{tokens / seconds / 1e6:.2f}"]
            cpu = statistics.median(run["cpu"] for run in same)
            rows.append([name, str(workers), state, f"{first:.2f}", *speed, f"{cpu:.1f}"])
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=8000, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", default="0,2", help="worker processes, comma-separated (default: 0,2)")
    parser.add_argument(
        "--peers", type=Path, metavar="PYTHON", help="interpreter that has the others installed"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    options = parser.parse_args(arguments)
    options.workers = [int(text) for text in options.workers.split(",")]
    return options


if __name__ == "__main__":
    main()
