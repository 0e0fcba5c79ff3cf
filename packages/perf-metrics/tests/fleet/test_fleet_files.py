"""The command that writes what a fleet's Prometheus and Grafana need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from perf_metrics.commands.main import main
from perf_metrics.monitoring.dashboard import grafana_dashboard
from perf_metrics.monitoring.rules import recording_and_alert_rules

NAMES = ["ofu-rules.yml", "ofu-dashboard.json", "prometheus.yml"]


@pytest.mark.usefixtures("prometheus_binaries")
@pytest.mark.parametrize(
    "options", [[], ["--job-label", "pod", "--cluster-label", "cluster"]], ids=["plain", "labels"]
)
def test_promtool_accepts_the_config_and_the_rules_that_it_names(tmp_path: Path, options: list[str]) -> None:
    assert main(["fleet-files", str(tmp_path), *options]) == 0
    command = ["promtool", "check", "config", "--lint=all", "--lint-fatal", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout
    assert "rules found" in done.stdout


def test_the_files_are_written_and_their_paths_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "b"
    assert main(["fleet-files", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / name) for name in NAMES]
    assert (folder / "ofu-rules.yml").read_text() == recording_and_alert_rules()
    assert json.loads((folder / "ofu-dashboard.json").read_text()) == grafana_dashboard()


def test_labels_and_clocks_are_those_that_were_asked_for(tmp_path: Path) -> None:
    options = ["--job-label", "pod", "--cluster-label", "site", "--tensor-mhz", "A=B=1500.5"]
    assert main(["fleet-files", str(tmp_path), *options, "--tensor-mhz", "NVIDIA H200 = 1800"]) == 0
    rules = (tmp_path / "ofu-rules.yml").read_text()
    clocks = {"A=B": 1500.5, "NVIDIA H200": 1800}
    asked = {"job_label": "pod", "cluster_label": "site"}
    assert rules == recording_and_alert_rules(**asked, tensor_mhz=clocks)
    assert json.loads((tmp_path / "ofu-dashboard.json").read_text()) == grafana_dashboard(**asked)
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    (dcgm,), (training,) = (scraped["static_configs"] for scraped in config["scrape_configs"])
    assert set(dcgm["labels"]) == set(training["labels"]) == {"site"}


def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prometheus.yml").write_text("mine\n")
    assert main(["fleet-files", str(tmp_path)]) == 2
    assert "prometheus.yml is there with another content. Give another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus.yml"]
    assert (tmp_path / "prometheus.yml").read_text() == "mine\n"


def test_writing_the_same_again_is_no_conflict(tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["fleet-files", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--job-label", "hpc-job"], "perf-metrics: job_label='hpc-job' is not the name of a label"),
        (["--cluster-label", "hpc_job"], "perf-metrics: cluster_label='hpc_job' is the job_label too"),
        (["--tensor-mhz", "1830"], "perf-metrics: tensor_mhz='1830' must be NAME=MHZ"),
        (["--tensor-mhz", "A=fast"], "perf-metrics: tensor_mhz='A=fast' must be NAME=MHZ"),
        (["--tensor-mhz", "A=-1"], "perf-metrics: tensor_mhz=-1.0 must be a positive number of MHz"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["fleet-files", str(tmp_path / "new"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert not (tmp_path / "new").exists()


def test_it_needs_neither_torch_nor_a_client_of_prometheus(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom perf_metrics.commands.main import main\n"
        "main(['fleet-files', sys.argv[1]])\n"
        "print({'torch', 'prometheus_client', 'httpx', 'yaml', 'matplotlib'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
