"""What a monitoring host runs: every command that reads logs, configs and counters, without torch.

`nox -s tests-perf-metrics-without-torch` runs this, and it is skipped where torch is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
COMMANDS = ("plot", "summary", "compare", "flops", "gemm", "trace", "watch", "fleet", "fleet-files")


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perf_metrics", *map(str, words)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda words: " ".join(words))
def test_help(command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(("Usage: perf-metrics", *command)))


def test_version() -> None:
    assert run("--version").stdout == f"perf-metrics {version('perf-metrics')}\n"


def test_summary(tmp_path: Path) -> None:
    log = tmp_path / "trainer_logs.json"
    log.write_text('[{"global_step": 1, "loss": 2.0}, {"global_step": 2, "loss": 1.5}]')
    done = run("summary", log)
    assert done.stderr == ""
    assert done.stdout.splitlines()[1].split()[1] == "2"


def test_flops_of_a_known_family(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    done = run("flops", "--hf-config", config, "--seq", 64, "--json")
    assert done.stderr == ""
    # By hand: attention 4 of 8 x 8, gated 3 of 8 x 16, twice; the head; attention 12 L d S.
    weights = 2 * (4 * 64 + 3 * 128) + 72
    assert json.loads(done.stdout)["flops_per_token"] == 6 * weights + 12 * 2 * 8 * 64


def test_gemm() -> None:
    done = run("gemm", 4096, 4096, 4096)
    assert (done.returncode, done.stderr) == (0, "")


def test_fleet_files(tmp_path: Path) -> None:
    assert run("fleet-files", tmp_path).returncode == 0
    assert (tmp_path / "ofu-rules.yml").is_file()


@pytest.mark.parametrize("family", ["llama", "unheard-of"])
def test_what_builds_a_model_names_the_extra(tmp_path: Path, family: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "model_type": family}))
    done = run("flops", "--hf-config", config, "--seq", 64, "--check")
    assert done.returncode == 1
    assert done.stderr.startswith("perf-metrics: ")
    assert "pip install 'perf-metrics[torch]'" in done.stderr


def test_a_library_of_an_extra_is_named(tmp_path: Path) -> None:
    log = tmp_path / "trainer_logs.json"
    log.write_text('[{"global_step": 1, "loss": 2.0}, {"global_step": 2, "loss": 1.5}]')
    done = run("plot", log, "--output", tmp_path / "curve.png")
    assert done.returncode == 0 or "perf-metrics[plot]" in done.stderr
