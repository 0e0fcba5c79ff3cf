"""What each rank says about itself to the doctor."""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dist_env.environment import DistributedEnvironment

# Settings that the doctor has an opinion on, or that must agree between ranks.
WATCHED_VARIABLES = (
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
_SIOCGIFADDR = 0x8915


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
        variables: Those of `WATCHED_VARIABLES` that are set.
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


def survey(env: DistributedEnvironment) -> RankReport:
    """Describe this rank.

    Args:
        env: The open environment.
    """
    interface, loopback = find_interface(env.backend or "gloo", env.master_addr)
    name = f"{env.device} {torch.cuda.get_device_name(env.device)}" if env.device_type == "cuda" else None
    return RankReport(
        rank=env.rank,
        local_rank=env.local_rank,
        host=env.hostname,
        device=name or str(env.device),
        backend=env.backend,
        python=platform.python_version(),
        torch=str(torch.__version__),
        collective_library=_nccl_version() if env.device_type == "cuda" else None,
        interface=interface,
        loopback=loopback,
        variables={key: os.environ[key] for key in WATCHED_VARIABLES if key in os.environ},
    )


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


def _nccl_version() -> str | None:
    if not dist.is_nccl_available():
        return None
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
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
