"""The ranks of this folder are forked from one process, which has imported torch and transformers once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from warm_start import WarmStart

IMPORTED = (
    *("trainer_core.build", "trainer_fsdp2", "trainer_pipeline", "torch._dynamo", "torch.distributed.tensor"),
    *("llama_pretrain.model.llama", "model_parallel", "model_parallel.shard", "perf_metrics"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStart]:
    """Starts the scripts beside this file."""
    start = WarmStart(IMPORTED, {**os.environ, "OMP_NUM_THREADS": "1"})
    yield start
    start.close()
