"""Carry out training steps by torch's schedules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer_core import ConfigurationError

from .clock import Clock
from .gradients import Copies
from .layout import Layout
from .relay import Boundary, Relay, run_forward
from .runner import Feed, Runner
from .schedules import SETTING, ScheduleKind

if TYPE_CHECKING:
    from .schedules import Schedule

_KEPT = 4
"""Schedules that are kept, each for one shape of microbatches; they hold memory for what they receive."""


class Place(NamedTuple):
    """Where a rank is in its pipeline."""

    layout: Layout
    rank: int
    group: ProcessGroup
    device: torch.device


class Execution:
    """Runs the stages of a rank over microbatches, as a schedule says.

    Args:
        place: Where this rank is.
        kind: The schedule.
        count: Microbatches of a step.
        stages: The stages of this rank, by number.
        model: The model that they are of.
        feed: What they work on; filled before each step.
        relay: Takes hidden states outside of the schedule.
        clock: Gets the time.
        copies: The ranks with the same stages.
    """

    def __init__(
        self,
        place: Place,
        kind: ScheduleKind,
        count: int,
        stages: Mapping[int, nn.Module],
        model: nn.Module,
        feed: Feed,
        relay: Relay,
        clock: Clock,
        copies: Copies,
    ) -> None:
        self._place = place
        self._kind = kind
        self._count = count
        last = place.layout.num_stages - 1
        self.runners = {
            index: Runner(stage, model, feed, place.device, last=index == last)
            for index, stage in stages.items()
        }
        self._feed = feed
        self._relay = relay
        self._clock = clock
        self._boundary = Boundary()
        self._schedules: OrderedDict[tuple[object, ...], Schedule] = OrderedDict()
        self._copies = copies
        self._last = True

    def train(self, *, last: bool) -> None:
        """Run the microbatches of the feed forward and backward; collective.

        Args:
            last: Whether gradients are complete after it, so that those of the copies are added up.
        """
        self._last = last
        schedule = self._schedule(tuple(self._feed.microbatches[0].labels.shape))
        with self._clock.step():
            # Targets only say which microbatch it is; the stage has everything else.
            schedule.step(target=torch.arange(self._count), return_outputs=False)
            if last:
                self._copies.finish()

    def before_backward(self, stage: int, *, last: bool) -> None:
        """Pass it on to the copies; the last backward pass of this batch may not be that of the step."""
        self._copies.before_backward(stage, last=last and self._last)

    def after_last(self, stage: int) -> None:
        """Pass it on to the copies, if it is the last one of the step."""
        if self._last:
            self._copies.after_last(stage)

    def finish(self) -> None:
        """Pass it on to the copies."""
        self._copies.finish()

    def score(self, note: Callable[[Tensor, object], None]) -> None:
        """Run the microbatches of the feed forward; collective.

        Args:
            note: Where the last stage is, called with the sum of the losses and the predictions of each
                microbatch, in order.
        """
        last = self._place.layout.num_stages - 1

        def compute(stage: int, number: int, hidden: Tensor | None) -> Tensor | None:
            runner = self.runners[stage]
            runner.place = number
            if stage < last:
                return runner(hidden)  # type: ignore[no-any-return]
            note(*runner.score(hidden))
            return None

        run_forward(self._place.layout, self._place.rank, self._relay, self._count, compute)

    def _schedule(self, labels: tuple[int, ...]) -> Schedule:
        shape, dtype = self._boundary.of(labels) or self._probe(labels)
        key = (shape, dtype)
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        made = self._schedules[key] = self._make(shape, dtype)
        if len(self._schedules) > _KEPT:
            self._schedules.popitem(last=False)
        return made

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> Schedule:
        # Tracing tools come with torch's stages, which take a second to import.
        from .stage import Shapes, Stage

        place = self._place
        layout = place.layout
        hidden = torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        stages = [
            Stage(
                runner,
                index,
                layout.num_stages,
                place.device,
                place.group,
                Shapes((hidden,) if index else (), (hidden,) if index < layout.num_stages - 1 else (loss,)),
                self._clock,
                self,
            )
            for index, runner in self.runners.items()
        ]
        try:
            return self._kind.factory(
                stages if self._kind.several_stages else stages[0],
                n_microbatches=self._count,
                loss_fn=_loss_as_it_is,
                scale_grads=False,
            )
        except ValueError as error:
            raise ConfigurationError(
                SETTING,
                self._kind.name,
                f"cannot be carried out with pipeline.n_microbatches={self._count}, {layout.ranks} ranks and "
                f"{layout.stages_per_rank} stages on each: {error}",
                "change one of them",
            ) from error

    def check(self) -> None:
        """Make a schedule for nothing, so that what torch refuses is refused before work begins.

        Raises:
            ConfigurationError: If this schedule cannot be carried out.
        """
        self._make((1, 1), torch.float32)

    def _probe(self, labels: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
        """Learn what hidden states look like by taking the first microbatch through the stages."""
        seen: list[Tensor] = []
        last = self._place.layout.num_stages - 1

        def compute(stage: int, number: int, hidden: Tensor | None) -> Tensor | None:
            runner = self.runners[stage]
            runner.place = number
            output = runner.score(hidden)[0] if stage == last else runner(hidden)
            _check_known(hidden, output)
            if stage == last:
                return None
            seen.append(output)
            return output

        modes = {module: module.training for runner in self.runners.values() for module in runner.modules()}
        for runner in self.runners.values():
            runner.eval()
        try:
            run_forward(self._place.layout, self._place.rank, self._relay, 1, compute)
        finally:
            for module, mode in modes.items():
                module.training = mode
        told: list[object] = [{"shape": tuple(seen[0].shape), "dtype": seen[0].dtype} if seen else None]
        # A rank that only has the last stage has seen none.
        dist.broadcast_object_list(told, group=self._place.group, group_src=0)
        found = told[0]
        if not isinstance(found, dict):
            raise RuntimeError("the first stage has seen no hidden state")
        self._boundary.learn(labels, found)
        return found["shape"], found["dtype"]


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
        "does not fit this model: a later stage needs more than the hidden state that its first block is "
        "given, such as a sum that the model keeps beside its blocks, or a position bias from weights",
        "do it inside the blocks, from buffers or weights of their own, or give a model_splitter",
    )
