"""Bad environments are refused with one line that names the variable; good ones are completed."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch.distributed as dist

from dist_env import DistributedEnvironment, DistributedEnvironmentError, RankTimeoutError
from dist_env.rendezvous import _mark
from dist_env.variables import resolve_variables

GOOD = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}

BAD = [
    ({"RANK": "two"}, "RANK='two' is not an integer"),
    ({"RANK": ""}, "RANK='' is not an integer"),
    ({"RANK": "1.0"}, "RANK='1.0' is not an integer"),
    ({"RANK": "1_0"}, "RANK='1_0' is not an integer"),
    ({"RANK": "-1"}, "RANK=-1 must be 0 or more"),
    ({"RANK": "4"}, "RANK=4 contradicts WORLD_SIZE=4"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be 1 or more"),
    ({"WORLD_SIZE": "1" * 30}, "is not an integer"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"),
    ({"LOCAL_RANK": "-3"}, "LOCAL_RANK=-3 must be 0 or more"),
    ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 contradicts WORLD_SIZE=4"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not an integer"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT=0 must be a port"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be a port"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR='' is not a host"),
    ({"MASTER_ADDR": "node1:29500"}, "Put the port into MASTER_PORT"),
    ({"MASTER_ADDR": "tcp://node1"}, "MASTER_ADDR='tcp://node1' is not a host"),
    ({"RANK": None}, "WORLD_SIZE=4 is set but RANK is not"),
    ({"WORLD_SIZE": None}, "RANK=1 is set but WORLD_SIZE is not"),
    ({"LOCAL_WORLD_SIZE": None}, "LOCAL_RANK=1 is set but LOCAL_WORLD_SIZE is not"),
    ({"LOCAL_RANK": None}, "LOCAL_WORLD_SIZE=2 is set but LOCAL_RANK is not"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_variable_is_named(
    change: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (GOOD | change).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    before = dict(os.environ)
    start = time.monotonic()
    with pytest.raises(DistributedEnvironmentError) as refusal:
        DistributedEnvironment()
    assert time.monotonic() - start < 45
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert dict(os.environ) == before


def test_variables_win_over_arguments_and_say_so() -> None:
    found = resolve_variables(rank=0, world_size=4, master_addr="other", master_port=1, environ=GOOD)
    assert (found.rank, found.world_size, found.master_addr, found.master_port) == (1, 4, "10.0.0.1", 29500)
    assert found.overruled == (
        "rank=0 gives way to the variable RANK=1",
        "master_port=1 gives way to the variable MASTER_PORT=29500",
        "master_addr=other gives way to the variable MASTER_ADDR=10.0.0.1",
    )
    assert not found.single_node


def test_defaults_are_one_process_here() -> None:
    found = resolve_variables(environ={})
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (0, 0, 1, 1)
    assert (found.master_addr, found.master_port, found.port_asked) == ("localhost", 29501, False)


def test_local_numbers_follow_the_global_ones_on_a_single_host() -> None:
    found = resolve_variables(environ={"RANK": "2", "WORLD_SIZE": "3"})
    assert (found.local_rank, found.local_world_size) == (2, 3)
    elsewhere = resolve_variables(environ={"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1"})
    assert (elsewhere.local_rank, elsewhere.local_world_size) == (0, 1)


@pytest.mark.parametrize("name", ["rank", "world_size", "master_port"])
def test_argument_of_wrong_type(name: str) -> None:
    with pytest.raises(DistributedEnvironmentError, match=f"{name}='1' is not an integer"):
        resolve_variables(**{name: "1"}, environ={})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["init_timeout", "training_timeout"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_timeout_must_be_positive(name: str, seconds: float) -> None:
    with pytest.raises(DistributedEnvironmentError, match=f"{name}=.* is not a positive number"):
        DistributedEnvironment(**{name: seconds})  # type: ignore[arg-type]


def test_taken_port_is_refused_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(
            DistributedEnvironmentError, match=f"MASTER_PORT={port} cannot be used on localhost"
        ):
            DistributedEnvironment(master_port=port).open()
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(DistributedEnvironmentError, match=f"MASTER_PORT={port} cannot be used"):
            DistributedEnvironment().open()
        assert time.monotonic() - start < 45


def test_a_second_rank_0_is_told_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another port, as for any other program that holds this one, would not help."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with pytest.raises(DistributedEnvironmentError, match=f"MASTER_PORT={store.port} cannot be used"):
        DistributedEnvironment().open()
    store.set("dist_env/mark", _mark(resolve_variables()))
    message = f"RANK=0 of this program is there already, and holds MASTER_PORT={store.port} on localhost"
    with pytest.raises(DistributedEnvironmentError, match=message):
        DistributedEnvironment().open()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("no-such-host.invalid", "MASTER_ADDR=no-such-host.invalid cannot be resolved"),
        ("192.0.2.1", "MASTER_ADDR=192.0.2.1 is not an address of this host"),
    ],
)
def test_wrong_host_is_refused(address: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(DistributedEnvironmentError, match=message):
        DistributedEnvironment(master_addr=address).open()
    assert time.monotonic() - start < 45


def test_absent_ranks_are_named() -> None:
    environment = DistributedEnvironment(rank=0, world_size=3, init_timeout=0.5)
    with pytest.raises(RankTimeoutError) as late:
        environment.open()
    assert late.value.missing == {1: "unknown host", 2: "unknown host"}
    assert "init_timeout=0.5 s" in str(late.value) or "init_timeout passed" in str(late.value)
    assert "RANK" not in os.environ


def test_rank_0_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = DistributedEnvironment(rank=1, world_size=2, master_port=port, init_timeout=0.5)
    with pytest.raises(
        RankTimeoutError, match=f"did not reach rank 0 .*init_timeout=0.5 s.*MASTER_PORT={port}"
    ):
        environment.open()
