"""A dry run: the first rank of a pipeline, and what it exchanges with the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dist_env import fake_job
from trainer_core import DryRun
from trainer_pipeline import PipelineArguments, PipelineTrainer, PipelineTrainingArguments

WIDTH, VOCABULARY, BLOCKS, ROWS, LENGTH = 64, 128, 4, 8, 16


class Stack(nn.Module):
    """A row of equal blocks between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Rows:
    """Batches of eight rows of 16."""

    batch_size = ROWS

    def __iter__(self):  # type: ignore[no-untyped-def]
        ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
        while True:
            yield {"input_ids": ids, "labels": ids}


def _dry_run(folder: Path, ranks: int, **settings: object) -> DryRun:
    pipeline = PipelineArguments(n_microbatches=4, layers_per_stage=None, **settings)  # type: ignore[arg-type]
    args = PipelineTrainingArguments(
        output_dir=str(folder / "run"), max_steps=1, per_device_train_batch_size=ROWS, pipeline=pipeline
    )
    with fake_job(ranks) as env:
        trainer = PipelineTrainer(
            args, model_init=Stack, train_dataset=Rows(), callbacks=[], distributed_env=env
        )
        return trainer.dry_run()


@pytest.mark.parametrize(
    ("schedule", "stages", "sent"),
    # Interleaved: stages 0 and 2 of 4 send on, and 2 gives a gradient back. In a V the last stage is here.
    [("gpipe", 1, 1), ("1f1b", 1, 1), ("interleaved_1f1b", 2, 3), ("zbv", 2, 2)],
)
def test_hidden_states_and_gradients_of_each_microbatch(
    tmp_path: Path, schedule: str, stages: int, sent: int
) -> None:
    found = _dry_run(tmp_path, 2, schedule=schedule)
    blocks = BLOCKS * WIDTH * WIDTH
    assert found.parameters == blocks + 2 * VOCABULARY * WIDTH
    assert found.weights == found.gradients
    ends = 2 if schedule == "zbv" else 1
    # The table of the embedding is here, in a V the head as well; the blocks are shared by what they cost.
    held = found.weights // 4 - ends * VOCABULARY * WIDTH
    assert held % (WIDTH * WIDTH) == 0
    assert stages <= held // (WIDTH * WIDTH) < BLOCKS
    seen = {each.kind: (each.calls, each.bytes) for each in found.collectives}
    hidden = 4 * ROWS * LENGTH * WIDTH  # of all four microbatches
    assert seen["send"] == seen["receive"] == (4 * sent, sent * hidden)
    assert found.rows == ROWS
    assert list(tmp_path.iterdir()) == []


def test_copies_of_a_pipeline_sum_their_gradients(tmp_path: Path) -> None:
    found = _dry_run(tmp_path, 8, schedule="1f1b", replicas=4)
    # The other one is of a single number: the square of the norm, over the two stages. With each gradient
    # comes a number, by which copies know whether any of them has used the parameter: a stage has four.
    summed = {each.ranks: each.bytes for each in found.collectives if each.kind == "all-reduce"}
    assert summed == {4: found.gradients + 4 * 4, 2: 8}
    assert found.rows == 4 * ROWS


def test_copies_that_share_weights_gather_them(tmp_path: Path) -> None:
    found = _dry_run(tmp_path, 8, schedule="1f1b", replicas=4, shard_replicas=True)
    whole = _dry_run(tmp_path, 8, schedule="1f1b", replicas=4)
    assert found.weights == whole.weights // 4
    kinds = {each.kind: each.ranks for each in found.collectives}
    assert (kinds["all-gather"], kinds["reduce-scatter"]) == (4, 4)
