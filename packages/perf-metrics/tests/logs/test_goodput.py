"""The account of a run's time holds what real processes that are killed have done."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perf_metrics import GoodputLogger, plot_goodput, read_goodput
from perf_metrics.commands.main import main
from perf_metrics.logs.goodput import GOODPUT_FOLDER, KINDS

WORKER = Path(__file__).parents[1] / "workers" / "episode.py"


@dataclass
class Episode:
    """What one start of a run did, as its own notes and this process saw it."""

    ranks: int
    started: float
    ended: float
    done: Sequence[Mapping[str, Any]]
    killed: bool
    spent: Counter[str] = field(default_factory=Counter)


def play(directory: Path, seed: int, episodes: int) -> list[Episode]:
    """A run of several starts, killed at some instant, with pauses and other numbers of ranks."""
    draw, found = random.Random(seed), []
    for number in range(episodes):
        truth, ranks = directory.parent / f"truth-{number}.jsonl", draw.choice([1, 2, 4])
        last = number == episodes - 1
        command = [sys.executable, str(WORKER), str(directory), str(truth), "12" if last else "1000"]
        command.append(str(draw.uniform(0, 0.3)))
        started = time.time()
        process = subprocess.Popen(command, env={**os.environ, "WORLD_SIZE": str(ranks)})
        if last:
            assert process.wait(timeout=60) == 0
        else:
            time.sleep(draw.uniform(0.8, 2.2))
            process.kill()
            process.wait()
        ended = time.time()
        lines = truth.read_text().splitlines() if truth.exists() else []
        if lines:  # otherwise it was killed before training began, which nobody could have noted
            found.append(Episode(ranks, started, ended, [json.loads(line) for line in lines], not last))
        time.sleep(draw.uniform(0, 0.5))
    return found


def judge(episodes: Sequence[Episode]) -> None:
    """Fill in what the time of each episode was for."""
    for number, own in enumerate(episodes):
        begins = [next(each["step"] for each in later.done) for later in episodes[number + 1 :]]
        kept = min(begins, default=10**9)
        for each in own.done:
            kind = each["kind"]
            if kind in ("steps", "data") and each["step"] > kept:
                kind = "lost"
            own.spent[kind] += each["to"] - each["from"]
        begin = own.done[0]["from"]
        own.spent["start"] += begin - own.started
        last = own.done[-1]["to"]
        own.spent["lost" if own.killed else "other"] += own.ended - last
        if number:
            own.spent["down"] += own.started - episodes[number - 1].ended


@pytest.mark.parametrize(
    "episodes", [pytest.param(4, id="4 episodes"), pytest.param(20, id="20 episodes", marks=pytest.mark.full)]
)
def test_the_account_is_what_happened(tmp_path: Path, episodes: int) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    truth = play(directory, 7, episodes)
    judge(truth)
    goodput = read_goodput(directory)
    assert len(goodput.sessions) == len(truth)
    for own, session in zip(truth, goodput.sessions, strict=True):
        assert session.ranks == own.ranks
        assert session.last_step == pytest.approx(max(each["step"] for each in own.done), abs=25)
        for kind in KINDS:
            # A sign of life comes each second: of a kill the account knows no better.
            assert session.seconds[kind] == pytest.approx(own.spent[kind], abs=1.0), (
                kind,
                session,
                own.spent,
            )
        assert sum(session.seconds.values()) - session.seconds["down"] == pytest.approx(
            session.ended - session.started, abs=1e-3
        )
    first, last = goodput.sessions[0].started, goodput.sessions[-1].ended
    assert sum(sum(each.seconds.values()) for each in goodput.sessions) == pytest.approx(
        last - first, abs=1e-2
    )
    assert last - first == pytest.approx(truth[-1].ended - truth[0].started, abs=1.0)
    wall = sum(each.ranks * sum(each.seconds.values()) for each in goodput.sessions)
    assert goodput.total == pytest.approx(wall)
    assert goodput.sessions[-1].outcome == "end"
    assert goodput.sessions[0].outcome == "no end"
    done = [each["to"] - each["from"] for own in truth for each in own.done if each["kind"] == "steps"]
    assert 0 < sum(each.seconds["steps"] for each in goodput.sessions) < sum(done)
    assert goodput.largest_loss is not None


# ---- Ledgers that are written by hand


Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the file of a session; times are seconds after the first start."""

    def session(
        started: float,
        begun: float,
        ended: float,
        step: int,
        last: int,
        seconds: dict[str, float],
        saves: Mapping[int, dict[str, float]] | None = None,
        event: str = "alive",
        ranks: int = 8,
    ) -> None:
        folder = tmp_path / GOODPUT_FOLDER
        folder.mkdir(exist_ok=True)
        lines: list[dict[str, object]] = [
            {"event": "begin", "time": 1e9 + begun, "started": 1e9 + started, "ranks": ranks, "step": step},
            *(
                {"event": "save", "time": 0, "step": saved, "seconds": spent}
                for saved, spent in (saves or {}).items()
            ),
            {"event": event, "time": 1e9 + ended, "step": last, "seconds": seconds},
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{len(list(folder.iterdir())):04}.jsonl").write_text(text)

    return session


def test_what_a_restart_does_again_is_lost(tmp_path: Path, write: Write) -> None:
    saves = {100: {"start": 5.0, "steps": 90.0, "data": 5.0, "saving": 2.0}}
    spent = {"start": 5.0, "steps": 180.0, "data": 15.0, "saving": 2.0}
    write(0, 20, 230, 0, 190, spent, saves)
    write(290, 300, 400, 100, 200, {"start": 10.0, "steps": 90.0}, event="end", ranks=4)
    one, two = read_goodput(tmp_path).sessions
    expected = {"steps": 90, "data": 5, "start": 25, "saving": 2, "lost": 90 + 10 + 8}
    assert one.seconds == {kind: expected.get(kind, 0) for kind in KINDS}
    assert two.seconds == {kind: {"start": 20, "steps": 90, "down": 60}.get(kind, 0) for kind in KINDS}
    goodput = read_goodput(tmp_path)
    assert goodput.device_seconds["steps"] == 8 * 90 + 4 * 90
    assert goodput.total == 8 * 230 + 4 * (60 + 110)
    assert goodput.ratio == pytest.approx(1080 / 2520)
    assert goodput.largest_loss == "lost"


def test_a_restart_from_further_back_undoes_earlier_sessions(tmp_path: Path, write: Write) -> None:
    write(0, 0, 100, 0, 100, {"steps": 100.0}, {40: {"steps": 40.0}, 80: {"steps": 80.0}})
    write(100, 100, 150, 80, 130, {"steps": 50.0}, {120: {"steps": 40.0}})
    write(150, 150, 160, 40, 50, {"steps": 10.0}, event="end")  # both later checkpoints were damaged
    steps = [each.seconds["steps"] for each in read_goodput(tmp_path).sessions]
    lost = [each.seconds["lost"] for each in read_goodput(tmp_path).sessions]
    assert (steps, lost) == ([40, 0, 10], [60, 50, 0])


def test_a_restart_where_the_last_one_ended_loses_nothing(tmp_path: Path, write: Write) -> None:
    write(0, 0, 100, 0, 100, {"steps": 99.0}, {100: {"steps": 99.0}}, event="end")
    write(100, 100, 200, 100, 200, {"steps": 100.0}, event="end")
    assert [each.seconds["lost"] for each in read_goodput(tmp_path).sessions] == [0, 0]
    assert read_goodput(tmp_path).ratio == pytest.approx(199 / 200)


def test_a_process_that_waited_for_its_turn_comes_behind_what_it_continues(
    tmp_path: Path, write: Write
) -> None:
    write(0, 100, 200, 50, 150, {"steps": 100.0}, event="end")  # started first, and trained second
    write(10, 20, 90, 0, 50, {"steps": 70.0}, {50: {"steps": 70.0}}, event="end")
    first, second = read_goodput(tmp_path).sessions
    assert (first.first_step, second.first_step) == (0, 50)
    assert [each.seconds["lost"] for each in (first, second)] == [0, 0]
    assert second.seconds["start"] == 10, "not while the other one trained"
    assert sum(sum(each.seconds.values()) for each in (first, second)) == 200 - 10


def test_steps_that_no_later_session_began_with_are_lost(tmp_path: Path, write: Write) -> None:
    write(0, 0, 100, 0, 100, {"steps": 100.0}, {50: {"steps": 50.0}, 100: {"steps": 100.0}})
    write(100, 100, 110, 50, 60, {"steps": 10.0})  # went back, and was given up
    write(110, 110, 115, 0, 5, {"steps": 5.0})  # began anew by mistake
    write(115, 115, 165, 100, 150, {"steps": 50.0}, event="end")  # continues with the first one
    sessions = read_goodput(tmp_path).sessions
    assert [each.seconds["steps"] for each in sessions] == [100, 0, 0, 50]
    assert [each.seconds["lost"] for each in sessions] == [0, 10, 5, 0]


@pytest.mark.parametrize("event", ["alive", "end"])
def test_a_restart_from_a_step_behind_the_last_sign_of_life(tmp_path: Path, write: Write, event: str) -> None:
    """One in memory, saved in the tenth of a second that had not been written yet."""
    write(0, 0, 5, 0, 5, {"steps": 4.0}, {4: {"steps": 3.0}}, event=event)
    write(10, 10, 20, 6, 12, {"steps": 8.0}, event="end")
    first, second = read_goodput(tmp_path).sessions
    # A session that has ended has had no step behind its last one: this checkpoint came from elsewhere.
    kept = 4 if event == "alive" else 0
    assert (first.seconds["steps"], second.seconds["steps"]) == (kept, 8)
    assert first.seconds["lost"] == {"alive": 1, "end": 4}[event]


def test_a_restart_from_a_checkpoint_of_elsewhere_is_credited_to_nobody(tmp_path: Path, write: Write) -> None:
    write(0, 0, 600, 0, 500, {"steps": 500.0}, {400: {"steps": 400.0}})  # killed
    write(700, 700, 710, 1000, 1010, {"steps": 10.0}, event="end")
    assert [each.seconds["steps"] for each in read_goodput(tmp_path).sessions] == [0, 10]


def test_the_newer_of_two_sessions_that_may_have_saved_a_step_is_continued(
    tmp_path: Path, write: Write
) -> None:
    write(0, 0, 200, 0, 200, {"steps": 200.0}, {50: {"steps": 50.0}, 200: {"steps": 200.0}})
    write(300, 300, 350, 50, 98, {"steps": 48.0}, {97: {"steps": 47.0}, 98: {"steps": 48.0}})
    write(400, 400, 420, 99, 119, {"steps": 20.0}, event="end")
    sessions = read_goodput(tmp_path).sessions
    assert [each.seconds["steps"] for each in sessions] == [50, 48, 20]


def test_a_clock_that_is_set_back_leaves_what_was_measured(tmp_path: Path, write: Write) -> None:
    write(0, 10, -50, 0, 100, {"steps": 100.0}, event="end")
    (session,) = read_goodput(tmp_path).sessions
    assert session.ended - session.started == 110 == sum(session.seconds.values())


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path, write: Write) -> None:
    write(0, 0, 100, 0, 100, {"steps": 100.0})
    (file,) = (tmp_path / GOODPUT_FOLDER).iterdir()
    with file.open("a") as out:
        out.write('ps": 3}}\n')
    assert read_goodput(tmp_path).sessions[0].last_step == 100


def test_what_is_no_account_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", str(tmp_path)]) == 2
    assert "has no account of its time, which perf_metrics.GoodputLogger writes" in capsys.readouterr().err
    (tmp_path / GOODPUT_FOLDER).mkdir()
    for text in ("", "[]\n", '{"event": "beg'):  # of a kill or a full disk before anything was known
        (tmp_path / GOODPUT_FOLDER / "0.jsonl").write_text(text)
        with pytest.raises(FileNotFoundError, match="has no session that began"):
            read_goodput(tmp_path)
    for text in ('{"event": "save"}\n', '{"event": "begin"}\n'):
        (tmp_path / GOODPUT_FOLDER / "0.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"0\.jsonl is not the account of a session: .*Remove it"):
            read_goodput(tmp_path)


def test_the_command_shows_shares_costs_and_the_largest_loss(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(0, 1800, 7200, 0, 100, {"steps": 5400.0})
    write(10800, 10800, 14400, 100, 200, {"steps": 3600.0}, event="end")
    (tmp_path / "trainer_logs.json").write_text(
        json.dumps([{"global_step": step, "loss": 1.0, "mfu": 0.4} for step in (100, 200)])
    )
    assert main(["goodput", str(tmp_path), "--price", "2.5", "--plot", str(tmp_path / "goodput.png")]) == 0
    out = capsys.readouterr().out
    for text in (
        "steps  62.5%         20.00  50.00  steps that are in the model",
        "all                  32.00  80.00",
        "MFU of the steps 40.0%; of all device time 25.0%.",
        "Largest loss: down, 25.0% (between two sessions). Let the scheduler start the job again at once",
    ):
        assert text in out, out
    assert (tmp_path / "goodput.png").stat().st_size > 10_000
    assert main(["goodput", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["effective_training_time_ratio"] == 0.625
    assert data["mfu_of_all_time"] == 0.25
    assert data["sessions"][1]["seconds"]["down"] == 3600
    with pytest.raises(SystemExit):
        main(["goodput", str(tmp_path), "--price", "-1"])
    assert "'-1' is not a price: give a number, 0 or more" in capsys.readouterr().err


def test_two_calls_of_train_in_one_process_are_two_sessions(tmp_path: Path, run: Any) -> None:
    run.args.output_dir = str(tmp_path)
    logger = GoodputLogger()
    for first in (0, 5):
        run.state.global_step = first
        run.fire("on_train_begin", logger)
        for _ in range(5):
            run.fire("on_step_begin", logger)
            run.state.global_step += 1
            run.fire("on_step_end", logger)
        run.fire("on_save", logger)
        run.fire("on_train_end", logger)
    one, two = read_goodput(tmp_path).sessions
    assert [one.first_step, one.last_step, two.first_step, two.last_step] == [0, 5, 5, 10]
    assert two.seconds["start"] < 1, "this process was started long before"
    run.state.is_world_process_zero = False
    run.fire("on_train_begin", logger)
    run.fire("on_train_end", logger)
    assert len(list((tmp_path / GOODPUT_FOLDER).iterdir())) == 2


def begin(logger: GoodputLogger, run: Any, steps: int = 3) -> None:
    run.fire("on_train_begin", logger)
    for _ in range(steps):
        run.fire("on_step_begin", logger)
        run.state.global_step += 1
        run.fire("on_step_end", logger)


def signs_of_life() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "goodput"]


@pytest.mark.parametrize("told", [True, False])
def test_an_exception_ends_a_session(tmp_path: Path, run: Any, told: bool) -> None:
    """Told of by our trainers; of others at the next session, or when the logger is gone."""
    run.args.output_dir = str(tmp_path)
    logger = GoodputLogger()
    begin(logger, run)
    if told:
        run.fire("on_exception", logger)
    begin(GoodputLogger(), run)
    first, second = read_goodput(tmp_path).sessions
    assert first.outcome == "no end"
    assert first.ended <= second.started + 0.01
    assert second.outcome == "running"
    del logger
    gc.collect()
    deadline = time.time() + 10
    while signs_of_life() and time.time() < deadline:
        time.sleep(0.05)
    assert not signs_of_life()


def test_a_save_does_not_end_a_session(tmp_path: Path, run: Any) -> None:
    run.args.output_dir = str(tmp_path)
    logger = GoodputLogger()
    begin(logger, run)
    run.fire("on_save", logger)
    assert read_goodput(tmp_path).sessions[0].outcome == "running"
    run.fire("on_train_end", logger)


def test_a_disk_that_is_full_for_a_while_leaves_training_alone(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing or a part of a line is written; what stays is made up for."""
    run.args.output_dir = str(tmp_path)
    logger, real, free = GoodputLogger(), os.pwrite, False

    def full(file: int, data: bytes, place: int) -> int:
        if not free:
            if len(data) > 40:
                return real(file, data[:40], place)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    begin(logger, run)
    run.fire("on_save", logger)
    assert caplog.text.count("No space left on device") == 1
    free = True
    run.fire("on_step_begin", logger)
    run.fire("on_train_end", logger)
    (session,) = read_goodput(tmp_path).sessions
    assert (session.outcome, session.last_step) == ("end", 3)
    (file,) = (tmp_path / GOODPUT_FOLDER).iterdir()
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["begin", "save", "end"]


def test_an_account_that_cannot_be_written_at_all_is_said_once(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run.args.output_dir = str(tmp_path)
    (tmp_path / GOODPUT_FOLDER).write_text("in the way")
    logger = GoodputLogger()
    begin(logger, run)
    run.fire("on_train_end", logger)
    assert caplog.text.count("the account of this session's time is not complete") == 1


def test_compilation_is_told_apart_if_the_compiler_comes_later(tmp_path: Path) -> None:
    code = """
import sys, time, types
from perf_metrics import GoodputLogger
args = types.SimpleNamespace(output_dir=sys.argv[1])
state = types.SimpleNamespace(global_step=0, is_world_process_zero=True)
logger = GoodputLogger()
logger.on_train_begin(args, state, None)
assert "torch._dynamo" not in sys.modules
logger.on_step_begin(args, state, None)
import torch
loaded = torch.compile(lambda x: x + 1, backend="eager")
loaded(torch.ones(1))
logger.on_step_end(args, state, None)
def slow(graph, inputs):
    time.sleep(0.5)
    return graph
torch.compile(lambda x: x * 2, backend=slow)(torch.ones(1))
logger.on_step_end(args, state, None)
logger.on_train_end(args, state, None)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert read_goodput(tmp_path).sessions[0].seconds["compilation"] > 0.5


def test_a_picture_of_one_short_session(tmp_path: Path, write: Write) -> None:
    write(0, 0, 0, 0, 0, {})
    assert plot_goodput(read_goodput(tmp_path), tmp_path / "goodput.svg", title="a$b_{$").is_file()
