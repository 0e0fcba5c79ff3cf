"""Bad input on one of two real processes: the same error on both, older checkpoints as they were."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_core import CheckpointConfig, CheckpointManager, SharingPattern, StateComponent
from checkpoint_core.manifest import verify_checkpoint

Worked = subprocess.CompletedProcess[str]
TIMEOUT = 4.0
"""Of the ranks that wait for a dead one."""
SECONDS = 20
"""More than any failure takes on a busy machine, and less than any timeout."""
KILLED = -int(signal.SIGKILL)
Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def directory(run_worker: Callable[..., Worked], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bad_input_ranks")
    done = run_worker("bad_input_ranks.py", directory)
    codes = json.loads((directory / "codes.json").read_text())
    expected = {group: [0, 0] for group in ("saves", "loads", "nodes")}
    for group in set(codes) - set(expected):
        expected[group] = [KILLED, 0] if group.endswith("rank 0") else [0, KILLED]
    assert codes == expected, done.stderr
    return directory


def ranks(directory: Path, group: str) -> tuple[Seen, Seen]:
    first, second = (json.loads((directory / group / f"rank{rank}.json").read_text()) for rank in range(2))
    return first, second


def check(directory: Path, group: str, scenario: str, parts: list[str]) -> dict[str, Any]:
    """Both ranks raised the same error with all the parts, in time. Returns what rank 0 saw."""
    first, second = (seen[scenario] for seen in ranks(directory, group))
    assert first["message"] == second["message"]
    assert first["may_pass"] is second["may_pass"] is any(word in first["message"] for word in OF_THE_MACHINE)
    assert "not a CheckpointError" not in first["message"]
    for part in parts:
        assert part in first["message"], first["message"]
    assert max(first["seconds"], second["seconds"]) < SECONDS
    return first


TOGETHER = "a SHARDED state is put together by name"
OF_THE_MACHINE = ("no space left", "memory for staging", "Too many open files", "too many open files")
FULL = ["no space left to write", "part.safetensors", "Free space, raise the quota or file size limit"]


@pytest.mark.parametrize(
    ("scenario", "parts"),
    [
        ("state_dict raises on rank 0", ["rank 0 (", "component 'part'", "RuntimeError: no state today"]),
        ("state_dict raises on rank 1", ["rank 1 (", "component 'part'", "RuntimeError: no state today"]),
        (
            "unsupported object on rank 1",
            [
                "rank 1 (",
                "component 'part'",
                "the state at extra.tags is a builtins.set",
                "Convert it in state_dict()",
            ],
        ),
        ("bad metrics on rank 1", ["rank 1 (", "metrics['eval_loss'] is a str", "Use float(value)"]),
        (
            "rank 1 cannot stage",
            ["rank 1 (", "refuses 400", "bytes of memory for staging", "async_save=False"],
        ),
        ("rank 0 cannot write its part", ["rank 0 (", *FULL]),
        ("rank 1 cannot write its part", ["rank 1 (", *FULL]),
        ("preprocessor raises on rank 0", ["rank 0 (", "preprocessor Broken", "it has no vocabulary"]),
        (
            "dtypes differ",
            [
                "component 'part': x is torch.float32 [3] on rank 0 and torch.int64 [3] on rank 1",
                "use one name",
            ],
        ),
        (
            "shapes differ",
            ["component 'part': x is torch.float32 [3] on rank 0 and torch.float32 [4] on rank 1"],
        ),
        ("values differ", ["component 'part': rank 1 holds another value of group.lr", TOGETHER, "PER_RANK"]),
        ("kinds differ", ["component 'part': rank 1 holds another value of x", TOGETHER, "PER_RANK"]),
        (
            "tied to nothing",
            ["component 'part': head is declared as tied to embed", "leave head out of tied"],
        ),
        ("partial sums", ["component 'part': x holds partial sums", "redistribute()"]),
        (
            "no such dtype",
            ["component 'part': x has dtype torch.complex128 on rank 1", "Convert it to one of"],
        ),
        (
            "replicas differ",
            [
                "component 'model'",
                "rank 1 differs from rank 0 (tensor 'weight'",
                "broadcast the state from rank 0",
            ],
        ),
    ],
)
def test_a_save_fails_on_both(directory: Path, scenario: str, parts: list[str]) -> None:
    seen = check(directory, "saves", scenario, ["saving checkpoint-2", *parts])
    assert seen["left"] == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("scenario", "parts"),
    [
        ("settings differ", ["async_save is False on rank 0 and True on rank 1", "same CheckpointConfig"]),
        ("max_shard_size differs", ["max_shard_size is 5000000000 on rank 0 and 1000 on rank 1"]),
        (
            "separate directories, load",
            ["rank 1 (", "of rank 1/checkpoint-1, which rank 0 found", "save_on_each_node=True"],
        ),
    ],
)
def test_other_calls_fail_on_both(directory: Path, scenario: str, parts: list[str]) -> None:
    assert check(directory, "saves", scenario, parts)["left"] == ["checkpoint-1"]


def test_what_is_not_shared_storage(directory: Path) -> None:
    parts = ["rank 1 (", "of rank 1/.tmp-checkpoint-2-", "which rank 0 made", "save_on_each_node=True"]
    check(directory, "saves", "separate directories, save", parts)
    for seen in ranks(directory, "saves"):
        assert seen["separate directories, save"]["left"] == []


@pytest.mark.parametrize("call", ["wait", "load", "close"])
def test_a_full_disk_in_the_background_shows_at_the_next_call(directory: Path, call: str) -> None:
    seen = check(directory, "saves", f"background, {call}", ["saving checkpoint-2", "rank 1 (", *FULL])
    later = [f"checkpoint-{step}" for step in (2, 3, 5)] if call == "close" else []
    assert seen["left"] == ["checkpoint-1", *later]


def test_the_next_save_is_made_before_it_raises_what_failed_in_the_background(directory: Path) -> None:
    check(directory, "saves", "background, save", ["saving checkpoint-4", "rank 1 (", *FULL])
    for seen in (seen["background, saved"] for seen in ranks(directory, "saves")):
        assert seen["message"] is None
        assert seen["left"] == [f"checkpoint-{step}" for step in (1, 2, 3, 5)]


def test_training_goes_on_after_that(directory: Path) -> None:
    first, second = (seen["background, continues"] for seen in ranks(directory, "saves"))
    assert first["message"] is second["message"] is None
    assert first["left"] == second["left"] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_replicas_may_differ_with_a_warning(directory: Path) -> None:
    first, second = (seen["replicas differ, warn"] for seen in ranks(directory, "saves"))
    assert first["message"] is second["message"] is None
    assert first["left"] == ["checkpoint-2"]
    assert len(first["warnings"]) == 1
    assert "component 'model'" in first["warnings"][0]
    assert second["warnings"] == []
    # What rank 0 had was stored, and rank 1 takes it over.
    assert (first["changed"], second["changed"]) == (False, True)


def test_the_older_checkpoint_outlives_all_of_it(directory: Path) -> None:
    for seen in ranks(directory, "saves"):
        assert seen["older one, load"]["message"] is None
        assert seen["older one, load"]["restored"] is True
        assert seen["older one, save"]["message"] is None
        assert seen["older one, save"]["left"] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    ("scenario", "parts"),
    [
        (
            "shape differs on rank 1",
            [
                "component 'model': rank 1 (",
                "b.weight ([3, 2] in the file, [4, 2] in the model)",
                "Build the model",
            ],
        ),
        (
            "rank 1 wants more",
            ["component 'model': rank 1 (", "missing: c.weight, c.bias", "Build the model"],
        ),
        ("nobody holds b", ["component 'model'", "unexpected: b.bias, b.weight", "Build the model"]),
        (
            "nobody optimizes b",
            [
                "component 'optimizer'",
                "only in the checkpoint: ['b.bias', 'b.weight']",
                "delete the optimizer files",
            ],
        ),
        (
            "rank 1 cannot open files",
            ["component 'model': rank 1 (", "Too many open files", "model.safetensors"],
        ),
        (
            "global model differs on rank 1",
            ["component 'model': rank 1 (", "a.weight ([2, 2] in the file, [3, 2] in the model)"],
        ),
    ],
)
def test_a_load_fails_on_both_and_changes_nothing(directory: Path, scenario: str, parts: list[str]) -> None:
    check(directory, "loads", scenario, ["loading ", "checkpoint-1", *parts])
    assert [seen[scenario]["changed"] for seen in ranks(directory, "loads")] == [False, False]
    # The same objects would change if it succeeded.
    assert [seen["good"]["changed"] for seen in ranks(directory, "loads")] == [True, True]


@pytest.mark.parametrize(
    ("scenario", "parts"),
    [
        (
            "load_state_dict raises on rank 1",
            ["component 'part': rank 1 (", "RuntimeError: not for me", "delete part.json, part.safetensors"],
        ),
        ("rank 1 has no memory", ["component 'large': rank 1 (", "256000000 bytes"]),
    ],
)
def test_an_object_fails_on_one(directory: Path, scenario: str, parts: list[str]) -> None:
    assert check(directory, "loads", scenario, parts)["left"] == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("scenario", "parts", "left"),
    [
        (
            "uneven nodes",
            ["rank 1 is local rank 0 of 1, and rank 0 is local rank 0 of 2", "Use as many ranks"],
            [[], []],
        ),
        (
            "divided between nodes",
            ["component 'part'", "this node holds 1 of its 2 parts", "storage that all nodes share"],
            [[], []],
        ),
        (
            "stages on nodes",
            ["component 'part'", "the node of rank 0 does not hold b.bias", "storage that all nodes share"],
            [[], []],
        ),
        ("one full", ["rank 1 (", "no space left", "node1/full"], [["checkpoint-1"]] * 2),
        (
            "one damaged, named",
            ["rank 1 (", "node1/damaged/checkpoint-2/shared.safetensors is damaged"],
            None,
        ),
        (
            "nothing in common",
            ["rank 0: step 2 (save", "rank 1: step 1 (save", "to begin afresh"],
            [["checkpoint-2"], ["checkpoint-1"]],
        ),
        ("nothing on one", ["rank 0: step 2 (save", "rank 1: none", "Copy a"], [["checkpoint-2"], []]),
        ("two runs", ["rank 0: step 1 (save", "rank 1: step 1 (save"], [["checkpoint-1"]] * 2),
        ("two runs, named", ["not the same save on all nodes", "copy the directory"], [["checkpoint-1"]] * 2),
    ],
)
def test_a_node_fails(directory: Path, scenario: str, parts: list[str], left: list[list[str]] | None) -> None:
    check(directory, "nodes", scenario, parts)
    if left is not None:
        assert [seen[scenario]["left"] for seen in ranks(directory, "nodes")] == left


@pytest.mark.parametrize(
    ("scenario", "step", "warning"),
    [
        ("one behind", 2, "checkpoint-3 is not committed on every node; going back"),
        ("one damaged", 1, "passing over checkpoint-2: choosing a checkpoint: rank 1 ("),
    ],
)
def test_nodes_go_back_to_what_all_have(directory: Path, scenario: str, step: int, warning: str) -> None:
    for seen in ranks(directory, "nodes"):
        assert seen[scenario]["message"] is None
        assert seen[scenario]["n"] == [step, step]
    assert warning in " ".join(ranks(directory, "nodes")[0][scenario]["warnings"])


def test_nodes_go_on_from_there(directory: Path) -> None:
    for seen in ranks(directory, "nodes"):
        assert seen["one behind, continues"]["message"] is None
        assert seen["one behind, continues"]["left"] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
        assert seen["one full, continues"]["left"] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    ("phase", "victim", "what"),
    [
        ("capture", 1, "saving checkpoint-2: "),
        ("write", 1, "saving checkpoint-2: "),
        ("write", 0, "saving checkpoint-2: "),
        ("background", 1, "saving checkpoint-2: "),
        ("load", 1, "checkpoint-1, component 'own': "),
    ],
)
def test_a_rank_is_killed(directory: Path, phase: str, victim: int, what: str) -> None:
    group = directory / f"killed in {phase}, rank {victim}"
    seen = json.loads((group / f"rank{1 - victim}.json").read_text())
    assert seen["killed"]["message"].startswith("LostRankError: ")
    assert f"{what}no answer within {TIMEOUT:g} s from rank {victim} (" in seen["killed"]["message"]
    assert "Look at the log of that rank" in seen["killed"]["message"]
    assert TIMEOUT <= seen["killed"]["seconds"] < SECONDS
    assert "can no longer agree" in seen["afterwards"]["message"]
    assert "Restart the job" in seen["afterwards"]["message"]
    # The leader's directory stays when it is the leader that dies.
    hidden = [name for name in seen["killed"]["left"] if name.startswith(".tmp-checkpoint-2-")]
    assert len(hidden) == (victim == 0)
    assert [name for name in seen["killed"]["left"] if name not in hidden] == ["checkpoint-1"]
    goes_on_alone(group / "run")


def goes_on_alone(run: Path) -> None:
    """One process loads what two had saved, and its next save cleans up."""

    class Number:
        value = 0

        def state_dict(self) -> dict[str, object]:
            return {"n": self.value}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.value = int(str(state["n"]))

    number = Number()
    single = StateComponent(key="single", stateful=number, sharing_pattern=SharingPattern.GLOBAL)
    manager = CheckpointManager(CheckpointConfig(output_dir=run), stateful_provider=[single])
    loaded = manager.load_checkpoint()
    assert loaded is not None
    assert (loaded.step, number.value) == (1, 1)
    manager.save_checkpoint(2)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    for step in (1, 2):
        verify_checkpoint(run / f"checkpoint-{step}", checksums=True)
