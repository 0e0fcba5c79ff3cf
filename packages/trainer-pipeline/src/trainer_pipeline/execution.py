"""Carry out training steps by torch's schedules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from checkpoint_core import RNGState
from dist_env import DistributedEnvInterface, gather_objects
from trainer_core import ConfigurationError, has_no_values

from .boundaries import Boundaries, Hidden
from .clock import Clock
from .gradients import Copies
from .layout import Layout
from .microbatches import Microbatch
from .relay import Relay, run_forward
from .runner import Feed, Runner
from .schedules import SETTING, ScheduleKind

if TYPE_CHECKING:
    from .schedules import Schedule

_KEPT = 2
"""Schedules that are kept, each for one shape of microbatches; they hold memory for what they receive."""


class Place(NamedTuple):
    """Where a rank is in its pipeline."""

    layout: Layout
    rank: int
    group: ProcessGroup
    device: torch.device
    env: DistributedEnvInterface


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
        boundaries: What is known of the hidden states between stages.
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
        boundaries: Boundaries,
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
        self._boundaries = boundaries
        self._schedules: OrderedDict[tuple[object, ...], Schedule] = OrderedDict()
        self._copies = copies
        self._last = True

    def train(self, *, last: bool) -> None:
        """Run the microbatches of the feed forward and backward; collective.

        Args:
            last: Whether gradients are complete after it, so that those of the copies are added up.
        """
        self._last = last
        schedule = self._schedule(self._feed.microbatches[0])
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

        with self._evaluating():
            run_forward(self._place.layout, self._place.rank, self._relay, self._count, compute)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A context in which the stages are in evaluation mode, also those that are no part of the model."""
        modes = {module: module.training for runner in self.runners.values() for module in runner.modules()}
        for runner in self.runners.values():
            runner.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _schedule(self, microbatch: Microbatch) -> Schedule:
        key = self._boundaries.of(microbatch) or self._probe(microbatch)
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        made = self._schedules[key] = self._make(key)
        if len(self._schedules) > _KEPT:
            self._schedules.popitem(last=False)
        return made

    def _make(self, boundaries: Sequence[Hidden]) -> Schedule:
        # Tracing tools come with torch's stages, which take a second to import.
        from .stage import Shapes, Stage

        place = self._place
        layout = place.layout
        loss = Hidden((), torch.float32)
        around = [
            (torch.empty(hidden.shape, dtype=hidden.dtype, device="meta", requires_grad=True),)
            for hidden in (*boundaries, loss)
        ]
        stages = [
            Stage(
                runner,
                index,
                layout.num_stages,
                place.device,
                place.group,
                Shapes(around[index - 1] if index else (), around[index]),
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
        self._make([Hidden((1, 1), torch.float32)] * (self._place.layout.num_stages - 1))

    def _probe(self, microbatch: Microbatch) -> tuple[Hidden, ...]:
        """Learn what hidden states look like by taking a microbatch through the stages; collective."""
        if has_no_values():
            return self._guess(microbatch)
        seen: dict[int, Hidden] = {}
        last = self._place.layout.num_stages - 1

        def compute(stage: int, number: int, hidden: Tensor | None) -> Tensor | None:
            runner = self.runners[stage]
            runner.place = number
            output: Tensor = runner.score(hidden)[0] if stage == last else runner(hidden)
            _check_known(hidden, output)
            if stage == last:
                return None
            seen[stage] = Hidden(tuple(output.shape), output.dtype)
            return output

        generators = RNGState()
        before = generators.state_dict()
        with self._evaluating():
            run_forward(self._place.layout, self._place.rank, self._relay, 1, compute)
        generators.load_state_dict(before)
        told = gather_objects(seen, self._place.env, process_group=self._place.group)
        everything = {stage: hidden for each in told for stage, hidden in each.items()}
        return self._boundaries.learn(microbatch, everything)

    def _guess(self, microbatch: Microbatch) -> tuple[Hidden, ...]:
        """Take all hidden states to be like the first one, in a dry run of the first rank."""
        runner = self.runners[0]
        runner.place = 0
        with self._evaluating(), torch.no_grad():
            output = runner(None)
        hidden = Hidden(tuple(output.shape), output.dtype)
        stages = range(self._place.layout.num_stages - 1)
        return self._boundaries.learn(microbatch, dict.fromkeys(stages, hidden))


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
        "do it inside the blocks, from buffers or weights of their own, or give a model_splitter; if one "
        "process has no finite loss in its first step either, the model is at fault",
    )
