"""A restart finds what was compiled: in fresh processes, each with an empty cache of torch's."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from dist_env import StaticDistributedEnvironment, forget_warnings
from trainer_core import Ranks, TrainingArguments
from trainer_core.errors import ConfigurationError
from trainer_core.model import compile_cache
from trainer_core.model.compile_cache import CompileCache, check_cache_dir

Arguments = Callable[..., TrainingArguments]
HEADER = 40


@pytest.fixture(autouse=True, scope="module")
def _key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A key of the tests, and not that of who runs them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(compile_cache.KEY_VARIABLE, str(tmp_path_factory.mktemp("keys") / "new" / "key"))
        yield


PROGRAM = """
import json, os, sys, torch
from dataclasses import replace
from torch import nn
from trainer_core import Trainer, TrainingArguments

class Rows:
    batch_size = 2
    def __len__(self): return 2
    def __iter__(self):
        for seed in (0, 1):
            ids = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(seed))
            yield {"input_ids": ids, "labels": ids}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)
    def forward(self, input_ids): return self.head(torch.tanh(self.embed(input_ids)))

class Seen:
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2:
            kept = os.path.exists(args.torch_compile_cache_dir + "/rank-00000.zip")
            print(json.dumps({"kept_after_step_1": kept}))

cache, output = sys.argv[1:]
args = TrainingArguments(
    output_dir=output, seed=7, per_device_train_batch_size=2, logging_steps=1, max_steps=2,
    save_strategy="no", torch_compile=True, torch_compile_cache_dir=cache, use_cpu=True,
)
trainer = Trainer(args, model_init=Model, train_dataset=Rows(), callbacks=[Seen()])
trainer.train()
plain = replace(args, torch_compile=False, torch_compile_cache_dir=None, output_dir=output + "-eager")
eager = Trainer(plain, model_init=Model, train_dataset=Rows(), callbacks=[])
eager.train()
# Private to torch: if it goes, this program fails, and another way to see a hit must be found.
from torch._dynamo.utils import counters
print(json.dumps({
    "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "eager": [entry["loss"] for entry in eager.state.log_history if "loss" in entry],
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "variable": os.environ["TORCHINDUCTOR_CACHE_DIR"],
}))
"""


def start(cache: Path, place: Path) -> tuple[dict[str, object], str]:
    """Run the program where torch has compiled nothing yet; what it told, and what it warned of."""
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache), str(place / "run")],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(place / "torch"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = {}
    for line in done.stdout.splitlines():
        with suppress(ValueError):
            told |= json.loads(line)
    assert told["variable"] == str(place / "torch"), "put back after the run"
    assert not list((place / "torch").iterdir()), "the folder of the process goes with it"
    return told, done.stderr


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The directory after a first start, and what that told."""
    place = tmp_path_factory.mktemp("cache")
    told, _ = start(place / "compiled", place / "first")
    return place / "compiled", told


def test_a_restart_finds_what_was_compiled(first: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    cache, before = first
    assert (before["hits"], before["misses"]) == (0, 2)
    assert before["loss"] == pytest.approx(before["eager"], rel=1e-5), "inductor computes what eager does"
    assert before["kept_after_step_1"], "a run that is killed later has kept it"
    assert [path.name for path in cache.iterdir()] == ["rank-00000.zip"]
    written = (cache / "rank-00000.zip").stat()
    assert (cache.stat().st_mode & 0o777, written.st_mode & 0o777) == (0o700, 0o600)
    told, warned = start(cache, tmp_path / "second")
    assert (told["hits"], told["misses"]) == (2, 0)
    assert told["loss"] == before["loss"]
    after = (cache / "rank-00000.zip").stat()
    assert (after.st_ino, after.st_mtime_ns) == (written.st_ino, written.st_mtime_ns), (
        "nothing new, not written"
    )
    assert "torch_compile_cache_dir" not in warned


@pytest.mark.full
def test_a_run_whose_file_is_damaged_compiles_and_writes_it_anew(
    first: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    whole = (first[0] / "rank-00000.zip").read_bytes()
    assert zipfile.is_zipfile(first[0] / "rank-00000.zip")
    path = keep(tmp_path / "compiled", whole[: len(whole) // 2])
    told, warned = start(path.parent, tmp_path / "second")
    assert told["loss"] == first[1]["loss"]
    assert told["misses"] == 2
    assert str(path) in warned
    assert "is damaged" in warned
    with zipfile.ZipFile(path) as packed:
        assert packed.testzip() is None


def keep(cache: Path, content: bytes, name: str = "rank-00000.zip") -> Path:
    """Put a file into a cache directory."""
    cache.mkdir(mode=0o700, exist_ok=True)
    (cache / name).write_bytes(content)
    (cache / name).chmod(0o600)
    return cache / name


def env(rank: int = 0, local_rank: int = 0) -> Ranks:
    return Ranks(
        StaticDistributedEnvironment(rank=rank, world_size=16, local_rank=local_rank, local_world_size=8)
    )


def authenticate(path: Path) -> None:
    """Make a file that a test has changed one that this user has written."""
    key, content = compile_cache._read_key(compile_cache._key_path()), path.read_bytes()[HEADER:]
    code = compile_cache._authenticate(io.BytesIO(content), key)
    path.write_bytes(compile_cache._key_id(key) + code + content)


@pytest.fixture
def cached(tmp_path: Path, arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arguments]:
    """Arguments with a cache directory; torch's own is in the test's folder, as this process is not fresh."""
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "torch"))
    cache = str(tmp_path / "compiled")
    return lambda **settings: arguments(
        **{"torch_compile": True, "torch_compile_cache_dir": cache, "use_cpu": True} | settings
    )


def compiles(cache: CompileCache, names: dict[str, bytes]) -> set[str]:
    """A run that compiles: what it found, before it left these files in torch's cache."""
    with cache:
        local = Path(os.environ[compile_cache.VARIABLE])
        found = {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}
        torch.compile(torch.sin, backend="eager")(torch.ones(1))  # torch tells the cache of it
        for name, content in names.items():
            (local / name).parent.mkdir(exist_ok=True)
            (local / name).write_bytes(content)
    return found


@pytest.mark.usefixtures("fresh_compiler")
def test_ranks_keep_a_file_each_and_a_new_one_reads_that_of_its_device_or_of_rank_0(
    cached: Arguments,
) -> None:
    args = cached()
    assert (
        compiles(CompileCache(args, env()), {"a/zero.so": b"0", "locks/a.lock": b"", "a/.1.tmp": b"half"})
        == set()
    )
    torch._dynamo.reset()
    assert compiles(CompileCache(args, env(1, 1)), {"a/one.so": b"1"}) == {"a/zero.so"}
    torch._dynamo.reset()
    assert compiles(CompileCache(args, env(9, 1)), {}) == {"a/zero.so", "a/one.so"}
    torch._dynamo.reset()
    assert compiles(CompileCache(args, env(8, 0)), {}) == {"a/zero.so"}
    names = sorted(path.name for path in Path(str(args.torch_compile_cache_dir)).iterdir())
    assert names == ["rank-00000.zip", "rank-00001.zip"]


@pytest.mark.usefixtures("fresh_compiler")
def test_the_oldest_entries_are_left_out_of_a_file_that_grows_too_large(
    cached: Arguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 250)
    args = cached()
    compiles(CompileCache(args, env()), {"a/old.so": bytes(100)})
    stored = Path(str(args.torch_compile_cache_dir)) / "rank-00000.zip"
    with zipfile.ZipFile(stored, "a") as packed:  # as if it were of last year
        packed.infolist()[0].date_time = (2025, 1, 1, 0, 0, 0)
        packed.writestr("a/older.txt", "")
    authenticate(stored)
    torch._dynamo.reset()
    assert "a/old.so" in compiles(
        CompileCache(args, env()), {"a/new.so": bytes(100), "a/newer.so": bytes(100)}
    )
    with zipfile.ZipFile(stored) as packed:
        assert {"a/new.so", "a/newer.so"} <= set(packed.namelist())
        assert "a/old.so" not in packed.namelist()
    assert "oldest entries are left out" in caplog.text


def damaged_files(whole: bytes) -> dict[str, bytes]:
    at = whole.index(b"0123456789")
    return {
        "empty": b"",
        "cut": whole[:-30],
        "not a zip": b"\x80\x04text",
        "a bit": whole[:at] + b"9" + whole[at + 1 :],
        "a bit of the facts": whole.replace(b'"format": 2', b'"format": ['),
    }


@pytest.mark.usefixtures("fresh_compiler")
def test_damaged_files_are_named_and_passed_over(cached: Arguments, caplog: pytest.LogCaptureFixture) -> None:
    args = cached()
    compiles(CompileCache(args, env()), {"a/one.so": b"0123456789"})
    path = Path(str(args.torch_compile_cache_dir)) / "rank-00000.zip"
    for what, content in damaged_files(path.read_bytes()).items():
        keep(path.parent, content)
        caplog.clear()
        forget_warnings()  # each is given once a process
        with CompileCache(args, env()):
            local = Path(os.environ[compile_cache.VARIABLE])
            assert not list(local.iterdir()), what
        assert f"{path} is damaged" in caplog.text, what


def damaged_when_written(whole: bytes) -> dict[str, tuple[bytes, str]]:
    """Files that this user's key vouches for, and what is said of each."""
    at, entry = whole.index(b"0123456789"), whole.index(b"PK\x01\x02")
    told = whole.index(b'{"format"')

    def put(position: int, *numbers: bytes) -> bytes:
        content = b"".join(numbers)
        return whole[:position] + content + whole[position + len(content) :]

    return {
        "not a zip": (whole[:HEADER] + b"\x80\x04text", "File is not a zip file"),
        "cut": (whole[:-300], "File is not a zip file"),
        "a bit": (put(at, b"9"), "damaged at a/one.so"),
        "facts that are not JSON": (put(told, b"["), "Expecting ',' delimiter"),
        "facts that are not a dict": (put(told, b" " * (len(whole) - told - 1), b"1"), "has no attribute"),
        "another compression": (put(entry + 10, b"\x63\x00"), "compression method is not supported"),
        "an entry beyond the end": (
            put(entry + 20, (1 << 20).to_bytes(4, "little") * 2),
            # By the release of Python: overlaps are looked for since 3.11.8, and 3.13.0 reads to the end.
            "EOFError|Overlapped entries|at a/one.so",
        ),
    }


@pytest.mark.usefixtures("fresh_compiler")
def test_what_was_damaged_before_it_was_authenticated_is_passed_over(
    cached: Arguments, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a disk while it was written, from which the code that vouches for it is read."""
    args = cached()
    compiles(CompileCache(args, env()), {"a/one.so": b"0123456789"})
    path = Path(str(args.torch_compile_cache_dir)) / "rank-00000.zip"
    for what, (content, told) in damaged_when_written(path.read_bytes()).items():
        keep(path.parent, content)
        authenticate(path)
        caplog.clear()
        forget_warnings()  # each is given once a process
        with CompileCache(args, env()):
            local = Path(os.environ[compile_cache.VARIABLE])
            assert not list(local.iterdir()), what
        assert re.search(f"{path} is damaged .*({told})|{path} is {told}", caplog.text), (what, caplog.text)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_name_outside_the_folder_is_damage(cached: Arguments, caplog: pytest.LogCaptureFixture) -> None:
    args = cached()
    compiles(CompileCache(args, env()), {"a/one.so": b"1"})
    path = Path(str(args.torch_compile_cache_dir)) / "rank-00000.zip"
    with zipfile.ZipFile(path, "a") as packed:
        packed.writestr("../outside.py", "")
    authenticate(path)
    with CompileCache(args, env()):
        local = Path(os.environ[compile_cache.VARIABLE])
        assert not list(local.iterdir())
        assert not (local.parent / "outside.py").exists()
    assert "is damaged" in caplog.text


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["torch", "python", "libc", "processor", "accelerator"])
def test_what_was_compiled_elsewhere_is_not_used(
    name: str, cached: Arguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args, facts = cached(), compile_cache._facts(torch.device("cpu"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(compile_cache, "_facts", lambda device: {**facts, name: "another"})
        compiles(CompileCache(args, env()), {"a/one.so": b"1"})
    torch._dynamo.reset()
    assert compiles(CompileCache(args, env()), {"a/two.so": b"2"}) == set()
    assert f"was made with {name} another, and this is {facts[name]}" in caplog.text
    torch._dynamo.reset()
    assert compiles(CompileCache(args, env()), {}) == {"a/two.so"}, "written anew"


def test_others_must_not_be_able_to_write(cached: Arguments, tmp_path: Path) -> None:
    args, cache = cached(), tmp_path / "compiled"
    check_cache_dir(args, env())  # which does not exist yet
    path = keep(cache, b"")
    check_cache_dir(args, env())
    for target, mode in ((cache, 0o777), (cache, 0o770), (path, 0o620), (path, 0o602)):
        before = target.stat().st_mode
        target.chmod(mode)
        with pytest.raises(
            ConfigurationError, match=rf"{target}.*may be written by others \(mode {mode:o}\)"
        ):
            check_cache_dir(args, env())
        with pytest.raises(ConfigurationError, match="chmod go-w"), CompileCache(args, env()):
            pass
        target.chmod(before)
    check_cache_dir(args, env())


def test_another_user_must_not_own_it(cached: Arguments, tmp_path: Path) -> None:
    if os.geteuid() != 0:  # /usr belongs to root everywhere
        with pytest.raises(ConfigurationError, match="belongs to user 0"):
            check_cache_dir(cached(torch_compile_cache_dir="/usr"), env())
        return
    path = keep(tmp_path / "compiled", b"")
    for target in (path, path.parent):
        os.chown(target, 12345, -1)
        with pytest.raises(
            ConfigurationError, match=f"{target}.*belongs to user 12345, and user 0 would execute"
        ):
            check_cache_dir(cached(), env())
        os.chown(target, 0, -1)


def test_a_link_is_not_followed(cached: Arguments, tmp_path: Path) -> None:
    path = keep(tmp_path / "elsewhere", b"")
    keep(tmp_path / "compiled", b"", "rank-00007.zip")
    (tmp_path / "compiled" / "rank-00000.zip").symlink_to(path)
    with pytest.raises(ConfigurationError, match="is neither a file nor a directory"):
        check_cache_dir(cached(), env())


def test_a_checkpoint_holds_no_code(cached: Arguments, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "manifest.json").write_text("{}")
    for place in ("checkpoint-3", "checkpoint-3/compiled"):
        with pytest.raises(ConfigurationError, match=r"lies in the checkpoint .*checkpoint-3"):
            check_cache_dir(cached(torch_compile_cache_dir=str(tmp_path / place)), env())


def test_a_directory_that_cannot_be_written_is_a_warning(
    cached: Arguments, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    args = cached(torch_compile_cache_dir=str(tmp_path / "file" / "compiled"))
    compiles(CompileCache(args, env()), {"a/one.so": b"1"})
    assert "could not be written" in caplog.text


def test_folders_of_killed_processes_are_removed(cached: Arguments, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = f"torch_compile-{os.geteuid()}-{compile_cache._process_space()}"
    left = tmp_path / "torch" / f"{here}-{ended.pid}-abc"
    own = tmp_path / "torch" / f"{here}-{os.getpid()}-abc"
    # On storage that hosts share, a number says nothing about a process of another one.
    elsewhere = tmp_path / "torch" / f"torch_compile-{os.geteuid()}-00000000-{ended.pid}-abc"
    for folder in (left, own, elsewhere):
        folder.mkdir(parents=True)
    with CompileCache(cached(), env()):
        assert own.exists()
        assert elsewhere.exists()
        assert not left.exists()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"torch_compile": False}, "has no effect while torch_compile is off"),
        ({"torch_compile_backend": "aot_eager"}, "which keeps nothing"),
        ({"torch_compile_cache_dir": "s3://bucket/compiled"}, "is an address"),
        ({"torch_compile_cache_dir": ""}, "is empty"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], rule: str, cached: Arguments) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        cached(**settings)


@pytest.mark.usefixtures("fresh_compiler")
def test_what_came_from_elsewhere_is_not_executed(
    cached: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that was unpacked is this user's by owner and mode; a config file beside it may name it."""
    args = cached()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(compile_cache.KEY_VARIABLE, str(tmp_path / "key of somebody else"))
        compiles(CompileCache(args, env()), {"a/one.so": b"1"})
    torch._dynamo.reset()
    path = Path(str(args.torch_compile_cache_dir)) / "rank-00000.zip"
    assert compiles(CompileCache(args, env()), {"a/two.so": b"2"}) == set()
    assert f"{path} was written with another key than {compile_cache._key_path()}" in caplog.text
    torch._dynamo.reset()
    assert compiles(CompileCache(args, env()), {}) == {"a/two.so"}, "written anew"
    assert compile_cache._key_path().stat().st_mode & 0o777 == 0o600


def test_files_of_an_earlier_version_are_compiled_anew(
    cached: Arguments, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("a/one.so", "1")
        file.comment = json.dumps({**compile_cache._facts(torch.device("cpu")), "format": 1}).encode()
    keep(tmp_path / "compiled", packed.getvalue())
    assert compiles(CompileCache(cached(), env()), {}) == set()
    assert "was written with another key" in caplog.text


def test_a_user_without_a_home_directory_is_a_warning(
    cached: Arguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (compile_cache.KEY_VARIABLE, "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    # What the system says of the user; the rest is as in such a container.
    monkeypatch.setattr("os.getuid", lambda: 54321)
    before = os.environ[compile_cache.VARIABLE]
    with CompileCache(cached(), env()):
        assert os.environ[compile_cache.VARIABLE] == before
    assert "its key has no place (this user has no home directory; name a file of the key in" in caplog.text


def test_a_directory_that_cannot_be_looked_at_is_told_to_all_ranks(cached: Arguments, tmp_path: Path) -> None:
    """An error of one rank before they meet would leave the others waiting."""
    # Longer than a file system allows: an error of the system's that also root gets.
    args = cached(torch_compile_cache_dir=str(tmp_path / ("x" * 300)))
    with pytest.raises(ConfigurationError, match=r"cannot be looked at .*File name too long"):
        check_cache_dir(args, env())


def test_a_loop_of_links_is_a_warning(
    cached: Arguments, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with CompileCache(cached(torch_compile_cache_dir=str(tmp_path / "loop")), env()):
        pass
    assert "could not be made" in caplog.text


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_may_read_is_not_used(
    cached: Arguments,
    tmp_path: Path,
    mode: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 64)
    key.chmod(mode)
    monkeypatch.setenv(compile_cache.KEY_VARIABLE, str(key))
    before = os.environ[compile_cache.VARIABLE]
    with CompileCache(cached(), env()):
        assert os.environ[compile_cache.VARIABLE] == before
    assert f"others have access to it (mode {mode:o})" in caplog.text
    assert f"chmod 600 {key}" in caplog.text
    key.chmod(0o600)
    assert compile_cache._read_key(key) == b"k" * 64


def test_a_key_is_made_where_files_have_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("os.link", refuse)
    path = tmp_path / "keys" / "key"
    key = compile_cache._read_key(path)
    assert len(key) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert compile_cache._read_key(path) == key
    assert [each.name for each in path.parent.iterdir()] == ["key"]
    with pytest.raises(FileExistsError):
        compile_cache._make_key(path)
    assert path.read_bytes() == key


def test_a_key_that_another_rank_is_writing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    monkeypatch.setattr("time.sleep", lambda _: path.write_text("k" * 64))
    assert compile_cache._read_key(path) == b"k" * 64


def test_hosts_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """As those in one folder that they share: each would take the other's processes for dead."""
    spaces = []
    for host, boot in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / host / "sys/kernel/random").mkdir(parents=True)
        (tmp_path / host / "sys/kernel/random/boot_id").write_text(boot)
        (tmp_path / host / "self/ns").mkdir(parents=True)
        (tmp_path / host / "self/ns/pid").symlink_to("pid:[4026531836]")
        spaces.append(compile_cache._process_space(tmp_path / host))
    assert spaces[0] != spaces[1]
    assert spaces[0] == spaces[2]


@pytest.mark.parametrize("content", ["", "short", None])
def test_a_key_that_cannot_be_is_a_warning(
    cached: Arguments,
    tmp_path: Path,
    content: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 64 if content is None else content)
    key.chmod(0o622 if content is None else 0o600)
    monkeypatch.setenv(compile_cache.KEY_VARIABLE, str(key))
    before = os.environ[compile_cache.VARIABLE]
    with CompileCache(cached(), env()):
        assert os.environ[compile_cache.VARIABLE] == before
    assert f"the key {key} cannot be used" in caplog.text


def test_without_room_for_a_folder_the_run_compiles_as_without_a_cache(
    cached: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = tmp_path / "full"
    full.write_text("")
    monkeypatch.setenv(compile_cache.VARIABLE, str(full / "torch"))
    from torch._dynamo.callback import callback_handler

    callbacks = len(callback_handler.start_callbacks)
    with CompileCache(cached(), env()):
        assert os.environ[compile_cache.VARIABLE] == str(full / "torch")
    assert "no folder to compile in could be made" in caplog.text
    assert len(callback_handler.start_callbacks) == callbacks


def test_a_directory_that_is_refused_leaves_no_callback(cached: Arguments, tmp_path: Path) -> None:
    from torch._dynamo.callback import callback_handler

    callbacks = len(callback_handler.start_callbacks)
    keep(tmp_path / "compiled", b"").parent.chmod(0o777)
    with pytest.raises(ConfigurationError), CompileCache(cached(), env()):
        pass
    assert len(callback_handler.start_callbacks) == callbacks


@pytest.mark.usefixtures("fresh_compiler")
def test_two_jobs_that_write_the_same_file_leave_a_whole_one(
    cached: Arguments, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job writes it from its beginning to its end while this one is about to."""
    args = cached()
    directory = Path(str(args.torch_compile_cache_dir))
    write, others = zipfile.ZipFile.write, [""]

    def write_after_another(packed: zipfile.ZipFile, *given: object) -> None:
        if others:
            others.pop()
            local, key = directory.parent / "other", compile_cache._read_key(compile_cache._key_path())
            local.mkdir()
            (local / "b.so").write_bytes(b"2")
            facts = compile_cache._facts(torch.device("cpu"))
            compile_cache._write(directory / "rank-00000.zip", local, ["b.so"], facts, key)
        write(packed, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(zipfile.ZipFile, "write", write_after_another)
        compiles(CompileCache(args, env()), {"a/one.so": b"1"})
    assert not others
    torch._dynamo.reset()
    assert compiles(CompileCache(args, env()), {}) == {"a/one.so"}
    assert "torch_compile_cache_dir" not in caplog.text
    assert [path.name for path in directory.iterdir()] == ["rank-00000.zip"]
