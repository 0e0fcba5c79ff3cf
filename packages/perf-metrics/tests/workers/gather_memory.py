"""One rank of a gloo group: gathers figures, and prints what came of it."""

import sys

import torch
import torch.distributed as dist

from perf_metrics.callbacks.device_metrics import MemoryFigures, PeakMemory, gather_memory_figures, gather_ofu

dist.init_process_group("gloo")
rank = dist.get_rank()
everywhere = gather_memory_figures(MemoryFigures(allocated=10 + rank, reserved=20 + rank, retries=rank))
on_one = gather_memory_figures(MemoryFigures(1, 2, 3) if rank == 0 else None)
ofu = gather_ofu((0.5 + rank, None) if rank == 0 else (None, "no \u2018NVML\u2019"))
told = []
for lie in (b"[1, 2]", b"cposix\nabort\n(tR.", b"[" * 5000):
    try:
        if rank == 0:
            # By hand, what no release sends.
            sizes = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
            dist.all_gather(sizes, torch.tensor([float(len(lie))], dtype=torch.float64))
            text = torch.tensor(list(lie.ljust(int(max(sizes)))), dtype=torch.uint8)
            dist.all_gather([torch.empty_like(text) for _ in range(2)], text)
        else:
            gather_memory_figures(None)
    except RuntimeError as error:
        told.append(str(error)[:40])
record: dict[str, object] = {"loss": 1.0}
PeakMemory().on_log_step(None, None, None, logs=record)
# In one piece: print writes the end of the line by itself, and ranks share the stream.
sys.stdout.write(f"{rank}: {everywhere} {on_one} {record}; {ofu} {told}\n")
dist.destroy_process_group()
