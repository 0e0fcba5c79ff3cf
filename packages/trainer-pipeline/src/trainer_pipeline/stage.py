"""One stage as torch's schedules carry it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import PipelineStage

from trainer_core import has_no_values

from .clock import Clock
from .gradients import Copies
from .runner import Runner


class Shapes(NamedTuple):
    """What a stage is given and returns: tensors without values."""

    given: tuple[Tensor, ...]
    returned: tuple[Tensor, ...]


class Stage(PipelineStage):
    """A stage of torch that takes its inputs from a feed, tells the time, and says what went wrong.

    Args:
        runner: What it computes.
        index: Its number.
        num_stages: How many there are.
        device: Where it computes.
        group: The ranks of the pipeline.
        shapes: What it is given and returns.
        clock: Gets the time.
        copies: Told of backward passes.
    """

    def __init__(
        self,
        runner: Runner,
        index: int,
        num_stages: int,
        device: torch.device,
        group: ProcessGroup,
        shapes: Shapes,
        clock: Clock,
        copies: Copies,
    ) -> None:
        super().__init__(
            runner,
            index,
            num_stages,
            device,
            group=group,
            input_args=shapes.given,
            output_args=shapes.returned,
        )
        self._runner = runner
        self._clock = clock
        self._copies = copies

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Compute the stage for a microbatch."""
        self._runner.place = fwd_chunk_id
        with self._clock.work(self.stage_index, "F", fwd_chunk_id), self._own_errors(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output=False)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Compute the gradients of a microbatch, or those of its inputs."""
        self._copies.before_backward(self.stage_index, last=last_backward)
        with (
            self._clock.work(self.stage_index, "B" if full_backward else "I", bwd_chunk_id),
            self._own_errors(bwd_chunk_id),
        ):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        if last_backward:
            self._copies.after_last(self.stage_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of the weights of a microbatch."""
        with self._clock.work(self.stage_index, "W", bwd_chunk_id), self._own_errors(bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        if last_backward:
            self._copies.after_last(self.stage_index)

    @contextmanager
    def _own_errors(self, microbatch: int) -> Iterator[None]:
        """A context in which an error of the model is raised as it is: torch puts its arguments in front."""
        try:
            yield
        except RuntimeError as error:
            cause = error.__cause__
            if cause is None:
                raise
            cause.add_note(f"in stage {self.stage_index}, microbatch {microbatch}")
            raise cause from None

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """Messages that open the connections to the stages before and after this one.

        Torch 2.11 sends them in every schedule. In one that goes back and forth, neighbouring stages can lie
        on one rank; gloo has no connection of a rank to itself, and no value travels there either.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        """Whether this stage and those before it know their shapes; in a dry run nobody can tell: they do."""
        if has_no_values():
            return torch.ones(1, dtype=torch.int32)
        return super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        """Whether all stages know their shapes; in a dry run they do."""
        if has_no_values():
            return torch.tensor([1], dtype=torch.int32)
        return super()._warmup_backward_result(received_result)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: shapes are told to this stage, so that torch computes nothing to find them.

        Its own drops gathered weights and gradients, even in the middle of a step of unlike batches.
        """
