"""A run of `llama-pretrain train` that takes a second: its inputs, its command line and its environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

_SHAPE = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def write_small_run(folder: Path) -> Path:
    """Write a shape and some text into a folder, and return the folder."""
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps({"model_type": "llama", **_SHAPE}))
    texts = [f"{number} is the number after {number - 1}. " * 8 for number in range(60)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


def small_run_words(folder: Path, output: str, *more: str, steps: int) -> list[str]:
    """The command line, without the program, of a run in `folder / output`."""
    settings = {
        "model": folder / "shape",
        "data": folder / "text.jsonl",
        "output-dir": folder / output,
        "sequence-length": 32,
        "max-steps": steps,
        "held-out": 0,
        "logging-steps": 1,
        "save-steps": 1000,
        "sample-tokens": 0,
        "lr-scheduler-type": "constant",
    }
    return ["train", *(word for name, value in settings.items() for word in (f"--{name}", str(value))), *more]


def unlaunched_environ() -> dict[str, str]:
    """The environment of this process without what a launcher tells its ranks."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
