"""Carry out training steps by torch's schedules: one schedule for all microbatches of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from checkpoint_core import RNGState
from dist_env import gather_objects
from trainer_core import (
    Batch,
    BuiltModel,
    CausalLMLoss,
    ConfigurationError,
    ForwardOutput,
    TokenLoss,
    is_fake,
    labels_of,
    to_device,
)

from .microbatches import ActivationSpec, ActivationSpecs, Microbatch, MicrobatchQueue, cut, join, shapes_of
from .schedules import SETTING, ScheduleKind, StageLayout
from .stage_forward import ActivationChannel, StageForward, run_forward
from .stage_timer import StageTimer
from .tied_weights import TiedWeights

if TYPE_CHECKING:
    from .schedules import Schedule

_KEPT = 4
"""Schedules that are kept, each for one shape and number of microbatches."""


class Place(NamedTuple):
    """Where a rank is in its pipeline."""

    layout: StageLayout
    rank: int
    group: ProcessGroup


class PipelineExecutor:
    """Runs the stages of a rank over the microbatches of a step, as a schedule says.

    Args:
        built: What this rank holds of the model; its `grad_sync` is told of backward passes.
        place: Where this rank is in its pipeline.
        kind: The schedule.
        n_microbatches: Pieces of each batch.
        stages: The stages of this rank, by number.
        channel: Takes hidden states outside of the schedule.
        tied: Weights that other stages have, too.
        specs: What is known of the hidden states between stages.

    Attributes:
        timer: Tells how long this rank computes.
    """

    def __init__(
        self,
        built: BuiltModel,
        place: Place,
        kind: ScheduleKind,
        n_microbatches: int,
        stages: Mapping[int, nn.Module],
        channel: ActivationChannel,
        tied: TiedWeights,
        specs: ActivationSpecs,
    ) -> None:
        self.timer = StageTimer(built.ranks.device)
        self._built = built
        self._place = place
        self._kind = kind
        self._n_microbatches = n_microbatches
        self._channel = channel
        self._tied = tied
        self._specs = specs
        self._device = built.ranks.device
        self._queue = MicrobatchQueue(built.args, CausalLMLoss())
        last = place.layout.num_stages - 1
        self._stages = {
            index: StageForward(stage, built.model, self._queue, self._device, last=index == last)
            for index, stage in stages.items()
        }
        self._schedules: OrderedDict[tuple[object, ...], Schedule] = OrderedDict()
        self._possible: dict[int, bool] = {}
        self._last = True

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput | None:
        """Take a batch through the stages, forward only; collective in the pipeline.

        Returns:
            The scores; None on ranks without the last stage. Predictions that are neither a tensor nor a
            mapping of tensors come as a list, those of each microbatch.
        """
        inputs = to_device(batch, self._device)
        losses: list[Tensor] = []
        predictions: list[object] = []
        last = self._place.layout.num_stages - 1

        def compute(stage: int, number: int, hidden: Tensor | None) -> Tensor | None:
            module = self._stages[stage]
            self._queue.place = number
            if stage < last:
                given_on: Tensor = module(hidden)
                return given_on
            total, predicted = module.score(hidden)
            losses.append(total)
            predictions.append(predicted)
            return None

        self._queue.fill(loss, cut(inputs, self._n_microbatches))
        try:
            with self._evaluating():
                run_forward(
                    self._place.layout, self._place.rank, self._channel, self._n_microbatches, compute
                )
        finally:
            self._queue.clear()
        if not losses:
            return None
        rows = len(labels_of(inputs))
        return ForwardOutput(torch.stack(losses).sum(), join(predictions, rows))

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Callable[[str], object]
    ) -> Tensor:
        """Take all batches of an optimizer step through the pipeline; collective in the pipeline.

        Consecutive batches of equal shapes go through in one schedule, so that accumulation fills the
        pipeline and does not restart it. Events of forward and backward passes are fired once a schedule.

        Returns:
            Sum of the token losses of all batches, on every rank of the pipeline.
        """
        sync = self._built.grad_sync
        share = denominator if sync.mean_over == 1 else denominator / sync.mean_over
        losses: list[Tensor] = []
        runs = self._runs(batches)
        for number, microbatches in enumerate(runs, start=1):
            fire("on_forward_backward_begin")
            self._last = number == len(runs)
            self._queue.fill(loss, microbatches, share)
            try:
                schedule = self._schedule(microbatches)
                with self.timer.step():
                    # Targets only say which microbatch it is; the stage has everything else.
                    schedule.step(target=torch.arange(len(microbatches)), return_outputs=False)
                    if self._last:
                        sync.finish()
                losses += self._queue.losses
            finally:
                self._queue.clear()
            fire("on_forward_backward_end")
        self._tied.sum_gradients()
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)
        dist.broadcast(total, group=self._place.group, group_src=self._place.layout.last_rank)
        return total

    def attach(self) -> None:
        """Parameters are complete; make a schedule for nothing, so that torch refuses it before work begins.

        Raises:
            ConfigurationError: If this schedule cannot be carried out.
        """
        self._make(self._any_specs(), self._n_microbatches)

    def _runs(self, batches: Sequence[Batch]) -> list[list[Microbatch]]:
        """The microbatches of a step, in as few schedules as their shapes and torch allow."""
        every = [cut(to_device(batch, self._device), self._n_microbatches) for batch in batches]
        breaks = [shapes_of(one[0]) != shapes_of(other[0]) for one, other in pairwise(every)]
        if self._built.experts and breaks:
            # Ranks that send each other tokens go forward and backward in one order, whatever their own
            # batches are.
            breaks = self._built.ranks.any(breaks)
        alike: list[list[list[Microbatch]]] = []
        for begins, pieces in zip([True, *breaks], every, strict=True):
            if begins:
                alike.append([pieces])
            else:
                alike[-1].append(pieces)
        runs = []
        for group in alike:
            while group:
                size = self._most_at_once(len(group))
                runs.append([piece for pieces in group[:size] for piece in pieces])
                group = group[size:]
        return runs

    def _most_at_once(self, batches: int) -> int:
        """The most of so many batches that one schedule takes.

        Interleaved ones want a number of microbatches that divides into rounds, which that of one batch may
        do, and that of three may not.
        """
        for size in range(batches, 1, -1):
            count = size * self._n_microbatches
            if count not in self._possible:
                try:
                    self._make(self._any_specs(), count)
                    self._possible[count] = True
                except ConfigurationError:
                    self._possible[count] = False
            if self._possible[count]:
                return size
        return 1

    def _before_backward(self, part: nn.Module, last: bool) -> None:
        """Tell it; the last backward pass of a schedule may not be that of the step."""
        self._built.grad_sync.before_backward(part, last=last and self._last)

    def _after_backward(self, part: nn.Module) -> None:
        if self._last:
            self._built.grad_sync.after_backward(part, last=True)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A context in which the stages are in evaluation mode, also those that are not part of the model."""
        modes = {module: module.training for stage in self._stages.values() for module in stage.modules()}
        for stage in self._stages.values():
            stage.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _schedule(self, microbatches: Sequence[Microbatch]) -> Schedule:
        specs = self._specs.of(microbatches[0])
        probes = specs is None
        if self._built.experts:
            # It sends tokens to ranks that may know the shapes of theirs already.
            probes = self._built.ranks.any([probes])[0]
        if specs is None or probes:
            specs = self._probe(microbatches[0])
        key = (specs, len(microbatches))
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        made = self._schedules[key] = self._make(specs, len(microbatches))
        if len(self._schedules) > _KEPT:
            self._schedules.popitem(last=False)
        return made

    def _any_specs(self) -> list[ActivationSpec]:
        """Of a schedule that is not carried out."""
        return [ActivationSpec((1, 1), torch.float32)] * (self._place.layout.num_stages - 1)

    def _make(self, specs: Sequence[ActivationSpec], count: int) -> Schedule:
        # Tracing tools come with torch's stages, which take a second to import.
        from .stage import Shapes, Stage

        layout = self._place.layout
        loss = ActivationSpec((), torch.float32)
        around = [
            (torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=True),)
            for spec in (*specs, loss)
        ]
        stages = [
            Stage(
                module,
                index,
                layout.num_stages,
                self._device,
                self._place.group,
                Shapes(around[index - 1] if index else (), around[index]),
                self.timer,
                partial(self._before_backward, module.stage),
                partial(self._after_backward, module.stage),
            )
            for index, module in self._stages.items()
        ]
        try:
            return self._kind.factory(
                stages if self._kind.several_stages else stages[0],
                n_microbatches=count,
                loss_fn=_loss_as_it_is,
                scale_grads=False,
            )
        except ValueError as error:
            raise ConfigurationError(
                SETTING,
                self._kind.name,
                f"cannot be executed with pipeline.n_microbatches={count}, {layout.ranks} ranks and "
                f"{layout.stages_per_rank} stages on each: {error}",
                "change one of them",
            ) from error

    def _probe(self, microbatch: Microbatch) -> tuple[ActivationSpec, ...]:
        """Learn what hidden states look like by taking a microbatch through the stages; collective."""
        if is_fake():
            return self._guess(microbatch)
        seen: dict[int, ActivationSpec] = {}
        last = self._place.layout.num_stages - 1

        def compute(stage: int, number: int, hidden: Tensor | None) -> Tensor | None:
            module = self._stages[stage]
            self._queue.place = number
            output: Tensor = module.score(hidden)[0] if stage == last else module(hidden)
            _check_known(hidden, output)
            if stage == last:
                return None
            seen[stage] = ActivationSpec(tuple(output.shape), output.dtype)
            return output

        generators = RNGState()
        before = generators.state_dict()
        with self._evaluating():
            run_forward(self._place.layout, self._place.rank, self._channel, 1, compute)
        generators.load_state_dict(before)
        told = gather_objects(seen, self._built.ranks.env, process_group=self._place.group)
        everything = {stage: spec for each in told for stage, spec in each.items()}
        return self._specs.learn(microbatch, everything)

    def _guess(self, microbatch: Microbatch) -> tuple[ActivationSpec, ...]:
        """Take all hidden states to be like the first one, in a dry run of the first rank."""
        module = self._stages[0]
        self._queue.place = 0
        with self._evaluating(), torch.no_grad():
            output = module(None)
        spec = ActivationSpec(tuple(output.shape), output.dtype)
        return self._specs.learn(microbatch, dict.fromkeys(range(self._place.layout.num_stages - 1), spec))


def _loss_as_it_is(output: Tensor, target: Tensor) -> Tensor:
    return output


def _check_known(hidden: Tensor | None, output: Tensor) -> None:
    """Refuse a stage that has computed with the weights of another one.

    What stands in for those is not a number, and hidden states bring along all that may be used of them.
    """
    if hidden is None or not bool(hidden.isfinite().all()) or bool(output.isfinite().all()):
        return
    raise ConfigurationError(
        "model_splitter",
        "BlockSplitter",
        "does not fit this model, because a later stage needs more than the hidden state that its first "
        "block is given, such as a sum that the model keeps beside its blocks, or a position bias from "
        "weights",
        "compute it inside the blocks, from buffers or weights of their own, or give a model_splitter. If "
        "one process has no finite loss in its first step either, the model is at fault",
    )
