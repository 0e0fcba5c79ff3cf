"""Measure steps of a small model on CPU threads that spin before they sleep, alone and in company.

    python tests/benchmarks/threads.py --json threads.json

Each process trains the model of `llama-pretrain`'s default run in a plain loop, with a thread for each core.
Threads that wait for one another look for the given number of times before they sleep (`GOMP_SPINCOUNT` of
GNU's OpenMP, which torch's builds for Linux use). Processes of a company start together and share the cores.
A figure is the mean of the company, of 30 steps after 10; the lowest and the highest of the rounds are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _timing import machine, print_table

SPINS = (0, 1_000, 10_000, 300_000)
COMPANIES = (1, 2, 4)
WARM_UP, STEPS = 10, 30
ROWS, TOKENS = 8, 128


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    if options.child:
        print(_milliseconds(options.child))
        return
    companies, steps = ((1,), 3) if options.quick else (COMPANIES, STEPS)
    found: dict[int, dict[int, list[float]]] = {size: {spins: [] for spins in SPINS} for size in companies}
    for round_number in range(options.rounds):
        for size, by_spins in found.items():
            for spins, samples in by_spins.items():
                samples.append(_together(size, spins, steps))
                print(f"round {round_number + 1}, {size} at once, {spins} spins: {samples[-1]:.1f} ms a step")
    rows = [["ms a step, by spins", *(f"{spins:,}" for spins in SPINS)]]
    for size, by_spins in found.items():
        told = (f"{min(samples):.0f} to {max(samples):.0f}" for samples in by_spins.values())
        rows.append([f"{size} at once", *told])
    print_table(rows)
    if options.json:
        results = {"benchmark": "threads", "machine": machine(Path.cwd(), ("torch",)), "milliseconds": found}
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds of everything (2)")
    parser.add_argument("--quick", action="store_true", help="one process, few steps: does it run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--child", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds} must be at least 1")
    return options


def _together(size: int, spins: int, steps: int) -> float:
    """Milliseconds of a step, the mean of processes that start together."""
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OMP_")},
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "GOMP_SPINCOUNT": str(spins),
    }
    command = [sys.executable, __file__, "--child", str(steps)]
    company = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(size)
    ]
    told = [process.communicate()[0] for process in company]
    if any(process.returncode for process in company):
        raise SystemExit(f"a process of {size} with {spins} spins failed")
    return sum(map(float, told)) / size


def _milliseconds(steps: int) -> float:
    """Of a step of this process, after a warm-up."""
    import torch

    from llama_pretrain import Llama
    from llama_pretrain.bench.baselines import CLIP_NORM, mean_loss
    from llama_pretrain.model.config import preset
    from llama_pretrain.tokenizer import ByteTokenizer

    tokens = ByteTokenizer()
    torch.manual_seed(0)
    config = preset(
        "tiny",
        vocab_size=320,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    model = Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    rows = torch.randint(tokens.vocab_size, (ROWS, TOKENS))
    began = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            began = time.perf_counter()
        mean_loss(model(rows), rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / steps * 1000


if __name__ == "__main__":
    main()
