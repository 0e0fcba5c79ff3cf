"""Speed of a whole session, for the summary at its end."""

from __future__ import annotations

from dataclasses import dataclass

from .state import TrainerState


@dataclass(frozen=True)
class _Mark:
    step: int
    target_tokens: int
    input_tokens: int
    flos: float


class RunSpeed:
    """Times the optimizer steps of this session after the first `start_step` ones.

    Numerators and denominators cover the same steps: neither warm-up nor earlier sessions count.

    Args:
        start_step: Steps of this session to leave out.
        samples_per_step: Examples per optimizer step over all ranks.
    """

    def __init__(self, start_step: int, samples_per_step: int) -> None:
        self.start_step = start_step
        self.samples_per_step = samples_per_step
        self.net_seconds = 0.0
        self.gross_seconds = 0.0
        self.hardware_flos = 0.0
        self._session_step = 0
        self._session_net = 0.0
        self._session_gross = 0.0
        self._mark: _Mark | None = None

    def begin(self, state: TrainerState) -> None:
        """Note where the session begins."""
        self._session_step = state.global_step
        self._session_net = self._session_gross = 0.0
        self.net_seconds = self.gross_seconds = self.hardware_flos = 0.0
        self._mark = None
        if self.start_step == 0:
            self.mark(state)

    def starts_after(self, state: TrainerState) -> bool:
        """Whether the step just done is the last one to leave out."""
        return self.start_step > 0 and state.global_step - self._session_step == self.start_step

    def mark(self, state: TrainerState) -> None:
        """Start timing; the state's totals must be up to date."""
        self._mark = _Mark(
            state.global_step, state.num_target_tokens_seen, state.num_input_tokens_seen, state.total_flos
        )

    def add(self, net_seconds: float, gross_seconds: float) -> None:
        """Add time; it counts for the speed if timing has started."""
        self._session_net += net_seconds
        self._session_gross += gross_seconds
        if self._mark is not None:
            self.net_seconds += net_seconds
            self.gross_seconds += gross_seconds

    def add_executed(self, flos: float) -> None:
        """Add FLOPs that were executed, recomputed ones included, if timing has started."""
        if self._mark is not None:
            self.hardware_flos += flos

    def summary(self, state: TrainerState) -> dict[str, float]:
        """Final metrics.

        A session that ended before timing began has no speeds, and its time is that of all its steps. Tokens
        are the counted ones, as in `total_tokens`; where that is meant the name says `input`.
        """
        metrics: dict[str, float] = {
            "epoch": state.epoch,
            "effective_batch_size": self.samples_per_step,
            "total_tokens": state.num_target_tokens_seen,
            "total_input_tokens": state.num_input_tokens_seen,
        }
        if state.total_flos > 0:
            metrics["total_flops"] = state.total_flos
        mark = self._mark
        steps = 0 if mark is None else state.global_step - mark.step
        if mark is None or steps <= 0 or self.net_seconds <= 0:
            return metrics | {
                "train_runtime": round(self._session_net, 3),
                "train_runtime_gross": round(self._session_gross, 3),
                "timed_steps": 0,
            }
        flos = state.total_flos - mark.flos
        rates = {
            "tokens_per_second": state.num_target_tokens_seen - mark.target_tokens,
            "input_tokens_per_second": state.num_input_tokens_seen - mark.input_tokens,
        }
        metrics |= {
            "train_runtime": round(self.net_seconds, 3),
            "train_runtime_gross": round(self.gross_seconds, 3),
            "timed_steps": steps,
            "train_samples": steps * self.samples_per_step,
            "train_samples_per_second": round(steps * self.samples_per_step / self.net_seconds, 3),
            "train_steps_per_second": round(steps / self.net_seconds, 3),
            **{name: round(tokens / self.net_seconds, 2) for name, tokens in rates.items()},
        }
        if flos > 0:
            metrics["flops_per_second"] = round(flos / self.net_seconds, 2)
        if self.hardware_flos > 0:
            metrics["hardware_flops_per_second"] = round(self.hardware_flos / self.net_seconds, 2)
        return metrics
