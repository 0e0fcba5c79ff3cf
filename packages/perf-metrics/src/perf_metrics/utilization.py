"""Model FLOPs utilization, the peak that it is measured against, and a meter of both for any loop."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .throughput import ThroughputMeter

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def device_peak_flops(
    dtype: str | Mapping[str, float] = "bf16",
    *,
    value: float | str | None = None,
    device: str | None = None,
) -> float | None:
    """Return the peak FLOP/s of one device of this process, or None when it is unknown.

    The order of `hardware_table.get_peak_hardware_flops`: `value` if given, the user's `hardware.yaml`, the
    table by the name of the current device. A processor without a record, the CPU for one, gives None unless
    it is measured.

    Args:
        dtype: The type that the matrix multiplications run in: "bf16", "fp16", "tf32", "fp32", "fp8", ...; of
            a model that computes in several, each with its share of the FLOPs, such as
            `{"fp8": 0.8, "bf16": 0.2}`: the peak is then that of `mixed_peak_flops`.
        value: A peak given by the user, in FLOP/s; text such as "165.2e12" will do. "measured": what
            `measure_peak_flops` finds.
        device: Where it is measured, such as "cpu"; None: the accelerator of this process, if it has one.

    Returns:
        Dense FLOP/s of one device. Sum it over the ranks for the peak of a job.

    Raises:
        ValueError: `value` or the user's file holds something that is not a positive number.
    """
    # Imported here: the plain formulas and the file readers must not need the table.
    from hardware_table import get_peak_hardware_flops

    if not isinstance(dtype, str):
        _check_shares(dtype)
    if value == MEASURED:
        names = [dtype] if isinstance(dtype, str) else list(dtype)
        peaks = {name: measure_peak_flops(name, device=device) for name in names}
        return peaks[dtype] if isinstance(dtype, str) else mixed_peak_flops(dtype, peaks)
    if isinstance(dtype, str) or value is not None:
        return get_peak_hardware_flops(value, dtype=dtype if isinstance(dtype, str) else "bf16")
    return mixed_peak_flops(dtype, {name: get_peak_hardware_flops(dtype=name) for name in dtype})


MEASURED = "measured"
"""In the place of a peak: measure it."""
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "tf32": "float32",
    "fp64": "float64",
}
_SIDES = {"cpu": 1024}
_SIDE = 4096
"""Rows and columns. Larger matrices come closer to the peak, and take memory that a run has used up."""


def measure_peak_flops(dtype: str = "fp32", *, device: str | None = None, seconds: float = 0.1) -> float:
    """Measure the FLOP/s of a device: the best of some products of square matrices, one after the other.

    It stands in where no peak is published, as for a CPU: MFU is then what a model reaches of the rate of
    such products. A measured rate is below the peak of a data sheet, and MFU higher by as much. Ranks that
    share a processor must measure at the same time, as the trainers do.

    Args:
        dtype: "bf16", "fp16", "fp32", "tf32" or "fp64". Whether float32 is computed as fp32 or tf32 is up to
            torch's setting of the precision of matrix products, which is left as it is.
        device: Such as "cuda:0"; None: the accelerator of this process, or else the CPU with as many threads
            as torch has.
        seconds: How long to measure, after one product to warm up.

    Returns:
        FLOP/s.

    Raises:
        ValueError: torch has no such products, or `seconds` is not above 0.
    """
    import torch

    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be measured. Use one of {', '.join(_DTYPES)}.")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be above 0.")
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if accelerator is None else str(accelerator)
    side = _SIDES.get(torch.device(device).type, _SIDE)
    with torch.inference_mode():
        # Ones: no random number of a training run is drawn for this.
        left = torch.ones(side, side, dtype=getattr(torch, _DTYPES[dtype]), device=device)
        out = torch.mm(left, left)
        wait_for_device()
        best, begun = 0.0, time.perf_counter()
        while best == 0.0 or time.perf_counter() - begun < seconds:
            start = time.perf_counter()
            torch.mm(left, left, out=out)
            wait_for_device()
            best = max(best, 2.0 * side**3 / (time.perf_counter() - start))
    return best


def mixed_peak_flops(shares: Mapping[str, float], peaks: Mapping[str, float | None]) -> float | None:
    """Return the peak of a device whose work is of several types: 1 / sum of share / peak.

    The harmonic mean weighted by FLOPs ("Instant GPU Efficiency Visibility at Fleet Scale", section on mixed
    precision): each type takes its share of the FLOPs at its own peak, one after the other.

    Args:
        shares: Share of the FLOPs by type; together 1.
        peaks: Peak FLOP/s by type.

    Returns:
        FLOP/s, or None where the peak of a type with work to do is unknown.

    Raises:
        ValueError: The shares are not positive or do not add up to 1, or a peak is not positive and finite.
    """
    _check_shares(shares)
    seconds = 0.0
    for name, share in shares.items():
        peak = peaks.get(name)
        if share == 0:
            continue
        if peak is None:
            return None
        check_peak(f"peaks[{name!r}]", peak)
        seconds += share / peak
    return 1.0 / seconds


def _check_shares(shares: Mapping[str, float]) -> None:
    right = all(isinstance(share, int | float) and share >= 0 for share in shares.values())
    if not right or not math.isclose(sum(shares.values()), 1.0):
        raise ValueError(f"shares={dict(shares)!r} must be 0 or more each, and 1 together.")


def sum_peaks(peaks: Iterable[float | None]) -> float | None:
    """Return the peak of a job from those of its devices, which may be unlike; None if one is unknown.

    Raises:
        ValueError: A peak is not a positive finite number.
    """
    known = list(peaks)
    for peak in known:
        if peak is not None:
            check_peak("peaks", peak)
    return None if not known or None in known else math.fsum(peak for peak in known if peak is not None)


def model_flops_utilization(flops: float, seconds: float, peak_flops: float | None) -> float | None:
    """Return MFU: model FLOPs / (seconds x peak), as a share where 1.0 is the peak.

    The value is not clamped: more than 1 means a wrong count, a wrong peak or a clock read too early.

    Args:
        flops: Model FLOPs done in the window by all devices.
        seconds: Net wall time of the window.
        peak_flops: Summed peak FLOP/s of the same devices; None when unknown.

    Returns:
        The share, or None when the peak is unknown or no time has passed.

    Raises:
        ValueError: `peak_flops` is not a positive finite number.
    """
    if peak_flops is None:
        return None
    check_peak("peak_flops", peak_flops)
    return flops / (seconds * peak_flops) if seconds > 0 else None


def check_peak(setting: str, value: float) -> None:
    """Raise ValueError unless `value` is a positive finite number of FLOP/s."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(
            f"{setting}={value!r} must be a positive number of FLOP/s, such as 989e12. Use None when the "
            "peak is unknown."
        )


def has_process_group() -> bool:
    """Whether this process is one of several ranks; does not load torch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def gather_over_ranks(values: Sequence[float]) -> list[list[float]]:
    """Return the numbers of each rank of the default process group, or of this process alone. Collective."""
    if not has_process_group():
        return [list(values)]
    import torch

    # Numbers in a tensor: gathering objects would unpickle what other ranks send.
    # By their bits, as not every accelerator has numbers of that size.
    own = torch.tensor(values, dtype=torch.float64).view(torch.int64).to(gathering_device())
    every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, own)
    return [one.cpu().view(torch.float64).tolist() for one in every]


def gathering_device() -> torch.device:
    """Where tensors must be to be gathered: a group for accelerators only takes none of the CPU."""
    import torch

    if "cpu" in torch.distributed.get_backend_config():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is not None  # the group has a backend for it alone
    return accelerator


def job_peak_flops(model: object, autocast: str | None) -> float | None:
    """Return the peak FLOP/s of all devices of the job, each looked up by its own rank. Collective.

    Args:
        model: The model, whose parameters decide where nothing is cast.
        autocast: The type that matrix products are cast to; None where they are not.
    """
    dtype = autocast or _parameter_dtype(model)
    own = None if dtype is None else device_peak_flops(dtype)
    return sum_peaks(peak or None for (peak,) in gather_over_ranks([own or 0.0]))


def _parameter_dtype(model: object) -> str | None:
    """The type of the matrix products of a model without casts; None for one that has no published peak."""
    import torch

    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    dtypes = (parameter.dtype for parameter in parameters if parameter.is_floating_point())
    named = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    dtype = named.get(next(dtypes, torch.float32))
    return "tf32" if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest" else dtype


class MFUMeter(ThroughputMeter):
    """Tokens per second and MFU of a training loop: `add` each batch, `read` at each log line.

    The windows are those of a `ThroughputMeter`: `exclude("evaluate")` leaves a phase out, and what
    `measure("data")` notes is in the record as `data_share`.

    Args:
        model: The model in training, wrapped or not.
        sequence_length: S, tokens in a row; see `model_flops_per_token`.
        dtype: The type that the matrix multiplications run in, which decides the peak: "bf16" under an
            autocast to it, "tf32" or "fp32" without one; see `device_peak_flops`.
        peak_flops: Peak FLOP/s of this process's device, in place of the table's; text such as "165.2e12"
            will do.
        clock: Returns seconds from any fixed origin and never goes back.

    Raises:
        ValueError: `sequence_length` or `peak_flops` is not a positive number.
    """

    def __init__(
        self,
        model: nn.Module,
        sequence_length: int,
        dtype: str | Mapping[str, float],
        *,
        peak_flops: float | str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from .flops.per_token import model_flops_per_token

        self._flops_per_token = model_flops_per_token(_unwrapped(model), sequence_length)
        self._peak = device_peak_flops(dtype, value=peak_flops)
        self._tokens: int | Tensor = 0
        self._positions: int | Tensor = 0
        super().__init__(clock)

    def start(self) -> None:
        """Begin a new window now, and forget the current one and its batches."""
        self._tokens = self._positions = 0
        super().start()

    def add(self, batch: object) -> None:
        """Count a batch of this rank; under gradient accumulation each of them. Does not wait for the device.

        Ranks that hold parts of one model share a batch: only one of them adds it.

        Args:
            batch: Its number of tokens; or a mapping with `input_ids` [..., S] and perhaps an
                `attention_mask`, of which padding counts for the FLOPs and not for the tokens; or an integer
                tensor of token ids; or a tuple or list that begins with one of these.

        Raises:
            TypeError: The batch is none of these.
        """
        if isinstance(batch, int):
            self._tokens, self._positions = self._tokens + batch, self._positions + batch
            return
        from .callbacks.lightning_state import count_batch

        counts = count_batch(batch)
        if counts is None:
            raise TypeError(
                f"batch has no tokens to count: a {type(batch).__name__} is not a mapping with input_ids and "
                "no integer tensor. Pass its number of tokens, such as meter.add(ids.numel())."
            )
        self._tokens = self._tokens + counts.input_tokens
        self._positions = self._positions + counts.compute_tokens

    def read(self, *, all_ranks: bool = False) -> dict[str, float | None]:
        """End the window, and return what it was; waits for the device first.

        | entry | is |
        |---|---|
        | `input_tokens` | tokens without padding |
        | `interval_seconds` | net wall time of the window, of the slowest rank |
        | `tok_per_sec` | `input_tokens` / `interval_seconds` |
        | `flos` | model FLOPs, padding included; absent if those of the model cannot be told |
        | `mfu` | `flos` / (`interval_seconds` x peak); None if the peak is unknown |
        | `<phase>_share` | share of a measured phase in the net time of this rank |

        Args:
            all_ranks: False: this rank and its device. True: sums over the ranks of the default process
                group, against the peak of all of their devices; then every rank has to call this.

        Raises:
            RuntimeError: `all_ranks` is True, WORLD_SIZE says that there are others, and there is no process
                group.
        """
        if all_ranks and os.environ.get("WORLD_SIZE", "1") != "1" and not has_process_group():
            raise RuntimeError(
                f"all_ranks=True needs a process group for the {os.environ['WORLD_SIZE']} ranks of "
                "WORLD_SIZE. Open one first, such as with dist_env.DistributedEnvironment."
            )
        wait_for_device()
        lap = self.lap()
        own = [int(self._tokens), int(self._positions), lap.net_seconds, self._peak or 0.0]
        self._tokens = self._positions = 0
        every = gather_over_ranks(own) if all_ranks else [own]
        tokens, positions = (int(sum(rank[place] for rank in every)) for place in (0, 1))
        seconds = max(rank[2] for rank in every)
        record: dict[str, float | None] = {"input_tokens": tokens, "interval_seconds": seconds}
        record["tok_per_sec"] = tokens / seconds if seconds > 0 else None
        if self._flops_per_token is not None:
            record["flos"] = flops = self._flops_per_token * positions
            record["mfu"] = model_flops_utilization(
                flops, seconds, sum_peaks(rank[3] or None for rank in every)
            )
        for phase in lap.phases:
            if self.is_measured(phase):
                record[f"{phase}_share"] = lap.share(phase)
        return record


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model itself; DDP and Lightning Fabric keep it as `module`, `torch.compile` as `_orig_mod`."""
    wrappers = {
        "DistributedDataParallel": "module",
        "_FabricModule": "module",
        "OptimizedModule": "_orig_mod",
    }
    while (name := wrappers.get(type(model).__name__)) is not None:
        model = getattr(model, name)
    return model


def check_flops_per_token(value: float | None) -> None:
    """Raise ValueError unless `value` is None or a positive number of FLOPs."""
    if value is not None and not value > 0:
        raise ValueError(
            f"flops_per_token={value!r} must be a positive number of FLOPs, or None when it is unknown."
        )


def wait_for_device() -> None:
    """Return when all that is queued on the accelerator is done."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
