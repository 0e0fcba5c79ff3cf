"""The commands on checkpoints in a store."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoint_core.cli import main
from checkpoint_core.directory import STAGING, temporary_path
from checkpoint_core.manifest import read_manifest
from checkpoint_core.store_directory import put_marker
from checkpoint_core.store_path import StorePath

Told = pytest.CaptureFixture[str]


@pytest.fixture
def run(training_job: Callable[..., object], url: str, place: Callable[[str], StorePath]) -> StorePath:
    """Four checkpoints, of which the second one is the best."""
    job = training_job(url, save_total_limit=None)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        job.train(1)
        job.manager.save_checkpoint(step, metrics={"eval_loss": loss})
    return place(url)


def weights(checkpoint: StorePath) -> StorePath:
    return checkpoint / read_manifest(checkpoint).save_directory / "model.safetensors"


def test_ls(run: StorePath, capsys: Told) -> None:
    assert main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "4", "3", "2", "1"]
    assert all(line.endswith("committed") for line in lines[1:])
    torn = run / "checkpoint-5/0123abcd/model.safetensors"
    torn.store.put(torn.key, bytes(3_000_000))
    put_marker(temporary_path(run, STAGING, 5, "0123abcd"), torn.parent)
    assert main(["ls", str(run)]) == 1
    out = capsys.readouterr().out
    assert "torn" in out
    assert "being written by process" in out
    assert out.count("3.00 MB") == 2
    assert main(["ls", f"{run}/checkpoint-1"]) == 2
    assert "is a checkpoint itself" in capsys.readouterr().err
    assert main(["ls", f"{run}-nowhere"]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_verify(run: StorePath, capsys: Told) -> None:
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": whole, step ") == 4
    damaged = weights(run / "checkpoint-3")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.store.put(damaged.key, bytes(content))
    unknown = run / "checkpoint-4" / "notes.pt"
    unknown.store.put(unknown.key, b"x")
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert "checkpoint-3: damaged" in out
    assert "model.safetensors does not match its checksum" in out
    assert "unknown: notes.pt (a pickle by its name" in out


def test_show(run: StorePath, capsys: Told) -> None:
    assert main(["show", f"{run}/checkpoint-4"]) == 0
    out = capsys.readouterr().out
    for part in (f"checkpoint  {run}/checkpoint-4", "eval_loss 4", "0.weight.exp_avg", "rng rank 0"):
        assert part in out


def test_diff(run: StorePath, capsys: Told) -> None:
    assert main(["diff", f"{run}/checkpoint-4", f"{run}/checkpoint-4"]) == 0
    assert "0 other entries differ" in capsys.readouterr().out
    assert main(["diff", f"{run}/checkpoint-1", f"{run}/checkpoint-2"]) == 1
    out = capsys.readouterr().out
    assert "0.weight" in out
    # Files of different saves are compared by the names that they share.
    assert "(file)" not in out


def test_export(run: StorePath, tmp_path: Path, capsys: Told) -> None:
    assert main(["export", f"{run}/checkpoint-4", str(tmp_path / "hf"), "--dtype", "bf16"]) == 0
    assert "dtype bf16" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    assert str(load_file(tmp_path / "hf" / "model.safetensors")["0.weight"].dtype) == "torch.bfloat16"


def test_prune(run: StorePath, capsys: Told, keys: Callable[[str], list[str]]) -> None:
    words = ["prune", str(run), "--keep", "1", "--keep-best", "1", "--metric", "eval_loss"]
    assert main(words) == 0
    assert "dry run: --yes would delete 2 checkpoint(s)" in capsys.readouterr().out
    assert len({name.partition("/")[0] for name in keys(str(run))}) == 4
    assert main([*words, "--yes"]) == 0
    assert {name.partition("/")[0] for name in keys(str(run))} == {"checkpoint-2", "checkpoint-4"}
    put_marker(temporary_path(run, STAGING, 5, "0123abcd"), run / "checkpoint-5" / "0123abcd")
    assert main([*words, "--yes"]) == 2
    assert "is in use, because checkpoint-5 is being written" in capsys.readouterr().err
