"""A dry run: the first of many ranks, whose shards and collectives can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dist_env import DistributedEnvironment, fake_job
from trainer_core import Collective, ConfigurationError, Trainer
from trainer_fsdp2 import FSDP2Arguments, FSDP2Trainer, FSDP2TrainingArguments, FullyShard

WIDTH, VOCABULARY, BLOCKS = 1024, 2048, 4


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
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


class Rows:
    """Batches of two rows of 16."""

    batch_size = 2

    def __iter__(self):  # type: ignore[no-untyped-def]
        ids = torch.arange(32).view(2, 16)
        while True:
            yield {"input_ids": ids, "labels": ids}


BLOCK, ROOT = WIDTH * WIDTH, 2 * VOCABULARY * WIDTH
ALL = BLOCKS * BLOCK + ROOT


def test_muon_and_an_average_are_held_in_shards(tmp_path: Path) -> None:
    args = FSDP2TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=2,
        optim="muon",
        ema_decay=0.9,
    )
    with fake_job(4, local_world_size=4) as env:
        found = FSDP2Trainer(
            args, model_init=Stack, train_dataset=Rows(), callbacks=[], distributed_env=env
        ).dry_run()
    assert found.optimizer_name == "AdamW+Muon"
    # One moment of a block and two of the root, step counts of two tensors, and the average.
    assert found.optimizer == (4 * BLOCKS * BLOCK + 8 * ROOT + 4 * ALL) // 4 + 2 * 4
    # Rows of four blocks go to a rank for each, and come back, in bfloat16.
    (exchange,) = (each for each in found.collectives if each.kind == "all-to-all")
    assert (exchange.calls, exchange.bytes) == (2, 2 * 2 * BLOCK)


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 1), (512, 1), (512, 64)])
def test_shards_and_collectives_of_one_rank(tmp_path: Path, ranks: int, replicas: int) -> None:
    args = FSDP2TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=2,
        fsdp2=FSDP2Arguments(replicas=replicas, param_dtype="bfloat16"),
    )
    with fake_job(ranks, local_world_size=4) as env:
        found = FSDP2Trainer(
            args, model_init=Stack, train_dataset=Rows(), callbacks=[], distributed_env=env
        ).dry_run()
    shards = ranks // replicas
    assert found.parameters == ALL
    assert found.weights == found.gradients == 4 * ALL // shards
    assert (found.rows, found.tokens) == (2 * ranks, 32 * ranks)
    seen = {each.kind: each for each in found.collectives}
    # Weights travel in bfloat16: each block's forward and back again, the root's once, as it stays.
    gathered = 2 * (2 * BLOCKS * BLOCK + ROOT)
    assert seen["all-gather"] == Collective("all-gather", shards, 2 * BLOCKS + 1, gathered)
    # Gradients travel in float32: whole ones to their shards, then the shards among the copies.
    assert seen["reduce-scatter"] == Collective("reduce-scatter", shards, BLOCKS + 1, 4 * ALL)
    norm = Collective("all-reduce", shards, 1, 8)
    among_copies = Collective("all-reduce", replicas, BLOCKS + 1, 4 * ALL // shards)
    reduced = [each for each in found.collectives if each.kind == "all-reduce"]
    assert sorted(reduced) == sorted([norm, among_copies] if replicas > 1 else [norm])
    assert list(tmp_path.iterdir()) == []


def test_a_plain_trainer_shards_as_its_arguments_say(tmp_path: Path) -> None:
    def transforms_of(ranks: int, mesh: str | None, settings: FSDP2Arguments) -> list[object]:
        args = FSDP2TrainingArguments(
            output_dir=str(tmp_path), mesh=mesh, fsdp2=settings, per_device_train_batch_size=2
        )
        alone = DistributedEnvironment(no_accelerator=True)
        with alone if ranks == 1 else fake_job(ranks, local_world_size=ranks) as env:
            return list(Trainer(args, model_init=Stack, train_dataset=Rows(), distributed_env=env).transforms)

    low = FSDP2Arguments(param_dtype="bfloat16")
    assert transforms_of(1, None, FSDP2Arguments()) == []
    for ranks, mesh in ((1, None), (4, "shard=4")):
        (transform,) = transforms_of(ranks, mesh, low)
        assert isinstance(transform, FullyShard)
        assert transform.settings == low
    with pytest.raises(ConfigurationError, match="leaves nothing to shard on 4 ranks"):
        transforms_of(4, "dp=4", low)
