"""Whatever a run does, the newest and the best checkpoints stay, and nothing foreign is touched."""

import math
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    find_latest_checkpoint,
)
from checkpoint_core.directory import checkpoint_directories
from dist_env import StaticDistributedEnvironment

EXAMPLES = 6
STEPS_PER_EXAMPLE = 15
# save_total_limit and preserve_n_best.
SETTINGS = [(None, 2), (1, 0), (1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]
NOBODY = 0
Tree = dict[str, bytes]

VALUES = st.one_of(
    st.sampled_from([1.0, 2.0, math.inf, -math.inf]),
    st.floats(0, 4),
    st.sampled_from([math.nan, None, "other"]),
)
"""A value of the metric; None saves without metrics, a text is the name of another metric."""

INCREMENTS = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0])
"""Steps of training before a save; after none the same step is saved again."""

OTHERS = [
    "another run",
    "another run",
    "another run",
    "damaged manifest.json",
    "damaged c.json",
    "checkpoint-{}",
    "checkpoint-{}.txt",
    ".tmp-checkpoint-{}",
    "checkpoint-best",
]
"""What other programs and users put into the directory."""


class Number:
    """A state of one number, which tells checkpoints apart."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = int(str(state["value"]))


@dataclass
class Known:
    """What the test knows of a committed checkpoint, without looking at the disk."""

    run: int
    metric: float | None
    content: Tree
    number: int


def tree(path: Path) -> Tree:
    """Every file below a path, and the path itself if it is one."""
    if path.is_file():
        return {"": path.read_bytes()}
    files = {str(item.relative_to(path)): item.read_bytes() for item in path.rglob("*") if item.is_file()}
    return {".": b"", **files}


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


class Runs(RuleBasedStateMachine):
    """Several runs share one directory; one at a time is under way."""

    directory: ClassVar[Path]
    limit: ClassVar[int | None]
    preserve: ClassVar[int]
    operations: ClassVar[Counter[str]]
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.root = self.directory / f"sequence-{self.operations['sequence']}"
        self.operations["sequence"] += 1
        self.root.mkdir()
        self.number = Number()
        self.known: dict[int, Known] = {}
        self.planted: dict[str, Tree] = {}
        # Whose they were, as far as they still tell.
        self.damaged: dict[int, int] = {}
        self.runs = 0
        self.step = 0
        self.metrics: dict[str, float] | None = None
        # Values of each run by step, deleted checkpoints included; None once one was replaced or damaged.
        self.history: dict[int, dict[int, float] | None] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    # What the user does.

    @initialize(greater=st.booleans())
    def begin(self, greater: bool) -> None:
        self.greater = greater
        self.start()

    def start(self) -> None:
        """A process begins."""
        self.manager = self.make_manager(self.number)
        self.run = self.new_run()
        self.resumed: int | None = None
        self.metrics = None

    def make_manager(self, number: Number) -> CheckpointManager:
        component = StateComponent(key="c", stateful=number, sharing_pattern=SharingPattern.GLOBAL)
        config = CheckpointConfig(
            output_dir=self.root,
            save_total_limit=self.limit,
            best_metric="score",
            greater_is_better=self.greater,
            preserve_n_best=self.preserve,
        )
        return CheckpointManager(
            config, dist=StaticDistributedEnvironment(), stateful_provider=StaticStatefulProvider([component])
        )

    def new_run(self) -> int:
        self.runs += 1
        self.history[self.runs] = {}
        return self.runs

    @rule(saves=st.lists(st.tuples(INCREMENTS, VALUES), min_size=1, max_size=5))
    def train(self, saves: list[tuple[int, float | str | None]]) -> None:
        for increment, value in saves:
            self.evaluate(value)
            self.save_at(self.step + increment)

    def evaluate(self, value: float | str | None) -> None:
        if isinstance(value, str):
            self.count("evaluate something else")
            self.metrics = {value: 1.0}
        elif value is not None:
            self.count("evaluate")
            self.metrics = {"score": value, "tokens": 7.0}

    def save_at(self, step: int) -> None:
        while step in self.damaged:  # A save would replace it.
            step += 1
        if reason := self.why_refused(step, self.run):
            self.count("save refused")
            with pytest.raises(CheckpointError, match=reason):
                self.manager.save_checkpoint(step, metrics=self.metrics)
            self.step = step  # Training continues past it.
            return
        self.count("save without metrics" if self.metrics is None else "save with metrics")
        self.number.value += 1
        path = self.manager.save_checkpoint(step, metrics=self.metrics)
        self.remember(path, self.run, self.metrics, self.number.value)
        self.metrics = None
        self.step = step
        self.check_rotation(step)

    def why_refused(self, step: int, run: int) -> str | None:
        """What a save says when something foreign is in its way, or would be resumed instead of it."""
        owners = {number: known.run for number, known in self.known.items()} | self.damaged
        if step not in owners and f"checkpoint-{step}" in self.planted:
            return "Move it away"
        if any(number >= step and owner not in (run, NOBODY) for number, owner in owners.items()):
            return "written by another run"
        return None

    def remember(self, path: Path, run: int, metrics: dict[str, float] | None, number: int) -> None:
        step = step_of(path)
        value = None if metrics is None else metrics.get("score")
        history = self.history[run]
        if history is not None and step in self.known:
            self.history[run] = None
        elif history is not None and value is not None and not math.isnan(value):
            history[step] = value
        self.known[step] = Known(run, value, tree(path), number)

    @rule(data=st.data(), way=st.sampled_from(["newest", "newest", "named", "same process", "another run"]))
    def restart(self, data: st.DataObject, way: str) -> None:
        if way == "another run":
            self.count("begin another run")
            self.start()
        elif way == "newest" or not self.known:
            self.count("restart")
            self.start()
            there = [path for _, path in checkpoint_directories(self.root)]
            if not self.known and any((path / "manifest.json").exists() for path in there):
                with pytest.raises(CheckpointError, match=r"none can be used.* to begin afresh"):
                    self.manager.load_checkpoint()
                return
            loaded = self.manager.load_checkpoint()
            assert (loaded.step if loaded else None) == max(self.known, default=None)
            self.resume(None if loaded is None else loaded.step)
        else:
            step = data.draw(st.sampled_from(sorted(self.known)))
            self.go_back(step, fresh_process=way == "named")

    def go_back(self, step: int, fresh_process: bool) -> None:
        self.count("restart from a named one" if fresh_process else "go back")
        if fresh_process:
            self.start()
        loaded = self.manager.load_checkpoint(self.root / f"checkpoint-{step}")
        assert loaded is not None
        assert loaded.step == step
        self.resume(step)

    def resume(self, step: int | None) -> None:
        if step is not None:
            self.run, self.step, self.resumed = self.known[step].run, step, step
            assert self.number.value == self.known[step].number

    # What others do.

    @rule(ahead=st.integers(-2, 5), what=st.sampled_from(OTHERS), data=st.data())
    def somebody_else(self, ahead: int, what: str, data: st.DataObject) -> None:
        step, own = max(0, self.step + ahead), sorted(self.own())
        if what.startswith("damaged"):
            if own:
                self.damage(data.draw(st.sampled_from(own)), what.removeprefix("damaged "))
        elif what == "another run":
            self.another_run_saves(step, data.draw(st.sampled_from([-math.inf, math.inf, 1.0])))
        else:
            self.plant(what.format(step))

    def another_run_saves(self, step: int, value: float) -> None:
        if (self.root / f"checkpoint-{step}").exists():
            return
        run, other = self.new_run(), Number()
        other.value = 1000 + step
        manager, metrics = self.make_manager(other), {"score": value}
        if reason := self.why_refused(step, run):
            self.count("another run's save refused")
            with pytest.raises(CheckpointError, match=reason):
                manager.save_checkpoint(step, metrics=metrics)
            return
        self.count("another run saves")
        self.remember(manager.save_checkpoint(step, metrics=metrics), run, metrics, other.value)

    def plant(self, name: str) -> None:
        path = self.root / name
        if path.exists():
            return
        self.count("plant a foreign file or directory")
        if path.suffix:
            path.write_text("notes")
        else:
            path.mkdir()
            (path / "pytorch_model.bin").write_text(name)
            (path / "c.json").write_text("{")
        self.planted[name] = tree(path)

    def damage(self, step: int, file: str) -> None:
        """A checkpoint of this run loses the end of a file."""
        self.count("damage a checkpoint of this run")
        path = self.root / f"checkpoint-{step}"
        (path / file).write_bytes((path / file).read_bytes()[:-3])
        self.planted[path.name] = tree(path)
        self.damaged[step] = NOBODY if file == "manifest.json" else self.run
        del self.known[step]
        self.history[self.run] = None

    # What must hold.

    def best(self, steps: set[int]) -> list[int]:
        """Best first, by the definition: a number, the better value, then the earlier step."""

        def key(step: int) -> tuple[float, int]:
            value = self.known[step].metric
            assert value is not None
            return (-value if self.greater else value, step)

        values = {step: self.known[step].metric for step in steps}
        numbers = [step for step, value in values.items() if value is not None and not math.isnan(value)]
        return sorted(numbers, key=key)

    def own(self) -> set[int]:
        return {step for step, known in self.known.items() if known.run == self.run}

    def present(self) -> set[int]:
        names = {path.name for path in self.root.iterdir()} - set(self.planted)
        return {int(name.removeprefix("checkpoint-")) for name in names}

    def check_rotation(self, newest: int) -> None:
        """After a save: what is left, and that no more was deleted than had to be."""
        before, left = self.own(), self.present() & self.own()
        assert left == self.present() - (set(self.known) - before), "another run's checkpoint is gone"
        protected = {*self.best(before)[: self.preserve], self.resumed} & before
        assert protected | {newest} <= left
        others = left - protected
        deleted = before - left
        if self.limit is None:
            assert not deleted
        else:
            assert len(others) <= self.limit
            assert not deleted or len(others) == self.limit

        def last_to_go(step: int) -> tuple[bool, int]:
            """Steps beyond the newest are of a branch that was left; they go first, from the oldest on."""
            return step <= newest, step

        kept = [last_to_go(step) for step in others - {newest}]
        assert max(map(last_to_go, deleted), default=(False, -1)) < min(kept, default=(True, math.inf))
        self.seen["deleted"] += len(deleted)
        self.seen["a best one outside the limit"] += len(
            protected & set(sorted(before)[: -(self.limit or 99)])
        )
        self.seen["limit below the protected"] += self.limit is not None and len(protected) > self.limit
        self.seen["at the limit"] += len(others) == self.limit
        for step in deleted:
            del self.known[step]

    @invariant()
    def the_directory_is_as_expected(self) -> None:
        assert self.present() == set(self.known)
        for step, known in self.known.items():
            assert tree(self.root / f"checkpoint-{step}") == known.content, step
        for name, content in self.planted.items():
            assert tree(self.root / name) == content, name
        newest = find_latest_checkpoint(self.root)
        assert (None if newest is None else step_of(newest)) == max(self.known, default=None)

    @invariant()
    def the_best_are_there(self) -> None:
        if not hasattr(self, "manager"):
            return
        ranking = self.best(self.own())[: max(1, self.preserve)]
        bests = self.manager.best_checkpoints()
        assert [best.step for best in bests] == ranking
        assert [best.value for best in bests] == [self.known[step].metric for step in ranking]
        # Of all that the run ever saved.
        history = self.history[self.run]
        if history is not None and self.preserve:
            sign = -1 if self.greater else 1
            ever = sorted(history, key=lambda step: (sign * history[step], step))[: self.preserve]
            assert ever == ranking[: self.preserve]
            self.seen["compared with the whole history"] += len(ever) > 0
        assert self.manager.best_summary().count("\n") == (len(bests) + 1 if bests else 0)

    def count(self, operation: str) -> None:
        self.operations[operation] += 1


def test_rotation_keeps_what_it_must(tmp_path: Path) -> None:
    operations: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for limit, preserve in SETTINGS:
        names = {
            "directory": tmp_path,
            "limit": limit,
            "preserve": preserve,
            "operations": operations,
            "seen": seen,
        }
        run_state_machine_as_test(
            type(f"Limit{limit}Best{preserve}", (Runs,), names),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS_PER_EXAMPLE,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )
    sequences = operations.pop("sequence")
    print(f"{operations.total()} operations in {sequences} sequences:")
    for name, count in [*sorted(operations.items()), *sorted(seen.items())]:
        print(f"{count:6d}  {name}")
    # The sequences must have come to where it matters, or nothing was tested.
    assert operations.total() > 5 * sequences
    for name in ("deleted", "a best one outside the limit", "limit below the protected"):
        assert seen[name] > 0, name
    assert seen["compared with the whole history"] > 50
