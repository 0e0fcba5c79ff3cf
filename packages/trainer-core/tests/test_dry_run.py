"""A step on tensors without values: what it tells, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from dist_env import fake_job
from trainer_core import Collective, ConfigurationError, DataError, Trainer, TrainingArguments
from trainer_core.metrics.comm_bytes import CollectiveWatch

VOCABULARY = 2**15
WIDTH = 2**12


class Wide(nn.Module):
    """2 GiB of weights, AdamW's moments not counted; an embedding that is tied, and a table."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(24))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(64.0), persistent=False)
        self.looks = looks

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) * self.table[: input_ids.shape[1], None]
        for layer in self.stack:
            hidden = hidden + torch.tanh(layer(hidden))
        if self.looks and hidden.sum().item() > 0:
            hidden = -hidden
        return self.head(hidden)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


class Rows:
    """Batches of two rows of 64."""

    batch_size = 2

    def __iter__(self):  # type: ignore[no-untyped-def]
        ids = torch.arange(128).view(2, 64)
        while True:
            yield {"input_ids": ids, "labels": ids}


def _trainer(folder: Path, model_init: Callable[[], nn.Module] = Wide, **settings: object) -> Trainer:
    given = {"output_dir": str(folder / "run"), "max_steps": 10, "per_device_train_batch_size": 2, "seed": 3}
    args = TrainingArguments(**(given | settings))  # type: ignore[arg-type]
    return Trainer(args, model_init=model_init, train_dataset=Rows(), callbacks=[])


PARAMETERS = VOCABULARY * WIDTH + 24 * WIDTH * WIDTH


def test_it_tells_what_is_held_and_computed(tmp_path: Path) -> None:
    found = _trainer(tmp_path, gradient_accumulation_steps=3).dry_run()
    assert found.parameters == PARAMETERS
    assert found.weights == found.gradients == 4 * PARAMETERS
    # Two moments for each parameter, and a step count for each tensor.
    assert found.optimizer == 8 * PARAMETERS + 4 * 25
    assert (found.rows, found.row_length, found.tokens) == (6, 64, 384)
    # Products only, and the head's weight is the embedding: 6 FLOPs a parameter and token.
    assert found.flops == 6 * PARAMETERS * 384
    assert found.collectives == ()


def test_it_writes_nothing_and_takes_no_memory_for_weights(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    _trainer(tmp_path).dry_run()  # what is imported for it takes memory of its own
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _trainer(tmp_path).dry_run()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024  # KiB; the weights alone are 2 GiB
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "full", "transformer_layers_path": "stack"},
        {"mixed_precision": "bf16"},
        {"default_dtype": "bfloat16"},
        {"fuse_optim_with_backward": True},
        {"fused_loss": "chunked"},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"construct_model_on": "device"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_model_and_step_are_followed(tmp_path: Path, settings: dict[str, object]) -> None:
    found = _trainer(tmp_path, **settings).dry_run()
    size = 2 if "default_dtype" in settings else 4
    assert found.weights == size * PARAMETERS
    # An optimizer that works during backward leaves none behind.
    assert found.gradients == (0 if "fuse_optim_with_backward" in settings else found.weights)
    assert any("torch_compile" in each for each in found.left_out) == ("torch_compile" in settings)


def test_a_model_that_looks_at_values_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"model='Wide' cannot run on tensors without values"):
        _trainer(tmp_path, lambda: Wide(looks=True)).dry_run()


def test_a_loss_scale_needs_values(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"mixed_precision='fp16' needs real tensor values"):
        _trainer(tmp_path, mixed_precision="fp16").dry_run()


def test_without_data_there_is_no_step(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1)
    with pytest.raises(DataError, match="needs a train_dataset"):
        Trainer(args, model_init=Wide, callbacks=[]).dry_run()


def test_a_collective_that_names_its_group_is_counted_with_its_ranks() -> None:
    with fake_job(4), CollectiveWatch() as watch:
        group = dist.group.WORLD
        assert group is not None
        # As DTensor calls it, by the name of the group.
        functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", group))
        dist.all_reduce(torch.ones(3), group=group)
    assert watch.found() == (Collective("all-reduce", ranks=4, calls=2, bytes=2 * 3 * 4),)
