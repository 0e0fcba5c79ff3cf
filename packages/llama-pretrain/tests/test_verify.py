"""`llama-pretrain verify` in real processes, and what it says of a machine that is not right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_pretrain.cli import main
from llama_pretrain.commands.verify import PARTS, default_layouts
from trainer_core import VerificationCheck

LIMIT_S = 900


def verify(work: Path, *options: str, **variables: str) -> tuple[int, str, dict[str, VerificationCheck]]:
    """Run the command; its exit code, what it printed, and the checks by part and name."""
    command = (sys.executable, "-m", "llama_pretrain", "verify", "--use-cpu", "--output-dir", str(work))
    done = subprocess.run(
        [*command, "--precisions", "fp32", "--steps", "4", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    written = json.loads((work / "verify.json").read_text())
    checks = [VerificationCheck(**each) for each in written["checks"]]
    return done.returncode, done.stdout + done.stderr, {f"{each.part} {each.name}": each for each in checks}


@pytest.mark.full
def test_two_processes(tmp_path: Path) -> None:
    code, said, checks = verify(tmp_path, "--processes", "2", "--layouts", "dp=2", "--parts", "devices,curve")
    assert code == 0, said
    assert list(checks) == [
        "devices computing, all-reduces and links",
        "curve one process, fp32",
        "curve dp=2, fp32",
    ]
    assert all(check.passed for check in checks.values()), said
    assert "all of that holds: 3 passed, 0 failed, 0 not looked at" in said
    page = (tmp_path / "verify.html").read_text()
    assert "curve dp=2, fp32" in page
    assert "All that was looked at holds" in page


def test_one_process_looks_at_everything_once(tmp_path: Path) -> None:
    code, said, checks = verify(tmp_path, "--parts", "repeat,waits")
    assert code == 0, said
    assert list(checks) == [
        "repeat one process, the same again",
        "waits of the host, in steps without a log entry",
    ]
    assert said.count("all of that holds: 1 passed, 0 failed, 1 not looked at") == 1


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_every_part(processes: int, tmp_path: Path) -> None:
    layouts = ("--layouts", "shard=2") if processes == 2 else ()
    code, said, checks = verify(tmp_path, "--processes", str(processes), *layouts)
    assert code == 0, said
    assert {name.partition(" ")[0] for name in checks} == set(PARTS)
    mesh = ", shard=2" if processes == 2 else ""
    assert len([name for name in checks if name.startswith("kill")]) == 1
    killed = checks[f"kill a run killed behind a save{mesh}"].figures["checkpoints"]
    assert isinstance(killed, list)
    assert 10 <= max(killed) < 20, "it was killed behind a save, and before its end"


FAULT = """
import os

import torch

# One rank's matrix products are a little wrong, as of a device that is not right.
if os.environ.get("RANK") == "1":
    from torch.nn import functional

    right = functional.linear
    functional.linear = lambda *given, **more: right(*given, **more) * 1.001
"""


def test_a_rank_that_computes_wrongly_is_named(tmp_path: Path) -> None:
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(FAULT)
    code, said, checks = verify(
        tmp_path,
        "--processes",
        "2",
        "--layouts",
        "dp=2",
        "--parts",
        "curve",
        PYTHONPATH=str(tmp_path / "fault"),
    )
    assert code == 1, said
    alone = checks["curve one process, fp32"]
    assert alone.passed is False
    assert alone.found.startswith("rank 1 ("), "the other rank is right"
    assert "NOT all of that holds" in said
    assert "FAILED" in (tmp_path / "verify.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "curves"], "parts='curves' is none of devices, curve, "),
        (["--layouts", "dp=3", "--processes", "2"], "layouts='dp=3' needs 3 processes, not 2"),
        (["--layouts", "foo"], "layouts='foo' cannot be used: "),
        (["--processes", "0"], "processes=0 must be at least 1"),
        (["--steps", "2", "--processes", "2"], "steps=2 must be at least 4"),
        (["--precisions", "fp8", "--processes", "2"], "precisions='fp8' must be one of fp32, bf16, fp16"),
    ],
)
def test_wrong_settings_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--use-cpu", "--output-dir", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "refused before room is made and processes are started"


def test_a_rank_refuses_wrong_settings_before_it_waits_for_others(tmp_path: Path) -> None:
    # The other rank of this job does not exist: whoever waits for it is stopped by the time limit.
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "llama_pretrain", "verify", "--use-cpu", "--output-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--steps", "2"],
        env={**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "steps=2 must be at least 4" in done.stderr


def test_the_layouts_of_a_number_of_processes() -> None:
    assert default_layouts(1) == ()
    assert default_layouts(2) == ("dp=2", "shard=2", "tp=2", "pp=2", "cp=2")
    assert default_layouts(8) == (
        *("dp=8", "shard=8", "cp=8", "dp=2,shard=4", "shard=4,tp=2", "shard=4,pp=2", "shard=2,pp=2,tp=2"),
    )
    assert default_layouts(3) == ("dp=3", "shard=3", "cp=3")


def test_results_need_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["verify", "--use-cpu", "--parts", "repeat", "--output-dir", str(tmp_path / "file")]) == 2
    assert "is a file, and results need a directory" in capsys.readouterr().err
