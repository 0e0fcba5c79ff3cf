"""Speed of a session, what the model's work amounts to, and what the devices could do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dist_env import get_logger
from perf_metrics import (
    CountedFlops,
    FlopsPerToken,
    FlopsUnknownError,
    ModelFlops,
    device_peak_flops,
    sum_peaks,
    warn_of_disagreement,
)

from ..arguments import TrainingArguments
from ..distributed.transforms import BuiltModel
from ..precision import fp8_share_of
from ..state import TrainerState


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
        """Final metrics; `train_loss` is the mean over the whole run.

        A session that ended before timing began has no speeds, and its time is that of all its steps. Tokens
        are the counted ones, as in `total_tokens`; where that is meant the name says `input`.
        """
        metrics: dict[str, float] = {
            "epoch": state.epoch,
            "effective_batch_size": self.samples_per_step,
            "total_tokens": state.num_target_tokens_seen,
            "total_input_tokens": state.num_input_tokens_seen,
        }
        if state.train_loss_sum is not None and state.train_loss_count > 0:
            metrics["train_loss"] = state.train_loss_sum / state.train_loss_count
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


logger = get_logger(__name__)


class FlopsAccount:
    """Model FLOPs per token of a run, what of them is computed twice, and the peak of its devices.

    Args:
        built: Has the model, and the ranks, whose peaks are gathered.
        args: Types that matrix products run in, `peak_hardware_flops` and `check_flops`.
    """

    def __init__(self, built: BuiltModel, args: TrainingArguments) -> None:
        self._built = built
        self._args = args
        self._flops: ModelFlops | None = None
        self._known: dict[int, FlopsPerToken | None] = {}
        self._totals: dict[int, float] = {}
        self._counted: CountedFlops | None = None
        self._is_counted = False
        self._peak: float | None = None
        self._is_gathered = False

    def knows(self, length: int) -> bool:
        """Whether this length has been asked for before; if not, it may take a moment."""
        return length in self._known

    def per_token(self, length: int) -> float:
        """Model FLOPs per token of rows of this length; 0 if they cannot be told."""
        if length not in self._totals:
            flops = self._known[length] = self._per_token(length)
            self._totals[length] = 0.0 if flops is None else flops.total
        return self._totals[length]

    def recomputed(self, tokens: Mapping[int, int]) -> float | None:
        """FLOPs that are done for the second time; None if that is not known.

        The first call holds the model FLOPs against a count, and takes a moment.

        Args:
            tokens: Number of positions by length of their rows.
        """
        if not self._is_counted and self._known:
            self._is_counted = True
            if self._args.check_flops and self._flops is not None:
                length = next(reversed(self._known))
                self._counted = warn_of_disagreement(self._built.meta_model, length, flops=self._flops)
        # What a memory budget recomputes is up to the compiler.
        if self._counted is None or self._args.activation_memory_budget is not None:
            return None
        known = {length: flops for length, flops in self._known.items() if flops is not None}
        return sum(
            count * self._counted.recomputed(known[length])
            for length, count in tokens.items()
            if length in known
        )

    def peak(self) -> float | None:
        """Peak FLOP/s of all devices together, None if one is unknown; the first call is collective."""
        if not self._is_gathered:
            self._is_gathered = True
            peak = device_peak_flops(self._types(), value=self._args.peak_hardware_flops)
            gathered = self._built.ranks.gather([math.nan if peak is None else peak])
            self._peak = sum_peaks(None if math.isnan(value) else value for (value,) in gathered)
        return self._peak

    def _per_token(self, length: int) -> FlopsPerToken | None:
        model = self._built.meta_model
        if length == 1 and not callable(getattr(model, "flops_per_token", None)):
            logger.warning(
                "the FLOPs of %s are not known: its batches have one label for each example and no input_ids "
                "that would tell how much it reads; give it a method flops_per_token(1) that returns the "
                "training FLOPs of an example",
                type(model).__name__,
            )
            return None
        if self._flops is None:
            self._flops = ModelFlops(model, length)
        try:
            return self._flops.per_token(length)
        except FlopsUnknownError as reason:
            if not self._known:
                logger.warning("%s", reason)
            return None

    def _types(self) -> str | Mapping[str, float]:
        """The types that products run in, with their shares where there are several."""
        usual = self._built.matmul_dtype or self._args.matmul_dtype
        share = fp8_share_of(self._built.model, self._args)
        flops = next(reversed(self._known.values()), None)
        if flops is not None and flops.total > 0:
            share *= flops.matmul / flops.total
        return {"fp8": share, usual: 1.0 - share} if share > 0 else usual
