"""A run in a notebook: the bar, the cell that is run again, and a picture of the loss."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

SETUP = """
import torch
from trainer_core import Trainer, TrainingArguments


class Bigram(torch.nn.Embedding):
    def forward(self, input_ids):
        return super().forward(input_ids)


data = [{"input_ids": row, "labels": row} for row in torch.arange(64 * 16).view(64, 16) % 50]
args = TrainingArguments(output_dir="run", max_steps=12, logging_steps=2, learning_rate=0.1, seed=1)
"""
TRAIN = """
trainer = Trainer(args, model_init=lambda: Bigram(50, 50), train_dataset=data)
trainer.train({}).metrics["train_loss"]
"""
PLOT = """
import matplotlib.pyplot as plt

entries = [entry for entry in trainer.state.log_history if "loss" in entry]
plt.plot([entry["step"] for entry in entries], [entry["loss"] for entry in entries])
plt.xlabel("step")
plt.ylabel("loss");
"""


def test_a_notebook_trains_says_that_it_is_done_and_begins_anew(tmp_path: Path) -> None:
    cells = [SETUP, TRAIN.format(""), TRAIN.format(""), TRAIN.format("fresh=True"), PLOT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    first, again, anew, plot = ([dict(each) for each in cell.outputs] for cell in notebook.cells[1:])
    (bar,) = [each for each in first if each["output_type"] == "display_data"]
    assert "application/vnd.jupyter.widget-view+json" in bar["data"]
    state = next(iter(notebook.metadata.widgets.values()))["state"]
    # One bar for each of the three, all at their end.
    bars = [each["state"] for each in state.values() if each["model_name"] == "FloatProgressModel"]
    assert [(each["value"], each["max"]) for each in bars] == [(12.0, 12.0)] * 3
    assert "12/12" in text(first, "stdout")
    assert "nothing left" not in text(first, "stderr")
    assert "nothing left to train: step 12 of 12" in text(again, "stderr")
    assert "resumed at step 12" in text(again, "stderr")
    assert "moved aside to" in text(anew, "stderr")
    losses = [result(each) for each in (first, again, anew)]
    assert losses[0] == losses[1] == losses[2]
    assert 0 < losses[0] < 4
    assert any("image/png" in each.get("data", {}) for each in plot)


def text(outputs: list[dict[str, object]], stream: str) -> str:
    return "".join(str(each["text"]) for each in outputs if each.get("name") == stream)


def result(outputs: list[dict[str, object]]) -> float:
    (found,) = [each for each in outputs if each["output_type"] == "execute_result"]
    return float(found["data"]["text/plain"])  # type: ignore[index]
