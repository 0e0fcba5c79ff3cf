"""Notes what each of four ranks raises, and after how many seconds, for plans and sizes that are refused."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from decoder import Decoder

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import PlanError, shard_tensors


def main(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    notes: list[tuple[str, float]] = []
    with DistributedEnvironment(no_accelerator=True):
        meshes = {size: Meshes(ParallelLayout(shard=4 // size, tensor=size)).tensor for size in (2, 4)}
        for model, given in cases:
            arguments = {"tensor": 2, **given}
            start = time.monotonic()
            try:
                shard_tensors(Decoder(**model), meshes[arguments.pop("tensor")], **arguments)
                notes.append(("nothing", 0.0))
            except PlanError as error:
                notes.append((str(error), time.monotonic() - start))
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
