"""When each rank would compute what, given how long each pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_core import ConfigurationError

from ..schedules import SETTING, ScheduleFactory, ScheduleKind, kind_of_factory, schedule_kind
from .table import Action, Kind, Table, compute_actions
from .timeline import Bar, Timeline


def simulate(
    schedule: str | ScheduleFactory,
    ranks: int,
    microbatches: int,
    *,
    stages_per_rank: int | None = None,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    transfer: float = 0.0,
) -> Timeline:
    """Return when each rank computes what in one step of a schedule, if all stages cost the same.

    Each rank does its actions in the order of torch's schedule. An action begins when its rank is free and
    what it needs is there: for a forward pass the output of the stage before; for a backward pass the
    gradient from the stage after, and its own forward pass; for weight gradients their own input gradients.

    Args:
        schedule: Name of the schedule, or a schedule class of torch, a subclass or a partial of one.
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of one step.
        stages_per_rank: By default 1, or 2 for schedules with several stages on a rank.
        forward: Time of one microbatch's forward pass through all stages of a rank. Each stage takes
            1 / stages_per_rank of it, and likewise of the two times below.
        backward_input: The same for the half of the backward pass that gives the gradients of the inputs.
        backward_weight: The same for the half that gives the gradients of the weights. A full backward pass
            takes both times.
        transfer: Time from the end of a pass to its result being on another rank.

    Returns:
        The timeline, in the unit of the given times; as they are by default, in forward passes of a rank.

    Raises:
        ConfigurationError: There is no such schedule, a count is below one, a time is not one, torch refuses
            to make the schedule from these counts, or its actions wait for one another for ever.
    """
    times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    for setting, value in times.items():
        if not value > 0:
            raise ConfigurationError(setting, value, "a pass takes time", "give a positive number")
    if not transfer >= 0:
        raise ConfigurationError("transfer", transfer, "it is a time", "give 0 or a positive number")
    kind = known_schedule(schedule)
    table = compute_actions(kind, ranks, microbatches, stages_per_rank)
    stages = 1 + max(action.stage for actions in table for action in actions)
    share = ranks / stages
    durations: dict[Kind, float] = {
        "F": forward * share,
        "I": backward_input * share,
        "W": backward_weight * share,
        "B": (backward_input + backward_weight) * share,
    }
    return Timeline(kind.name, _Simulation(kind.name, table, durations, transfer, stages).run())


def known_schedule(schedule: str | ScheduleFactory) -> ScheduleKind:
    """Return what is known of a schedule, given by name or by class.

    Raises:
        ConfigurationError: There is none of that name, or it is no schedule class.
    """
    return schedule_kind(schedule) if isinstance(schedule, str) else kind_of_factory(schedule)


@dataclass(frozen=True)
class _Result:
    """What an action leaves behind: where it is, and since when."""

    rank: int
    time: float


class _Simulation:
    """One step, from an empty pipeline to an empty one."""

    def __init__(
        self, name: str, table: Table, durations: dict[Kind, float], transfer: float, stages: int
    ) -> None:
        self._name = name
        self._table = table
        self._durations = durations
        self._transfer = transfer
        self._last_stage = stages - 1
        # A full backward pass leaves what the half for the inputs leaves: kind "I".
        self._results: dict[Action, _Result] = {}
        self._free = [0.0] * len(table)
        self._done = [0] * len(table)

    def run(self) -> tuple[Bar, ...]:
        bars: list[Bar] = []
        while any(done < len(actions) for done, actions in zip(self._done, self._table, strict=True)):
            before = len(bars)
            for rank in range(len(self._table)):
                bars += self._advance(rank)
            if len(bars) == before:
                raise self._deadlock()
        return tuple(bars)

    def _advance(self, rank: int) -> list[Bar]:
        """Do the actions of a rank until one needs what is not there yet."""
        bars: list[Bar] = []
        for action in self._table[rank][self._done[rank] :]:
            needed = [self._results.get(need) for need in self._needs(action)]
            there = [self._arrival(result, rank) for result in needed if result is not None]
            if len(there) < len(needed):
                break
            start = max(self._free[rank], *there, 0.0)
            end = start + self._durations[action.kind]
            bars.append(Bar(rank, action.stage, action.kind, action.microbatch, start, end))
            left = action._replace(kind="I") if action.kind == "B" else action
            self._results[left] = _Result(rank, end)
            self._free[rank] = end
            self._done[rank] += 1
        return bars

    def _arrival(self, result: _Result, rank: int) -> float:
        return result.time if result.rank == rank else result.time + self._transfer

    def _needs(self, action: Action) -> Sequence[Action]:
        stage, kind, microbatch = action
        if kind == "F":
            return [] if stage == 0 else [Action(stage - 1, "F", microbatch)]
        if kind == "W":
            return [Action(stage, "I", microbatch)]
        own = Action(stage, "F", microbatch)
        return [own] if stage == self._last_stage else [own, Action(stage + 1, "I", microbatch)]

    def _deadlock(self) -> ConfigurationError:
        waiting = ", ".join(
            f"rank {rank} for {actions[done]}"
            for rank, (done, actions) in enumerate(zip(self._done, self._table, strict=True))
            if done < len(actions)
        )
        return ConfigurationError(
            SETTING, self._name, f"its ranks wait for one another: {waiting}", "mend its order of actions"
        )
