"""`train --mesh` starts its own processes: real ones, over gloo, on a very small model."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from small_run import small_run_words, unlaunched_environ, write_small_run

from checkpoint_core import DirectoryLease
from llama_pretrain.launch import REPORT_VARIABLE, _Job, launch, report_end
from llama_pretrain.restarts import Restarts
from trainer_core import LAUNCH_VARIABLE

LIMIT_S = 240
SLOW_MACHINE_S = 8
"""Beside other work a Python that has imported torch takes this long to end; nothing else takes long."""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a shape and some text."""
    return write_small_run(tmp_path)


def start(
    work: Path, output: str, *more: str, steps: int = 6, program: tuple[str, str] = ("-m", "llama_pretrain")
) -> subprocess.Popen[str]:
    (work / "temporary").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *program, *small_run_words(work, output, *more, steps=steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=unlaunched_environ() | {"TMPDIR": str(work / "temporary")},
    )


def losses(work: Path, output: str) -> list[float]:
    entries = json.loads((work / output / "trainer_logs.json").read_text())
    return [entry["loss"] for entry in entries if "loss" in entry]


def process_of_rank(rank: int, launcher: int) -> int:
    """Return the process that the launcher has started for a rank."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            variables = (stat.parent / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if b"RANK=%d" % rank in variables:
            return int(stat.parent.name)
    raise LookupError(f"process {launcher} has no child with RANK={rank}")


def is_rank(rank: int, launcher: int) -> bool:
    """Whether the launcher has started this rank."""
    try:
        return process_of_rank(rank, launcher) > 0
    except LookupError:
        return False


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_a_step(process: subprocess.Popen[str], log: Path) -> None:
    wait_for(lambda: log.is_file() and '"loss"' in log.read_text(), process)


@pytest.mark.full
def test_every_rank_restarts_with_what_it_has_compiled(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = ("--torch-compile", "--torch-compile-cache-dir", str(work / "compiled"))
    monkeypatch.setenv("TRAINER_CORE_COMPILE_CACHE_KEY", str(work / "key"))
    written = []
    for output in ("first", "second"):
        # Torch's own cache is empty, as in a fresh container.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(work / f"torch-{output}"))
        process = start(work, output, "--mesh", "dp=2", *cached, steps=3)
        _, warned = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, warned
        written.append({path.name: path.stat().st_mtime_ns for path in (work / "compiled").iterdir()})
    assert sorted(written[0]) == ["rank-00000.zip", "rank-00001.zip"]
    assert written[1] == written[0], "nothing was compiled that the files did not have"
    assert losses(work, "second") == losses(work, "first")


@pytest.mark.full
def test_one_command_trains_along_each_axis_on_one_curve(work: Path) -> None:
    done = {}
    for mesh, accumulated in (("dp=1", 4), ("dp=2", 2), ("shard=2,pp=2", 2)):
        microbatches = ("--microbatches", "2") if "pp" in mesh else ()
        batch = ("--per-device-train-batch-size", "2", "--gradient-accumulation-steps", str(accumulated))
        process = start(work, mesh, "--mesh", mesh, *batch, *microbatches)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        done[mesh] = losses(work, mesh)
        assert "Traceback" not in out + err
    assert len(done["dp=1"]) == 6
    assert done["dp=2"] == pytest.approx(done["dp=1"], rel=1e-5)
    assert done["shard=2,pp=2"] == pytest.approx(done["dp=1"], rel=1e-5)


def test_a_signal_to_the_command_saves_and_ends_with_75(work: Path) -> None:
    process = start(work, "run", "--mesh", "dp=2", steps=100_000)
    wait_for_a_step(process, work / "run" / "trainer_logs.json")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, err
    assert len(list((work / "run").glob("checkpoint-*"))) == 1
    assert {path.name.partition("_")[0] for path in (work / "temporary").iterdir()} <= {"torchinductor"}
    assert "Traceback" not in out + err


def test_a_rank_that_is_killed_ends_the_job_and_is_named(work: Path) -> None:
    process = start(work, "run", "--mesh", "dp=2", steps=100_000)
    wait_for_a_step(process, work / "run" / "trainer_logs.json")
    other = process_of_rank(0, process.pid)
    os.kill(process_of_rank(1, process.pid), signal.SIGKILL)
    struck = time.monotonic()
    _, err = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - struck < 2 + SLOW_MACHINE_S
    assert process.returncode == 1
    assert err.splitlines()[-1] == "llama-pretrain: error: rank 1 was ended by SIGKILL."
    assert not Path(f"/proc/{other}").exists()
    assert {path.name.partition("_")[0] for path in (work / "temporary").iterdir()} <= {"torchinductor"}


def is_alive(pid: int) -> bool:
    """Not a zombie either, which nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.full
def test_ranks_that_can_do_nothing_themselves_end_with_a_launcher_that_is_killed(work: Path) -> None:
    process = start(work, "run", "--mesh", "dp=2", steps=100_000)
    wait_for(lambda: is_rank(0, process.pid) and is_rank(1, process.pid), process)
    ranks = [process_of_rank(rank, process.pid) for rank in (0, 1)]
    # Each asks to die with the launcher before it runs the program, with Python's site-packages.
    wait_for(lambda: all(b"-S" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ranks), process)
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    deadline = time.monotonic() + 2 + SLOW_MACHINE_S
    while (left := [pid for pid in ranks if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert left == []


@pytest.mark.full
def test_a_signal_that_comes_again_stops_at_once(work: Path) -> None:
    process = start(work, "run", "--mesh", "dp=2", steps=100_000)
    wait_for_a_step(process, work / "run" / "trainer_logs.json")
    # Nothing is finished any more, and nobody saves.
    os.kill(process_of_rank(1, process.pid), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)  # sooner it is taken for the same one, as a terminal and a launcher both send it
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=2 + SLOW_MACHINE_S)
    assert process.returncode == 130, err
    last = "llama-pretrain: stopped at once; checkpoints saved so far are whole, the same command continues."
    assert err.splitlines()[-1] == last
    assert "Traceback" not in err


def listening(pid: int) -> set[str]:
    """The addresses that a process listens on, as digits of the kernel."""
    own = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            own.add(str(path.readlink()))
    tables = (Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for table in tables for row in table.splitlines()]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_a_signal_during_the_start_ends_without_a_traceback(work: Path) -> None:
    """And before, the store of the launcher is reached from this machine only."""
    process = start(work, "run", "--mesh", "dp=2", steps=100_000)
    wait_for(lambda: is_rank(1, process.pid), process)
    assert listening(process.pid) == {"0100007F"}
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    assert "stopped before there was anything to save" in err
    assert "Traceback" not in err


@pytest.mark.full
def test_a_disk_that_fills_up_is_no_wrong_input_and_is_named_last(work: Path) -> None:
    """A file may not become larger, which the system refuses as it refuses a full disk."""
    process = start(work, "run", "--mesh", "dp=2", steps=100_000)
    wait_for_a_step(process, work / "run" / "trainer_logs.json")
    pid = process_of_rank(0, process.pid)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (8192, 8192))
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, err
    # Rank 1 repeats it, in a sentence on rank 0, before or after.
    assert err.splitlines()[-1].startswith("llama-pretrain: error: [rank 0] [Errno 27] File too large: ")
    assert "SIGTERM" not in err


def test_wrong_input_is_told_in_one_line_before_anything_starts(work: Path) -> None:
    process = start(work, "run", "--mesh", "dp=2", "--learning-rate", "-1")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1
    assert "learning_rate=-1" in err
    assert not (work / "run").exists()


def test_what_only_the_processes_can_see_is_wrong_input_too(work: Path) -> None:
    """And the launcher ends at once when they have: to let Python collect all of torch takes seconds."""
    script = "import atexit, llama_pretrain.cli as cli; atexit.register(print, 'collects'); cli.run()"
    process = start(work, "run", "--mesh", "dp=2", "--data", str(work / "nothing"), program=("-c", script))
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, err
    assert f"data path {work}/nothing does not exist" in err
    assert "collects" not in out


@pytest.mark.full
def test_a_tracker_that_one_rank_lacks_is_refused_on_all(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hides = "import os, sys\nif os.environ.get('RANK') == '1':\n    sys.modules['wandb'] = None\n"
    (work / "site").mkdir()
    (work / "site" / "sitecustomize.py").write_text(hides)
    monkeypatch.setenv("PYTHONPATH", str(work / "site"))
    job = start(work, "run", "--mesh", "dp=2", "--report-to", "wandb")
    _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 2, err
    assert "report_to='wandb' needs the library wandb" in err
    assert "pip install 'trainer-core[wandb]'" in err
    assert {rank for rank in (0, 1) if f"[rank {rank}]" in err} == {0, 1}
    assert not (work / "run" / "run.json").exists()


def test_what_a_rank_tells_its_launcher_cannot_be_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    for name, value in (("RANK", "1"), (REPORT_VARIABLE, str(writes))):
        monkeypatch.setenv(name, value)
    report_end("\U0001f600" * 2000, is_cause=True)
    line = os.read(reads, 2**16)
    os.close(reads)
    os.close(writes)
    assert len(line) <= select.PIPE_BUF
    told = json.loads(line)
    assert (told["rank"], told["kind"], set(told["text"])) == (1, "cause", {"\U0001f600"})


def test_a_directory_in_use_is_refused_before_ranks_start(work: Path) -> None:
    with DirectoryLease(work / "run").acquire():
        process = start(work, "run", "--mesh", "dp=2")
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, err
    named = f"output_dir='{work}/run' is in use by process {os.getpid()} on "
    assert err.startswith(f"llama-pretrain: error: {named}")
    assert len(err.splitlines()) == 1


@pytest.mark.full
def test_a_directory_taken_while_ranks_start_is_refused_before_they_can_look(work: Path) -> None:
    process = start(work, "run", "--mesh", "dp=2")
    wait_for(lambda: is_rank(1, process.pid), process)
    ranks = [process_of_rank(rank, process.pid) for rank in (0, 1)]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        with DirectoryLease(work / "run").acquire():
            _, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # They may have been stopped before they asked to die with the launcher.
        for pid in (process.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        raise
    assert process.returncode == 2, err
    assert f"is in use by process {os.getpid()} on " in err.splitlines()[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.full
def test_a_lease_of_another_machine_is_left_to_the_ranks_which_watch_it(work: Path) -> None:
    (work / "run").mkdir()
    who = {"lease_id": "0", "host": "elsewhere", "pid": 1, "machine": "another", "started": 1}
    holder = who | {"since": 0.0, "takeover_seconds": 1.0}
    (work / "run" / ".lease-1").write_text(json.dumps(holder) + "\n0\n")
    process = start(work, "run", "--mesh", "dp=2")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "taken over from process 1 on elsewhere" in err


@pytest.mark.full
def test_a_launcher_of_another_size_is_refused(work: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words = ["-m", "llama_pretrain", "train", "--mesh", "dp=2", "--output-dir", str(work / "run")]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "mesh='dp=2' needs 2 processes, but 1 were started" in done.stderr


def pipes() -> list[str]:
    """The ends of pipes that this process has open."""
    return sorted(str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_fifo())


def test_each_job_of_a_launcher_has_a_name_of_its_own(tmp_path: Path) -> None:
    """So that the second one does not continue the run of the first."""
    names = set()
    for _ in range(2):
        job = _Job(["recipes"], str(tmp_path), 1, Restarts(0), hot_spares=False, fresh=True)
        names.add(job._variables[LAUNCH_VARIABLE])
        job.close()
    assert len(names) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_job_closes_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which launch sets
    words = ["recipes", "tiny-cpu"]
    assert launch(words, 1, str(tmp_path)) == 0
    before = pipes()  # with what torch opens once
    assert launch(words, 1, str(tmp_path)) == 0
    assert pipes() == before


def test_a_signal_that_comes_again_while_ranks_start_stops_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = _Job(["recipes", "tiny-cpu"], str(tmp_path), 1, Restarts(0), hot_spares=False, fresh=True)
    job.remember(signal.SIGINT, None)
    time.sleep(1.1)  # later than an echo of the same one
    job.remember(signal.SIGINT, None)
    job.start()
    job.wait()
    job.kill()
    job.close()
    assert job.conclude() == 130
    said = capfd.readouterr().err
    assert "checkpoints saved so far are whole, the same command without its fresh start (--fresh, or" in said
