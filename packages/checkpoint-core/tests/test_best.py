"""Best checkpoints: ranked from the disk, exempt from rotation, and the same after a restart."""

import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint_core import (
    BestCheckpoint,
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
)
from checkpoint_core.config import lower_is_better
from checkpoint_core.files import FileRecord
from checkpoint_core.manifest import Manifest, read_manifest
from checkpoint_core.retention import best_checkpoints, best_summary, rotate
from dist_env import StaticDistributedEnvironment

LOSS = "eval_loss"


class Number:
    """A state of one number."""

    def state_dict(self) -> dict[str, object]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing here depends on the number."""


def make_manager(run: Path, dist: StaticDistributedEnvironment | None = None, **config: object):
    component = StateComponent(key="c", stateful=Number(), sharing_pattern=SharingPattern.GLOBAL)
    return CheckpointManager(
        CheckpointConfig(output_dir=run, **config),
        dist=dist or StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider([component]),
    )


def save_losses(manager: CheckpointManager, losses: dict[int, float]) -> None:
    for step, loss in losses.items():
        manager.save_checkpoint(step, metrics={LOSS: loss})


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in run.iterdir())


def ranked(run: Path, metric: str = LOSS, greater_is_better: bool | None = None, **options: int) -> list[int]:
    """The steps of the run that wrote the newest checkpoint, best first."""
    run_id = read_manifest(run / f"checkpoint-{max(steps(run))}").run_id
    found = best_checkpoints(
        run, run_id=run_id, metric=metric, greater_is_better=greater_is_better, **options
    )
    return [best.step for best in found]


@pytest.mark.parametrize(
    ("metric", "greater_is_better", "lower"),
    [
        ("eval_loss", None, True),
        ("Perplexity", None, True),
        ("eval_loss", True, False),
        ("accuracy", True, False),
        ("accuracy", False, True),
    ],
)
def test_direction(metric: str, greater_is_better: bool | None, lower: bool) -> None:
    assert lower_is_better(metric, greater_is_better) is lower


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"best_metric": "accuracy"}, ["best_metric='accuracy'", "Set greater_is_better to True or False"]),
        ({"preserve_n_best": 2}, ["preserve_n_best=2", "best_metric is None", "Set best_metric"]),
        ({"greater_is_better": False}, ["greater_is_better=False", "best_metric is None", "Set best_metric"]),
        ({"best_metric": LOSS, "preserve_n_best": -1}, ["preserve_n_best=-1", "an integer of 0 or more"]),
        ({"best_metric": LOSS, "preserve_n_best": True}, ["preserve_n_best=True", "an integer"]),
        ({"best_metric": LOSS, "greater_is_better": "no"}, ["greater_is_better='no'", "True, False or None"]),
        ({"best_metric": ""}, ["best_metric=''", "name of a metric"]),
        ({"best_metric": 3}, ["best_metric=3", "name of a metric"]),
    ],
)
def test_settings_are_checked(tmp_path: Path, settings: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        CheckpointConfig(output_dir=tmp_path, **settings)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_ranking(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, save_total_limit=None)
    save_losses(manager, {1: 2.0, 2: math.inf, 3: 1.0, 4: math.nan, 5: 1.0, 6: -math.inf, 7: 3, 8: 10**400})
    manager.save_checkpoint(9)
    manager.save_checkpoint(10, metrics={"accuracy": 0.1})
    assert ranked(tmp_path) == [6, 3, 5, 1, 7, 2, 8]
    assert ranked(tmp_path, greater_is_better=True) == [2, 8, 7, 1, 3, 5, 6]
    assert ranked(tmp_path, count=2) == [6, 3]
    assert ranked(tmp_path, "accuracy", True) == [10]
    assert ranked(tmp_path, "perplexity") == []
    with pytest.raises(CheckpointError, match="greater_is_better=None"):
        ranked(tmp_path, "accuracy")


def test_only_whole_checkpoints_of_the_run_are_ranked(tmp_path: Path) -> None:
    save_losses(make_manager(tmp_path), {1: 0.0})
    manager = make_manager(tmp_path, save_total_limit=None)
    save_losses(manager, {2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0, 6: 5.0})
    (tmp_path / "checkpoint-2" / "c.json").write_text("{")
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-004")
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-40")
    run_id = read_manifest(tmp_path / "checkpoint-6").run_id
    found = best_checkpoints(tmp_path, run_id=run_id, metric=LOSS, greater_is_better=None)
    assert found == [
        BestCheckpoint(tmp_path / f"checkpoint-{step}", step, float(step - 1)) for step in (4, 5, 6)
    ]
    assert best_checkpoints(tmp_path / "none", run_id=run_id, metric=LOSS, greater_is_better=None) == []


def test_the_newest_two_and_the_best_remain(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, save_total_limit=2, best_metric=LOSS, preserve_n_best=1)
    save_losses(manager, {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0})
    assert steps(tmp_path) == [2, 4, 5]
    assert manager.best_checkpoints() == (BestCheckpoint(tmp_path / "checkpoint-2", 2, 1.0),)


def test_protected_ones_do_not_count_against_the_limit(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, save_total_limit=1, best_metric=LOSS, preserve_n_best=3)
    save_losses(manager, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0})
    assert steps(tmp_path) == [1, 2, 3, 5]
    # The newest is one of the best now: the place in the limit is the newest of the others'.
    save_losses(manager, {6: 0.0})
    assert steps(tmp_path) == [1, 2, 5, 6]


def test_the_ranking_survives_a_restart(tmp_path: Path) -> None:
    settings = {"save_total_limit": 1, "best_metric": LOSS, "preserve_n_best": 2}
    first = make_manager(tmp_path, **settings)
    save_losses(first, {1: 1.0, 2: 5.0, 3: 2.0, 4: 9.0})
    before = first.best_checkpoints()
    assert [best.step for best in before] == [1, 3]
    second = make_manager(tmp_path, **settings)
    assert second.best_checkpoints() == ()  # Not this run's before it is resumed.
    second.load_checkpoint()
    assert second.best_checkpoints() == before
    assert second.best_summary() == first.best_summary()
    save_losses(second, {5: 1.5, 6: 8.0})
    assert [best.step for best in second.best_checkpoints()] == [1, 5]
    assert steps(tmp_path) == [1, 4, 5, 6]  # 4 was resumed from, 6 is the newest.


@pytest.mark.parametrize("named", [True, False])
def test_the_one_resumed_from_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    save_losses(make_manager(run, save_total_limit=None), {1: 1.0, 2: 2.0, 3: 3.0})
    manager = make_manager(run, save_total_limit=1)
    manager.load_checkpoint(tmp_path / "run" / "checkpoint-2" if named else None)
    for step in (4, 5, 6):
        manager.save_checkpoint(step)
        assert steps(run) == [2 if named else 3, step]
    after = make_manager(run, save_total_limit=1)
    after.load_checkpoint()
    after.save_checkpoint(7)
    assert steps(run) == [6, 7]


def test_rotation_leaves_links_and_copies_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    manager = make_manager(run, save_total_limit=1)
    manager.save_checkpoint(1)
    shutil.copytree(run / "checkpoint-1", run / "checkpoint-01")
    (run / "checkpoint-1").rename(tmp_path / "elsewhere")
    (run / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    manager.save_checkpoint(2)
    manager.save_checkpoint(3)
    left = ["checkpoint-01", "checkpoint-1", "checkpoint-3"]
    assert sorted(path.name for path in run.iterdir()) == left
    assert read_manifest(tmp_path / "elsewhere").step == 1


def test_paths_may_be_named_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    make_manager(run, save_total_limit=None).save_checkpoint(0)
    manager = make_manager(run, save_total_limit=None)
    for step in range(1, 6):
        manager.save_checkpoint(step)
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    removed = rotate(
        run,
        limit=1,
        run_id=read_manifest(run / "checkpoint-1").run_id,
        newest=Path("run/checkpoint-4"),
        protected={tmp_path / "link" / "checkpoint-2", Path("run/../run/checkpoint-3"), Path("nowhere")},
    )
    assert removed == [run / "checkpoint-1", run / "checkpoint-5"]
    assert steps(run) == [0, 2, 3, 4]


def test_nothing_is_deleted_while_the_best_cannot_be_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(tmp_path, save_total_limit=1, best_metric=LOSS, preserve_n_best=1)
    save_losses(manager, {1: 1.0, 2: 2.0})
    # The operating system refuses to look at a file with a name of this length.
    odd = Manifest(
        step=0,
        world_size=1,
        run_id="x",
        save_id="y",
        components=[],
        files={"n" * 300: FileRecord(1, "0" * 16)},
    )
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "manifest.json").write_bytes(odd.to_bytes())
    with caplog.at_level(logging.WARNING):
        save_losses(manager, {3: 3.0})
    assert "nothing is rotated after checkpoint-3" in caplog.text
    assert steps(tmp_path) == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match="ranking the checkpoints: File name too long"):
        _ = manager.best_checkpoints()
    (tmp_path / "checkpoint-0").rename(tmp_path.parent / f"{tmp_path.name}-odd")
    save_losses(manager, {4: 4.0})
    assert steps(tmp_path) == [1, 4]


def test_metrics_without_the_best_metric_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(tmp_path, best_metric=LOSS, preserve_n_best=1)
    with caplog.at_level(logging.WARNING):
        manager.save_checkpoint(1)
        save_losses(manager, {2: math.nan})
        assert not caplog.records
        manager.save_checkpoint(3, metrics={"eval_tokens": 5, "accuracy": 0.5})
        manager.save_checkpoint(4, metrics={"accuracy": 0.5})
    (record,) = caplog.records
    message = record.getMessage()
    assert "best_metric='eval_loss' is not among the metrics of checkpoint-3" in message
    assert "accuracy, eval_tokens" in message
    assert manager.best_checkpoints() == ()


def test_without_a_number_to_keep_the_best_is_still_told(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, save_total_limit=2, best_metric=LOSS)
    save_losses(manager, {1: 1.0, 2: 3.0, 3: 2.0})
    assert steps(tmp_path) == [2, 3]
    assert [best.step for best in manager.best_checkpoints()] == [3]


def test_summary(tmp_path: Path) -> None:
    bests = [BestCheckpoint(Path("run/checkpoint-100"), 100, 0.5), BestCheckpoint(Path("x"), 9, 1 / 3)]
    assert best_summary(bests, "accuracy", True) == "\n".join(
        [
            "Best checkpoints by accuracy (greater is better):",
            "rank  step  accuracy  checkpoint",
            "   1   100       0.5  run/checkpoint-100",
            "   2     9  0.333333  x",
        ]
    )
    assert "(lower is better)" in best_summary(bests, LOSS)
    assert best_summary([], LOSS) == (
        "No best checkpoint: none of this run holds a value of eval_loss that is a number."
    )
    assert make_manager(tmp_path).best_summary() == "No best checkpoint: best_metric is not set."
    assert make_manager(tmp_path).best_checkpoints() == ()


def test_every_rank_sees_what_rank_0_sees(run_worker: Callable[..., object], tmp_path: Path) -> None:
    run_worker(Path(__file__), tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert [(step, value) for _, step, value in first["best"]] == [(3, -math.inf), (1, 1.0)]
    assert str(tmp_path / "run" / "checkpoint-3") in first["summary"]
    assert steps(tmp_path / "run") == [1, 3, 5]
    assert list((tmp_path / "empty").iterdir()) == []


def run_rank(rank: int, directory: Path) -> None:
    """Save on two ranks, then ask for the best where rank 1 looks at another directory."""
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    env = StaticDistributedEnvironment(
        rank=rank, local_rank=rank, world_size=2, local_world_size=2, backend="gloo"
    )
    settings = {"save_total_limit": 1, "best_metric": LOSS, "preserve_n_best": 2, "timeout_seconds": 60.0}
    with make_manager(directory / "run", env, **settings) as manager:
        save_losses(manager, {1: 1.0, 2: 2.0, 3: -math.inf, 4: 3.0, 5: math.nan})
    (directory / "empty").mkdir(exist_ok=True)
    with make_manager(directory / ("empty" if rank else "run"), env, **settings) as manager:
        manager.load_checkpoint(directory / "run" / "checkpoint-5")
        best = [(str(best.path), best.step, best.value) for best in manager.best_checkpoints()]
        seen = {"best": best, "summary": manager.best_summary()}
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    child = os.fork()
    run_rank(0 if child else 1, directory)
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"rank 1 ended with status {status}")


if __name__ == "__main__":
    main()
