"""One of two ranks, each with a scripted device: gathers all that ranks gather, and writes it."""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from perf_metrics import MFUMeter
from perf_metrics.callbacks.device_metrics import (
    MemoryFigures,
    OFUMetrics,
    PeakMemory,
    gather_memory_figures,
    gather_ofu,
)


def meter(rank: int) -> dict[str, float | None]:
    """100 and 200 tokens in 2 and 3 seconds, on devices of one and two MFLOP/s."""
    seconds = [0.0]
    model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32))
    meter = MFUMeter(model, 16, "fp32", peak_flops=1e6 * (1 + rank), clock=lambda: seconds[0])
    meter.add(100 * (1 + rank))
    seconds[0] = 2.0 + rank
    return meter.read(all_ranks=True)


def memory(rank: int) -> dict[str, object]:
    """Figures of both ranks, of one of them, and lies."""
    everywhere = gather_memory_figures(MemoryFigures(allocated=10 + rank, reserved=20 + rank, retries=rank))
    on_one = gather_memory_figures(MemoryFigures(1, 2, 3) if rank == 0 else None)
    ofu = gather_ofu((0.5 + rank, None) if rank == 0 else (None, "no \u2018NVML\u2019"))
    refused = []
    for lie, size in (
        (b"[1, 2]", 6),
        (b"cposix\nabort\n(tR.", 17),
        (b"[" * 5000, 5000),
        (b"", "nan"),
        (b"", -1),
    ):
        try:
            if rank == 0:
                # By hand, what no release sends.
                told = torch.tensor([float(size)], dtype=torch.float64).view(torch.int64)
                sizes = [torch.empty_like(told) for _ in range(2)]
                dist.all_gather(sizes, told)
                if lie:
                    longest = int(max(one.view(torch.float64) for one in sizes))
                    text = torch.tensor(list(lie.ljust(longest)), dtype=torch.uint8)
                    dist.all_gather([torch.empty_like(text) for _ in range(2)], text)
            else:
                gather_memory_figures(None)
        except RuntimeError as error:
            refused.append(str(error))
    record: dict[str, object] = {"loss": 1.0}
    PeakMemory().on_log_step(None, None, None, logs=record)
    figures = [asdict(one) for one in everywhere or ()]
    return {"everywhere": figures, "on_one": on_one, "ofu": ofu, "refused": refused, "record": record}


def ofu(rank: int) -> list[dict[str, object]]:
    """All ranks have a device that can be measured; then one of them has not."""
    state = SimpleNamespace(is_world_process_zero=rank == 0)
    records: list[dict[str, object]] = []
    for device in (rank, 2 * rank):
        metrics = OFUMetrics([f"GPU-00000000-0000-0000-0000-00000000000{device}"], interval_s=0.1)
        metrics.on_train_begin(None, state, None)
        for _ in range(2):
            metrics._sampler.wait(20)
            records.append({"loss": 1.0})
            metrics.on_log_step(None, state, None, logs=records[-1])
        metrics.on_train_end(None, state, None)
    return records


logging.basicConfig(stream=sys.stderr, format="%(message)s")
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
told = {"meter": meter(rank), "memory": memory(rank), "ofu": ofu(rank)}
(folder / f"told-{rank}.json").write_text(json.dumps(told))
dist.destroy_process_group()
