"""A hang: what the ranks write about it, and what the doctor reads from that."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_env import DistributedEnvironment, DistributedEnvironmentError
from dist_env.__main__ import main
from dist_env.flight_recorder import trace_function
from dist_env.hang_report import explain_hang

HOST = socket.gethostname()
WORKER = Path(__file__).parent / "workers" / "hanging.py"


def doctor(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dist_env", "doctor", *words])
    return main()


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_a_rank_that_hangs_is_explained(
    how: str, launch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    job = launch("hanging.py", 3, how, DIST_ENV_FLIGHT_RECORDER=str(tmp_path))
    assert job.codes[0] == 3, job.err
    files = ["rank_0.json", "rank_1.json", "rank_2.json"][: 3 if how == "sleep" else 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert doctor(monkeypatch, "--dump", str(tmp_path)) == 1
    told = capsys.readouterr().out
    line = 1 + WORKER.read_text().splitlines().index("    dist.all_reduce(torch.ones(7, 3))")
    assert "is not finished in group '0' (default_pg) of all ranks" in told
    assert "hang: gloo:all_reduce #4 of [7, 3] Float is not finished" in told
    assert f"waiting: rank 0 on {HOST}, rank 1 on {HOST}, at {WORKER}:{line} in train_step" in told
    if how == "sleep":
        assert f"missing: rank 2 on {HOST} has not called it: its last one in this group is gloo:bro" in told
    else:
        assert "missing: rank 2 wrote no trace: ended, stopped or cut off?" in told
    assert "no progress for " in told
    assert doctor(monkeypatch, "--dump", str(tmp_path), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert list(found["hangs"][0]["waiting"]) == ["0", "1"]
    assert found["hangs"][0]["members"] == [0, 1, 2]


def test_a_barrier_that_times_out_writes_a_trace(launch: Callable[..., Any], tmp_path: Path) -> None:
    job = launch("hanging.py", 3, "late", DIST_ENV_FLIGHT_RECORDER=str(tmp_path))
    assert job.codes == [0] * 3, job.err
    report = explain_hang(tmp_path)
    assert (report.ranks, report.without_trace, report.hangs) == ((0, 1), (2,), ())
    assert "barrier 'save': timeout=4 s passed on rank 0" in report.reasons[0]
    assert not report.ok


def test_what_torch_records_of_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Watches the private function, and what is read of its answer."""
    get_trace = trace_function()
    assert get_trace is not None
    with DistributedEnvironment(no_accelerator=True, flight_recorder=tmp_path / "traces"):
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "traces" / "nccl_rank_")
        dist.all_reduce(torch.ones(3, 2))
        entry = json.loads(get_trace(True, False))["entries"][-1]
        group = dist.group.WORLD
        assert group is not None
        assert entry["process_group"] == [group.group_name, "default_pg"]
    assert entry["profiling_name"] == "gloo:all_reduce"
    assert (entry["input_sizes"], entry["input_dtypes"], entry["is_p2p"]) == ([[3, 2]], ["Float"], False)
    assert entry["thread_id"] == str(threading.get_ident())
    assert {"collective_seq_id", "retired", "state"} <= set(entry)
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(DistributedEnvironmentError, match="flight_recorder='' is not a directory"):
        DistributedEnvironment(flight_recorder="")
    monkeypatch.setenv("DIST_ENV_FLIGHT_RECORDER", str(tmp_path))
    env = DistributedEnvironment(flight_recorder="elsewhere", no_accelerator=True)
    assert env.flight_recorder == tmp_path
    with env:
        assert "flight_recorder='elsewhere' gives way to the variable DIST_ENV_FLIGHT_RECORDER" in caplog.text
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with pytest.raises(DistributedEnvironmentError, match="TORCH_FR_BUFFER_SIZE=0 turns off the flight rec"):
        DistributedEnvironment()


def test_without_torch_s_function_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
    with DistributedEnvironment(no_accelerator=True, flight_recorder=tmp_path):
        assert "cannot be asked for the trace of its flight recorder" in caplog.text


def entry(
    number: int, *, name: str = "nccl:all_reduce", size: int = 4, finished: bool = True
) -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": name,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "state": "completed" if finished else "started",
        "retired": finished,
        "thread_id": "1",
        "frames": [
            {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 9},
            {"name": "step", "filename": "train.py", "line": 31},
        ],
    }


def write_nccl(folder: Path, rank: int, *entries: dict[str, Any]) -> None:
    trace = {"version": "2.10", "entries": list(entries), "pg_config": {"0": {"ranks": "[0, 1]"}}}
    (folder / f"nccl_rank_{rank}").write_bytes(pickle.dumps(trace))


def test_traces_of_nccl(tmp_path: Path) -> None:
    write_nccl(tmp_path, 0, entry(1), entry(2, finished=False))
    write_nccl(tmp_path, 1, entry(1))
    text = str(explain_hang(tmp_path))
    assert "hang: nccl:all_reduce #2 of [4] Float is not finished in group '0' (default_pg)" in text
    assert "waiting: rank 0, at train.py:31 in step" in text
    assert "missing: rank 1 has not called it: its last one in this group is nccl:all_reduce #1" in text
    write_nccl(tmp_path, 0, entry(1))
    assert explain_hang(tmp_path).ok
    assert "nothing is wrong" in str(explain_hang(tmp_path))


@pytest.mark.parametrize("other", [{"size": 8}, {"name": "nccl:broadcast"}])
def test_a_mismatch_is_named_with_its_frames(tmp_path: Path, other: dict[str, Any]) -> None:
    write_nccl(tmp_path, 0, entry(1), entry(2, finished=False))
    write_nccl(tmp_path, 1, entry(1), entry(2, finished=False, **other))
    (text,) = explain_hang(tmp_path).mismatches
    assert text.startswith(
        "collective #2 of group '0' is not the same on all ranks: rank 0: nccl:all_reduce #2"
    )
    assert "; rank 1: " in text
    assert text.endswith("at train.py:31 in step")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo unpickled",)


def test_a_trace_never_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    (tmp_path / "nccl_rank_0").write_bytes(pickle.dumps({"entries": [Evil()]}))
    assert doctor(monkeypatch, "--dump", str(tmp_path)) == 2
    told = capfd.readouterr()
    assert (
        "nccl_rank_0 cannot be read as a trace of the flight recorder: UnpicklingError: it names" in told.err
    )
    assert told.out == ""


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"\x80\x04garbage"])
def test_unusable_directories_are_refused(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if content is not None:
        (tmp_path / "rank_0.json").write_bytes(content)
    assert doctor(monkeypatch, "--dump", str(tmp_path)) == 2
    assert doctor(monkeypatch, "--dump", str(tmp_path / "nowhere")) == 2
    told = capsys.readouterr().err
    assert ("holds no traces" if content is None else "rank_0.json cannot be read as a trace") in told
    assert "nowhere is not a directory" in told


def test_traces_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    for rank, run, when in ((0, "new", 9.0), (1, "old", 1.0)):
        content = {
            "rank": rank, "world_size": 2, "host": "n", "run": run, "time": when, "reason": "x",
            "stacks": {}, "groups": {"0": [0, 1]}, "trace": {"entries": [entry(1, finished=False)]},
        }  # fmt: skip
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(content))
    report = explain_hang(tmp_path)
    assert (report.ranks, report.older, report.without_trace) == ((0,), (1,), (1,))
    assert report.hangs[0].without_trace == (1,)
