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
