"""Sums up what happens between two log entries, on the device until somebody looks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from perf_metrics import ThroughputMeter

from ..data.batch import Window, row_length
from ..distributed.ranks import Ranks
from ..state import TrainerState
from .comm_bytes import CommBytes
from .throughput import FlopsAccount, RunSpeed

_HELD_STEPS = 256
"""Steps whose scalars are held before they are added up, which bounds memory when nothing is logged."""


@dataclass
class Totals:
    """Figures of an interval, over all data-parallel ranks."""

    loss_sum: float = 0.0
    target_tokens: int = 0
    input_tokens: int = 0
    compute_tokens: int = 0
    flos: float = 0.0
    hardware_flos: float | None = None
    """The same with what is recomputed; none where that is not known."""
    updates: int = 0
    """Optimizer steps that were applied."""
    skipped: int = 0
    """Optimizer steps that were not, because the gradient was not finite."""
    applied_tokens: float = 0
    """What counts in the loss of the applied steps; a sum of weights need not be whole."""
    grad_norm_square_sum: float = 0.0
    grad_norm_max: float = 0.0
    learning_rate: float = 0.0
    """The rate that the last optimizer step was made with."""
    net_seconds: float = 0.0
    gross_seconds: float = 0.0
    data_seconds: float = 0.0
    communicated_bytes: float | None = None
    """Payload that the ranks have handed to collectives, all together; none where nobody counts."""


class _DeviceSums:
    """Running sums of this rank; float64 keeps sums of float32 losses exact.

    The scalars of the last steps are held as they are and added up a few hundred at a time: one addition
    for each of them would cost more than the step of a small model.

    Args:
        device: Where the sums are.
        finite: Scalar on the device for a run in which no step is applied after one whose gradient was not
            finite: 1 until that one, 0 from there on. None where each step stands for itself.
    """

    def __init__(self, device: torch.device, finite: Tensor | None) -> None:
        self._finite = finite
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        """Loss and counted tokens of applied steps, counted tokens, input tokens; then, equal on all ranks,
        the number of applied steps."""
        self._norms = torch.zeros(2, dtype=torch.float64, device=device)
        """Sum of squares, and largest."""
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._inputs: list[Tensor] = []
        self.known_inputs = 0
        self.tokens_by_length: Counter[int] = Counter()
        self.flos = 0.0
        self.updates = 0

    def add(self, window: Window, loss_sum: Tensor, grad_norm: Tensor, flos: float) -> None:
        self._steps.append((loss_sum, window.target_tokens, grad_norm))
        for tokens in window.input_tokens:
            if isinstance(tokens, int):
                self.known_inputs += tokens
            else:
                self._inputs.append(tokens)
        self.flos += flos
        self.updates += 1
        if len(self._steps) == _HELD_STEPS:
            self.add_up()

    def add_up(self) -> None:
        """Add the scalars that are held to the sums; waits for nothing."""
        if not self._steps:
            return
        losses, tokens, norms = (
            torch.stack(part).double().to(self._sums.device) for part in zip(*self._steps, strict=True)
        )
        # A step whose gradient is not finite is never applied, and no part of the curve.
        applied = norms.isfinite()
        if self._finite is not None:
            # Nor are those after it, which the device has computed before the host knew.
            so_far = torch.cat([self._finite[None], applied.to(self._finite)]).cumprod(0)
            self._finite.copy_(so_far[-1])
            applied = so_far[1:].bool()
        self._sums[0] += losses.where(applied, 0.0).sum()
        self._sums[1] += tokens.where(applied, 0.0).sum()
        self._sums[2] += tokens.sum()
        if self._inputs:
            self._sums[3] += torch.stack(self._inputs).sum()
        self._sums[4] += applied.sum()
        norms = norms.where(applied, 0.0)
        self._norms[0] += norms.square().sum()
        self._norms[1] = torch.maximum(self._norms[1], norms.max())
        self._steps.clear()
        self._inputs.clear()

    def values(self, *, counts: bool) -> list[float]:
        """The five sums, the two of norms, and what the host counts; waits for the device once.

        Args:
            counts: Whether the data of this rank is counted; otherwise its sums are 0.
        """
        self.add_up()
        on_device: list[float] = torch.cat([self._sums, self._norms]).tolist()
        if not counts:
            return [0.0] * 4 + on_device[4:] + [0.0] * 3
        return [*on_device, self.known_inputs, self.tokens_by_length.total(), self.flos]


class MetricAccumulator:
    """The current log interval; part of a checkpoint, so that a resumed curve has the same points.

    Args:
        ranks: Sums over ranks.
        state: Receives the token and FLOP totals.
        meter: Net time and time spent waiting for data.
        speed: Speed of the whole session; gets the same time.
        flops: What a token costs.
        traffic: What this rank has sent; None where nobody counts.
        halts: Whether no step is applied after one whose gradient was not finite.
    """

    def __init__(
        self,
        ranks: Ranks,
        state: TrainerState,
        meter: ThroughputMeter,
        speed: RunSpeed,
        flops: FlopsAccount,
        *,
        traffic: CommBytes | None = None,
        halts: bool = False,
    ) -> None:
        self.totals = Totals()
        self._ranks = ranks
        self._traffic = traffic
        self._state = state
        self._meter = meter
        self._speed = speed
        self._flops = flops
        self._finite = torch.ones((), device=ranks.device) if halts else None
        self._sums = _DeviceSums(ranks.device, self._finite)
        self._sent = 0

    def add(self, window: Window, loss_sum: Tensor, grad_norm: Tensor, learning_rate: float) -> None:
        """Add one optimizer step; waits for nothing."""
        self.totals.learning_rate = learning_rate
        flos = 0.0
        for positions in window.positions:
            length = row_length(positions)
            self._sums.tokens_by_length[length] += positions.numel()
            flos += positions.numel() * self._flops_per_token(length)
        self._sums.add(window, loss_sum, grad_norm, flos)

    def flush(self) -> None:
        """Bring the figures to the host, summed over ranks, and add them to the run's totals."""
        if self._sums.updates:
            self._take(self._sums)
            self._sums = _DeviceSums(self._ranks.device, self._finite)
        # The clock is read last: reading the sums above has waited for the device.
        lap = self._meter.lap()
        self._speed.add(lap.net_seconds, lap.gross_seconds)
        self.totals.net_seconds += lap.net_seconds
        self.totals.gross_seconds += lap.gross_seconds
        self.totals.data_seconds += lap.phases.get("data", 0.0)

    def _take(self, sums: _DeviceSums) -> None:
        counts = self._ranks.counts_tokens
        recomputed = self._recomputed(sums) if counts else 0.0
        ranks = self._ranks.gather([*sums.values(counts=counts), self._new_comm_bytes(), recomputed])
        columns = list(zip(*ranks, strict=True))
        loss_sum, applied_tokens, target, masked_inputs = map(sum, columns[:4])
        # Equal on all ranks, but where each trains a model of its own.
        applied, square_sum = map(_common, columns[4:6])
        known_inputs, compute, flos, sent, again = map(sum, columns[7:])
        inputs = masked_inputs + known_inputs
        totals, state = self.totals, self._state
        totals.loss_sum += loss_sum
        totals.applied_tokens += applied_tokens
        if state.train_loss_sum is not None:
            state.train_loss_sum += loss_sum
            state.train_loss_count += applied_tokens
        totals.target_tokens += int(target)
        totals.input_tokens += int(inputs)
        totals.compute_tokens += int(compute)
        totals.flos += flos
        if not math.isnan(again):
            totals.hardware_flos = (totals.hardware_flos or 0.0) + flos + again
            self._speed.add_executed(flos + again)
        totals.updates += int(applied)
        totals.skipped += sums.updates - int(applied)
        totals.grad_norm_square_sum += square_sum
        totals.grad_norm_max = max(totals.grad_norm_max, *columns[6])
        if self._traffic is not None:
            totals.communicated_bytes = (totals.communicated_bytes or 0) + sent
        state.num_target_tokens_seen += int(target)
        state.num_input_tokens_seen += int(inputs)
        state.total_flos += flos

    def _recomputed(self, sums: _DeviceSums) -> float:
        """FLOPs that this rank's data cost a second time; not a number if that is not known."""
        with self._meter.exclude("flops"):
            recomputed = self._flops.recomputed(sums.tokens_by_length)
        return math.nan if recomputed is None else recomputed

    def _new_comm_bytes(self) -> float:
        """Bytes that this rank has sent since the last call."""
        before, self._sent = self._sent, 0 if self._traffic is None else self._traffic.bytes
        return self._sent - before

    def close(self) -> Totals | None:
        """End the interval.

        Returns:
            Its figures, or None if it holds no optimizer step.
        """
        self.flush()
        finished, self.totals = self.totals, Totals()
        return finished if finished.updates or finished.skipped else None

    def begin(self) -> None:
        """Count the steps from here on as applied again, whatever was observed before."""
        self._sums.add_up()
        if self._finite is not None:
            self._finite.fill_(1)

    def state_dict(self) -> dict[str, object]:
        """The figures so far; call `flush` first."""
        return asdict(self.totals)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take up an interval where a checkpoint left it."""
        self.begin()
        self._sums = _DeviceSums(self._ranks.device, self._finite)
        known = {field.name for field in fields(Totals)}
        self.totals = Totals(**{name: value for name, value in state.items() if name in known})  # type: ignore[arg-type]

    def _flops_per_token(self, length: int) -> float:
        if self._flops.knows(length):
            return self._flops.per_token(length)
        with self._meter.exclude("flops"):
            return self._flops.per_token(length)


def _common(values: Sequence[float]) -> float:
    """The value that all ranks have; their mean where they differ."""
    return values[0] if min(values) == max(values) else sum(values) / len(values)


def record_of(totals: Totals, state: TrainerState) -> dict[str, object]:
    """The log entry of an interval.

    `loss` is the sum of the token losses over the counted tokens, `grad_norm` the root mean square over the
    optimizer steps; both are over the steps that were applied, and not a number if none was.
    `interval_seconds` leaves out evaluation and saving.
    """
    record: dict[str, object] = {
        "epoch": state.epoch,
        "loss": totals.loss_sum / (totals.applied_tokens or 1) if totals.updates else math.nan,
        "grad_norm": math.sqrt(totals.grad_norm_square_sum / totals.updates) if totals.updates else math.nan,
        "grad_norm_max": totals.grad_norm_max,
        "learning_rate": totals.learning_rate,
        "tokens": totals.target_tokens,
        "input_tokens": totals.input_tokens,
        "compute_tokens": totals.compute_tokens,
        "total_tokens": state.num_target_tokens_seen,
        "flos": totals.flos or None,
        "hardware_flos": totals.hardware_flos or None,
        "total_flos": state.total_flos or None,
        "interval_seconds": totals.net_seconds,
        "data_wait_share": totals.data_seconds / totals.net_seconds if totals.net_seconds > 0 else None,
    }
    if totals.skipped:
        record["skipped_steps"] = totals.skipped
    if totals.communicated_bytes is not None:
        record["communicated_bytes"] = int(totals.communicated_bytes)
        record["communicated_bytes_per_1k_tokens"] = (
            totals.communicated_bytes / totals.input_tokens * 1000 if totals.input_tokens else None
        )
    return record


def plain_record(record: Mapping[str, object]) -> dict[str, object]:
    """A log entry as a checkpoint can hold it: numbers, texts, None, and lists and tables of them.

    Raises:
        TypeError: For anything else, naming the entry.
    """
    return {name: _plain(name, value) for name, value in record.items()}


def _plain(name: str, value: object) -> object:
    # By exact type: numbers of numpy pass for floats, and cannot be saved.
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if callable(to_python := getattr(value, "tolist", None)):
        return _plain(name, to_python())  # tensors, and arrays and scalars of numpy
    raise TypeError(
        f"log entry {name!r} is a {type(value).__name__}, not a number, a text, or a list or table of them."
    )
