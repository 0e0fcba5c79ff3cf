"""The rounds: in each every contender takes one turn, in a process of its own, in an order that moves on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dist_env import die_with_parent_command

from .contenders import Contender
from .options import BenchArguments
from .turn import Turn


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        turns: By name of the contender, one of each round; of those that never failed.
        failures: By name, the last line of what a contender said when it failed.
    """

    turns: dict[str, list[Turn]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def run_rounds(args: BenchArguments, contenders: Sequence[Contender]) -> Measured:
    """Let all contenders take their turns, and say how it goes. One that fails takes no further turns."""
    measured = Measured(turns={contender.name: [] for contender in contenders})
    for number in range(args.rounds):
        shift = number % len(contenders)
        for contender in (*contenders[shift:], *contenders[:shift]):
            if contender.name in measured.failures:
                continue
            told = _turn_of(contender, args)
            if isinstance(told, Turn):
                measured.turns[contender.name].append(told)
            else:
                measured.failures[contender.name] = told
                del measured.turns[contender.name]
            shown = f"{told.step_s * 1e3:.1f} ms a step" if isinstance(told, Turn) else f"failed: {told}"
            print(f"round {number + 1}/{args.rounds}  {contender.label}: {shown}", flush=True)
    return measured


def _turn_of(contender: Contender, args: BenchArguments) -> Turn | str:
    """What a turn has shown, or why it failed."""
    with tempfile.TemporaryDirectory(prefix="llama-pretrain-bench-") as folder:
        result, said = Path(folder) / "turn.json", Path(folder) / "said.txt"
        words = [contender.name, json.dumps(asdict(args)), str(result)]
        with said.open("wb") as output:
            process = subprocess.run(
                die_with_parent_command([sys.executable, "-m", "llama_pretrain.bench.turn", *words]),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": _first_gpu(), "TOKENIZERS_PARALLELISM": "false"},
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if process.returncode == 0:
            return Turn.from_json(json.loads(result.read_text(encoding="utf-8")))
        lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else f"ended with {process.returncode}"


def _first_gpu() -> str:
    """The one GPU that a turn may see: transformers would spread a batch over all that it finds."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
