"""One stage as torch's schedules carry it out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import PipelineStage

from trainer_core import is_fake, own_part

from .stage_forward import StageForward
from .stage_timer import StageTimer


class Shapes(NamedTuple):
    """What a stage is given and returns: tensors without values."""

    given: tuple[Tensor, ...]
    returned: tuple[Tensor, ...]


class Stage(PipelineStage):
    """A stage of torch that takes its inputs from a queue, tells the time, and says what went wrong.

    Args:
        forward: What it computes.
        index: Its number.
        num_stages: How many there are.
        device: Where it computes.
        group: The ranks of the pipeline.
        shapes: What it is given and returns.
        timer: Gets the time.
        before_backward: Called before each backward pass, with whether it is the last one of the schedule.
        after_backward: Called after the last one.
    """

    def __init__(
        self,
        forward: StageForward,
        index: int,
        num_stages: int,
        device: torch.device,
        group: ProcessGroup,
        shapes: Shapes,
        timer: StageTimer,
        before_backward: Callable[[bool], None],
        after_backward: Callable[[], None],
    ) -> None:
        super().__init__(
            forward,
            index,
            num_stages,
            device,
            group=group,
            input_args=shapes.given,
            output_args=shapes.returned,
        )
        self._queue = forward.queue
        self._timer = timer
        self._before_backward = before_backward
        self._after_backward = after_backward
        # Not the tensors: a plan would take them for memory.
        self._given = [(each.shape, each.dtype) for each in shapes.given]
        self._returned = [(each.shape, each.dtype) for each in shapes.returned]
        self._none = torch.empty(0, device=device)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Compute the stage for a microbatch."""
        self._queue.place = fwd_chunk_id
        if not self.is_first:
            infos: Sequence[Any] = self.args_recv_info[fwd_chunk_id]
            for info in infos:
                # Newer releases do this themselves; torch 2.11 does where it makes buffers.
                info.buffer.requires_grad_(self.has_backward)
        with self._work("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output=False)
        if not self.is_first:
            self._drop_buffers(self.args_recv_info[fwd_chunk_id])  # the graph has what it needs of them
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Compute the gradients of a microbatch, or those of its inputs."""
        self._before_backward(last_backward)
        with self._work("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        if not self.is_last:
            self._drop_buffers(self.grad_recv_info[bwd_chunk_id])
        if last_backward:
            self._lay_out_gradients()
            self._after_backward()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of the weights of a microbatch."""
        with self._work("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        if last_backward:
            self._lay_out_gradients()
            self._after_backward()

    def _lay_out_gradients(self) -> None:
        """Give gradients the memory layout of their weights, as autograd does where it accumulates them.

        Torch (2.11 to 2.13) puts what it computed apart from the inputs into `grad` as it comes, such as a
        transposed view behind a batched product. Fused optimizers read a gradient in the order of its
        memory, and would step each weight by the gradient of another one.
        """
        for weight in self.submod.parameters():
            if weight.grad is None or own_part(weight.grad).stride() == own_part(weight).stride():
                continue
            if own_part(weight).is_contiguous():
                weight.grad = weight.grad.contiguous()
            else:
                weight.grad = torch.empty_like(weight).copy_(weight.grad)

    # Torch keeps a buffer to receive into for every microbatch of a schedule and each way, for as long as the
    # schedule lives. With all microbatches of a step in one that would be much, so here a buffer is made when
    # something is received and dropped when it was used. Relied on, in torch 2.11 to 2.13: the infos of a
    # microbatch are tuples in `args_recv_info` and `grad_recv_info`, and each has its `buffer`.

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """What is received in forward passes, as of one microbatch, for all of them and without buffers."""
        found = super()._prepare_forward_infra(1, *args, **kwargs)
        self.args_recv_info = self._for_all(self.args_recv_info[0], num_microbatches, self.is_first)
        return found

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """What is received in backward passes, likewise."""
        found = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        self.grad_recv_info = self._for_all(self.grad_recv_info[0], num_microbatches, self.is_last)
        return found

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Messages with the hidden state of a microbatch."""
        if not self.is_first:
            self._make_buffers(self.args_recv_info[fwd_chunk_id], self._given)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Messages with the gradient of a hidden state."""
        if not self.is_last and self.has_backward:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id], self._returned)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradient from a stage of this rank; without one torch puts zeros into the buffer."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self._make_buffers(self.grad_recv_info[mb_index], self._returned)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _for_all(self, infos: tuple[Any, ...], count: int, nothing_comes: bool) -> dict[int, tuple[Any, ...]]:
        if nothing_comes:
            return dict.fromkeys(range(count), infos)
        self._drop_buffers(infos)
        return {number: tuple(copy.copy(info) for info in infos) for number in range(count)}

    def _make_buffers(self, infos: Sequence[Any], like: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        for info, (shape, dtype) in zip(infos, like, strict=True):
            if info.buffer is self._none:
                info.buffer = torch.empty(shape, dtype=dtype, device=self.device)

    def _drop_buffers(self, infos: Sequence[Any]) -> None:
        for info in infos:
            info.buffer = self._none  # not None: torch 2.11 sets `buffer.grad` before each step

    @contextmanager
    def _work(self, kind: str, microbatch: int) -> Iterator[None]:
        """A context around what is computed; an error of the model is raised as it is.

        Torch puts its arguments in front of it.
        """
        began = self._timer.now()
        try:
            yield
        except RuntimeError as error:
            cause = error.__cause__
            if cause is None:
                raise
            cause.add_note(f"in stage {self.stage_index}, microbatch {microbatch}")
            raise cause from None
        finally:
            self._timer.add(self.stage_index, kind, microbatch, began)

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """Messages that open the connections to the stages before and after this one.

        Torch 2.11 sends them in every schedule. In one that goes back and forth, neighbouring stages can lie
        on one rank; gloo has no connection of a rank to itself, and no value travels there either. In a dry
        run nothing is opened, as with later releases: it counts what a step sends.
        """
        if is_fake():
            return []
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        """Whether this stage and those before it know their shapes; in a dry run nobody can tell: they do."""
        if is_fake():
            return torch.ones(1, dtype=torch.int32)
        return super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        """Whether all stages know their shapes; in a dry run they do."""
        if is_fake():
            return torch.tensor([1], dtype=torch.int32)
        return super()._warmup_backward_result(received_result)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: shapes are told to this stage, so that torch computes nothing to find them.

        Its own drops gathered weights and gradients, even in the middle of a step of unlike batches.
        """
