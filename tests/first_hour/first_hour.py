"""What a newcomer types in the first hour, here and, where there is a counterpart, with other trainers.

Run by `nox -s first-hour`, which makes a fresh environment from the clone. Each entry is run once, in order,
in one working directory. What was seen is printed, and written as JSON and Markdown. An entry holds if the
command ended with the expected code, and printed or wrote what a user needs to see. Seconds are wall time,
with the start of Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import _peers

SECONDS = 300
PEERS = ("transformers", "lightning", "accelerate", "torchtitan")
_TRAIN = ("--data", "text", "--logging-steps", "4", "--warmup-steps", "2")
_RUN = (*_TRAIN, "--output-dir", "runs/first")


@dataclass(frozen=True)
class Seen:
    """One command, ended.

    Attributes:
        code: Its exit code.
        seconds: Wall time.
        text: Standard output and standard error, in the order in which they came.
    """

    code: int
    seconds: float
    text: str


@dataclass(frozen=True)
class Entry:
    """One thing to type.

    Attributes:
        name: What the newcomer wants.
        words: The command, after the Python of the environment; or the code of a script.
        shows: What must be in the output, a pattern.
        code: The expected exit code.
        writes: A file or directory that must be there afterwards.
        interrupt: Send Ctrl-C once this is in the output.
        visit: An address in the output, to read before Ctrl-C; its page and /news are searched too.
    """

    name: str
    words: Sequence[str] | str
    shows: str
    code: int = 0
    writes: str = ""
    interrupt: str = ""
    visit: str = ""


@dataclass
class Result:
    """What was seen of one entry.

    Attributes:
        name: The entry's.
        typed: What was typed.
        held: Whether all of it was as a user needs it.
        seconds: Wall time.
        seen: The line that tells.
        peers: For each peer "yes", "no", "not installed" or "no counterpart", and what it said.
    """

    name: str
    typed: str
    held: bool
    seconds: float
    seen: str
    peers: dict[str, str] = field(default_factory=dict)


def command(*words: str) -> list[str]:
    """A command line of llama-pretrain."""
    return ["-m", "llama_pretrain", *words]


OWN_MODEL = """
import torch
from trainer_core import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 50)
    def forward(self, input_ids):
        return self.head(self.embed(input_ids))

rows = (torch.arange(64)[:, None] + torch.arange(9)) % 50
data = [{"input_ids": row, "labels": row} for row in rows]
args = TrainingArguments(output_dir="runs/own", per_device_train_batch_size=8, num_train_epochs=3)
output = Trainer(args, model_init=Net, train_dataset=data).train()
print("trained", output.global_step, "steps")
"""
TYPO = """
from trainer_core import TrainingArguments
TrainingArguments(output_dir="runs/typo", learning_rat=1e-3)
"""
INPUTS = """
from trainer_core import Trainer, TrainingArguments
Trainer(TrainingArguments(output_dir="runs/inputs"), compute_metrics=len)
"""
EXPORTED = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("exported")
print("logits", tuple(model(torch.tensor([[1, 2, 3]])).logits.shape))
"""
CHECKPOINT = """
import torch
from checkpoint_core import CheckpointManager, RNGState
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
manager = CheckpointManager("runs/loop", {"model": model, "optimizer": optimizer, "rng": RNGState()})
loaded = manager.load()
begin = loaded.step if loaded else 0
for step in range(begin + 1, begin + 4):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.save(step)
print("steps", begin + 1, "to", step)
manager.close()
"""
LOOP = """
import torch
from perf_metrics import MFUMeter
model = torch.nn.Sequential(torch.nn.Embedding(256, 128), torch.nn.Linear(128, 256))
optimizer, ids = torch.optim.AdamW(model.parameters()), torch.randint(256, (8, 64))
meter = MFUMeter(model, 64, "fp32", peak_flops=1e12)
for step in range(3):
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward(), optimizer.step(), optimizer.zero_grad()
    meter.add(ids)
    read = meter.read()
    print(f"step {step}: {read['tok_per_sec']:,.0f} tokens/s, MFU {read['mfu']:.1%}")
"""
PEAK = """
from hardware_table import peak_flops
print(f"{6 * 7e9 * 9600 / peak_flops('NVIDIA H100 80GB HBM3', 'bf16'):.1%} of the peak")
"""

ENTRIES = (
    Entry("help", command("-h"), r"llama-pretrain \[train\].*--output-dir"),
    Entry("version", command("--version"), r"llama-pretrain \d"),
    Entry("the machine", ["-m", "dist_env", "doctor"], r"all-reduce|1 rank"),
    Entry(
        "a first run",
        command(*_RUN, "--max-steps", "12"),
        r"12/12.*done in",
        writes="runs/first/checkpoint-12",
    ),
    Entry(
        "its loss curve",
        command(*_RUN, "--max-steps", "12"),
        r"loss by step",
        writes="runs/first/loss_curve.png",
    ),
    Entry("the same again, at its end", command(*_RUN, "--max-steps", "12"), r"had reached its end, step 12"),
    Entry("train longer", command(*_RUN, "--max-steps", "20"), r"resumed at step 12.*20/20"),
    Entry(
        "Ctrl-C",
        command(*_RUN, "--max-steps", "400", "--learning-rate", "0.002"),
        r"stopped by SIGINT after step \d+",
        code=75,
        interrupt=" 24/400",
    ),
    Entry("the same command resumes", command(*_RUN, "--max-steps", "28"), r"resumed at step 2\d"),
    Entry(
        "begin anew", command(*_RUN, "--max-steps", "4", "--fresh"), r"begins +at step 0", writes="runs/first"
    ),
    Entry(
        "another rate in the middle",
        command(*_RUN, "--max-steps", "8", "--learning-rate", "5e-4"),
        r"--allow-changes learning_rate",
        code=2,
    ),
    Entry(
        "another rate, allowed",
        command(*_RUN, "--max-steps", "8", "--learning-rate", "5e-4", "--allow-changes", "learning_rate"),
        r"8/8",
    ),
    Entry("a slip of the finger", command("train", "--max-step", "3"), r"Did you mean --max-steps\?", code=2),
    Entry("a name of Hugging Face", command("train", "--bf16"), r"--mixed-precision", code=2),
    Entry(
        "a name of Lightning",
        command("train", "--max_epochs", "3"),
        r"Did you mean --num-train-epochs\?",
        code=2,
    ),
    Entry("a value out of range", command("train", "--learning-rate", "-1"), r"from 0 to 1000", code=2),
    Entry("a slip in a script", TYPO, r"learning_rate", code=1),
    Entry(
        "score it",
        command("eval", "--data", "text", "--output-dir", "runs/first"),
        r"loss +\d\.\d+ nats per byte",
    ),
    Entry(
        "let it write",
        command("generate", "def ", "--output-dir", "runs/first", "--max-new-tokens", "40"),
        r"def .{40}",
    ),
    Entry(
        "export it",
        command("export", "exported", "--output-dir", "runs/first"),
        r"exported",
        writes="exported",
    ),
    Entry("load it in transformers", EXPORTED, r"logits \(1, 3, \d+\)"),
    Entry(
        "TensorBoard",
        command(*_TRAIN, "--output-dir", "runs/board", "--max-steps", "4", "--report-to", "tensorboard"),
        r"4/4",
        writes="runs/board/**/events.out.tfevents*",
    ),
    Entry(
        "a live page",
        command("watch", "runs/first"),
        r"<html.*</html>.*runs/first",
        visit=r"http://(?:127\.0\.0\.1|localhost):\d+\S*",
    ),
    Entry(
        "two processes",
        command(*_TRAIN, "--output-dir", "runs/two", "--mesh", "dp=2", "--max-steps", "4"),
        r"2 data-parallel.*4/4",
    ),
    Entry("how much memory", command("plan", "--model", "7b", "--gpus", "8"), r"total +\d+\.\d+\n"),
    Entry("a model of one's own", OWN_MODEL, r"trained 24 steps", writes="runs/own"),
    Entry("a checkpoint in a loop of one's own", CHECKPOINT, r"steps 1 to 3"),
    Entry("the same loop again", CHECKPOINT, r"steps 4 to 6"),
    Entry("inputs of another trainer", INPUTS, r"Did you mean 'eval_metrics'\?", code=1),
    Entry("MFU in a loop of one's own", LOOP, r"step 2: [\d,]+ tokens/s, MFU \d"),
    Entry("what share of an H100", PEAK, r"40\.8% of the peak"),
)


def run(words: Sequence[str], folder: Path, entry: Entry | None = None) -> Seen:
    """Run Python with some words, and do to it what the entry says."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "110"}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Timer(SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    lines: list[str] = []
    acted = False
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if entry is None or acted:
                continue
            address = re.search(entry.visit, line) if entry.visit else None
            if address:
                for place in (address[0], address[0].rstrip("/") + "/news"):
                    with urllib.request.urlopen(place, timeout=20) as answer:
                        lines.append(answer.read().decode())
            if address or (entry.interrupt and entry.interrupt in line):
                acted = True
                os.killpg(process.pid, signal.SIGINT)
        code = process.wait()
    finally:
        late.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Seen(code, time.monotonic() - start, "".join(lines))


def judge(entry: Entry, seen: Seen, folder: Path) -> tuple[bool, str]:
    """Whether an entry held, and the line that tells."""
    found = re.search(entry.shows, seen.text, re.DOTALL)
    written = not entry.writes or any(folder.glob(entry.writes))
    if seen.code == entry.code and found and written:
        line = seen.text[: found.end()].splitlines()[-1].strip()
        return True, line[:110]
    last = (seen.text.strip().splitlines() or [""])[-1][:110]
    return False, f"code {seen.code}, expected {entry.code}; {'shown' if found else 'not shown'}; {last}"


def of_peers(entry: Entry, folder: Path, told: Callable[[str], None]) -> dict[str, str]:
    """Run the counterpart of an entry with each peer that is installed and has one."""
    answers = {}
    for peer in PEERS:
        if importlib.util.find_spec(peer) is None:
            answers[peer] = "not installed"
        elif (task := _peers.TASKS.get((entry.name, peer))) is None:
            answers[peer] = "not tried"
        else:
            place = folder / "peers" / peer
            place.mkdir(parents=True, exist_ok=True)
            script = place / "script.py"
            script.write_text(_peers.COMMON[peer] + task.code)
            words = [str(word).replace("SCRIPT", str(script)) for word in task.words]
            seen = run(words, place)
            found = re.search(task.shows, seen.text, re.DOTALL)
            held = found is not None and (seen.code == 0) == task.succeeds
            answers[peer] = "yes" if held else f"no: {(seen.text.strip().splitlines() or [''])[-1][:80]}"
            told(f"    {peer}: {answers[peer]}")
    return answers


def typed(entry: Entry) -> str:
    """The entry as one types it."""
    if isinstance(entry.words, str):
        return "a script of " + f"{len(entry.words.strip().splitlines())} lines"
    return " ".join(entry.words).replace("-m llama_pretrain", "llama-pretrain").replace("-m ", "python -m ")


def markdown(results: Sequence[Result]) -> str:
    """The results as a table."""
    heads = ["", "typed", "held", "s", "seen", *PEERS]
    rows = [
        [
            str(place),
            f"{result.name}: `{result.typed}`",
            "yes" if result.held else "**no**",
            f"{result.seconds:.1f}",
            f"`{result.seen.replace('|', '/')}`",
            *(result.peers.get(peer, "").replace("|", "/") for peer in PEERS),
        ]
        for place, result in enumerate(results, start=1)
    ]
    lines = [" | ".join(row) for row in (heads, ["---"] * len(heads), *rows)]
    return "".join(f"| {line} |\n" for line in lines)


def text_of_the_library(folder: Path) -> None:
    """Twenty files of Python's own, which every reader has, to train on."""
    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("[a-h]*.py"), key=lambda path: path.stat().st_size)[:20]:
        shutil.copy(path, folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("first-hour"), help="directory of what was seen")
    parser.add_argument(
        "--only", help="run the entries whose names contain this; later ones may need earlier"
    )
    parser.add_argument("--without-peers", action="store_true")
    options = parser.parse_args(argv)
    folder = options.output.absolute()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--output: {folder} is not empty. Name a new directory.")
    folder.mkdir(parents=True, exist_ok=True)
    text_of_the_library(folder / "text")
    results = []
    for entry in ENTRIES:
        if options.only and options.only not in entry.name:
            continue
        words = list(entry.words)
        if isinstance(entry.words, str):
            script = folder / "script.py"
            script.write_text(entry.words)
            words = [str(script)]
        seen = run(words, folder, entry)
        held, line = judge(entry, seen, folder)
        result = Result(entry.name, typed(entry), held, round(seen.seconds, 1), line)
        print(f"{'ok ' if held else 'NO '} {seen.seconds:5.1f} s  {entry.name}: {line}", flush=True)
        if not options.without_peers:
            result.peers = of_peers(entry, folder, lambda said: print(said, flush=True))
        results.append(result)
    write(folder, results)
    missed = [result.name for result in results if not result.held]
    print(f"{len(results) - len(missed)} of {len(results)} held", *missed, sep="\n  ")
    return 1 if missed else 0


def write(folder: Path, results: Sequence[Result]) -> None:
    """Write what was seen as JSON and Markdown."""
    content: Mapping[str, object] = {"python": sys.version, "results": [asdict(result) for result in results]}
    (folder / "first_hour.json").write_text(json.dumps(content, indent=1))
    (folder / "first_hour.md").write_text(markdown(results))


if __name__ == "__main__":
    sys.exit(main())
