"""What is measured, in plain data: contenders by name, a task for a process, and what comes back.

Nothing here imports torch, so the process that hands out the work starts at once and stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FULL_PARAMETERS = 102_500_000  # 410 MB in fp32; 1.23 GB with the two moments of AdamW
BYTES_PER_PARAMETER = 12
BLOCK_FACTOR = 2  # Touched before a save: as much as the page cache and a staging copy take.
ASYNC_SAVES = 3

SYNC_LABELS = {
    "raw": "raw write / read",
    "ours": "checkpoint-core",
    "torch-save-no-crc": "torch.save without CRC",
    "torch-save": "torch.save",
    "safetensors": "safetensors + torch.save",
    "dcp": "torch.distributed.checkpoint",
    "accelerate": "Accelerate",
    "hf-trainer": "Hugging Face Trainer",
}
ASYNC_LABELS = {
    "ours-async": "checkpoint-core, async",
    "dcp-async": "torch.distributed.checkpoint, async",
}
LABELS = SYNC_LABELS | ASYNC_LABELS

_OURS = ("checkpoint_core", "dist_env")
_DCP = ("torch.distributed.checkpoint.state_dict", "torch.distributed.checkpoint.staging")
MODULES = {
    "ours": _OURS,
    "safetensors": ("safetensors.torch",),
    "dcp": _DCP,
    "accelerate": ("accelerate",),
    "hf-trainer": ("transformers.trainer", "accelerate"),
    "ours-async": _OURS,
    "dcp-async": _DCP,
}
"""What each contender imports besides torch, to be loaded before anything is timed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure.

    Attributes:
        name: A contender.
        directory: An empty directory of its own, on the file system to measure.
        scale: Size of the model; 1 is 102.5 million parameters.
        number: Of the round, from 0.
        threads: Of torch, within one operation.
        drop_caches: Empty the page cache before each save.
    """

    name: str
    directory: Path
    scale: float
    number: int
    threads: int
    drop_caches: bool

    @property
    def checkpoints(self) -> Path:
        """Where the contender saves."""
        return self.directory / "checkpoints"

    def in_order(self, contender: Callable[[], None], baseline: Callable[[], None]) -> None:
        """Run both, the contender first in every second round."""
        for run in (contender, baseline) if self.number % 2 == 0 else (baseline, contender):
            run()


@dataclass(kw_only=True)
class SaveSample:
    """One save. Times are in seconds; durable means that every file and directory is synced too."""

    seconds: float = 0.0
    durable_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_extra_bytes: int | None = None
    disk_bytes: int = 0
    state_bytes: int = 0
    raw_seconds: float = 0.0
    raw_durable_seconds: float = 0.0


@dataclass(kw_only=True)
class LoadSample:
    """One load from a warm page cache into a fresh model and optimizer, and raw reads of the same files.

    Weights are loaded into memory that was touched when the model was built, optimizer state into fresh
    memory: ``raw_seconds`` reads as many bytes into memory of each kind.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    raw_seconds: float = 0.0
    raw_fresh_seconds: float = 0.0
    raw_touched_seconds: float = 0.0


@dataclass(kw_only=True)
class AsyncSample:
    """A few asynchronous saves one after another. Times are in seconds, from the call of the save.

    ``committed_seconds`` includes syncing what the contender left unsynced.
    """

    cold_copy_seconds: float = 0.0
    warm_copy_seconds: float = 0.0
    blocking_seconds: list[float]
    committed_seconds: list[float]
    peak_extra_bytes: int | None = None
