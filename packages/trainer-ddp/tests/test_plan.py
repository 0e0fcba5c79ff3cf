"""A plan of copies: their buckets count from the forward pass on, unless gradients are views of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer_core import Plan, plan
from trainer_ddp import DDPArguments, DDPTrainer, DDPTrainingArguments

WIDTH, LENGTH = 256, 512


class Model(nn.Module):
    """Activations of several times the size of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def _plan(ranks: int, **ddp: bool) -> Plan:
    args = DDPTrainingArguments(per_device_train_batch_size=4, ddp=DDPArguments(**ddp))
    return plan(args, model_init=Model, world_size=ranks, sequence_length=LENGTH, trainer=DDPTrainer)


def test_buckets_count_from_the_first_forward_pass_on() -> None:
    one, copies, views = _plan(1), _plan(8), _plan(8, gradient_as_bucket_view=True)
    assert copies.state == views.state == one.state
    assert (copies.reduced, views.reduced) == (one.gradients, 0)
    # The most is at the end of the forward pass, where one process has no gradients yet.
    assert one.peak < 1.2 * one.activations
    assert copies.peak >= one.peak + copies.reduced
    assert one.peak < views.peak <= one.peak + one.gradients + 8  # and a factor


def test_settings_that_read_values_in_a_step_can_be_planned() -> None:
    assert _plan(8, static_graph=True) == _plan(8)
    assert _plan(8, find_unused_parameters=True) == _plan(8)
