import json
import logging
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from perf_metrics import JsonLogger, load_logs


def log(run, *steps: int, **record: object) -> Path:
    logger = JsonLogger()
    for step in steps:
        run.state.global_step = step
        run.fire("on_log", logger, logs={"loss": 1.0 / step, **record})
    return Path(run.args.logging_dir) / "trainer_logs.json"


def begin(run, step: int) -> None:
    run.state.global_step = step
    run.fire("on_train_begin", JsonLogger())


def steps_in(path: Path) -> list[object]:
    return [entry["global_step"] for entry in json.loads(path.read_text())]


def test_entries_with_their_position_and_the_values_as_they_are(run) -> None:
    before = time.time()
    begin(run, 0)
    path = Path(run.args.logging_dir) / "trainer_logs.json"
    assert json.loads(path.read_text()) == []
    run.state.epoch = 0.5
    log(run, 250, peak_mem_allocated=[1900000000], note="text", nested={"a": (1, 2)}, mfu=None)
    (entry,) = json.loads(path.read_text())
    assert before <= entry.pop("timestamp") <= time.time()
    assert entry == {
        "global_step": 250, "epoch": 0.5, "loss": 0.004, "peak_mem_allocated": [1900000000],
        "note": "text", "nested": {"a": [1, 2]}, "mfu": None,
    }  # fmt: skip
    assert load_logs(path) == load_logs(path.parent) == json.loads(path.read_text())


def test_the_file_is_valid_after_every_entry(run) -> None:
    for step in range(1, 20):
        path = log(run, step)
        assert steps_in(path) == list(range(1, step + 1))


def test_not_a_number_is_null(run) -> None:
    nan, inf = float("nan"), float("inf")
    path = log(run, 1, grad_norm=nan, limits=[1.0, -inf], deep={"x": [inf]})
    (entry,) = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (entry["grad_norm"], entry["limits"], entry["deep"]) == (None, [1.0, None], {"x": [None]})


def test_arrays_are_written_as_lists_and_other_objects_refused(run) -> None:
    import torch

    path = log(run, 1, norm=torch.tensor(2.5), per_rank=torch.tensor([1, 2]), bad=torch.tensor(float("nan")))
    (entry,) = json.loads(path.read_text())
    assert (entry["norm"], entry["per_rank"], entry["bad"]) == (2.5, [1, 2], None)
    with pytest.raises(TypeError, match="log entry 'where' is a PosixPath"):
        log(run, 2, where=Path())
    assert steps_in(path) == [1]


def test_a_resumed_run_goes_on_from_its_step(run) -> None:
    path = log(run, 10, 20, 30, 40)
    begin(run, 20)
    assert steps_in(path) == [10, 20]
    log(run, 30)
    assert steps_in(path) == [10, 20, 30]
    begin(run, 30)
    assert steps_in(path) == [10, 20, 30]
    begin(run, 0)
    assert steps_in(path) == []


def test_final_metrics_of_a_part_are_dropped_when_the_run_goes_on(run) -> None:
    log(run, 10)
    path = Path(run.args.logging_dir) / "trainer_logs.json"
    run.fire("on_log", JsonLogger(), logs={"train_runtime": 3.5})
    assert steps_in(path) == [10, 10]
    begin(run, 10)
    assert steps_in(path) == [10]


def test_a_runtime_in_the_record_of_an_interval_does_not_make_it_final(run) -> None:
    """transformers.Trainer puts it there when it counts tokens."""
    log(run, 5, 10, train_runtime=3.5)
    begin(run, 10)
    assert steps_in(Path(run.args.logging_dir) / "trainer_logs.json") == [5, 10]


def test_arguments_without_a_directory_for_logs(tmp_path: Path, run) -> None:
    """transformers.TrainingArguments has only the one of the run."""
    run.args = SimpleNamespace(output_dir=str(tmp_path / "run"))
    begin(run, 0)
    assert (tmp_path / "run" / "trainer_logs.json").is_file()


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 30])
def test_a_torn_end_is_repaired_and_kept_aside(run, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    path = log(run, 1, 2, 3)
    torn = path.read_bytes()[:-cut]
    path.write_bytes(torn)
    survivors = load_logs(path)
    with caplog.at_level(logging.WARNING, logger="perf_metrics"):
        begin(run, 3)
    kept = [1, 2, 3] if cut < 4 else [1, 2]
    assert steps_in(path) == kept == [entry["global_step"] for entry in survivors]
    damaged = path.with_name("trainer_logs.json.damaged")
    # Without its last line break the file is still whole JSON, and nothing was lost.
    assert damaged.exists() == (cut > 1)
    assert bool(caplog.records) == (cut > 1)
    if cut > 1:
        assert damaged.read_bytes() == torn
    log(run, 4)
    assert steps_in(path) == [*kept, 4]


def test_a_torn_end_is_repaired_at_the_next_entry_too(run) -> None:
    path = log(run, 1, 2)
    path.write_bytes(path.read_bytes()[:-10])
    log(run, 3)
    assert steps_in(path) == [1, 3]
    path.write_bytes(path.read_bytes()[:-10])
    log(run, 4)
    assert steps_in(path) == [1, 4]
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "trainer_logs.json",
        "trainer_logs.json.damaged",
        "trainer_logs.json.damaged-2",
    ]


@pytest.mark.parametrize(
    "content", ["", "[]", '[{"global_step": 7}]', '[\n  {\n    "global_step": 7\n  }\n]\n']
)
def test_a_valid_file_laid_out_otherwise_is_taken_over(run, content: str) -> None:
    path = Path(run.args.logging_dir) / "trainer_logs.json"
    path.parent.mkdir()
    path.write_text(content)
    begin(run, 7)
    log(run, 8)
    assert steps_in(path) == ([7, 8] if "7" in content else [8])
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_no_log_is_kept_aside(run) -> None:
    path = Path(run.args.logging_dir) / "trainer_logs.json"
    path.parent.mkdir()
    path.write_text("my notes\n")
    with pytest.raises(ValueError, match="not a log file"):
        load_logs(path)
    begin(run, 0)
    assert json.loads(path.read_text()) == []
    assert path.with_name("trainer_logs.json.damaged").read_text() == "my notes\n"


def test_only_world_rank_zero_writes(run) -> None:
    run.state.is_world_process_zero = False
    begin(run, 0)
    assert not log(run, 1).exists()


def test_settings() -> None:
    with pytest.raises(ValueError, match="must be a file name"):
        JsonLogger("logs/trainer.json")
    with pytest.raises(FileNotFoundError):
        load_logs("/nowhere/trainer_logs.json")


def test_a_missing_directory_is_named(run) -> None:
    run.args.logging_dir = None
    with pytest.raises(ValueError, match="logging_dir=None"):
        begin(run, 0)


def test_without_a_directory_for_logs_the_file_is_in_that_of_the_run(run) -> None:
    run.args.output_dir, run.args.logging_dir = run.args.logging_dir, None
    begin(run, 0)
    assert (Path(run.args.output_dir) / "trainer_logs.json").is_file()


WRITER = """
import sys
from types import SimpleNamespace
from perf_metrics import JsonLogger
args = SimpleNamespace(logging_dir=sys.argv[1])
state = SimpleNamespace(global_step=int(sys.argv[2]), epoch=None, is_world_process_zero=True)
logger = JsonLogger()
logger.on_train_begin(args, state, None)
print("ready", flush=True)
while True:
    state.global_step += 1
    logger.on_log(args, state, None, logs={"loss": 1.0, "text": "x" * 5000})
"""


def test_a_killed_writer_leaves_a_file_to_go_on_from(run) -> None:
    path = Path(run.args.logging_dir) / "trainer_logs.json"
    last = 0
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, run.args.logging_dir, str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(0.1)
            writer.send_signal(signal.SIGKILL)
        steps = [entry["global_step"] for entry in load_logs(path)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) > last
        last = len(steps) - 2
    begin(run, last)
    assert steps_in(path) == list(range(1, last + 1))


LIMITED = """
import json, resource, signal, sys
from types import SimpleNamespace
from perf_metrics import JsonLogger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
args = SimpleNamespace(logging_dir=sys.argv[1])
state = SimpleNamespace(global_step=1, epoch=None, is_world_process_zero=True)
logger = JsonLogger()
logger.on_log(args, state, None, logs={"loss": 1.0})
path = sys.argv[1] + "/trainer_logs.json"
before = open(path).read()
for room in (1, 40):
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, resource.RLIM_INFINITY))
    try:
        logger.on_log(args, state, None, logs={"loss": 2.0})
    except OSError as error:
        print("refused" if "File too large" in str(error) and path in str(error) else error)
    print(open(path).read() == before)
"""


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["refused", "True"] * 2


def test_appending_does_not_rewrite_the_file(run) -> None:
    path = log(run, *range(1, 50))
    inode, size = path.stat().st_ino, path.stat().st_size
    log(run, 50)
    assert path.stat().st_ino == inode
    assert size < path.stat().st_size < size + 200
