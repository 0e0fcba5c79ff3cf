"""`python -m dist_env doctor`, alone and under torchrun."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

HOST = socket.gethostname()
DOCTOR = ("-m", "dist_env", "doctor")
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_four_ranks(launch: Callable[..., Any]) -> None:
    job = launch(DOCTOR, 4, NCCL_DEBUG="INFO", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert job.codes == [0] * 4, job.err
    done, *others = job.processes
    assert [other.out for other in others] == [""] * 3
    rows = [line.split() for line in done.out.splitlines()]
    ranks = [row for row in rows if len(row) > 6 and row[2] == HOST]
    assert [row[0] for row in ranks] == ["0", "1", "2", "3"]
    assert all(row[3:5] == ["cpu", "gloo"] for row in ranks)
    assert [row[-1] for row in rows if row[-1:] in (["right"], ["wrong"])] == ["right"] * (4 + 6)
    assert "warning: TORCH_DISTRIBUTED_DEBUG=DETAIL on all ranks" in done.out
    assert "warning: NCCL_DEBUG=INFO on all ranks" in done.out
    # Beside this, starting and ending the processes takes what importing torch takes.
    seconds = re.search(r"healthy: 4 rank\(s\) in ([0-9.]+) s", done.out)
    assert seconds is not None
    assert float(seconds[1]) < 20


# torchrun starts ranks in test_two_ranks.py.
@pytest.mark.full
def test_under_torchrun(torchrun: Callable[..., Any]) -> None:
    done = torchrun(2, *DOCTOR)
    assert done.code == 0, done.err
    assert "healthy: 2 rank(s)" in done.out


def test_stalled_rank_is_named_with_its_phase(launch: Callable[..., Any]) -> None:
    job = launch(DOCTOR, 4, "--stall-timeout", "5", DIST_ENV_TEST_STALL="2:all_reduce")
    assert job.codes == [1] * 4
    assert f"missing: rank 2 on {HOST}, last seen at step 2 in phase 'all_reduce'" in job.err
    assert job.err.count("waiting for other ranks") == 3


def test_one_process_json_and_bad_input(launch: Callable[..., Any]) -> None:
    (alone,) = launch(DOCTOR, 1, "--json", "--max-bytes", "40000", unset=VARIABLES).processes
    assert alone.code == 0, alone.err
    found = json.loads(alone.out)
    assert found["ok"] is True
    assert [rank["host"] for rank in found["ranks"]] == [HOST]
    assert [(r["bytes"], r["wrong_ranks"], r["bus_bandwidth"]) for r in found["all_reduce"]] == [
        (1024, [], None),
        (32768, [], None),
    ]
    (rank,) = found["ranks"]
    assert rank["matmul_flops"] > 1e8
    assert (len(rank["checksum"]), rank["repeatable"], found["links"]) == (16, True, [])
    (refused,) = launch(DOCTOR, 1, unset=VARIABLES[1:], RANK="two").processes
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "dist_env doctor: RANK='two' is not an integer. Set a number, or unset RANK.\n"


@pytest.mark.parametrize("hook", ["2", "x:all_reduce", "1:lunch"])
def test_misspelt_test_hook_is_refused(hook: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from dist_env.__main__ import main

    monkeypatch.setenv("DIST_ENV_TEST_STALL", hook)
    monkeypatch.setattr(sys, "argv", ["dist_env", "doctor"])
    assert main() == 2
    assert f"DIST_ENV_TEST_STALL={hook!r} is not RANK:PHASE" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--timeout", "-3"), ("--max-bytes", "many"), ("--no-such",)])
def test_wrong_option_is_refused(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from dist_env.__main__ import main

    monkeypatch.setattr(sys, "argv", ["dist_env", "doctor", *option])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--help"], ["doctor", "--help"], ["layout", "--help"], ["--version"]], ids=" ".join
)
def test_help_and_version_do_without_torch(words: list[str], python: Callable[..., Any]) -> None:
    code = "import sys; sys.modules['torch'] = None; from dist_env.__main__ import main; main()"
    done = python("-c", code, *words)
    assert (done.code, done.err) == (0, "")
    wanted = f"dist-env {version('dist-env')}\n" if words == ["--version"] else "Usage: python -m dist_env "
    assert done.out.startswith(wanted)
