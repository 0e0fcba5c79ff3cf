"""The forward pass of a stage, and hidden states from stage to stage outside of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer_core import autocast, predict, with_router_loss

from .blocks import Bound
from .microbatches import MicrobatchQueue
from .schedules import StageLayout

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMENSIONS = 6


class ActivationChannel:
    """Sends and receives tensors whose shape the receiver does not know.

    Those that go to a higher rank and those that go to a lower one have a group each: on backends that carry
    out the messages of two ranks in their order, stages of one rank would wait for one another otherwise.

    Args:
        layout: Which rank has which stage.
        rank: This rank, in the pipeline.
        up: The ranks of the pipeline, for messages to higher ranks.
        down: The same ranks, for messages to lower ranks.
        device: Where tensors are.
    """

    def __init__(
        self, layout: StageLayout, rank: int, up: ProcessGroup, down: ProcessGroup, device: torch.device
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._groups = {True: up, False: down}
        self._device = device
        self._here: dict[int, list[Tensor]] = {}
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, hidden: Tensor, stage: int) -> None:
        """Give a stage its next hidden state, without waiting."""
        peer = self._layout.rank_of(stage)
        if peer == self._rank:
            self._here.setdefault(stage, []).append(hidden)
            return
        hidden = hidden.detach().contiguous()
        header = [hidden.ndim, _DTYPES.index(hidden.dtype), *hidden.shape]
        header += [0] * (2 + _MOST_DIMENSIONS - len(header))
        group = self._groups[peer > self._rank]
        for tensor in (torch.tensor(header, device=self._device), hidden):
            self._sent.append((dist.isend(tensor, group=group, group_dst=peer), tensor))

    def receive(self, stage: int) -> Tensor:
        """The next hidden state for a stage of this rank."""
        if self._here.get(stage):
            return self._here[stage].pop(0)
        peer = self._layout.rank_of(stage - 1)
        group = self._groups[self._rank > peer]
        header = torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=self._device)
        dist.recv(header, group=group, group_src=peer)
        dimensions, code, *shape = header.tolist()
        hidden = torch.empty(shape[:dimensions], dtype=_DTYPES[code], device=self._device)
        dist.recv(hidden, group=group, group_src=peer)
        return hidden

    def wait(self) -> None:
        """Wait until everything that was sent has arrived."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self.clear()

    def clear(self) -> None:
        """Let go of everything, also of what an error has left behind."""
        self._sent.clear()
        self._here.clear()


Compute = Callable[[int, int, Tensor | None], Tensor | None]
"""`(stage, microbatch, hidden) -> hidden`: None from the last stage, and for the first one."""


@torch.no_grad()
def run_forward(
    layout: StageLayout, rank: int, channel: ActivationChannel, count: int, compute: Compute
) -> None:
    """Take microbatches through all stages, forward only; collective.

    Each rank takes all microbatches through one of its stages before it goes on to the next one, which keeps
    every rank busy as soon as the first microbatch has reached it.
    """
    channel.clear()
    for stage in layout.stages_of(rank):
        for place in range(count):
            hidden = channel.receive(stage) if stage else None
            output = compute(stage, place, hidden)
            if output is not None:
                channel.send(output, stage + 1)
    channel.wait()


class StageForward(nn.Module):
    """A stage with everything that it needs beside the hidden state.

    Args:
        stage: Called as `stage(hidden, **inputs)`.
        model: The model, for losses that ask it for things.
        last: Whether it is the last stage, which computes the loss.
        queue: The microbatches.
        device: Where it computes.
    """

    def __init__(
        self, stage: nn.Module, model: nn.Module, queue: MicrobatchQueue, device: torch.device, *, last: bool
    ) -> None:
        super().__init__()
        self.stage = stage
        self._model = (model,)
        self.queue = queue
        self._device = device
        self._last = last

    def forward(self, hidden: Tensor | None = None) -> Tensor:
        """The hidden state, or the loss of the microbatch over the divisor."""
        if self._last:
            total, _ = self.score(hidden)
            self.queue.losses.append(total.detach())
            return total / self.queue.divisor
        queue, microbatch = self.queue, self.queue.current

        def compute() -> Tensor:
            with autocast(queue.args, self._device.type):
                return checked_hidden(self.stage(hidden, **microbatch.inputs))

        return with_router_loss(queue.loss, compute, microbatch.labels, queue.divisor)

    def score(self, hidden: Tensor | None) -> tuple[Tensor, object]:
        """For the last stage: the sum of the token losses of the microbatch, and the predictions."""
        queue, microbatch = self.queue, self.queue.current
        # One for each microbatch: a loss may keep it, and call it again in the backward pass.
        bound = Bound(self.stage, self._model[0], hidden)
        with autocast(queue.args, self._device.type):
            predictions = predict(queue.loss, bound, microbatch.inputs, microbatch.labels)
        return queue.loss(predictions, microbatch.labels), predictions


def checked_hidden(output: object) -> Tensor:
    """What a stage hands on.

    Raises:
        TypeError: If it is not a tensor.
    """
    if not isinstance(output, Tensor):
        raise TypeError(
            f"a stage returned a {type(output).__name__}, but every stage except the last one must return "
            "the hidden state, one tensor."
        )
    return output.contiguous()
