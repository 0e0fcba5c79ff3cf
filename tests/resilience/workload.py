"""What the scenario trains on what: a very small Llama, and documents that can be told apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llama_pretrain import preset

from .documents import ROW, Word, words_to_train_on, write_documents
from .layouts import Layout

_DOCUMENTS = 64
_HELD_OUT = 0.1
_SEED = 1
_SAVE_STEPS = 3
_KEPT = 3
"""Checkpoints that a run keeps, so that behind a damaged one there is another."""


@dataclass(frozen=True)
class Workload:
    """One run's model, data and settings.

    Args:
        folder: Where model and data are.
        steps: Length of the run in optimizer steps.
    """

    folder: Path
    steps: int

    @classmethod
    def write(cls, folder: Path, steps: int) -> Workload:
        """Write model and data, and return the run of them."""
        folder.mkdir(parents=True)
        write_documents(folder / "documents.jsonl", _DOCUMENTS, _SEED)
        shape = replace(preset("tiny"), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8)
        (folder / "shape").mkdir()
        shape.save(folder / "shape")
        return cls(folder, steps)

    def words(self, output: Path, layout: Layout) -> list[str]:
        """The command line of `train`, the same at each start but for the layout."""
        settings = {
            "model": self.folder / "shape",
            "data": self.folder / "documents.jsonl",
            "output-dir": output,
            "device": "cpu",
            "sequence-length": ROW,
            "shards": 4,
            "held-out": _HELD_OUT,
            "seed": _SEED,
            "max-steps": self.steps,
            "warmup-steps": 10,
            "logging-steps": 1,
            "eval-steps": 16,
            "per-device-eval-batch-size": 4,
            "save-steps": _SAVE_STEPS,
            "save-total-limit": _KEPT,
            "sample-tokens": 8,
        }
        given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return ["train", *given, *layout.words]

    def words_of_an_epoch(self) -> frozenset[Word]:
        """The words of all documents to train on."""
        return words_to_train_on(self.folder / "documents.jsonl", _HELD_OUT, _SEED)
