"""What each rank says about itself to the doctor, and the settings in it that make a job slow or wrong."""

from __future__ import annotations

import os
import platform
import re
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist

from dist_env.environment import DistributedEnvironment
from dist_env.tables import name_ranks
from dist_env.variables import unused_launcher

# Settings that the doctor has an opinion on, or that must agree between ranks.
_WATCHED_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "GLOO_SOCKET_IFNAME",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_BLOCKING_WAIT",
)
# Where the kernel modules of NVIDIA and AMD tell their versions.
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
_SIOCGIFADDR = 0x8915
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


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One row of the doctor's table.

    Attributes:
        rank: Global rank.
        local_rank: Rank on its host.
        host: Host name.
        device: Device, with its name for accelerators.
        backend: Collective backend.
        python: Version of Python.
        torch: Version of torch.
        collective_library: Version of NCCL (or RCCL), None where it is not in use.
        interface: Network interface that the backend uses, with its address, as far as known.
        loopback: Whether that interface reaches only this host.
        variables: The watched variables that are set.
        device_name: Model of the device; of a CPU that which the system tells.
        threads: Threads that torch uses for an operator on the CPU.
        driver: Version of the device's driver, where the system tells it.
        device_count: Accelerators that this process sees.
        device_memory: Memory of the accelerator in bytes; None for a CPU.
        capability: Compute capability of a CUDA device, such as `9.0`.
        peers: CUDA devices of this host, by index, that this rank's device can reach without the host's
            memory; None for other devices.
        matmul_flops: FLOP per second of a fixed matrix product; None until it was measured.
        checksum: Digest of what a fixed computation gave on the device; None until it was made.
        repeatable: Whether the computation gave the same bits twice; None until it was made.
    """

    rank: int
    local_rank: int
    host: str
    device: str
    backend: str | None
    python: str
    torch: str
    collective_library: str | None
    interface: str
    loopback: bool
    variables: Mapping[str, str] = field(default_factory=dict)
    device_name: str = ""
    threads: int = 1
    driver: str | None = None
    device_count: int = 0
    device_memory: int | None = None
    capability: str | None = None
    peers: tuple[int, ...] | None = None
    matmul_flops: float | None = None
    checksum: str | None = None
    repeatable: bool | None = None


def report_rank(env: DistributedEnvironment) -> RankReport:
    """Describe this rank.

    Args:
        env: The open environment.
    """
    interface, loopback = find_interface(env.backend or "gloo", env.master_addr)
    device = _describe_device(env.device)
    return RankReport(
        rank=env.rank,
        local_rank=env.local_rank,
        host=env.hostname,
        device=f"{env.device} {device['device_name']}" if env.device_type == "cuda" else str(env.device),
        backend=env.backend,
        python=platform.python_version(),
        torch=str(torch.__version__),
        collective_library=_nccl_version() if env.device_type == "cuda" else None,
        interface=interface,
        loopback=loopback,
        variables={key: os.environ[key] for key in _WATCHED_VARIABLES if key in os.environ},
        threads=torch.get_num_threads(),
        device_count=torch.accelerator.device_count(),
        **device,
    )


class _DeviceFacts(TypedDict, total=False):
    device_name: str
    driver: str | None
    device_memory: int | None
    capability: str | None
    peers: tuple[int, ...] | None


def _describe_device(device: torch.device) -> _DeviceFacts:
    if device.type == "cpu":
        return {"device_name": _cpu_name()}
    if device.type != "cuda":
        return {"device_name": device.type}
    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return {
        "device_name": properties.name,
        "driver": _driver_version(),
        "device_memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "peers": tuple(other for other in others if torch.cuda.can_device_access_peer(index, other)),
    }


def _cpu_name() -> str:
    """The model that Linux tells; elsewhere what Python knows."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _driver_version() -> str | None:
    """Version of the kernel's driver. torch tells that of the CUDA interface only."""
    for path in _DRIVER_FILES:
        try:
            found = re.search(r"\d+(?:\.\d+)+", Path(path).read_text())
        except OSError:
            continue
        if found:
            return found[0]
    return None


def find_interface(backend: str, master_addr: str) -> tuple[str, bool]:
    """The network interface that a backend will use, and whether it is the loopback one.

    A backend takes the interface that its variable names. Otherwise gloo binds to what the host's own name
    resolves to, and NCCL chooses; for NCCL this names the interface towards rank 0.

    Args:
        backend: Backend, or pairs of device and backend.
        master_addr: Host of rank 0.

    Returns:
        `eth0 (10.0.0.5)`, or only the part that is known; and whether it is loopback.
    """
    variable = "NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
    named = os.environ.get(variable)
    if named:
        address = _address_of(named)
        return (f"{named} ({address})" if address else named), named.lstrip("=^").startswith("lo")
    address = _address_towards(master_addr) if "nccl" in backend else _address_of_host()
    if address is None:
        return "unknown", False
    name = next((name for _, name in _interfaces() if _address_of(name) == address), None)
    return (f"{name} ({address})" if name else address), address.startswith("127.") or address == "::1"


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
        *_peers(reports),
        *_unused_launcher(reports, environ),
    ]


def name_device(report: RankReport) -> str:
    """`rank 3 on node0 (cuda:3 NVIDIA H100)`."""
    return f"rank {report.rank} on {report.host} ({report.device})"


def _nccl_version() -> str | None:
    if not dist.is_nccl_available():
        return None
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _address_of_host() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _address_towards(host: str) -> str | None:
    """Own address on the route to a host. Connecting a datagram socket sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interfaces() -> list[tuple[int, str]]:
    return socket.if_nameindex() if hasattr(socket, "if_nameindex") else []


def _address_of(interface: str) -> str | None:
    """IPv4 address of an interface; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


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


def _peers(reports: Sequence[RankReport]) -> list[str]:
    """Devices of one host that reach each other only through its memory."""
    lines = []
    for host in dict.fromkeys(r.host for r in reports):
        ranks = [r for r in reports if r.host == host and r.peers is not None]
        cut_off = [r.rank for r in ranks if len(r.peers or ()) < r.device_count - 1]
        if not cut_off:
            continue
        shown = "; ".join(
            f"{r.device} of rank {r.rank} reaches {', '.join(map(str, r.peers or ())) or 'none'}"
            for r in ranks
            if r.rank in cut_off
        )
        lines.append(
            f"devices of {host} cannot all reach each other directly, so that traffic between them goes "
            f"through the host's memory: {shown}. Where there are NVLink or PCIe switches, look at the "
            "driver, at virtualisation (ACS, IOMMU) and at containers."
        )
    return lines


def _differences(reports: Sequence[RankReport]) -> list[str]:
    """Versions and settings that are not the same everywhere."""
    values: dict[str, list[str | None]] = {
        "Python": [r.python for r in reports],
        "torch": [r.torch for r in reports],
        "NCCL": [r.collective_library for r in reports],
        "the device": [r.device_name for r in reports],
        "the device's memory": [
            None if r.device_memory is None else f"{r.device_memory / 1024**3:.0f} GiB" for r in reports
        ],
        "the device's capability": [r.capability for r in reports],
        "the driver": [r.driver for r in reports],
        "the number of devices of a host": [str(r.device_count) for r in reports],
        "the number of threads of torch": [str(r.threads) for r in reports],
    }
    for variable in _WATCHED_VARIABLES:
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
    problem = unused_launcher(environ, also=["SLURM_NTASKS"]) if len(reports) == 1 else None
    return [] if problem is None else [problem]
