"""What happens between two log entries, summed on the device until asked for, and the speed of a session."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from dist_env import get_logger
from perf_metrics import (
    MEASURED,
    CountedFlops,
    FlopsPerToken,
    FlopsUnknownError,
    ModelFlops,
    ThroughputMeter,
    device_peak_flops,
    sum_peaks,
    warn_of_disagreement,
)

from ..arguments import TrainingArguments
from ..data.loaders import Window, row_length
from ..distributed.ranks import Ranks
from ..distributed.transforms import BuiltModel
from ..precision import fp8_share_of
from ..state import TrainerState
from .comm_bytes import CommBytes


@dataclass(frozen=True)
class _Mark:
    step: int
    target_tokens: float
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
        self._frozen: list[bool] = []
        self._peak: float | None = None
        self._is_gathered = False

    def knows(self, length: int) -> bool:
        """Whether this length has been asked for before; if not, it may take a moment."""
        self._follow_freezing()
        return length in self._known

    def per_token(self, length: int) -> float:
        """Model FLOPs per token of rows of this length; 0 if they cannot be told."""
        self._follow_freezing()
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
            device = str(self._built.ranks.device)
            peak = device_peak_flops(self._types(), value=self._args.peak_hardware_flops, device=device)
            gathered = self._built.ranks.gather([math.nan if peak is None else peak])
            self._peak = sum_peaks(None if math.isnan(value) else value for (value,) in gathered)
            if self._args.peak_hardware_flops == MEASURED and self._peak is not None:
                logger.info(
                    "MFU is of %.4g GFLOP/s, measured by matrix products on the devices of this run, as %s",
                    self._peak / 1e9,
                    self._types(),
                )
        return self._peak

    def _follow_freezing(self) -> None:
        """Begin anew where a callback has frozen parameters, or thawed them, since the last question."""
        frozen = [not parameter.requires_grad for parameter in self._built.parameters]
        if frozen == self._frozen or not (any(frozen) or self._frozen):
            return
        self._frozen = frozen
        now = dict(self._built.named_parameters())  # in a pipeline those of this rank's stages
        for name, parameter in self._built.meta_model.named_parameters():
            if name in now:
                parameter.requires_grad_(now[name].requires_grad)
        self._flops, self._counted, self._is_counted = None, None, False
        self._known.clear()
        self._totals.clear()

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


_HELD_STEPS = 256
"""Steps whose scalars are held before they are added up, which bounds memory when nothing is logged."""


@dataclass
class Totals:
    """Figures of an interval, over all data-parallel ranks."""

    loss_sum: float = 0.0
    target_tokens: float = 0
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
            self._on_device(torch.stack(part).double()) for part in zip(*self._steps, strict=True)
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

    def _on_device(self, values: Tensor) -> Tensor:
        # Token counts come from the host. From pageable memory the copy would wait for all that is queued.
        if values.device.type == "cpu" and self._sums.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._sums.device, non_blocking=True)

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
        target = int(target) if target % 1 == 0 else target  # of a loss with weights it is their sum
        totals.target_tokens += target
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
        state.num_target_tokens_seen += target
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
