"""One rank of the data-parallel benchmark."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from _ddp_agreement import agreement
from _ddp_contenders import CONTENDERS
from _ddp_summary import mean_of_ranks, summarise
from _ddp_work import RankWork
from _step_contenders import Contender, Sample
from _step_work import SIZES
from step_overhead import _run
from torch import nn

from dist_env import DistributedEnvInterface, DistributedEnvironment, gather_objects


def measure(size: str, options: Mapping[str, Any], env: DistributedEnvInterface) -> dict[str, Any]:
    """All contenders once in each round, after one round that checks them and warms up imports.

    Without rounds, the figures are those of the round that checks.
    """
    work = RankWork.of_ranks(
        SIZES[size],
        options["windows"],
        Path(options["directory"]),
        env=env,
        accumulation=options["accumulation"],
    )
    trained = {contender.label: train(contender, work) for contender in CONTENDERS}
    agreed = agreement({label: model for label, (_, model) in trained.items()}, work)
    first = {label: sample for label, (sample, _) in trained.items()}
    del trained
    tell(f"{size}: the contenders agree", env)
    samples = {label: [] if options["rounds"] else [sample] for label, sample in first.items()}
    began = time.monotonic()
    for number in range(options["rounds"]):
        shift = number % len(CONTENDERS)
        for contender in CONTENDERS[shift:] + CONTENDERS[:shift]:
            samples[contender.label].append(train(contender, work)[0])
        minutes = (time.monotonic() - began) / 60
        tell(f"[{minutes:5.1f} min] {size}: round {number + 1}/{options['rounds']}", env)
    told = {label: [asdict(sample) for sample in taken] for label, taken in samples.items()}
    return {
        "rounds": options["rounds"],
        "windows": options["windows"],
        "contenders": summarise(mean_of_ranks(gather_objects(told, env))),
        "first_setup_ms": {label: asdict(sample.setup) for label, sample in first.items()},
        "agreement": agreed,
    }


def train(contender: Contender, work: RankWork) -> tuple[Sample, nn.Module]:
    """One run, which all ranks begin together."""
    dist.barrier()
    return _run(contender, work)


def tell(line: str, env: DistributedEnvInterface) -> None:
    """Progress, from one rank."""
    if env.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with DistributedEnvironment(no_accelerator=True, training_timeout=300) as env:
        told = {size: measure(size, options, env) for size, options in json.loads(sys.argv[1]).items()}
        if env.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(told))
