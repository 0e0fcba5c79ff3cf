"""Ranks of several hosts without coherent storage: each file has one writer, and loads as any other does."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoint_core import CheckpointConfig, CheckpointError, load_model_weights, shared_files
from checkpoint_core.agreement import RankAgreement
from checkpoint_core.cli import main
from checkpoint_core.shared_files import file_system, needs_one_writer
from dist_env import StaticDistributedEnvironment

Worked = subprocess.CompletedProcess[str]
LAYOUTS = ["columns on 2", "2 stages of 2 shards"]
MORE = [*LAYOUTS, "whole", "shards on 3", "shards on 4", "2 copies of 2 shards", "2 stages"]
HEADERS = 60_000
"""Bytes of all file headers, which every rank reads."""


def check(results: dict, directory: Path) -> None:
    for pair, ranks in results["load"].items():
        for rank, seen in enumerate(ranks):
            assert seen["compared"] > 10, pair
            assert (pair, rank, seen["wrong"], seen["missing"]) == (pair, rank, [], [])
            assert seen["own"] <= seen["read"] <= seen["own"] + HEADERS, (pair, rank)
    expected = None
    for name, ranks in results["save"].items():
        tensors = {file: size for file, size in ranks[0]["files"].items() if file.endswith(".safetensors")}
        by_rank = [set(seen["written"]) for seen in ranks]
        assert sum(map(len, by_rank)) == len(set.union(*by_rank)), name
        assert set.union(*by_rank) == set(tensors), name
        sizes = [sum(tensors[file] for file in mine) for mine in by_rank]
        if name.startswith(("shards", "columns")):
            assert max(sizes) <= 1.5 * sum(sizes) / len(sizes), (name, sizes)
        index = json.loads((directory / f"{name} exported" / "model.safetensors.index.json").read_text())
        found = {}
        for file in set(index["weight_map"].values()):
            found.update(load_file(directory / f"{name} exported" / file))
        expected = expected or found
        assert set(found) == set(expected) == set(index["weight_map"])
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_any_layout_loads_what_one_writer_saved_and_the_other_way_round(
    run_worker: Callable[..., Worked], tmp_path: Path
) -> None:
    check(json.loads(run_worker("one_writer_layouts.py", tmp_path, *LAYOUTS).stdout), tmp_path)


@pytest.mark.full
def test_more_layouts(run_worker: Callable[..., Worked], tmp_path: Path) -> None:
    check(json.loads(run_worker("one_writer_layouts.py", tmp_path, *MORE).stdout), tmp_path)


def test_a_host_without_room(run_worker: Callable[..., Worked], tmp_path: Path) -> None:
    run_worker("one_writer_ranks.py", tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for seen in first:
        assert seen["first"] is None
        assert "rank 1 (" in seen["failing"]
        assert "no space left to write" in seen["failing"]
        assert seen["left"] == ["checkpoint-1"]
        assert seen["loaded"] == [1, [1.0]]
        assert seen["again"] is None
        assert seen["loaded again"] == [2, [2.0]]


@pytest.mark.full
def test_transformers_and_the_commands_read_it(
    run_worker: Callable[..., Worked], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run_worker("one_writer_model.py", tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint-1"
    shards = sorted(path.name for path in checkpoint.glob("model-*.safetensors"))
    assert len(shards) == 2
    whole = torch.load(tmp_path / "whole", weights_only=True)
    for directory in (checkpoint, tmp_path / "exported"):
        loaded = transformers.GPT2LMHeadModel.from_pretrained(directory).state_dict()
        assert set(loaded) == set(whole)
        assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    for command in (
        ["ls", str(tmp_path / "run")],
        ["verify", str(tmp_path / "run")],
        ["show", str(checkpoint)],
        ["diff", str(checkpoint), str(tmp_path / "run" / "checkpoint-2")],
        ["export", str(checkpoint), str(tmp_path / "out")],
        ["prune", str(tmp_path / "run"), "--keep", "1", "--yes"],
    ):
        assert main(command) == 0, command
    assert "transformer.wte.weight" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]
    out = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(out[name], whole[name]) for name in whole)


def test_the_file_system_of_a_directory(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    # Of a directory that is made later it is that of the nearest one above.
    assert file_system(tmp_path / "later" / "run") == file_system(tmp_path)
    assert file_system(tmp_path) not in (None, "proc")


@pytest.mark.parametrize(
    ("kind", "local", "setting", "expected"),
    [
        ("nfs4", 1, None, True),
        ("fuse.unknown", 1, None, True),
        ("lustre", 1, None, False),
        ("nfs4", 2, None, False),
        ("nfs4", 1, False, False),
        ("lustre", 2, True, True),
    ],
)
def test_who_decides(
    tmp_path: Path, monkeypatch, kind: str, local: int, setting: bool | None, expected: bool
) -> None:
    table = (
        f"1 0 0:1 / / rw - ext4 disk rw\n2 1 0:2 / {tmp_path} rw,relatime shared:1 - {kind} server:/a rw\n"
    )
    mounts = tmp_path / "mounts"
    mounts.write_text(table)
    monkeypatch.setattr(shared_files, "_MOUNTS", mounts)
    assert file_system(tmp_path / "run") == kind

    class TwoRanks(RankAgreement):
        """Two ranks that see the same."""

        def run(self, phase: str, action: Callable) -> list:
            return [action(), action()]

    ranks = TwoRanks(StaticDistributedEnvironment(), 1.0)
    ranks.world_size = ranks._node_size = 2
    assert needs_one_writer(ranks, "saving", tmp_path / "run", setting, local) is expected


def test_settings_that_contradict_one_another() -> None:
    with pytest.raises(CheckpointError, match=r"one_writer_per_file=True does not go with save_on_each_node"):
        CheckpointConfig("run", one_writer_per_file=True, save_on_each_node=True)
    with pytest.raises(CheckpointError, match=r"one_writer_per_file='yes' must be True, False or None"):
        CheckpointConfig("run", one_writer_per_file="yes")  # type: ignore[arg-type]


def test_a_single_process_has_one_writer_anyway(tmp_path: Path, training_job: Callable) -> None:
    saved = training_job(tmp_path / "run", one_writer_per_file=True)
    saved.train(2)
    path = saved.save()
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))
    load_model_weights(model, path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.model.parameters(), strict=True))
