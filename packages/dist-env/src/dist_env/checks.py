"""Settings that make a distributed job slow or wrong, found in what the ranks report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from dist_env.survey import WATCHED_VARIABLES, RankReport

_OFF = {"", "0", "false", "off", "no"}

# Variable, which values are slow, why and what to do.
_SLOW: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    (
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.upper() == "DETAIL",
        "adds a consistency check with collectives of its own to every collective; left on, it starved a "
        "256-GPU job (source: 'Instant GPU Efficiency Visibility at Fleet Scale'). Unset it",
    ),
    (
        "NCCL_DEBUG",
        lambda value: value.upper() in ("INFO", "TRACE"),
        "writes many lines per rank; use WARN, or NCCL_DEBUG_FILE",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        lambda value: value.lower() not in _OFF,
        "waits for each kernel, so that computing and communicating never overlap. Unset it",
    ),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        lambda value: value.lower() not in _OFF,
        "waits on the host for each collective, so that nothing overlaps. Unset it",
    ),
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        lambda value: value.lower() not in _OFF,
        "allocates device memory anew for each tensor. Unset it",
    ),
    (
        "NCCL_P2P_DISABLE",
        lambda value: value.lower() not in _OFF,
        "keeps devices of one host from talking over NVLink or PCIe directly. Unset it",
    ),
    (
        "NCCL_SHM_DISABLE",
        lambda value: value.lower() not in _OFF,
        "sends traffic within a host over the network. Unset it",
    ),
    (
        "TORCH_CPP_LOG_LEVEL",
        lambda value: value.upper() == "INFO",
        "logs every collective. Unset it",
    ),
)


def find_warnings(reports: Sequence[RankReport], environ: Mapping[str, str]) -> list[str]:
    """Everything worth a warning, one line each.

    Args:
        reports: What each rank says about itself, in the order of the ranks.
        environ: Variables of rank 0, to recognise another launcher.

    Returns:
        Lines that name the setting, the ranks, and what to do.
    """
    return [
        *_slow_settings(reports),
        *_network(reports),
        *_differences(reports),
        *_unused_launcher(reports, environ),
    ]


def name_ranks(ranks: Sequence[int], total: int) -> str:
    """`all ranks`, `rank 3`, or `ranks 0-2, 5`."""
    if len(ranks) == total:
        return "all ranks" if total > 1 else f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _slow_settings(reports: Sequence[RankReport]) -> list[str]:
    lines = []
    for variable, is_slow, why in _SLOW:
        ranks = [r.rank for r in reports if is_slow(r.variables.get(variable, ""))]
        if ranks:
            value = next(r.variables[variable] for r in reports if r.rank == ranks[0])
            lines.append(f"{variable}={value} on {name_ranks(ranks, len(reports))}: {why}.")
    return lines


def _network(reports: Sequence[RankReport]) -> list[str]:
    hosts = {report.host for report in reports}
    if len(hosts) == 1:
        return []
    lines = []
    local = [r.rank for r in reports if r.loopback]
    if local:
        first = next(r for r in reports if r.rank == local[0])
        variable = "NCCL_SOCKET_IFNAME" if "nccl" in (first.backend or "") else "GLOO_SOCKET_IFNAME"
        lines.append(
            f"{name_ranks(local, len(reports))} use the loopback interface {first.interface} although "
            f"the job spans {len(hosts)} hosts: set {variable} to the interface that reaches the other "
            "hosts, or make the host's name resolve to its network address."
        )
    ranks = [r.rank for r in reports if r.variables.get("NCCL_IB_DISABLE", "").lower() not in _OFF]
    if ranks:
        lines.append(
            f"NCCL_IB_DISABLE is set on {name_ranks(ranks, len(reports))}: traffic between hosts goes "
            "over TCP. Unset it where there is InfiniBand or RoCE."
        )
    return lines


def _differences(reports: Sequence[RankReport]) -> list[str]:
    """Versions and settings that are not the same everywhere."""
    values: dict[str, list[str | None]] = {
        "Python": [r.python for r in reports],
        "torch": [r.torch for r in reports],
        "NCCL": [r.collective_library for r in reports],
    }
    for variable in WATCHED_VARIABLES:
        # Hosts may well name their interfaces differently.
        if not variable.endswith("_IFNAME"):
            values[variable] = [r.variables.get(variable) for r in reports]
    lines = []
    for label, of_ranks in values.items():
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for rank, value in enumerate(of_ranks):
            groups["unset" if value is None else value].append(rank)
        if len(groups) > 1:
            shown = "; ".join(f"{v} on {name_ranks(ranks, len(reports))}" for v, ranks in groups.items())
            lines.append(f"{label} differs between ranks: {shown}. Use the same on every rank.")
    return lines


def _unused_launcher(reports: Sequence[RankReport], environ: Mapping[str, str]) -> list[str]:
    for variable in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        size = environ.get(variable, "")
        if len(reports) == 1 and size.isdecimal() and int(size) > 1 and "WORLD_SIZE" not in environ:
            return [
                f"{variable}={size} tells of several processes, but WORLD_SIZE is not set, so that each is "
                "a job of its own: start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and "
                "LOCAL_WORLD_SIZE."
            ]
    return []
