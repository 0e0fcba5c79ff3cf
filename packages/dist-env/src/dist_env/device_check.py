"""Does the device of a rank compute as fast as others of its kind, and the same numbers?"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from dist_env.device import synchronize
from dist_env.rank_report import RankReport, name_device
from dist_env.tables import name_ranks

# A rank slower than this part of its kind is named. The reference is the higher median: of two ranks, the
# faster one. Cores of a CPU are shared among ranks and with other programs, so that a healthy rank may get
# half of one for the time of the measurement; a device belongs to one rank.
ACCELERATOR_FRACTION, CPU_FRACTION = 0.85, 0.4
# Rows and columns. 8192 in bfloat16 keeps every unit of a large accelerator busy for a few milliseconds;
# 512 in float32 takes one core about as long.
_ACCELERATOR_ROWS, _CPU_ROWS = (512, 2048, 8192), 512
_LONG_SECONDS = 0.02
# How long to repeat, in seconds; each rank adds a first product that is not timed.
_ACCELERATOR_SECONDS, _CPU_SECONDS = 0.8, 0.3
_LEAST_REPEATS, _MOST_REPEATS = 3, 200
# The computation whose bits are compared; large enough that all units of an accelerator take part.
_ACCELERATOR_CHECKED_ROWS, _CPU_CHECKED_ROWS = 2048, 256
_SEED = 20260101


def measure_matmul(device: torch.device) -> float:
    """Time a fixed matrix product: bfloat16 on accelerators, float32 on CPUs.

    Args:
        device: Where to compute.

    Returns:
        FLOP per second, `2 n^3` for each product, from the median time. It takes about a second on
        accelerators and 0.3 s on CPUs.
    """
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16

    def seconds() -> float:
        start = time.perf_counter()
        torch.matmul(left, right)
        synchronize(device)
        return time.perf_counter() - start

    # A device that is too slow for the largest product by far is told from others by a smaller one, too.
    for rows in (_CPU_ROWS,) if on_cpu else _ACCELERATOR_ROWS:
        tiles = rows // _CPU_ROWS  # drawing all numbers on the CPU would take longer than the products
        left, right = (tile.repeat(tiles, tiles) for tile in _random(2, _CPU_ROWS, device, dtype))
        seconds()  # and what was drawn before; not counted
        if seconds() > _LONG_SECONDS:
            break
    times: list[float] = []
    budget = _CPU_SECONDS if on_cpu else _ACCELERATOR_SECONDS
    while len(times) < _LEAST_REPEATS or (sum(times) < budget and len(times) < _MOST_REPEATS):
        times.append(seconds())
    return 2 * rows**3 / statistics.median(times)


def checksums(device: torch.device) -> tuple[str, str]:
    """Compute the same thing twice: a matrix product, a softmax and a sum, of numbers drawn on the CPU.

    Args:
        device: Where to compute.

    Returns:
        A digest of all bits of each of the two results.
    """
    rows = _CPU_CHECKED_ROWS if device.type == "cpu" else _ACCELERATOR_CHECKED_ROWS
    left, right = _random(2, rows, device, torch.float32)
    first, second = (_digest(left, right) for _ in range(2))
    return first, second


def _digest(left: torch.Tensor, right: torch.Tensor) -> str:
    product = torch.matmul(left, right)
    weights = torch.softmax(product / left.shape[1] ** 0.5, dim=-1)
    total = (weights * product).sum()
    digest = hashlib.sha256()
    for part in (product, weights, total.reshape(1)):
        # Bytes, because a NaN is not equal to itself, and 0.0 is to -0.0. Not by NumPy, which may be missing.
        found = part.cpu().contiguous()
        buffer = bytearray(found.numel() * found.element_size())
        torch.frombuffer(buffer, dtype=found.dtype).copy_(found.flatten())
        digest.update(buffer)
    return digest.hexdigest()[:16]


def _random(count: int, rows: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Matrices whose numbers do not depend on the device, nor on the program's own generator."""
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(rows, rows, generator=generator).to(device, dtype) for _ in range(count)]


def check_device(report: RankReport, device: torch.device) -> RankReport:
    """The report of a rank with what its device computes, and how fast."""
    first, second = checksums(device)
    return replace(
        report,
        matmul_flops=measure_matmul(device),
        checksum=first,
        repeatable=first == second,
    )


def find_slow_devices(reports: Sequence[RankReport]) -> tuple[list[str], list[str]]:
    """Ranks that multiply matrices far more slowly than others with a device of the same name.

    Args:
        reports: All ranks, in their order.

    Returns:
        Warnings, of CPUs, and problems, of accelerators.
    """
    warnings: list[str] = []
    problems: list[str] = []
    kinds: defaultdict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        kinds[report.device_name].append(report)
    for name, kind in kinds.items():
        rates = {r.rank: r.matmul_flops for r in kind if r.matmul_flops is not None}
        if len(rates) < 2:
            continue
        usual = statistics.median_high(rates.values())
        for rank, rate in rates.items():
            on_cpu = reports[rank].device == "cpu"
            least = CPU_FRACTION if on_cpu else ACCELERATOR_FRACTION
            if rate >= least * usual:
                continue
            line = (
                f"{name_device(reports[rank])} is slow: its matrix product runs at {rate / 1e9:.1f} GFLOP/s, "
                f"{rate / usual:.0%} of the {usual / 1e9:.1f} GFLOP/s of others with {name}, where at least "
                f"{least:.0%} are expected. "
            )
            if on_cpu:
                warnings.append(line + "Look at what else runs on its cores.")
            else:
                problems.append(line + "Look at the clocks, temperature and power limit of the device.")
    return warnings, problems


def find_wrong_devices(reports: Sequence[RankReport]) -> list[str]:
    """Ranks that compute other bits: than a moment before, or than others of their kind.

    Compared are ranks with the same device name, release of torch and number of threads: with another number
    of threads, sums may be made in another order.

    Args:
        reports: All ranks, in their order.
    """
    lines = [
        f"{name_device(r)} computes wrong numbers: the same computation gave other bits the second time. "
        "Take the device out of the job."
        for r in reports
        if r.repeatable is False
    ]
    kinds: defaultdict[tuple[str, str, int], list[RankReport]] = defaultdict(list)
    for report in reports:
        if report.repeatable:
            kinds[report.device_name, report.torch, report.threads].append(report)
    for kind in kinds.values():
        counts = Counter(report.checksum for report in kind)
        common, votes = counts.most_common(1)[0]
        if len(counts) == 1:
            continue
        if 2 * votes <= len(kind):
            names = name_ranks([r.rank for r in kind], len(reports))
            shown = ", ".join(f"{r.checksum} on rank {r.rank} ({r.host}, {r.device})" for r in kind)
            lines.append(
                f"{names} compute different numbers with devices of the same name, and none of these has a "
                f"majority: {shown}. Compare each with a device that is known to be right."
            )
            continue
        lines += [
            f"{name_device(r)} computes wrong numbers: checksum {r.checksum}, where {votes} of {len(kind)} "
            f"ranks with {r.device_name} and torch {r.torch} have {common}. Take the device out of the job."
            for r in kind
            if r.checksum != common
        ]
    return lines
