"""Two real processes over gloo: sharing patterns, and agreement on every failure."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    agreement,
    sharded,
)
from checkpoint_core.encoding import encode_state
from checkpoint_core.manifest import verify_checkpoint
from checkpoint_core.shared_files import RankReport, gather_reports
from dist_env import StaticDistributedEnvironment

Worked = subprocess.CompletedProcess[str]
SHORT_TIMEOUT = 5.0


def test_tensors_are_sent_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_CHUNK_BYTES", 100)
    sizes = [40, 0, 40, 20, 1, 101, 0, 100, 60, 40]
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    batches = [[tensor.nbytes for tensor in batch] for batch in agreement._batches(tensors)]
    assert batches == [[40, 40, 20], [1], [101], [100], [60, 40]]
    assert list(agreement._batches([torch.empty(0)])) == []


class ManyAlike(agreement.RankAgreement):
    """The first of a thousand ranks, of which all others report what it reports."""

    def __init__(self) -> None:
        super().__init__(StaticDistributedEnvironment(), SHORT_TIMEOUT)
        self.world_size = self._node_size = 1000
        self.node = self.site = range(1000)

    def _exchange(self, phase: str, report: object, failure: object) -> list[str]:
        return [json.dumps(report) for _ in range(self.world_size)]


def test_what_a_thousand_ranks_report_alike_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model it is a table of thousands of tensors, which would fill memory a thousand times."""
    looked: list[object] = []
    from_json = sharded.TensorSpec.from_json
    monkeypatch.setattr(
        sharded.TensorSpec, "from_json", lambda described: looked.append(described) or from_json(described)
    )
    ranks = ManyAlike()
    state = encode_state({"values": {f"t{number}": torch.ones(3) for number in range(50)}}, sharded=True)
    joined = sharded.join_states(ranks, "saving", {"some": state}, "error")["some"]
    assert len(joined.specs) == len(joined.parts) == len(looked) == 50
    first, second, *_ = ranks.run("saving", lambda: {"files": {}})
    assert first is second
    # To what a rank has written, files are added: each has a report of its own.
    first, second, *_ = gather_reports(ranks, "saving", lambda: RankReport(components={}, files={}))
    first["files"]["more"] = (1, 2)
    assert second["files"] == {}


@pytest.fixture(scope="module")
def outcome(
    run_worker: Callable[..., Worked], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict, dict, Path]:
    directory = tmp_path_factory.mktemp("two_ranks")
    run_worker("two_ranks.py", directory)
    seen = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]
    return seen[0], seen[1], directory / "run"


def test_files_of_each_pattern(outcome: tuple[dict, dict, Path]) -> None:
    first, second, run = outcome
    assert first["files"] == second["files"]
    assert first["files"] == [
        "eval_metrics.json",
        "grouped.group0.json",
        "grouped.group1.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "own.rank0.json",
        "own.rank1.json",
        "rng.rank0.json",
        "rng.rank0.safetensors",
        "rng.rank1.json",
        "rng.rank1.safetensors",
        "shared.json",
        "shared.safetensors",
    ]
    manifest = verify_checkpoint(run / "checkpoint-1", checksums=True)
    assert manifest.world_size == 2
    assert [part.writer for part in manifest.component("own").parts] == [0, 1]
    assert [part.writer for part in manifest.component("model").parts] == [0]


def test_every_rank_gets_its_state_back(outcome: tuple[dict, dict, Path]) -> None:
    for rank, seen in enumerate(outcome[:2]):
        assert (seen["step"], seen["missing"], seen["restored"]) == (1, [], True)
        assert (seen["own"], seen["grouped"]) == (rank, rank)
        assert seen["shared_rank"] == 0
        assert seen["shared_infinite"] is True
        assert seen["shared_tensors"] == {
            "bf16": ["torch.bfloat16", [1], [1.5]],
            "empty": ["torch.float32", [0, 3], []],
            "scalar": ["torch.int64", [], 7],
        }
    assert outcome[0]["after_resume"] == outcome[1]["after_resume"]


@pytest.mark.parametrize(
    ("scenario", "parts", "left"),
    [
        ("rank 1 raises", ["saving checkpoint-2", "rank 1 (", "no space left"], ["checkpoint-1"]),
        ("rank 1 cannot write", ["rank 1 (", "no space left", "own.rank1.safetensors"], ["checkpoint-1"]),
        ("steps differ", ["rank 0 has save of step 2, but rank 1 has save of step 3"], ["checkpoint-1"]),
        ("bad step on one", ["rank 0 (", "step=-2 must be an integer"], ["checkpoint-1"]),
        (
            "rank 1 refuses the state",
            ["component 'shared'", "rank 1 (", "does not like the state"],
            ["checkpoint-1", "checkpoint-2"],
        ),
        ("good again", [], ["checkpoint-1", "checkpoint-2", "checkpoint-3"]),
        (
            "declarations differ",
            ["component 'x' is REPLICATED on another rank and GLOBAL on rank 1"],
            ["checkpoint-1", "checkpoint-2", "checkpoint-3"],
        ),
        (
            "names collide",
            ["component 'x': ranks 0 and 1 hold different values under the name weight"],
            ["checkpoint-1", "checkpoint-2", "checkpoint-3"],
        ),
        (
            "groups joined",
            ["component 'grouped' was saved PER_GROUP", "the state of the group of rank 1 would be lost"],
            ["checkpoint-1", "checkpoint-2", "checkpoint-3"],
        ),
        (
            "damage named",
            ["own.rank1.json is damaged"],
            ["checkpoint-1", "checkpoint-2", "checkpoint-3"],
        ),
        ("rank 1 cannot read", ["Permission denied"], ["checkpoint-1", "checkpoint-2", "checkpoint-3"]),
        ("damage passed over", [], ["checkpoint-1", "checkpoint-2", "checkpoint-3"]),
    ],
)
def test_all_ranks_agree(
    outcome: tuple[dict, dict, Path], scenario: str, parts: list[str], left: list[str]
) -> None:
    first, second = outcome[0][scenario], outcome[1][scenario]
    assert first["message"] == second["message"]
    if parts:
        assert all(part in first["message"] for part in parts), first["message"]
    else:
        assert first["message"] is None
    assert max(first["seconds"], second["seconds"]) < 30
    assert first["left"] == left


def test_a_rank_that_cannot_read_leaves_no_file_in_suspicion(outcome: tuple[dict, dict, Path]) -> None:
    assert "damaged" not in outcome[0]["rank 1 cannot read"]["message"]


def test_a_file_deleted_for_one_rank_is_fresh_state_for_both(outcome: tuple[dict, dict, Path]) -> None:
    for seen in outcome[:2]:
        assert seen["loaded instead"] == [1]
        assert seen["one rank's file deleted"] == ["own"]


def test_a_rank_that_does_not_come(outcome: tuple[dict, dict, Path]) -> None:
    first, second = outcome[0], outcome[1]
    assert f"no answer within {SHORT_TIMEOUT:g} s from rank 1 (" in first["late message"]
    assert SHORT_TIMEOUT <= first["late seconds"] < 30
    assert "late message" in second
    for seen in (first, second):
        assert "can no longer agree" in seen["afterwards"]
        assert seen["late left"] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_another_world_size_is_an_error_until_the_files_are_deleted(
    outcome: tuple[dict, dict, Path], counter
) -> None:
    path = outcome[2] / "checkpoint-2"
    own = StateComponent(key="own", stateful=counter(), sharing_pattern=SharingPattern.PER_RANK)
    manager = CheckpointManager(
        CheckpointConfig(output_dir=outcome[2]),
        dist=StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider([own]),
    )
    with pytest.raises(
        CheckpointError, match=r"by 2 ranks and cannot be loaded by 1\. Use 2 ranks, or delete"
    ):
        manager.load_checkpoint(path)
    for rank in range(2):
        (path / f"own.rank{rank}.json").unlink()
    assert manager.load_checkpoint(path).missing == ("own",)


def test_many_ranks_need_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no process group"):
        CheckpointManager(
            CheckpointConfig(output_dir=tmp_path),
            dist=StaticDistributedEnvironment(world_size=2, local_world_size=2),
            stateful_provider=StaticStatefulProvider([]),
        )
