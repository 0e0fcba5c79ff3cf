"""When each rank would compute what, given how long each pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_core import ConfigurationError

from ..schedules import SETTING, ScheduleFactory, ScheduleKind, kind_of_factory, schedule_kind
from .table import Action, Kind, Table, compute_actions
from .timeline import Bar, Timeline

_PLAIN = ("gpipe", "1f1b")
_LOOPED = ("interleaved_1f1b", "looped_bfs")
_WEIGHTS_LATER = ("interleaved_zero_bubble",)


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
            raise ConfigurationError(
                setting,
                value,
                "must be above 0, because a pass takes time",
                "give a positive number, such as 1.0",
            )
    if not transfer >= 0:
        raise ConfigurationError(
            "transfer", transfer, "must be 0 or more, because it is a time", "give 0 or a positive number"
        )
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
        ConfigurationError: There is none of that name, or it is not a schedule class.
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
            SETTING,
            self._name,
            f"cannot be executed, because its ranks wait for one another: {waiting}",
            "correct its order of actions",
        )


def textbook_bubble(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> float | None:
    """Return the bubble that the literature gives for a schedule: the share of the ranks' time spent waiting.

    All stages cost the same, a backward pass costs two forward passes (each of its halves one), and nothing
    is lost to transfers. With p ranks, m microbatches and v stages on a rank:

    - gpipe: (p-1) / (m+p-1), Huang et al. 2019, "GPipe", arXiv:1811.06965, section 2.3.
    - 1f1b: the same, Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1. They give the time of waiting as
      a share (p-1) / m of the time of computing; here it is the share of both together.
    - interleaved_1f1b: (p-1) / (v*m + p-1), the same paper, section 2.2.2.
    - looped_bfs: the same, Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", arXiv:2211.05953.
    - interleaved_zero_bubble: (p-1) / (3*v*m + p-1). With one stage on a rank this is ZB-H1 of Qi et al.
      2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, whose ranks wait (p-1) (F + I - W); with v
      stages, F, I and W each take 1/v of the time.
    - zbv and dualpipe_v: None. For zbv the same paper claims no bubble at all where F = I = W, counted
      between the first and the last action of each rank; `Timeline.bubble_between` is that figure, and it
      is 0 from 2p-1 microbatches on.

    The formulas with several stages on a rank, and that of interleaved_zero_bubble, take m to be at least p:
    with fewer microbatches a rank waits for its own earlier stage too, and the answer is None. Torch's
    schedules reach all formulas exactly where they are given, also where p does not divide m.

    Args:
        name: Name of the schedule.
        ranks: Ranks of the pipeline, p.
        microbatches: Microbatches of one step, m.
        stages_per_rank: Stages on a rank, v. By default 1 for gpipe and 1f1b, 2 for others.

    Returns:
        A share from 0 to 1; None where there is no simple formula, or the name is not one of these.
    """
    waiting = ranks - 1
    if name in _PLAIN:
        return waiting / (microbatches + waiting)
    if microbatches < ranks:
        return None
    passes = (2 if stages_per_rank is None else stages_per_rank) * microbatches
    if name in _LOOPED:
        return waiting / (passes + waiting)
    if name in _WEIGHTS_LATER:
        return waiting / (3 * passes + waiting)
    return None
