"""Jobs by what they are called elsewhere: pods of one job, users of Slurm, runs over requeues, costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perf_metrics import Device, FleetSamples
from perf_metrics.fleet.job_identity import JobIdentity, JobNames, read_sacct

from .fleet_command import fleet_command, report_of, run
from .prometheus_server import PrometheusServer

pytestmark = pytest.mark.xdist_group("fleet")

START = 1_700_000_000
HOUR = 3600
MODEL = "NVIDIA H100 80GB HBM3"


@dataclass
class Planted:
    """Series of dcgm-exporter and kube-state-metrics, as lines of OpenMetrics."""

    activity: list[str] = field(default_factory=list)
    clock: list[str] = field(default_factory=list)
    pods: list[str] = field(default_factory=list)

    def work(self, uuid: str, ofu: float, first: float, last: float, **labels: str) -> None:
        """A GPU works for a job between two times, in hours; at the tensor clock activity is OFU."""
        told = {"gpu": "0", "UUID": uuid, "modelName": MODEL, "Hostname": uuid, **labels}
        text = ",".join(f'{name}="{value}"' for name, value in told.items())
        for time in range(START + round(first * HOUR), START + round(last * HOUR), 30):
            self.activity.append(f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{text}}} {ofu} {time}")
            self.clock.append(f"DCGM_FI_DEV_SM_CLOCK{{{text}}} 1830 {time}")

    def pod(self, namespace: str, pod: str, **labels: str) -> None:
        """kube-state-metrics shows a pod in the first hour."""
        text = ",".join(f'{k}="{v}"' for k, v in {"namespace": namespace, "pod": pod, **labels}.items())
        self.pods += [f"kube_pod_labels{{{text}}} 1 {START + minute * 60}" for minute in range(0, 60, 5)]

    def text(self) -> str:
        """A file that promtool takes."""
        return "\n".join(
            [
                "# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge",
                *self.activity,
                "# TYPE DCGM_FI_DEV_SM_CLOCK gauge",
                *self.clock,
                "# TYPE kube_pod_labels gauge",
                *self.pods,
                "# EOF\n",
            ]
        )


JOBSET = "label_jobset_sigs_k8s_io_jobset_name"
KUBEFLOW = "label_training_kubeflow_org_job_name"
QUEUE = "label_kueue_x_k8s_io_queue_name"


@pytest.fixture(scope="module")
def served(prometheus_binaries: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    planted = Planted()
    for number in range(4):  # a JobSet of four pods, which is restarted with other pods of the same names
        pod = f"llama-workers-0-{number}-{'abcd'[number]}"
        for life, (first, last) in enumerate(((0.0, 2.0), (2.25, 3.0))):
            labels = {"pod": pod, "namespace": "nlp", "pod_uid": f"{number}-{life}"}
            planted.work(f"GPU-{number}", 0.4, first, last, **labels)
        planted.pod("nlp", pod, **{JOBSET: "llama", "label_job_name": "llama-workers-0", QUEUE: "a100s"})
    for number in range(2):
        pod = f"vit-worker-{number}"
        planted.work(f"GPU-v{number}", 0.2, 0, 1, pod=pod, namespace="vision")
        planted.pod("vision", pod, **{KUBEFLOW: "vit"})
    planted.work("GPU-x", 0.1, 0, 1, pod="notebook", namespace="nlp")  # of no job
    for number, (job, first) in enumerate((("101", 0), ("102", 3), ("103", 6), ("104", 9))):
        # One after the other, of one name; the last one is slower.
        for gpu in range(2):
            planted.work(f"GPU-s{gpu}", 0.3 if number == 3 else 0.5, first, first + 2, hpc_job=job)
    planted.work("GPU-s9", 0.25, 0, 4, hpc_job="200")
    folder = tmp_path_factory.mktemp("identity")
    (folder / "series.om").write_text(planted.text())
    server = PrometheusServer(folder / "prometheus")
    server.backfill(folder / "series.om")
    with server:
        yield server


def command(server: PrometheusServer, *options: str, hours: float = 12) -> list[str]:
    times = ["--start", str(START - 60), "--end", str(START + round(hours * HOUR))]
    return fleet_command("--prometheus", server.url, *times, *options)


def by_name(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {job["job"]: job for job in report["jobs"]}


def sacct(folder: Path) -> Path:
    """As Slurm 23.11 and 22.05 write numbers: alone, and as objects that say whether they are set."""
    unset = {"set": False, "infinite": False, "number": 0}
    jobs: list[dict[str, object]] = [
        {"job_id": number, "name": "pretrain", "user": "ana", "account": "nlp", "array": {"job_id": 0}}
        for number in (101, 102, 103, 104)
    ]
    jobs.append({"job_id": 200, "name": "sweep", "user": "ben", "array": {"job_id": 199, "task_id": 7}})
    jobs.append({"job_id": 300, "name": "", "user": "", "array": {"job_id": 300, "task_id": unset}})
    path = folder / "sacct.json"
    path.write_text(json.dumps({"meta": {}, "jobs": jobs}))
    return path


def test_pods_of_one_job_are_one_job_over_restarts(served: PrometheusServer, tmp_path: Path) -> None:
    pods = by_name(report_of(command(served, "--job-label", "pod", hours=4), tmp_path))
    assert len(pods) == 4 * 2 + 2 + 1, "each pod and each of its lives is a job"

    jobs = by_name(report_of(command(served, "--job-label", "pod", "--kube-labels", hours=4), tmp_path))
    assert set(jobs) == {"nlp/llama", "vision/vit", "notebook"}
    llama = jobs["nlp/llama"]
    assert (llama["gpus"], llama["user"], llama["account"]) == (4, "nlp", "a100s")
    assert llama["device_hours"] == pytest.approx(4 * 2.75, rel=0.01)
    assert llama["ofu"]["mean"] == pytest.approx(0.4, abs=1e-3)
    assert jobs["vision/vit"]["gpus"] == 2
    assert jobs["notebook"]["user"] is None


def test_a_pattern_joins_pods_and_names_their_runs(served: PrometheusServer, tmp_path: Path) -> None:
    pattern = r"^(?P<job>(?P<run>\w+)-(worker|workers-0))-"
    report = report_of(command(served, "--job-label", "pod", "--job-pattern", pattern, hours=4), tmp_path)
    jobs = by_name(report)
    assert {name: job["run"] for name, job in jobs.items()} == {
        "llama-workers-0": "llama",
        "vit-worker": "vit",
        "notebook": None,
    }
    assert jobs["llama-workers-0"]["gpus"] == 4
    assert any("1 names of jobs do not match the job pattern" in note for note in report["notes"])


def test_slurm_tells_users_and_runs_whose_baseline_survives_new_job_ids(
    served: PrometheusServer, tmp_path: Path
) -> None:
    options = ("--sacct", str(sacct(tmp_path)), "--price", "2")
    report = report_of(command(served, *options), tmp_path)
    jobs = by_name(report)
    assert {name: (job["run"], job["user"]) for name, job in jobs.items()} == {
        **{str(number): ("ana/pretrain", "ana") for number in (101, 102, 103, 104)},
        "200": ("ben/sweep", "ben"),
    }
    (fall,) = report["regressions"]
    assert (fall["job"], fall["kind"]) == ("104", "against earlier jobs of the run")
    assert (fall["before"], fall["after"]) == pytest.approx((0.5, 0.3), abs=1e-3)
    users = {one["user"]: one for one in report["users"]}
    assert users["ana"]["device_hours"] == pytest.approx(4 * 2 * 2, rel=0.01)
    assert users["ana"]["ofu"] == pytest.approx((3 * 0.5 + 0.3) / 4, abs=1e-3)
    assert users["ana"]["cost"] == pytest.approx(32, rel=0.01)
    assert (users["ben"]["jobs"], users["ben"]["mfu_share"]) == (1, 0)
    shown = run(command(served, *options)).stdout
    assert "GPU time by user (2)" in shown
    assert "ana   nlp" in shown
    assert "32.0" in next(line for line in shown.splitlines() if line.startswith("ana"))


def test_what_cannot_be_joined_is_told(served: PrometheusServer, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for text in ("[]", "{}", '{"jobs": [{}]}', "no"):
        bad.write_text(text)
        assert "is not what `sacct --json` writes" in run(command(served, "--sacct", str(bad))).stderr
    for pattern, told in (("(", "is not a regular expression"), ("^a", "names neither a job nor a run")):
        done = run(command(served, "--job-pattern", pattern))
        assert done.returncode == 2
        assert told in done.stderr
    without = run(fleet_command("--prometheus", served.url, "--start", "1000000000", "--end", "1000003600",
                                "--job-label", "pod", "--kube-labels"))  # fmt: skip
    assert "kube_pod_labels has 0 series in this time and none with a label of a job" in without.stderr
    with pytest.raises(SystemExit):
        run(command(served, "--price", "much"))


def test_what_slurm_and_kubernetes_do_not_know_is_noted(served: PrometheusServer, tmp_path: Path) -> None:
    file = sacct(tmp_path)
    known = json.loads(file.read_text())
    known["jobs"] = known["jobs"][1:4]
    file.write_text(json.dumps(known))
    report = report_of(command(served, "--sacct", str(file)), tmp_path)
    assert any("2 jobs are not among those that Slurm" in note for note in report["notes"]), report["notes"]
    joined = report_of(command(served, "--job-label", "modelName,hpc_job", "--sacct", str(file)), tmp_path)
    assert {job["user"] for job in joined["jobs"]} == {"ana", None}, "found by the one label that is an id"


def test_an_id_of_two_clusters_is_refused(tmp_path: Path) -> None:
    jobs = [{"job_id": 7, "name": "a", "user": user, "cluster": user} for user in ("ann", "bob")]
    (tmp_path / "sacct.json").write_text(json.dumps({"jobs": jobs}))
    with pytest.raises(ValueError, match="has job 7 of two users or names"):
        read_sacct(tmp_path / "sacct.json")
    (tmp_path / "sacct.json").write_text(json.dumps({"jobs": [{"job_id": {"set": True, "number": 7}}]}))
    assert list(read_sacct(tmp_path / "sacct.json")) == ["7"]


@pytest.mark.parametrize("order", [("x/7", "x/8", "x/9"), ("x/9", "x/8", "x/7")])
def test_a_joined_job_has_a_user_in_any_order(order: tuple[str, ...]) -> None:
    slurm = {
        f"x/{number}": JobIdentity(f"x/{number}", None, user) for number, user in ((8, "ann"), (9, "bob"))
    }
    names = JobNames(["hpc_job"], pattern="^(?P<job>x)/", slurm=slurm)
    assert {names.name_of({"hpc_job": each}) for each in order} == {"x"}
    assert names.identity("x").user == ("ann" if order[0] == "x/7" else "bob")
    assert any("joined from those of several users" in note for note in names.notes())


def test_labels_that_the_scrape_has_renamed_name_the_pod() -> None:
    pods = {("nlp", "a-0"): JobIdentity("nlp/a", "nlp/a", "nlp")}
    names = JobNames(["exported_pod"], pods=pods)
    series = {"pod": "exporter-1", "namespace": "gpu", "exported_pod": "a-0", "exported_namespace": "nlp"}
    assert names.name_of(series) == "nlp/a"


def test_names_of_runs_are_not_those_of_other_jobs() -> None:
    fleet = FleetSamples(0, 30_000, 30)
    for name, times in (("a", (0, 20_000)), ("a#1", (0,))):
        for time in times:
            fleet.add(name, Device("node", "0", model=MODEL), time, 0.5, 1830)
    found = [name for of_name in fleet.runs().values() for name in of_name]
    assert sorted(found) == ["a##1", "a##2", "a#1"]


def test_tasks_of_an_array_have_both_names(tmp_path: Path) -> None:
    found = read_sacct(sacct(tmp_path))
    assert found["199_7"] == JobIdentity("199_7", "ben/sweep", "ben", None)
    assert found["200"].run == "ben/sweep"
    assert found["300"] == JobIdentity("300")
    assert "300_0" not in found
    names = JobNames(["hpc_job"], slurm=found)
    assert names.name_of({"hpc_job": "199_7"}) == "199_7"
    assert names.identity("199_7").user == "ben"
    assert names.identity("never seen") == JobIdentity("never seen")
