"""What the doctor warns of."""

from __future__ import annotations

import dataclasses

import pytest

from dist_env.rank_report import RankReport, find_interface, find_warnings, name_ranks

PLAIN = RankReport(
    rank=0,
    local_rank=0,
    host="node0",
    device="cuda:0",
    backend="nccl",
    python="3.12.1",
    torch="2.13.0",
    collective_library="2.27.5",
    interface="eth0 (10.0.0.1)",
    loopback=False,
)


def ranks(count: int, **changes: object) -> list[RankReport]:
    """Ranks on as many hosts; the last one has the changes."""
    reports = [dataclasses.replace(PLAIN, rank=rank, host=f"node{rank}") for rank in range(count)]
    reports[-1] = dataclasses.replace(reports[-1], **changes)
    return reports


def test_nothing_to_warn_of() -> None:
    assert find_warnings(ranks(4), {}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}, "TORCH_DISTRIBUTED_DEBUG=DETAIL on rank 2: "),
        ({"variables": {"NCCL_DEBUG": "info"}}, "NCCL_DEBUG=info on rank 2: "),
        ({"variables": {"NCCL_DEBUG": "TRACE"}}, "NCCL_DEBUG=TRACE on rank 2: "),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "CUDA_LAUNCH_BLOCKING=1 on rank 2: "),
        ({"variables": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE=1 on rank 2: "),
        ({"variables": {"NCCL_SHM_DISABLE": "1"}}, "NCCL_SHM_DISABLE=1 on rank 2: "),
        ({"variables": {"NCCL_IB_DISABLE": "1"}}, "NCCL_IB_DISABLE is set on rank 2"),
        ({"variables": {"TORCH_NCCL_BLOCKING_WAIT": "1"}}, "TORCH_NCCL_BLOCKING_WAIT=1 on rank 2"),
        (
            {"loopback": True, "interface": "lo (127.0.0.1)"},
            "rank 2 use the loopback interface lo (127.0.0.1)",
        ),
        ({"torch": "2.12.0"}, "torch differs between ranks: 2.13.0 on ranks 0-1; 2.12.0 on rank 2"),
        ({"python": "3.11.9"}, "Python differs between ranks"),
        ({"driver": "535.1"}, "the driver differs between ranks: unset on ranks 0-1; 535.1 on rank 2"),
        ({"device_name": "A100"}, "the device differs between ranks: "),
        (
            {"device_memory": 40 * 1024**3},
            "the device's memory differs between ranks: unset on ranks 0-1; 40 GiB",
        ),
        ({"capability": "8.0"}, "the device's capability differs between ranks"),
        (
            {"device_count": 8},
            "the number of devices of a host differs between ranks: 0 on ranks 0-1; 8 on rank 2",
        ),
        ({"threads": 4}, "the number of threads of torch differs between ranks"),
        (
            {"device_count": 4, "peers": (1, 3)},
            "devices of node2 cannot all reach each other directly, so that traffic between them goes "
            "through the host's memory: cuda:0 of rank 2 reaches 1, 3.",
        ),
        ({"collective_library": "2.21.5"}, "NCCL differs between ranks"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO differs between ranks: unset on ranks 0-1; Ring"),
    ],
)
def test_warning(changes: dict[str, object], message: str) -> None:
    found = find_warnings(ranks(3, **changes), {})
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCH_DISTRIBUTED_DEBUG": "INFO"},
        {"NCCL_DEBUG": "WARN"},
        {"CUDA_LAUNCH_BLOCKING": "0"},
        {"NCCL_IB_DISABLE": "0"},
    ],
)
def test_harmless_setting(variables: dict[str, str]) -> None:
    assert find_warnings([dataclasses.replace(PLAIN, variables=variables)], {}) == []


def test_devices_that_all_reach_each_other_are_fine() -> None:
    assert find_warnings([dataclasses.replace(PLAIN, device_count=3, peers=(1, 2))], {}) == []


def test_loopback_is_fine_on_one_host() -> None:
    assert find_warnings([dataclasses.replace(PLAIN, loopback=True)], {}) == []


def test_other_launcher_without_torch_variables() -> None:
    [line] = find_warnings([PLAIN], {"SLURM_NTASKS": "4"})
    assert line.startswith("SLURM_NTASKS=4 tells of several processes, but WORLD_SIZE is not set")
    assert find_warnings([PLAIN], {"SLURM_NTASKS": "4", "WORLD_SIZE": "1"}) == []


def test_ranks_are_named_in_runs() -> None:
    assert name_ranks([0, 1, 2, 5], 8) == "ranks 0-2, 5"
    assert name_ranks([3], 8) == "rank 3"
    assert name_ranks([0, 1], 2) == "all ranks"


def test_interface_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    name, loopback = find_interface("gloo", "localhost")
    assert name.startswith("lo")
    assert loopback
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    name, loopback = find_interface("nccl", "127.0.0.1")
    assert "127.0.0.1" in name
    assert loopback
