"""Runs of earlier commits, small enough to keep, which every later commit must load and continue.

    python tests/resilience/golden_runs.py --commit NAME [--only KIND]

writes `golden/NAME/<kind>/` with the code as it is: the run's directory with one checkpoint in mid-run, and
`losses.json`, the losses that the same run had after it. Model and documents are in `golden/NAME`, too.
Written ones are never written again: they stand for what users have on their disks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:
    sys.path.append(str(Path(__file__).parents[1]))

from resilience.curve import curve
from resilience.documents import write_documents

GOLDEN = Path(__file__).with_name("golden")
STEPS = 8
SAVED = 4
"""Step of the checkpoint that is kept."""
SHAPE = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("--gradient-accumulation-steps", "2")),
    "ddp": (2, ("--trainer", "ddp")),
    "fsdp2": (2, ("--trainer", "fsdp2")),
    "fsdp2-replicas": (4, ("--trainer", "fsdp2", "--fsdp2.replicas", "2")),
    "pipeline": (2, ("--trainer", "pipeline", "--microbatches", "2")),
    "pipeline-replicas": (4, ("--trainer", "pipeline", "--microbatches", "2", "--pipeline.replicas", "2")),
    "pipeline-shards": (
        4,
        (
            *("--trainer", "pipeline", "--microbatches", "2"),
            *("--pipeline.replicas", "2", "--pipeline.shard-replicas"),
        ),
    ),
}
"""Ranks, and what the command line said about them. Every kind trains eight rows a step."""
_WAYS = {"single": 1, "ddp": 2, "fsdp2": 2, "fsdp2-replicas": 4, "pipeline": 1}
_ROWS = 8


def words(kind: str | None, steps: int = STEPS) -> list[str]:
    """The command line of a run in the folder it is started in.

    Args:
        kind: One of `KINDS`; None for one process that takes over, whose batch is the whole step.
        steps: Length of the run in optimizer steps.
    """
    settings = {
        "model": "shape",
        "data": "documents.jsonl",
        "output-dir": "run",
        "device": "cpu",
        "sequence-length": 64,
        "shards": 4,
        "held-out": 0.1,
        "seed": 1,
        "max-steps": steps,
        "warmup-steps": 2,
        "logging-steps": 1,
        "save-steps": SAVED,
        "sample-tokens": 0,
    }
    accumulation = 2 if kind == "single" else 1
    rows = _ROWS // (_WAYS.get(kind or "", 2 if kind else 1) * accumulation)
    given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    own = KINDS[kind][1] if kind else ()
    return ["train", *given, "--per-device-train-batch-size", str(rows), *own]


def start(kind: str | None, folder: Path, ranks: int) -> None:
    """Train in processes of their own.

    Raises:
        subprocess.CalledProcessError: The run failed; its output is printed before.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "llama_pretrain", *words(kind)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()


def write(commit: str, kinds: list[str]) -> None:
    """Write the runs of this commit that are not there yet."""
    home = GOLDEN / commit
    if not home.exists():
        (home / "shape").mkdir(parents=True)
        (home / "shape" / "config.json").write_text(json.dumps(SHAPE, indent=1) + "\n")
        write_documents(home / "documents.jsonl", 48, seed=1)
    for kind in kinds:
        if (home / kind).exists():
            print(f"{kind}: is there already")
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = prepared(home, Path(name))
            start(kind, folder, KINDS[kind][0])
            losses = {step: loss for step, loss in curve(folder / "run", "loss").items() if step > SAVED}
            shutil.rmtree(folder / "run" / f"checkpoint-{STEPS}")
            (folder / "run" / "loss_curve.png").unlink(missing_ok=True)
            sessions = json.loads((folder / "run" / "sessions.json").read_text())
            named = [{**session, "host": "node0"} for session in sessions]
            (folder / "run" / "sessions.json").write_text(json.dumps(named, indent=2) + "\n")
            shutil.move(folder / "run", home / kind)
            (home / kind / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")
        print(
            f"{kind}: written, {sum(f.stat().st_size for f in (home / kind).rglob('*') if f.is_file())} bytes"
        )


def prepared(home: Path, folder: Path, kind: str | None = None) -> Path:
    """Copy the model, the documents, and one of the runs, to where it can go on."""
    shutil.copytree(home / "shape", folder / "shape")
    shutil.copy(home / "documents.jsonl", folder)
    if kind is not None:
        shutil.copytree(home / kind, folder / "run")
    return folder


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", required=True, help="short name of the commit that writes")
    parser.add_argument("--only", choices=KINDS, action="append", help="this kind alone; may be repeated")
    options = parser.parse_args()
    write(options.commit, options.only or list(KINDS))


if __name__ == "__main__":
    main()
