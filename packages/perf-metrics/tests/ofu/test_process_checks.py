import os
import subprocess
import sys
import threading
import tracemalloc

import pytest
import torch
from torch.utils.data import DataLoader

from perf_metrics.ofu.process_checks import Finding, check_process


def settings() -> set[str]:
    return {finding.setting for finding in check_process()}


@pytest.mark.parametrize(
    ("variables", "setting"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT"),
        ({"NCCL_DEBUG": "trace"}, "NCCL_DEBUG"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL"}, "NCCL_DEBUG_SUBSYS"),
    ],
)
def test_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], setting: str) -> None:
    assert setting not in settings()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (finding,) = [one for one in check_process() if one.setting == setting]
    assert finding.value == variables[setting]
    assert str(finding).startswith(f"{setting}={variables[setting]}: ")
    assert finding.effect
    assert finding.fix


@pytest.mark.parametrize(
    "variables",
    [
        {"CUDA_LAUNCH_BLOCKING": "0"},
        {"NCCL_DEBUG": "WARN"},
        {"NCCL_DEBUG": "INFO"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"},
        {"NCCL_DEBUG_SUBSYS": "COLL"},
    ],
)
def test_harmless_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    before = settings()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings() == before


def test_the_level_in_force_counts_and_not_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    # torch was loaded without it, so that it has no effect here.
    assert "TORCH_DISTRIBUTED_DEBUG" not in settings()
    before = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    try:
        assert "TORCH_DISTRIBUTED_DEBUG" in settings()
    finally:
        torch.distributed.set_debug_level(before)


def test_anomaly_mode() -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert "torch.autograd.set_detect_anomaly" in settings()
    assert "torch.autograd.set_detect_anomaly" not in settings()


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True)
    try:
        (finding,) = [one for one in check_process() if "deterministic" in one.setting]
    finally:
        torch.use_deterministic_algorithms(False)
    assert finding.setting == "torch.use_deterministic_algorithms"
    assert ":16:8" in finding.effect
    with torch.backends.cudnn.flags(deterministic=True):
        assert "torch.backends.cudnn.deterministic" in settings()
    assert not any("deterministic" in name for name in settings())


def test_profilers() -> None:
    assert "torch.profiler" not in settings()
    with torch.profiler.profile():
        assert "torch.profiler" in settings()
    assert "torch.profiler" not in settings()
    tracemalloc.start()
    try:
        assert "tracemalloc" in settings()
    finally:
        tracemalloc.stop()


def test_python_profiler_of_this_thread() -> None:
    found: list[Finding] = []

    def watch(frame: object, event: str, argument: object) -> None:
        pass

    def work() -> None:
        sys.setprofile(watch)
        found.extend(check_process())
        sys.setprofile(None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (finding,) = [one for one in found if one.setting == "sys.setprofile"]
    assert finding.value.endswith("watch")


def test_pageable_copies() -> None:
    data = [torch.zeros(1)]
    plain, pinned = DataLoader(data), DataLoader(data, pin_memory=True)
    (finding,) = [one for one in check_process(plain, device_type="cuda") if "pin_memory" in one.setting]
    assert (finding.setting, finding.value) == ("DataLoader.pin_memory", "False")
    assert "copies to cuda" in finding.effect
    for loader, device_type in ((pinned, "cuda"), (plain, "cpu"), (plain, "mps"), (iter(data), "cuda")):
        assert not any("pin_memory" in one.setting for one in check_process(loader, device_type=device_type))
    told = torch.accelerator.current_accelerator(check_available=True)
    judged = any("pin_memory" in one.setting for one in check_process(plain))
    assert judged == (told is not None and told.type != "mps")


SCRIPT = """
import sys
from perf_metrics.ofu import counter_files, diagnosis, process_checks, samples
print([one.setting for one in process_checks.check_process(object(), device_type="cuda")])
heavy = {"torch", "numpy", "matplotlib", "pynvml", "httpx", "prometheus_client", "hardware_table"}
print(sorted(heavy & set(sys.modules)))
import torch
print([one.setting for one in process_checks.check_process()])
"""


def test_a_process_without_torch_is_judged_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    # A measured process has a trace function, of which it is told rightly.
    measured = [name for name in os.environ if name.startswith("COVERAGE")]
    for name in ("NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "PYTHONTRACEMALLOC", *measured):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["['TORCH_DISTRIBUTED_DEBUG']", "[]", "['TORCH_DISTRIBUTED_DEBUG']"]
