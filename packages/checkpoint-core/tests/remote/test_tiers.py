"""Two tiers: what is committed on the disk gets to the store, and either one is enough to resume."""

import json
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from s3_proxy import Proxy

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    find_latest_checkpoint,
)
from checkpoint_core.cli import main
from checkpoint_core.directory import checkpoint_directories, find_leftovers
from checkpoint_core.manifest import MANIFEST_NAME, read_manifest, verify_checkpoint
from checkpoint_core.store_path import locate

WORKERS = Path(__file__).parent / "workers"
Worked = subprocess.CompletedProcess[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "fast" / "run"


@pytest.fixture
def start(training_job: Callable[..., object], run: Path, url: str) -> Callable[..., object]:
    """Makes jobs that save to the disk and to each kind of store."""
    return lambda **options: training_job(run, remote_dir=url, **options)


def steps(where: str | Path) -> list[int]:
    """Steps of the checkpoints that are whole, highest first."""
    found = [
        (step, path)
        for step, path in checkpoint_directories(locate(where))
        if (path / MANIFEST_NAME).is_file()
    ]
    return [step for step, path in found if verify_checkpoint(path, checksums=True).step == step]


class Values:
    """A state of some values that all say one number."""

    def __init__(self, count: int = 1000) -> None:
        self.values = torch.zeros(count)

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert isinstance(state["values"], torch.Tensor)
        self.values = state["values"]


STATE_FILES = ["state.json", "state.safetensors"]
DENIED = 403, "<Code>AccessDenied</Code>"


def refuse_writing(method: str, path: str, number: int) -> tuple[int, str] | None:
    """An answer of a gateway."""
    return DENIED if method == "PUT" else None


def manager(run: Path, url: str, state: object | None = None, **options: object) -> CheckpointManager:
    config = CheckpointConfig(run, remote_dir=url, **{"timeout_seconds": 20.0, **options})  # type: ignore[arg-type]
    return CheckpointManager(config, {"state": Values() if state is None else state})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_wiped_disk_resumes_from_the_store(
    start: Callable, run: Path, url: str, asynchronous: bool
) -> None:
    whole = start().train(6)
    first = start(async_save=asynchronous)
    first.train(3)
    assert first.save() == run / "checkpoint-3"
    first.manager.close()
    assert steps(run) == steps(url) == [3]
    local, remote = read_manifest(run / "checkpoint-3"), read_manifest(locate(url) / "checkpoint-3")
    assert {remote.plain_name(name): record for name, record in remote.files.items()} == local.files
    assert [each.key for each in remote.components] == [each.key for each in local.components]
    shutil.rmtree(run.parent)
    second = start(seed=1, async_save=asynchronous)
    loaded = second.manager.load_checkpoint()
    assert (str(loaded.path), loaded.step, loaded.missing) == (f"{url}/checkpoint-3", 3, ())
    assert second.train(3) == whole[3:]
    # It is the same run, which the store lets continue.
    second.save()
    second.manager.close()
    assert (steps(run), steps(url)) == ([6], [6, 3])


def test_the_newest_good_one_of_both(start: Callable, run: Path, url: str) -> None:
    job = start(save_total_limit=None, remote_save_total_limit=None)
    for _ in range(3):
        job.train(1)
        job.save()
        job.manager.wait_for_upload()
    job.manager.close()
    store = locate(url)

    def chosen() -> str:
        found = start(seed=1)
        loaded = found.manager.load_checkpoint()
        found.manager.close()
        newest = find_latest_checkpoint(run, remote_dir=url, verify_checksums=True)
        assert newest is not None
        assert (str(loaded.path), found.counter.value) == (str(newest), loaded.step)
        return str(newest)

    assert chosen() == str(run / "checkpoint-3")
    damaged = run / "checkpoint-3" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    assert chosen() == f"{store}/checkpoint-3"
    (store.store).delete([f"{store.key}/checkpoint-3/{MANIFEST_NAME}"])  # type: ignore[attr-defined]
    assert chosen() == str(run / "checkpoint-2")
    shutil.rmtree(run)
    assert chosen() == f"{store}/checkpoint-2"


def test_each_tier_keeps_its_own_number_and_the_best(run: Path, url: str) -> None:
    options = {"save_total_limit": 1, "remote_save_total_limit": 3, "best_metric": "eval_loss"}
    with manager(run, url, preserve_n_best=1, **options) as saving:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0, 6.0], start=1):
            saving.save(step, metrics={"eval_loss": loss})
            saving.wait_for_upload()
        assert [best.step for best in saving.best_checkpoints()] == [2]
    assert (steps(run), steps(url)) == ([6, 2], [6, 5, 4, 2])
    shutil.rmtree(run / "checkpoint-2")
    with manager(run, url, preserve_n_best=1, **options) as saving:
        saving.load()
        # Only the store has it, so it stays there, and is the best.
        saving.save(7, metrics={"eval_loss": 7.0})
        saving.wait_for_upload()
        (best,) = saving.best_checkpoints()
        assert str(best.path) == f"{url}/checkpoint-2"
        assert "checkpoint-2" in saving.best_summary()
    # The one that was resumed from stays, too, in each.
    assert (steps(run), steps(url)) == ([7, 6], [7, 6, 5, 4, 2])


@pytest.fixture
def gateway(weed, s3: str, use: Callable) -> Iterator[Proxy]:
    found = Proxy(weed.endpoint)
    use({**weed.environment(), "AWS_ENDPOINT_URL": found.address})
    yield found
    found.close()


class Held:
    """Lets no tensor file be uploaded until it is opened."""

    def __init__(self, gateway: Proxy) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        gateway.fault = self.answer

    def answer(self, method: str, path: str, number: int) -> None:
        if method == "PUT" and ".safetensors" in path:
            self.arrived.set()
            assert self.opened.wait(60)


def committed(gateway: Proxy) -> list[int]:
    """Steps in the order in which they were committed in the store."""
    puts = [
        each.path for each in gateway.requests if each.method == "PUT" and each.path.endswith(MANIFEST_NAME)
    ]
    return [int(path.split("/")[-2].removeprefix("checkpoint-")) for path in puts]


def test_a_slow_upload_holds_nothing_up_and_the_newest_is_next(gateway: Proxy, run: Path, s3: str) -> None:
    held = Held(gateway)
    with manager(run, s3) as saving:
        saving.save(1)
        assert held.arrived.wait(30)
        for step in range(2, 7):
            saving.save(step)
        # What is being uploaded stays, whatever the limit.
        assert steps(run) == [6, 5, 1]
        held.opened.set()
        saving.wait_for_upload()
        # 2, 3 and 4 had rotated away on the disk before their turn.
        assert steps(s3) == [6, 5]
    assert find_leftovers(locate(s3)) == []
    assert committed(gateway) == [1, 6, 5]


def test_the_best_follows_the_newest(gateway: Proxy, run: Path, s3: str) -> None:
    held = Held(gateway)
    options = {"save_total_limit": 3, "remote_save_total_limit": 1, "best_metric": "eval_loss"}
    with manager(run, s3, preserve_n_best=1, **options) as saving:
        for step, loss in enumerate([5.0, 1.0, 2.0, 3.0, 4.0, 5.0], start=1):
            saving.save(step, metrics={"eval_loss": loss})
            assert held.arrived.wait(30)
        held.opened.set()
    assert steps(s3) == [6, 2]
    assert committed(gateway) == [1, 6, 2]


def test_a_store_that_is_down_stops_nothing(
    gateway: Proxy, run: Path, s3: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_down = True
    gateway.fault = lambda method, path, number: DENIED if is_down else None
    with manager(run, s3) as saving:
        for step in (1, 2):
            saving.save(step)
            until = time.monotonic() + 30
            while f"checkpoint-{step} is committed, but {s3} does not have" not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.02)
        assert "remote_dir cannot be asked now" in caplog.text
        assert "the credentials do not permit it" in caplog.text
        assert steps(run) == [2, 1]
        with pytest.raises(CheckpointError, match=f"checkpoint-2 is committed, but {s3} does not have"):
            saving.wait_for_upload()
        is_down = False
        saving.save(3)
    assert (steps(run), steps(s3)) == ([3, 2], [3, 2])


def test_what_was_not_uploaded_is_told_at_the_end_and_brought_by_the_next_run(
    gateway: Proxy, run: Path, s3: str
) -> None:
    gateway.fault = refuse_writing
    saving = manager(run, s3)
    saving.save(1)
    with pytest.raises(CheckpointError, match=r"do not permit it.*tried again with the next checkpoint"):
        saving.close()
    saving.close()
    assert steps(s3) == []
    gateway.fault = lambda method, path, number: None
    with manager(run, s3) as resumed:
        assert resumed.load().step == 1  # type: ignore[union-attr]
    assert steps(s3) == [1]


def test_an_upload_that_does_not_end(gateway: Proxy, run: Path, s3: str, monkeypatch) -> None:
    monkeypatch.setattr("checkpoint_core.tiers.GRACE_SECONDS", 0.1)
    held = Held(gateway)
    saving = manager(run, s3)
    saving.save(1)
    assert held.arrived.wait(30)
    # Shorter than the requests of the store wait.
    saving._tier._limit_seconds = 1.0  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="the upload did not end within 1 s"):
        saving.close()
    held.opened.set()
    assert steps(run) == [1]


def test_a_store_that_is_down_is_not_taken_for_empty(gateway: Proxy, run: Path, s3: str) -> None:
    with manager(run, s3) as saving:
        saving.save(1)
    gateway.fault = lambda method, path, number: DENIED
    with manager(run, s3) as resumed, pytest.raises(CheckpointError, match="Leave remote_dir out to resume"):
        resumed.load()
    with CheckpointManager(CheckpointConfig(run), {"state": Values()}) as alone:
        assert alone.load().step == 1  # type: ignore[union-attr]


def test_a_step_of_ones_choice(run: Path, s3: str, caplog: pytest.LogCaptureFixture, use, weed) -> None:
    with manager(run, s3) as saving:
        for step in (1, 2):
            saving.save(step)
            saving.wait_for_upload()
    shutil.rmtree(run / "checkpoint-2")
    with manager(run, s3) as resumed:
        assert resumed.load(run / "checkpoint-1").step == 1  # type: ignore[union-attr]
        assert f"{s3} holds later checkpoints (checkpoint-2)" in caplog.text
        # It is brought to the store as the newest of this branch, of which 2 is not any more.
        resumed.save(2)
    assert (steps(run), steps(s3)) == ([2, 1], [2, 1])
    use({**weed.environment(), "AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    with manager(run, s3, timeout_seconds=2.0) as resumed:
        assert resumed.load(run / "checkpoint-1").step == 1  # type: ignore[union-attr]


def test_a_tier_that_cannot_replace_advises_what_a_tier_can_be(run: Path, tmp_path: Path) -> None:
    values = Values()
    config = CheckpointConfig(run, remote_dir=f"file://{tmp_path / 'slow'}")
    manager = CheckpointManager(config, {"values": values})
    manager.save_checkpoint(1)
    manager.wait_for_upload()
    values.values += 1
    manager.save_checkpoint(1)
    with pytest.raises(CheckpointError, match="or give an address in another store") as caught:
        manager.close()
    assert "directory, without file://" not in str(caught.value)


def test_a_second_run_is_refused(run: Path, url: str, tmp_path: Path) -> None:
    with manager(run, url) as first:
        first.save(5)
    other = tmp_path / "other"
    with manager(other, url) as second, pytest.raises(CheckpointError, match=r"another run.*remote_dir"):
        second.save(3)
    assert (steps(other), steps(url)) == ([], [5])


def test_two_runs_at_one_time(run: Path, url: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    first, second = manager(run, url), manager(other, url)
    second.save(1)
    second.wait_for_upload()
    first.save(2)
    first.wait_for_upload()
    # It was not there when the second one began: told by the next call, which saves to the disk all the same.
    second.save(3)
    with pytest.raises(CheckpointError, match=r"another run.*remote_dir"):
        second.wait_for_upload()
    with pytest.raises(CheckpointError, match=r"another run.*remote_dir"):
        second.save(4)
    assert steps(other) == [4, 3]
    with pytest.raises(CheckpointError, match=r"another run.*remote_dir"):
        second.close()
    first.close()
    # Each is whole, and of one run.
    assert steps(url) == [2, 1]


def test_a_store_that_cannot_commit(rclone, use: Callable, run: Path) -> None:
    use(rclone.environment())
    saving = manager(run, f"s3://tests/{uuid.uuid4().hex[:8]}/run")
    saving.save(1)
    with pytest.raises(CheckpointError, match="cannot commit a checkpoint"):
        saving.close()
    assert steps(run) == [1]


def test_nothing_damaged_is_uploaded(gateway: Proxy, run: Path, s3: str) -> None:
    saving = manager(run, s3, Values(6_000_000))
    gateway.fault = refuse_writing
    saving.save(1)
    with pytest.raises(CheckpointError):
        saving.wait_for_upload()
    file = run / "checkpoint-1" / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    gateway.fault = lambda method, path, number: None
    with pytest.raises(CheckpointError, match=r"state\.safetensors is damaged"):
        saving.wait_for_upload()
    # It does not keep the next one back.
    with pytest.raises(CheckpointError, match=r"state\.safetensors is damaged"):
        saving.save(2)
    saving.close()
    assert steps(s3) == [2]
    assert find_leftovers(locate(s3)) == []
    assert sorted(path.name for path in locate(s3).rglob("*")) == [MANIFEST_NAME, *STATE_FILES]


def test_a_checkpoint_without_one_of_its_files_stays_local(
    run: Path, s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(CheckpointConfig(run), {"state": Values(), "more": Values()}) as saving:
        saving.save(1)
    (run / "checkpoint-1" / "more.json").unlink()
    with manager(run, s3) as saving:
        assert saving.load().step == 1  # type: ignore[union-attr]
        saving.save(2)
    assert steps(s3) == [2]
    assert "checkpoint-1 is not uploaded: more.json was deleted from it" in caplog.text
    assert "is committed, but" not in caplog.text


def test_a_step_that_is_saved_again(run: Path, s3: str) -> None:
    state = Values()
    with manager(run, s3, state) as saving:
        for value in (1.0, 2.0):
            state.values.fill_(value)
            saving.save(1)
            saving.wait_for_upload()
    shutil.rmtree(run)
    with manager(run, s3, state) as resumed:
        resumed.load()
        assert float(state.values.max()) == float(state.values.min()) == 2.0
    assert find_leftovers(locate(s3)) == []
    assert sorted(path.name for path in locate(s3).rglob("*")) == [MANIFEST_NAME, *STATE_FILES]


def test_the_store_rotates_also_where_a_pass_under_way_has_brought_the_save(run: Path, s3: str) -> None:
    with manager(run, s3, remote_save_total_limit=5) as saving:
        for step in range(1, 6):
            saving.save(step)
            saving.wait_for_upload()
    with manager(run, s3, remote_save_total_limit=2) as resumed:
        resumed.load()
        tier = resumed._tier
        request = tier.request

        def late(step: int, *, saved: bool, **more: object) -> None:
            """That of the resume sees what the save has just published."""
            request(step, saved=False, **more)
            tier.wait(20.0)
            request(step, saved=saved, **more)

        tier.request = late
        resumed.save(5)
    assert steps(s3) == [5, 4, 3]  # that of the resume, and two


def test_what_a_killed_upload_left_is_cleaned(run: Path, s3: str, run_worker: Callable, weed) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(WORKERS)!r})
os.environ.update({weed.environment()!r})
from checkpoint_core import tiers
from tier_job import manager
tiers.TierUpload._commit = lambda *_: os._exit(0)
saving = manager({str(run)!r}, {s3!r})
saving.save(1)
saving.wait_for_upload()
"""
    path = run.parent.parent / "killed.py"
    path.write_text(script)
    run_worker(path)
    assert (steps(run), steps(s3)) == ([1], [])
    assert len(find_leftovers(locate(s3))) == 1
    with manager(run, s3) as resumed:
        resumed.load()
    assert steps(s3) == [1]
    assert sorted(path.name for path in locate(s3).rglob("*")) == [MANIFEST_NAME, *STATE_FILES]


SETTINGS = [
    ({"remote_dir": "runs/a"}, "remote_dir='runs/a' is a directory"),
    ({"remote_dir": Path("/runs/a")}, "remote_dir='/runs/a' is a directory"),
    ({"remote_dir": "ftp://host/run"}, "addresses that begin with ftp:// are not supported"),
    ({"remote_dir": "s3://bucket"}, "is a whole bucket"),
    ({"remote_dir": "file:///tmp/run"}, "one holds the other"),
    ({"remote_dir": "file:///tmp/run/remote"}, "one holds the other"),
    ({"remote_dir": "s3://b/run", "output_dir": "s3://b/run"}, "must be a directory"),
    ({"remote_dir": "s3://b/run", "remote_save_total_limit": 0}, "remote_save_total_limit=0 must be"),
    ({"remote_dir": "s3://b/run", "save_total_limit": 0}, "save_total_limit=0 must be"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings_that_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointConfig(**{"output_dir": "/tmp/run", **settings})


def test_without_obstore(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_env.object_store.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="needs obstore"):
        manager(run, f"s3://without-{uuid.uuid4().hex[:8]}/run")


def test_the_commands(run: Path, s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with manager(run, s3, remote_save_total_limit=None, save_total_limit=None) as saving:
        for step in (1, 2, 3):
            saving.save(step)
            saving.wait_for_upload()
    for command in (["ls", s3], ["verify", s3], ["show", f"{s3}/checkpoint-3"]):
        assert main(command) == 0, command
    assert main(["diff", f"{s3}/checkpoint-3", str(run / "checkpoint-3")]) == 0
    assert main(["prune", s3, "--keep", "1", "--yes"]) == 0
    capsys.readouterr()
    assert (steps(run), steps(s3)) == ([3, 2, 1], [3])


def test_a_path_of_ones_own_stays_on_the_disk(run: Path, s3: str, tmp_path: Path) -> None:
    with manager(run, s3) as saving:
        saving.save(1, path=tmp_path / "apart")
    assert steps(s3) == []
    assert not locate(s3).exists()


def test_a_forked_child_ends(gateway: Proxy, run: Path, s3: str) -> None:
    held = Held(gateway)
    saving = manager(run, s3)
    saving.save(1)
    assert held.arrived.wait(30)
    child = os.fork()
    if child == 0:
        saving._tier.close()  # type: ignore[union-attr]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    held.opened.set()
    saving.close()
    assert steps(s3) == [1]


ENDINGS = {"exit": "", "error": "raise SystemExit(0)", "close": "saving.close()"}


@pytest.mark.parametrize(
    "ending", ["exit", *(pytest.param(each, marks=pytest.mark.full) for each in ("error", "close"))]
)
def test_the_end_of_a_process_finishes_uploads(
    run_worker: Callable[..., Worked], gateway: Proxy, weed, run: Path, s3: str, tmp_path: Path, ending: str
) -> None:
    gateway.delay_s = 0.05
    script = f"""
import os, sys
sys.path.insert(0, {str(WORKERS)!r})
os.environ.update({ {**weed.environment(), "AWS_ENDPOINT_URL": gateway.address}!r})
from tier_job import manager
saving = manager({str(run)!r}, {s3!r}, count=6_000_000)
saving.save(1)
{ENDINGS[ending]}
"""
    path = tmp_path / "job.py"
    path.write_text(script)
    run_worker(path)
    assert steps(s3) == [1]


def test_a_process_that_was_told_to_end_does_not_wait(
    run_worker: Callable[..., Worked], gateway: Proxy, weed, run: Path, s3: str, tmp_path: Path
) -> None:
    """The store answers no more; without `give_up_upload` the process would wait for half a minute."""
    Held(gateway)
    path, waited = tmp_path / "job.py", tmp_path / "waited"
    path.write_text(f"""
import atexit, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(WORKERS)!r})
os.environ.update({ {**weed.environment(), "AWS_ENDPOINT_URL": gateway.address}!r})
from tier_job import manager
# Called after all that was registered later.
atexit.register(lambda: Path({str(waited)!r}).write_text(str(time.monotonic() - began)))
saving = manager({str(run)!r}, {s3!r}, count=6_000_000)
saving.save(1)
saving.give_up_upload()
began = time.monotonic()
""")
    run_worker(path)
    assert float(waited.read_text()) < 20
    assert (steps(run), steps(s3)) == ([1], [])


@pytest.mark.parametrize("moment", ["closing", "training"])
def test_ctrl_c_gives_an_upload_up(
    run_worker: Callable[..., Worked], gateway: Proxy, weed, run: Path, s3: str, tmp_path: Path, moment: str
) -> None:
    """Twice, where the first one only ends the training."""
    held, pressed = Held(gateway), tmp_path / "pressed"
    script = f"""
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(WORKERS)!r})
os.environ.update({ {**weed.environment(), "AWS_ENDPOINT_URL": gateway.address}!r})
from tier_job import manager

def press():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def press_all(saving):
    if {moment == "training"!r}:
        press()
    while not saving._tier._closed:
        time.sleep(0.01)
    time.sleep(0.2)
    press()
    time.sleep(0.5)
    Path({str(pressed)!r}).touch()

try:
    with manager({str(run)!r}, {s3!r}, count=6_000_000) as saving:
        saving.save(1)
        threading.Thread(target=press_all, args=(saving,)).start()
        if {moment == "training"!r}:
            time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    path = tmp_path / "job.py"
    path.write_text(script)

    def open_once_pressed() -> None:
        while not pressed.exists():
            time.sleep(0.02)
        held.opened.set()

    threading.Thread(target=open_once_pressed, daemon=True).start()
    assert "interrupted" in run_worker(path).stdout
    assert (steps(run), steps(s3)) == ([1], [])
    gateway.fault = lambda method, path, number: None
    with manager(run, s3) as resumed:
        resumed.load()
    assert steps(s3) == [1]


@pytest.mark.full
def test_memory_stays_bounded(
    run_worker: Callable[..., Worked], weed, run: Path, s3: str, tmp_path: Path
) -> None:
    script = f"""
import os, sys, threading, time, resource
sys.path.insert(0, {str(WORKERS)!r})
os.environ.update({weed.environment()!r})
from tier_job import manager
saving = manager({str(run)!r}, {s3!r}, count=75_000_000)
warm = manager({str(run)!r} + "-warm", {s3!r} + "-warm", count=1000)
warm.save(1)
warm.close()
saving._tier.request = lambda *a, **k: None
saving.save(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
del saving._tier.request
saving._tier.request(1, saved=True)
saving.close()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    path = tmp_path / "job.py"
    path.write_text(script)
    used = int(run_worker(path).stdout)
    print(f"uploading 300 MB took {used} MB more")
    assert used < 150
    assert steps(s3) == [1]


def test_two_ranks(run_worker: Callable[..., Worked], gateway: Proxy, weed, s3: str, tmp_path: Path) -> None:
    environment = {**weed.environment(), "AWS_ENDPOINT_URL": gateway.address}
    run_worker(WORKERS / "tier_ranks.py", tmp_path, json.dumps(environment), s3, 2)
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    first = seen[0]
    assert first["wiped"] == [f"{s3}/checkpoint-2", 2.0]
    assert first["local"] == [str(tmp_path / "fast" / "run" / "checkpoint-3"), 3.0]
    assert "was written by another run" in first["refused"]
    assert first["refused"].startswith("saving a checkpoint: rank 0")
    # Why depends on whether the last try has ended within the time limit.
    assert "does not have all that it should keep" in first["down"]
    assert first["saved while down"] == 4.0


@pytest.mark.full
def test_four_ranks(run_worker: Callable[..., Worked], weed, s3: str, tmp_path: Path) -> None:
    run_worker(WORKERS / "tier_ranks.py", tmp_path, json.dumps(weed.environment()), s3, 4)
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert all(each == seen[0] for each in seen)
    assert seen[0]["wiped"] == [f"{s3}/checkpoint-2", 2.0]
