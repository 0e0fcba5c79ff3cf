"""One rank of a gloo group: gathers memory figures, and prints what came of it."""

import sys

import torch.distributed as dist

from perf_metrics.callbacks.peak_memory import MemoryFigures, PeakMemory, gather_memory_figures

dist.init_process_group("gloo")
rank = dist.get_rank()
everywhere = gather_memory_figures(MemoryFigures(allocated=10 + rank, reserved=20 + rank, retries=rank))
on_one = gather_memory_figures(MemoryFigures(1, 2, 3) if rank == 0 else None)
record: dict[str, object] = {"loss": 1.0}
PeakMemory().on_log_step(None, None, None, logs=record)
# In one piece: print writes the end of the line by itself, and ranks share the stream.
sys.stdout.write(f"{rank}: {everywhere} {on_one} {record}\n")
dist.destroy_process_group()
