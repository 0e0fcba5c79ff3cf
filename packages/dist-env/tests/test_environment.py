"""One process: opening, closing, device, backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_env import (
    DistributedEnvInterface,
    DistributedEnvironment,
    DistributedEnvironmentError,
    Heartbeat,
    StaticDistributedEnvironment,
    barrier,
    broadcast_object,
    gather_objects,
    main_process_first,
)
from dist_env.device import check_visible, choose_device

SIX = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_opens_and_closes_group_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    environment = DistributedEnvironment(no_accelerator=True)
    assert not dist.is_initialized()
    assert "RANK" not in os.environ
    with environment as env:
        assert env.owns_process_group
        assert (dist.get_world_size(), dist.get_backend(), env.backend) == (1, "gloo", "gloo")
        assert [os.environ[name] for name in SIX[:5]] == ["0", "0", "1", "1", "localhost"]
        assert os.environ["MASTER_PORT"] == str(env.master_port)
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
    assert not dist.is_initialized()
    assert [name for name in SIX if name in os.environ] == ["MASTER_ADDR"]


def test_picks_another_port_when_none_was_asked_for(usual_port_taken: bool) -> None:
    with DistributedEnvironment(master_addr="127.0.0.1") as env:
        assert not usual_port_taken or env.master_port != 29501
        assert os.environ["MASTER_PORT"] == str(env.master_port)


def test_may_be_opened_again_but_not_twice() -> None:
    environment = DistributedEnvironment()
    with environment, pytest.raises(RuntimeError, match="is open already"):
        environment.open()
    with environment:
        assert dist.is_initialized()
    environment.close()


def test_without_always_one_process_forms_no_group() -> None:
    with DistributedEnvironment(always=False) as env:
        assert not dist.is_initialized()
        assert os.environ["WORLD_SIZE"] == "1"
        barrier(env)
        assert broadcast_object("x", env) == "x"
        assert gather_objects("x", env) == ["x"]
        with main_process_first(env) as first:
            assert first
        with Heartbeat(env, stall_timeout=60) as heart:
            heart.beat(1, "forward")


def test_existing_group_is_used_with_a_warning_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with DistributedEnvironment() as env:
            assert not env.owns_process_group
        assert "exists already" in caplog.text
        assert dist.is_initialized()
        with pytest.raises(DistributedEnvironmentError, match="RANK=1, WORLD_SIZE=2 contradict the process"):
            DistributedEnvironment(rank=1, world_size=2).open()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_a_launcher_that_know_nothing_of_one_another_are_warned_of(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")  # also where one process was started in an allocation
    monkeypatch.setenv(variable, "1")
    with DistributedEnvironment(no_accelerator=True):
        assert not caplog.messages
    monkeypatch.setenv(variable, "4")
    with DistributedEnvironment(no_accelerator=True):
        [message] = caplog.messages
    assert message.startswith(f"{variable}=4 tells of several processes, but WORLD_SIZE is not set")


def test_error_inside_passes_through_and_closes() -> None:
    with pytest.raises(KeyError), DistributedEnvironment():
        raise KeyError("mine")
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_training_timeout_can_change() -> None:
    with DistributedEnvironment(training_timeout=100) as env:
        env.set_training_timeout(5)
        assert env.training_timeout == 5
        with pytest.raises(DistributedEnvironmentError, match="training_timeout=0"):
            env.set_training_timeout(0)


def test_device_follows_what_the_machine_has() -> None:
    assert DistributedEnvironment(no_accelerator=True).device == torch.device("cpu")
    chosen = choose_device(0, 0)
    if torch.accelerator.is_available():
        count = torch.accelerator.device_count()
        assert chosen.index == 0
        assert choose_device(5, 0, device_map={5: count - 1}).index == count - 1
        with pytest.raises(DistributedEnvironmentError, match=f"LOCAL_RANK={count} is beyond"):
            choose_device(0, count)
        with pytest.raises(DistributedEnvironmentError, match="no entry for global rank 1"):
            choose_device(1, 0, device_map={0: 0})
    else:
        assert chosen == torch.device("cpu")
        assert choose_device(0, 17) == torch.device("cpu"), "on CPU every local rank will do"


def test_index_beyond_the_visible_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_visible(1, 2, kind="cuda", rank=3, mapped=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(DistributedEnvironmentError) as refusal:
        check_visible(2, 2, kind="cuda", rank=3, mapped=False)
    assert "LOCAL_RANK=2 is beyond the visible cuda devices, which are 0..1" in str(refusal.value)
    assert "CUDA_VISIBLE_DEVICES=0,1" in str(refusal.value)
    with pytest.raises(DistributedEnvironmentError, match=r"device_map\[3\]=-1 is beyond"):
        check_visible(-1, 2, kind="cuda", rank=3, mapped=True)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nccl", "which cannot serve the device cpu. Use gloo"),
        ("smoke-signals", "names 'smoke-signals', which this build of torch does not have"),
        ("cuda:gloo", "names no backend for the device cpu"),
        ("cpu:nccl", "names nccl, which cannot serve the device cpu"),
        ("cpu:", "is neither a name nor pairs"),
    ],
)
def test_unfit_backend_is_refused(backend: str, message: str) -> None:
    with pytest.raises(DistributedEnvironmentError, match=message):
        DistributedEnvironment(backend=backend, no_accelerator=True)


def test_unknown_log_level_is_refused() -> None:
    with pytest.raises(DistributedEnvironmentError, match="log_level='LOUD' is not one of"):
        DistributedEnvironment(log_level="LOUD")


def test_static_environment() -> None:
    plain = StaticDistributedEnvironment()
    assert isinstance(plain, DistributedEnvInterface)
    assert isinstance(DistributedEnvironment(), DistributedEnvInterface)
    assert (plain.rank, plain.world_size, plain.device_type, plain.backend) == (0, 1, "cpu", None)
    assert StaticDistributedEnvironment(device=torch.device("meta")).device_type == "meta"
    with pytest.raises(DistributedEnvironmentError, match="RANK=2 contradicts WORLD_SIZE=2"):
        StaticDistributedEnvironment(rank=2, world_size=2, local_world_size=2)
    with pytest.raises(DistributedEnvironmentError, match="needs a process group, and there is none"):
        barrier(StaticDistributedEnvironment(world_size=2))


def test_source_of_a_broadcast_must_take_part() -> None:
    with pytest.raises(DistributedEnvironmentError, match="src=1 is not one of the ranks"):
        broadcast_object("x", StaticDistributedEnvironment(), 1)


def test_import_loads_nothing_beyond_torch_and_the_standard_library(python: Callable[..., Any]) -> None:
    code = (
        "import torch.distributed, sys; a = set(sys.modules); import dist_env; "
        "[getattr(dist_env, name) for name in dist_env.__all__]; print(*set(sys.modules) - a)"
    )
    done = python("-c", code)
    imported = {name.split(".")[0] for name in done.out.split()}
    assert "dist_env" in imported, done.err
    # The help of a command has a format of its own.
    assert imported - {"dist_env", "rich_argparse"} <= set(sys.stdlib_module_names)


def test_a_layout_needs_no_torch(python: Callable[..., Any]) -> None:
    code = "import sys, dist_env; dist_env.ParallelLayout(shard=2); print('torch' in sys.modules)"
    assert python("-c", code).out == "False\n"
