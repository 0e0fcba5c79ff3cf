"""One rank of a gloo group with a device of its own: logs four times, and prints the records."""

import json
import logging
import sys
from types import SimpleNamespace

import torch.distributed as dist

from perf_metrics.callbacks.device_metrics import OFUMetrics

logging.basicConfig(stream=sys.stdout, format="%(message)s")
dist.init_process_group("gloo")
rank = dist.get_rank()
state = SimpleNamespace(is_world_process_zero=rank == 0)
records: list[dict[str, object]] = []
# All ranks have a device that can be measured; then one of them has not.
for device in (rank, 2 * rank):
    metrics = OFUMetrics([f"GPU-00000000-0000-0000-0000-00000000000{device}"], interval_s=0.1)
    metrics.on_train_begin(None, state, None)
    for _ in range(2):
        metrics._sampler.wait(20)
        records.append({"loss": 1.0})
        metrics.on_log_step(None, state, None, logs=records[-1])
    metrics.on_train_end(None, state, None)
# In one piece: print writes the end of the line by itself, and ranks share the stream.
sys.stdout.write(f"{rank}: {json.dumps(records)}\n")
dist.destroy_process_group()
