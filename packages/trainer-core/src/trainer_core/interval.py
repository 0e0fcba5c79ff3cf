"""Sums up what happens between two log entries, on the device until somebody looks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from perf_metrics import ThroughputMeter, model_flops_per_token

from .batch import Window, labels_of
from .parallelism import Parallelism
from .speed import RunSpeed
from .state import TrainerState


@dataclass
class Totals:
    """Figures of an interval, over all data-parallel ranks."""

    loss_sum: float = 0.0
    target_tokens: int = 0
    input_tokens: int = 0
    compute_tokens: int = 0
    flos: float = 0.0
    updates: int = 0
    grad_norm_square_sum: float = 0.0
    grad_norm_max: float = 0.0
    net_seconds: float = 0.0
    gross_seconds: float = 0.0
    data_seconds: float = 0.0


class _DeviceSums:
    """Running sums of this rank, as scalars on the device; float64 keeps sums of float32 losses exact."""

    def __init__(self, device: torch.device) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.loss = zero.clone()
        self.target_tokens = zero.clone()
        self.input_tokens = zero.clone()
        self.grad_norm_square = zero.clone()
        self.grad_norm_max = zero.clone()
        self.compute_tokens = 0
        self.flos = 0.0
        self.updates = 0

    def add(self, window: Window, loss_sum: Tensor, grad_norm: Tensor, flos: float) -> None:
        self.loss += loss_sum
        self.target_tokens += window.target_tokens
        self.input_tokens += window.input_tokens
        self.grad_norm_square += grad_norm.double().square()
        self.grad_norm_max = torch.maximum(self.grad_norm_max, grad_norm.double())
        self.compute_tokens += window.compute_tokens
        self.flos += flos
        self.updates += 1

    def per_rank(self) -> Tensor:
        """What has to be summed over ranks: float64 [5]."""
        counted = [self.loss, self.target_tokens, self.input_tokens]
        known = torch.tensor([self.compute_tokens, self.flos], dtype=torch.float64, device=self.loss.device)
        return torch.cat([torch.stack(counted), known])

    def global_norms(self) -> Tensor:
        """What is the same on every rank: float64 [2]."""
        return torch.stack([self.grad_norm_square, self.grad_norm_max])


class Interval:
    """The current log interval; part of a checkpoint, so that a resumed curve has the same points.

    Args:
        parallel: Sums over ranks.
        state: Receives the token and FLOP totals.
        meter: Net time and time spent waiting for data.
        speed: Speed of the whole session; gets the same time.
    """

    def __init__(
        self, parallel: Parallelism, state: TrainerState, meter: ThroughputMeter, speed: RunSpeed
    ) -> None:
        self.totals = Totals()
        self._parallel = parallel
        self._state = state
        self._meter = meter
        self._speed = speed
        self._flops_by_length: dict[int, float | None] = {}
        self._sums = _DeviceSums(parallel.device)

    def add(self, window: Window, loss_sum: Tensor, grad_norm: Tensor) -> None:
        """Add one optimizer step; waits for nothing."""
        flos = sum(self._flops_of(labels_of(batch)) for batch in window.batches)
        self._sums.add(window, loss_sum, grad_norm, flos)

    def flush(self) -> None:
        """Bring the figures to the host, summed over ranks, and add them to the run's totals."""
        if self._sums.updates:
            self._take(self._sums)
            self._sums = _DeviceSums(self._parallel.device)
        # The clock is read last: reading the sums above has waited for the device.
        lap = self._meter.lap()
        self._speed.add(lap.net_seconds, lap.gross_seconds)
        self.totals.net_seconds += lap.net_seconds
        self.totals.gross_seconds += lap.gross_seconds
        self.totals.data_seconds += lap.phases.get("data", 0.0)

    def _take(self, sums: _DeviceSums) -> None:
        loss_sum, target, inputs, compute, flos = self._parallel.sum(sums.per_rank()).tolist()
        square_sum, largest = sums.global_norms().tolist()
        totals, state = self.totals, self._state
        totals.loss_sum += loss_sum
        totals.target_tokens += int(target)
        totals.input_tokens += int(inputs)
        totals.compute_tokens += int(compute)
        totals.flos += flos
        totals.updates += sums.updates
        totals.grad_norm_square_sum += square_sum
        # Written so that a norm that is not a number shows.
        totals.grad_norm_max = totals.grad_norm_max if largest <= totals.grad_norm_max else largest
        state.num_target_tokens_seen += int(target)
        state.num_input_tokens_seen += int(inputs)
        state.total_flos += flos

    def close(self) -> Totals | None:
        """End the interval.

        Returns:
            Its figures, or None if it holds no optimizer step.
        """
        self.flush()
        finished, self.totals = self.totals, Totals()
        return finished if finished.updates else None

    def state_dict(self) -> dict[str, object]:
        """The figures so far; call `flush` first."""
        return asdict(self.totals)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take up an interval where a checkpoint left it."""
        known = {field.name for field in fields(Totals)}
        self.totals = Totals(**{name: value for name, value in state.items() if name in known})  # type: ignore[arg-type]

    def _flops_of(self, labels: Tensor) -> float:
        length = labels.shape[-1]
        if length not in self._flops_by_length:
            self._flops_by_length[length] = model_flops_per_token(self._parallel.unwrapped_model(), length)
        return labels.numel() * (self._flops_by_length[length] or 0.0)


def record_of(totals: Totals, state: TrainerState, learning_rate: float) -> dict[str, object]:
    """The log entry of an interval.

    `loss` is the sum of the token losses over the counted tokens, `grad_norm` the root mean square over the
    optimizer steps; `interval_seconds` leaves out evaluation and saving.
    """
    record: dict[str, object] = {
        "epoch": state.epoch,
        "loss": totals.loss_sum / max(1, totals.target_tokens),
        "grad_norm": math.sqrt(totals.grad_norm_square_sum / totals.updates),
        "grad_norm_max": totals.grad_norm_max,
        "learning_rate": learning_rate,
        "tokens": totals.target_tokens,
        "input_tokens": totals.input_tokens,
        "compute_tokens": totals.compute_tokens,
        "total_tokens": state.num_target_tokens_seen,
        "flos": totals.flos or None,
        "total_flos": state.total_flos or None,
        "interval_seconds": totals.net_seconds,
        "data_wait_share": totals.data_seconds / totals.net_seconds if totals.net_seconds > 0 else None,
    }
    return record
