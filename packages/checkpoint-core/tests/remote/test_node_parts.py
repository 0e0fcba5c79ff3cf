"""Nodes without shared storage keep a checkpoint together; a lost node leaves the second tier."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_core import CheckpointError, find_latest_checkpoint, load_model_weights
from checkpoint_core.cli import main
from checkpoint_core.manifest import read_manifest, verify_checkpoint

WORKER = Path(__file__).parent / "workers" / "node_parts.py"
Worked = subprocess.CompletedProcess[str]
Run = Callable[[str], dict[str, Any]]


@pytest.fixture
def play(run_worker: Callable[..., Worked], weed, s3: str, tmp_path: Path) -> Run:
    """Runs one scenario of the worker."""

    def run(scenario: str) -> dict[str, Any]:
        done = run_worker(WORKER, tmp_path, json.dumps(weed.environment()), s3, scenario)
        return json.loads(done.stdout.splitlines()[-1])

    return run


def loaded(ranks: list[dict[str, Any]]) -> set[str]:
    """What all ranks have loaded, every value of it right."""
    assert all("error" not in seen and seen["wrong"] == [] for seen in ranks), ranks
    assert all(seen["compared"] for seen in ranks)
    return {seen["loaded"] for seen in ranks}


def notes(ranks: list[dict[str, Any]]) -> str:
    return "\n".join(note for seen in ranks for note in seen["notes"])


def check_disks(seen: dict[str, Any], tmp_path: Path) -> None:
    first, second = (set(seen["held"][disk]) for disk in "ab")
    assert first | second == set(seen["manifest"])
    assert not first & second
    for kept in (first, second):
        assert any(name.startswith("model-") for name in kept)
        assert any(name.startswith("optimizer-") for name in kept)
    assert {"rng.rank0.json", "rng.rank1.json"} <= first
    assert {"rng.rank2.json", "rng.rank3.json"} <= second
    assert seen["same manifest"] == 1
    assert read_manifest(tmp_path / "a/run/checkpoint-2").nodes == 2


def test_a_checkpoint_in_two_parts(
    play: Run, s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = play("roundtrip")
    check_disks(seen, tmp_path)
    assert seen["store"] == {"committed": ["checkpoint-1", "checkpoint-2"], "left": []}
    here = {f"{tmp_path}/{disk}/run/checkpoint-2" for disk in "ab"}
    assert loaded(seen["load"]) == here
    assert "of rank 0 has 17 of 28 files; it reads the others from rank 2 on" in notes(seen["load"])
    # Each rank has read its part of the tensors, headers, and its own states, wherever they lie.
    assert all(rank["read"] < 1.6 * rank["own"] for rank in seen["load"])
    assert loaded(seen["swapped"]) == here
    assert loaded(seen["lost"]) == {f"{s3}/run/checkpoint-2"}
    assert "checkpoint-2 is not whole: none of the nodes of this job has model-0000" in notes(seen["lost"])
    assert f"{s3}/run/checkpoint-2 is taken" in notes(seen["lost"])
    for rank in seen["model alone"]:
        # The optimizer, and nothing of the model, is as it was.
        assert rank["compared"]
        assert all(name == "lr" or "exp_avg" in name or name.endswith(".step") for name in rank["wrong"])
    assert "holds later checkpoints" not in notes(seen["model alone"])
    # All of the model is where the first node exports it, and nothing anywhere else.
    assert seen["exported"]["a"] == [
        name for name in seen["manifest"] if name.startswith("model") and name != "manifest.json"
    ]
    assert not seen["exported too"]
    assert loaded(seen["merged"]) == {f"{tmp_path}/m/run/checkpoint-2"}
    check_prune(tmp_path / "a/run", capsys)


def check_prune(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One node cannot tell whether others can use a part, so it is deleted only where that is asked for."""
    assert main(["prune", str(directory), "--keep", "1", "--yes"]) == 0
    told = capsys.readouterr().out
    assert told.count("2 nodes saved it together); --parts lets it go, too") == 2
    assert "nothing to delete" in told
    assert main(["prune", str(directory), "--keep", "1", "--parts", "--yes"]) == 0
    assert [path.name for path in directory.glob("checkpoint-*")] == ["checkpoint-2"]


def test_one_part_alone_is_refused(play: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play("saved")
    part = tmp_path / "a/run/checkpoint-1"
    with pytest.raises(CheckpointError, match=r"is not whole: .*is not in it. 2 nodes saved it"):
        verify_checkpoint(part, checksums=False)
    assert verify_checkpoint(part, checksums=True, one_node=True).step == 1
    assert find_latest_checkpoint(part.parent) is None
    assert find_latest_checkpoint(part.parent, one_node=True) == part
    assert main(["verify", str(part)]) == 1
    assert "a part, step 1, 17 of 28 files; 2 nodes saved it together" in capsys.readouterr().out
    assert main(["ls", str(part.parent)]) == 0
    assert "a part (17 of 28 files; 2 nodes saved it together)" in capsys.readouterr().out
    assert main(["export", str(part), str(tmp_path / "exported")]) == 2
    assert "another node keeps it" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="model-0000"):
        load_model_weights(torch.nn.Linear(1, 1), part)
    first = next(part.glob("model-*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1] + b"\x99")
    assert main(["verify", str(part)]) == 1
    assert f"damaged: {first.name} does not match its checksum" in capsys.readouterr().out


@pytest.mark.full
def test_other_numbers_of_nodes(play: Run, s3: str, tmp_path: Path) -> None:
    seen = play("other_nodes")
    assert loaded(seen["more nodes"]) == {f"{tmp_path}/{disk}/run/checkpoint-2" for disk in "abcd"}
    assert loaded(seen["named"]) == {f"{tmp_path}/{disk}/run/checkpoint-1" for disk in "ab"}
    assert loaded(seen["other layout"]) == {f"{tmp_path}/{disk}/run/checkpoint-2" for disk in "ab"}
    assert loaded(seen["one node"]) == {f"{s3}/run/checkpoint-2"}


@pytest.mark.full
def test_what_never_got_to_the_store(play: Run, s3: str, tmp_path: Path) -> None:
    seen = play("not_uploaded")
    assert all("does not have all that it should keep" in each["waiting"] for each in seen["away"])
    assert seen["store"] == {"committed": ["checkpoint-1", "checkpoint-2"], "left": []}
    assert loaded(seen["damaged"]) == {f"{tmp_path}/{disk}/run/checkpoint-2" for disk in "aB"}
    assert "checkpoint-3" in notes(seen["damaged"])
    assert "is damaged: its content does not match its checksum" in notes(seen["damaged"])
    assert loaded(seen["lost"]) == {f"{s3}/run/checkpoint-2"}
    assert all(
        "is not whole: none of the nodes of this job has" in each["error"] for each in seen["newest named"]
    )
    assert all("none can be used" in each["error"] for each in seen["copies"])
    assert loaded(seen["back"]) == {f"{tmp_path}/{disk}/run/checkpoint-3" for disk in "ab"}
    assert seen["store then"] == {"committed": [f"checkpoint-{step}" for step in (1, 2, 3)], "left": []}


def test_a_node_that_does_not_answer(play: Run, tmp_path: Path) -> None:
    seen = play("leaves")
    for rank in seen["leaves"]:
        assert "rank 0" in rank["error"]
        assert "rank 2 on" in rank["error"]
        assert "does not answer" in rank["error"]
    assert seen["store"] == {"committed": ["checkpoint-1"], "left": []}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["2 copies of 2 shards", "2 stages", "copies on 2"])
def test_other_layouts(play: Run, s3: str, tmp_path: Path, layout: str) -> None:
    seen = play(layout)
    run = layout.replace(" ", "-")
    assert loaded(seen["load"]) == {f"{tmp_path}/{disk}/{run}/checkpoint-1" for disk in "ab"}
    assert loaded(seen["lost"]) == {f"{s3}/{run}/checkpoint-1"}


def test_no_save_is_lost_between_nodes_that_are_late(play: Run) -> None:
    seen = play("races")
    assert seen["store"] == {"committed": ["checkpoint-1", "checkpoint-2"], "left": []}
    assert "was deleted" not in notes(seen["late publisher"])
    assert seen["store of late request"] == {"committed": ["checkpoint-1"], "left": []}


def test_a_save_is_replaced_while_it_is_uploaded(play: Run) -> None:
    seen = play("saved_again")
    for reader in "02":
        assert seen[f"store {reader}"] == {"committed": ["checkpoint-1", "checkpoint-2"], "left": []}
    assert "is damaged" not in notes(seen["here"] + seen["there"])


def test_a_node_that_stands_still_is_named(play: Run) -> None:
    seen = play("frozen")
    assert "did not end within 0.5 s, because rank 2 on " in seen["ranks"][0]["told"][0]
    assert seen["store"] == {"committed": ["checkpoint-1"], "left": []}


def test_an_upload_is_continued_after_all(play: Run) -> None:
    seen = play("continued")
    assert seen["store"] == {"committed": ["checkpoint-1", "checkpoint-2"], "left": []}
    assert [rank["child"] for rank in seen["ranks"]] == [7] * 4
    assert not any("answering" in name for rank in seen["ranks"] for name in rank["threads"])


def test_rank_0_has_nothing_of_what_it_uploads(play: Run) -> None:
    seen = play("new_main")
    assert seen["before"]["committed"] == ["checkpoint-1", "checkpoint-2"]
    assert {path.rpartition("/")[2] for path in loaded(seen["load"])} == {"checkpoint-3"}
    assert seen["store"] == {"committed": ["checkpoint-1", "checkpoint-2", "checkpoint-3"], "left": []}


def test_the_best_is_one_that_can_be_loaded(play: Run, s3: str, tmp_path: Path) -> None:
    seen = play("best")
    assert loaded(seen["all"]) == {f"{tmp_path}/{disk}/run/checkpoint-1" for disk in "ab"}
    # Half of it is still on a disk, which the resume tells, and not each ranking.
    assert notes(seen["lost"]).count("passing over checkpoint-1") == 1
    assert loaded(seen["lost"]) == loaded(seen["one node"]) == {f"{s3}/run/checkpoint-1"}
    assert "checkpoint-1" in seen["a"]
    # The best that the new node knows; the other one ranks the half above it.
    assert "checkpoint-3" in seen["a"]
    assert "checkpoint-3" in seen["c"]


def test_a_component_that_was_deleted_begins_afresh(play: Run, s3: str, tmp_path: Path) -> None:
    seen = play("deleted")
    assert loaded(seen["load"]) == {f"{tmp_path}/{disk}/run/checkpoint-1" for disk in "ab"}
    assert [rank["missing"] for rank in seen["load"]] == [["rng"]] * 4
    assert "rng.rank3.json, rng.rank3.safetensors was deleted; component 'rng' keeps its fresh state" in (
        notes(seen["load"])
    )
    assert loaded(seen["copy"]) == {f"{s3}/run/checkpoint-1"}


def test_all_nodes_lose_their_power_while_they_publish(play: Run, tmp_path: Path) -> None:
    seen = play("power_cut")
    assert loaded(seen["load"]) == {f"{tmp_path}/{disk}/run/checkpoint-1" for disk in "ab"}


def test_nodes_that_share_the_wrong_place_are_refused(play: Run, tmp_path: Path) -> None:
    seen = play("misplaced")
    for rank in seen["shared"]:
        assert f"{tmp_path}/a/run is also the directory of the node of rank 2, but with save" in rank["error"]
    assert seen["left"] == []
    for rank in seen["memory"]:
        assert "remote_dir='memory://name/run' is not one place for all nodes" in rank["error"]
        assert "rank 2 (" in rank["error"]
    # A directory that all see is one place, in which nothing is left of what tells it.
    assert seen["file"] == [{}] * 4
    assert seen["stored"] == ["checkpoint-1"]
