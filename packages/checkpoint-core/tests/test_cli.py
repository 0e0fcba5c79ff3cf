"""The console script over real checkpoints: ls, show, verify, prune, and the program itself."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from checkpoint_core import DirectoryLease
from checkpoint_core.cli import main, make_parser, parse_size
from checkpoint_core.cli.checkpoints import table_lines
from checkpoint_core.directory import create_staging, discard

STAGE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from checkpoint_core.directory import create_staging
staging = create_staging(Path(sys.argv[1]), 7)
(staging / "model.safetensors").write_bytes(bytes(500))
aside = staging.name.replace(".tmp-checkpoint-7-", ".old-checkpoint-3-")
(Path(sys.argv[1]) / "checkpoint-3").rename(staging.with_name(aside))
os.kill(os.getpid(), signal.SIGKILL)
"""


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(directory)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture
def run(job, tmp_path: Path) -> Path:
    """A directory with checkpoints of the steps 1 to 6, and eval_loss 5, 4, 3, 2, 3, 4."""
    training = job(save_total_limit=None)
    for step in range(1, 7):
        training.train(1)
        loss = 2.0 + abs(step - 4)
        training.manager.save_checkpoint(step, metrics={"eval_loss": loss, "eval_accuracy": -loss})
    return tmp_path / "run"


def lines(text: str, key: str) -> list[str]:
    return [line for line in text.splitlines() if key in line]


def test_ls_tells_every_state_and_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(run)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["step", "age", "size", "ranks", "metrics", "state"]
    assert [row.split()[0] for row in table[1:]] == ["6", "5", "4", "3", "2", "1"]
    assert table[1].endswith("eval_loss 4, eval_accuracy -4  committed")

    (run / "checkpoint-6" / "manifest.json").unlink()
    model = run / "checkpoint-5" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-8])
    flip(run / "checkpoint-4" / "manifest.json", 200)
    (run / "checkpoint-2" / "optimizer.json").unlink()
    (run / "damaged-checkpoint-9-0123abcd").mkdir()
    killed = subprocess.run([sys.executable, "-c", STAGE_AND_DIE, str(run)], check=False)
    assert killed.returncode == -signal.SIGKILL
    mine = create_staging(run, 8)
    before = snapshot(run)
    assert main(["ls", str(run)]) == 1
    out = capsys.readouterr().out
    assert "torn (it has no manifest.json" in lines(out, "6 ")[0]
    size = model.stat().st_size
    assert f"damaged (model.safetensors has {size} bytes, {size + 8} were written)" in out
    assert lines(out, "damaged (manifest.json is ")[0].startswith("4 ")
    assert "committed (optimizer.json was deleted)" in out
    assert f"being written by process {os.getpid()} ({mine.name})" in out
    [leftover] = lines(out, "leftover of a killed save")
    assert leftover.startswith("7 ")
    assert "500 B" in leftover
    [aside] = lines(out, "put aside by process")
    assert aside.startswith("3 ")
    assert "kept aside when its step was saved again (damaged-checkpoint-9-0123abcd)" in out
    assert snapshot(run) == before
    discard(mine)


def test_ls_of_nothing(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(tmp_path)]) == 0
    assert f"no checkpoints in {tmp_path}" in capsys.readouterr().out
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert main(["ls", str(run / "checkpoint-1")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith(f"checkpoint-core ls: there is no directory {tmp_path / 'nowhere'}. Pass")
    assert errors[1].endswith(f"Pass the directory that holds it, {run}.")


def test_show_reads_headers_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoint-6"
    assert main(["show", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert ["model", "replicated", "weights"] in [line.split()[:3] for line in text.splitlines()]
    assert ["model", "0.weight", "float32", "[8,", "6]", "192"] in [
        line.split() for line in text.splitlines()
    ]
    assert re.search(r"^step +6$", text, re.M)
    assert re.search(r"^metrics +eval_loss 4, eval_accuracy -4$", text, re.M)
    assert re.search(r"^versions +checkpoint-core .*torch ", text, re.M)
    for component in ("model", "optimizer", "scheduler", "trainer", "rng rank 0", "(eval_metrics.json)"):
        assert lines(text, component)
    for name in ("2.running_mean", "2.num_batches_tracked", "3.bias"):
        assert re.search(rf"^model +{re.escape(name)} ", text, re.M)

    # What show prints does not hang on the values, which it has not read.
    flip(checkpoint / "model.safetensors")
    assert main(["show", str(checkpoint)]) == 0
    assert capsys.readouterr().out == text
    (checkpoint / "scheduler.json").unlink()
    flip(checkpoint / "model.safetensors", 3)
    assert main(["show", str(checkpoint)]) == 1
    text = capsys.readouterr().out
    assert "deleted: scheduler.json" in text
    assert "model.safetensors is not a readable safetensors file" in text
    assert main(["show", str(run)]) == 2
    assert f"such as {run / 'checkpoint-6'}" in capsys.readouterr().err


def test_verify_names_every_damaged_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoint-6"
    (checkpoint / "scheduler.json").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80\x04]\x94.")
    (checkpoint / "more").mkdir()
    (checkpoint / "more" / "state.PKL").write_bytes(b"\x80\x04]\x94.")
    (checkpoint / "notes.txt").write_text("mine")
    assert main(["verify", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{checkpoint}: whole, step 6, ")
    assert "  deleted: scheduler.json (component scheduler starts fresh" in out
    for name in ("pytorch_model.bin", "more/state.PKL"):
        assert f"  unknown: {name} (a pickle by its name, which is never read)" in out
    assert "  unknown: notes.txt (not in the manifest, never loaded)" in out

    flip(checkpoint / "model.safetensors")
    flip(checkpoint / "trainer.json", 3)
    rng = checkpoint / "rng.rank0.safetensors"
    rng.write_bytes(rng.read_bytes() + b"\x00")
    (checkpoint / "optimizer.json").unlink()
    (checkpoint / "optimizer.json").mkdir()
    assert main(["verify", str(checkpoint)]) == 1
    damaged = lines(capsys.readouterr().out, "  damaged: ")
    assert [line.split()[1] for line in damaged] == sorted(
        ["model.safetensors", "optimizer.json", "trainer.json", "rng.rank0.safetensors"],
        key=[line.split()[1] for line in damaged].index,
    )
    assert len(damaged) == 4


def test_verify_a_directory(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert len(lines(capsys.readouterr().out, ": whole, ")) == 6
    flip(run / "checkpoint-2" / "optimizer.safetensors")
    (run / "checkpoint-5").rename(run / "checkpoint-50")
    (run / "checkpoint-1" / "manifest.json").unlink()
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert len(lines(out, ": whole, ")) == 3
    assert f"{run / 'checkpoint-2'}: damaged\n  damaged: optimizer.safetensors does not match" in out
    assert "it holds step 5 but is named checkpoint-50" in out
    assert f"{run / 'checkpoint-1'}: torn\n  torn: it has no manifest.json" in out
    assert main(["verify", str(run / "checkpoint-1")]) == 1
    assert main(["verify", str(tmp_path)]) == 2
    assert "holds no checkpoint-<step>" in capsys.readouterr().err

    manifest = run / "checkpoint-6" / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "schema_version": 99}))
    assert main(["verify", str(run / "checkpoint-6")]) == 2
    assert "Upgrade checkpoint-core" in capsys.readouterr().err


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in directory.glob("checkpoint-*"))


def test_prune_is_dry_by_default(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(run)
    command = ["prune", str(run), "--keep", "2", "--keep-best", "1", "--metric", "eval_loss"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:7]] == [
        ["keep", "checkpoint-6"],
        ["keep", "checkpoint-5"],
        ["keep", "checkpoint-4"],
        ["delete", "checkpoint-3"],
        ["delete", "checkpoint-2"],
        ["delete", "checkpoint-1"],
    ]
    assert "best (1 of 1, eval_loss 2)" in lines(out, "checkpoint-4")[0]
    assert out.splitlines()[-1].startswith("dry run: --yes would delete 3 checkpoint(s), ")
    assert snapshot(run) == before
    assert main([*command, "--yes"]) == 0
    assert steps(run) == [4, 5, 6]
    assert not list(run.glob(".*"))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--metric", "eval_loss", "--keep-best", "2"], [3, 4, 6]),
        (["--metric", "eval_loss", "--keep-best", "2", "--greater-is-better"], [1, 2, 6]),
        (["--metric", "eval_accuracy", "--keep-best", "1", "--greater-is-better"], [4, 6]),
        (["--metric", "eval_accuracy", "--keep-best", "1", "--lower-is-better"], [1, 6]),
    ],
)
def test_prune_keeps_the_best(run: Path, options: list[str], kept: list[int]) -> None:
    assert main(["prune", str(run), "--keep", "1", "--yes", *options]) == 0
    assert steps(run) == kept


def test_prune_does_not_count_what_is_damaged(
    run: Path, job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "checkpoint-6" / "model.safetensors")  # Its size is right; only the checksum tells.
    (run / "checkpoint-2" / "manifest.json").unlink()
    model = run / "checkpoint-1" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-8])
    shutil.copytree(run / "checkpoint-3", tmp_path / "elsewhere")
    (run / "checkpoint-3").rename(run / "checkpoint-03")
    (run / "checkpoint-3").symlink_to(tmp_path / "elsewhere")
    assert main(["prune", str(run), "--keep", "1", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "damaged (model.safetensors does not match its checksum)" in lines(out, "checkpoint-6")[0]
    assert "newest (1 of 1)" in lines(out, "checkpoint-5")[0]
    assert "a link or a copy" in lines(out, "checkpoint-3 ")[0]
    assert "a link or a copy" in lines(out, "checkpoint-03")[0]
    assert steps(run) == [1, 2, 3, 3, 5, 6]
    (run / "checkpoint-3").unlink()
    shutil.rmtree(run / "checkpoint-03")

    other = job(save_total_limit=None)
    for step in (20, 21):
        other.manager.save_checkpoint(step)
    assert main(["prune", str(run), "--keep", "1", "--yes"]) == 0
    assert "of another run" in lines(capsys.readouterr().out, "checkpoint-5")[0]
    assert steps(run) == [1, 2, 5, 6, 21]
    assert main(["prune", str(run), "--keep", "1", "--all-runs", "--yes"]) == 0
    assert steps(run) == [1, 2, 21]
    assert main(["verify", str(run / "checkpoint-21")]) == 0


def test_prune_refuses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    staging = create_staging(run, 7)
    assert main(["prune", str(run), "--keep", "1", "--yes"]) == 2
    error = capsys.readouterr().err
    assert f"{run} is in use, because checkpoint-7 is being written by process {os.getpid()}" in error
    staging.rmdir()
    with DirectoryLease(run):
        assert main(["prune", str(run), "--keep", "1"]) == 0
        assert main(["prune", str(run), "--keep", "1", "--yes"]) == 2
        assert f"{run} is in use by process {os.getpid()} on " in capsys.readouterr().err
    for options, message in (
        (["--keep-best", "1"], "--keep-best 1 needs --metric"),
        (["--metric", "eval_loss"], "need --keep-best K"),
        (["--metric", "eval_accuracy", "--keep-best", "1"], "Add --greater-is-better or --lower-is-better"),
        (["--metric", "my_loss", "--keep-best", "1"], "They have eval_accuracy, eval_loss"),
    ):
        assert main(["prune", str(run), "--keep", "1", "--yes", *options]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["prune", str(run), "--keep", "0", "--yes"])
    assert stop.value.code == 2
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_the_program(run: Path) -> None:
    script = Path(sys.executable).with_name("checkpoint-core")
    assert script.is_file(), "the package is installed without its console script"
    flip(run / "checkpoint-6" / "model.safetensors")
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60"}
    module = [sys.executable, "-m", "checkpoint_core", "verify", run]
    child = subprocess.Popen(module, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    table = subprocess.Popen([script, "ls", run], stdout=slave, env=environment)
    # The reader goes away before the first line, as with `| head -0`.
    pipe = subprocess.Popen(
        [script, "show", run / "checkpoint-5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    pipe.stdout.close()
    assert pipe.stderr.read() == b""
    assert pipe.wait() == 141
    out, error = child.communicate()
    assert (child.returncode, error) == (1, "")
    assert "damaged: model.safetensors does not match its checksum" in out
    table.wait()
    os.close(slave)
    shown = os.read(master, 1 << 16).decode().splitlines()
    os.close(master)
    assert table.returncode == 0
    assert len(shown) > 7  # The rows are wrapped.
    assert max(map(len, shown)) <= 60


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert table_lines(("a", "b"), [("x\x1b[31m\n", "two  blanks")], None) == [
        "a            b",
        "x\\x1b[31m\\n  two  blanks",
    ]
    assert max(map(len, table_lines(("name", "shape"), [("w" * 70, "s" * 30)], 50))) <= 50
    assert [parse_size(text) for text in ("5GB", "500 MiB", "1.5kb", "7")] == [
        5 * 10**9,
        500 * 2**20,
        1500,
        7,
    ]
    for text in ("", "0", "GB", "5 parsecs", "-1", "1e3"):
        with pytest.raises(SystemExit):
            make_parser().parse_args(["export", "a", "b", f"--max-shard-size={text}"])
    assert "is not a size of 1 byte or more" in capsys.readouterr().err
    for command in ("ls", "show", "verify", "diff", "export", "prune"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"Example:\n  checkpoint-core {command} " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["export", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_do_without_torch(words: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from checkpoint_core.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wanted = (
        f"checkpoint-core {version('checkpoint-core')}\n"
        if words == ["--version"]
        else "Usage: checkpoint-core "
    )
    assert done.stdout.startswith(wanted)
