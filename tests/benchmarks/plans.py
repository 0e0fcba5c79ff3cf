"""Measure what one rank needs to plan and commit a checkpoint of a model that no rank here could hold.

    python tests/benchmarks/plans.py --json plans.json

One process is a rank of a job of 2,048 that shards a 70B Llama with AdamW over all ranks: what each rank
holds is memory that nobody touches, and what the other ranks report is computed in place of received, as
texts of their own. What is measured is the code with which `checkpoint_core` plans and commits a save, on
the first rank and on another one: seconds, the peak of memory, and bytes of what all report.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from _timing import PeakMemory, machine, print_table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from checkpoint_core import CheckpointConfig, ModelState, OptimizerState
from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import Plan
from checkpoint_core.encoding import EncodedState
from checkpoint_core.files import FileRecord, combine
from checkpoint_core.manifest import ComponentPart, ComponentRecord, Manifest, current_versions
from checkpoint_core.saving import (
    ComponentFiles,
    RankReport,
    Shares,
    _add,
    capture,
    divide_into_files,
)
from checkpoint_core.sharded import _table
from dist_env import StaticDistributedEnvironment, fake_job
from llama_pretrain import Llama, preset


class Planned(RankAgreement):
    """The agreement of a job whose other ranks say what a function computes for them.

    Attributes:
        others: What another rank results in, where this one has a result.
        reported_bytes: Of the different reports of one exchange, at most.
        computing_s: Seconds for what the others would have computed.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(StaticDistributedEnvironment(), timeout_seconds=60)
        self.rank, self.world_size = rank, world_size
        self.node = self.site = range(world_size)
        self._node_size = world_size

    others: Callable[[int, Any], Any]
    reported_bytes = 0
    computing_s = 0.0

    def _exchange(self, phase: str, report: Any, failure: BaseException | None) -> list[str]:
        began = time.perf_counter()
        texts, same = [], dict[str, str]()
        for rank in range(self.world_size):
            said = report if rank == self.rank else {**report, "result": self.others(rank, report["result"])}
            text = json.dumps(said)
            # Of equal texts one object, as a gather leaves them.
            texts.append(same.setdefault(text, text))
        self.reported_bytes = max(self.reported_bytes, sum(map(len, same)))
        self.computing_s += time.perf_counter() - began
        return texts


def sharded(model: nn.Module, mesh: DeviceMesh) -> torch.optim.AdamW:
    """Give each parameter this rank's rows of it, untouched, and make the optimizer that has stepped them."""

    def part(shape: torch.Size) -> DTensor:
        rows = Shard.local_shard_size_and_offset(shape[0], mesh.size(), mesh.get_local_rank())[0]
        local = torch.empty(rows, *shape[1:])
        return DTensor.from_local(
            local,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(part(parameter.shape)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {name: part(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def measure(rank: int, world_size: int, size: str) -> dict[str, Any]:
    """Plan and commit on one rank."""
    with fake_job(world_size, rank=rank):
        mesh = init_device_mesh("cpu", (world_size,))
        with torch.device("meta"):
            model = Llama(preset(size))
        parameters = sum(each.numel() for each in model.parameters())
        optimizer = sharded(model, mesh)
        states = {"model": ModelState(model), "optimizer": OptimizerState(optimizer, model)}
        ranks = Planned(rank, world_size)
        parts: dict[str, Any] = {}
        for name, step in _steps(ranks, states).items():
            ranks.computing_s, ranks.reported_bytes = 0.0, 0
            with PeakMemory() as memory:
                began = time.perf_counter()
                told = step()
                seconds = time.perf_counter() - began - ranks.computing_s
            parts[name] = {
                "seconds": seconds,
                "peak_bytes": memory.extra_bytes,
                "reported_bytes": ranks.reported_bytes,
                **told,
            }
    return {"parameters": parameters, "parts": parts}


def _steps(
    ranks: Planned, states: Mapping[str, ModelState | OptimizerState]
) -> Mapping[str, Callable[[], dict[str, int]]]:
    """The parts of a save that grow with the model or with the ranks, in their order."""
    captured: dict[str, EncodedState] = {}
    files: dict[str, ComponentFiles] = {}

    def take() -> dict[str, int]:
        captured.update({key: capture(state, sharded=True) for key, state in states.items()})
        return {"tensors": sum(len(state.tensors) for state in captured.values())}

    def divide() -> dict[str, int]:
        # The first rank speaks for the mesh; of the others each tells what is not divided.
        first, other = copy.copy(ranks), copy.copy(ranks)
        first.rank, other.rank = 0, 1
        of_first, of_others = (
            {key: _table(key, state, each) for key, state in captured.items()} for each in (first, other)
        )

        def others(rank: int, result: Any) -> Any:
            return result if result is None else of_others if rank else of_first

        ranks.others = others
        plan = SimpleNamespace(
            sharded=tuple(states),
            assignments={
                key: SimpleNamespace(component=SimpleNamespace(stateful=state), stem=key, writer=0)
                for key, state in states.items()
            },
        )
        config = CheckpointConfig(output_dir=Path("unused"))
        files.update(divide_into_files(ranks, "saving", cast("Plan", plan), captured, config))
        return {"files": sum(len(each.names) for each in files.values())}

    def commit() -> dict[str, int]:
        ranks.others = lambda rank, result: {
            "components": {},
            "files": {name: (size, share ^ rank) for name, (size, share) in result["files"].items()},
        }

        def write() -> RankReport:
            layouts = {name: layout for each in files.values() for name, layout in each.layouts.items()}
            told = {key: (each.names, each.format, dict(each.tied)) for key, each in files.items()}
            shares = {name: (layout.size, 2**31 + 2**20) for name, layout in layouts.items()}
            return RankReport(components=told if ranks.rank == 0 else {}, files=shares)

        reports = ranks.run("saving", write)
        if not ranks.is_leader:
            return {"manifest_bytes": 0}
        shares: Shares = {}
        for report in reports:
            _add(shares, report["files"])
        manifest = Manifest(
            step=1,
            world_size=ranks.world_size,
            run_id="run",
            save_id="save",
            components=[
                ComponentRecord(key, "sharded", each.format, [ComponentPart(0, each.names)])
                for key, each in files.items()
            ],
            files={name: FileRecord(size, combine([share])) for name, (size, share) in shares.items()},
            tied_weights={},
            metrics=None,
            versions=current_versions(),
        )
        return {"manifest_bytes": len(manifest.to_bytes())}

    return {"capture": take, "divide into files": divide, "commit": commit}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    if options.rank is not None:
        print("MEASURED", json.dumps(measure(options.rank, options.ranks, options.model)))
        return
    results: dict[str, Any] = {"benchmark": "plans", "machine": machine(Path.cwd(), ("torch",))}
    results["ranks"], results["of"] = options.ranks, {}
    for rank in (0, options.ranks - 1):
        words = ["--rank", str(rank), "--ranks", str(options.ranks), "--model", options.model]
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, *words], stdout=subprocess.PIPE, text=True, check=True
        )
        told = next(line for line in ended.stdout.splitlines() if line.startswith("MEASURED "))
        results["of"][rank] = json.loads(told.removeprefix("MEASURED "))
    parameters = results["of"][0]["parameters"]
    print(f"\n{options.model}: {parameters / 1e9:.1f} G parameters with AdamW on {options.ranks:,} ranks\n")
    table = [["", "seconds", "peak (MiB)", "different reports (MiB)"]]
    for rank, found in results["of"].items():
        for name, part in found["parts"].items():
            peak, reported = (part[key] / 2**20 for key in ("peak_bytes", "reported_bytes"))
            table.append([f"rank {rank}: {name}", f"{part['seconds']:.2f}", f"{peak:.0f}", f"{reported:.1f}"])
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2048, help="of the job (%(default)s)")
    parser.add_argument("--model", default="70b", help="a preset (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
