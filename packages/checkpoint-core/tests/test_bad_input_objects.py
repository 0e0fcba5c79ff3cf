"""Objects that cannot be saved, or not so: state, metrics and preprocessors. Older checkpoints stay."""

import os
import time
from collections import UserDict, defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    ModelState,
    SharingPattern,
    StateComponent,
)
from checkpoint_core.manifest import verify_checkpoint

P = SharingPattern


class Held:
    """State that a test gives: a value, or a function that returns it."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return self.value() if callable(self.value) else self.value  # type: ignore[return-value]

    def load_state_dict(self, state: dict[str, object]) -> None:
        if state.get("refuse"):
            raise KeyError("momentum")
        self.value = state


class Preprocessor:
    """A tokenizer that does what a test wants."""

    def __init__(self, action: Callable[[Path], object]) -> None:
        self.action = action

    def save_pretrained(self, directory: str) -> None:
        self.action(Path(directory))


class Color(Enum):
    RED = 1


class Subclass(torch.Tensor):
    """A tensor of somebody else's."""


def cut(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor whose storage has another size since."""
    tensor.untyped_storage().resize_(size)
    return tensor


class Configured(nn.Linear):
    """A model with a configuration, of which config.json is written."""

    config: ClassVar = {"hidden_size": 2}


class Run:
    """A manager over one held state, with step 1 saved."""

    def __init__(self, directory: Path, *components: StateComponent, **settings: bool) -> None:
        self.directory = directory
        self.held = Held({"n": 1})
        held = StateComponent(key="held", stateful=self.held, sharing_pattern=P.REPLICATED)
        config = CheckpointConfig(output_dir=directory, **settings)  # type: ignore[arg-type]
        self.manager = CheckpointManager(config, stateful_provider=[held, *components])
        self.manager.save_checkpoint(1)
        self.manager.wait()

    def fails(self, action: Callable[[], object], *parts: str) -> None:
        """An action raises an error with all the parts, and step 1 is all there is, whole."""
        with pytest.raises(CheckpointError) as caught:
            action()
        for part in parts:
            assert part in str(caught.value)
        assert [path.name for path in self.directory.iterdir()] == ["checkpoint-1"]
        verify_checkpoint(self.directory / "checkpoint-1", checksums=True)
        self.held.value = {}
        assert self.manager.load_checkpoint().step == 1  # type: ignore[union-attr]
        assert self.held.value == {"n": 1}


STATES: dict[str, tuple[object, str]] = {
    "set": ({"a": {1}}, "the state at a is a builtins.set"),
    "enum": ({"a": [0, Color.RED]}, "the state at a.1 is a"),
    "numpy scalar": ({"a": numpy.float32(1)}, "the state at a is a numpy.float32"),
    "numpy array": ({"a": numpy.ones(2)}, "the state at a is a numpy.ndarray"),
    "function": ({"a": {"b": len}}, "the state at a.b is a builtins.builtin_function_or_method"),
    "module": ({"a": nn.Linear(1, 1)}, "the state at a is a torch.nn.modules.linear.Linear"),
    "default dict": ({"a": defaultdict(int)}, "the state at a is a collections.defaultdict"),
    "sparse": (
        {"a": torch.eye(2).to_sparse()},
        "the state at a is sparse or quantized. Convert it to a dense",
    ),
    "nested": (lambda: {"a": torch.nested.nested_tensor([torch.ones(2)])}, "the state at a is a nested"),
    "freed": ({"a": cut(torch.ones(4), 0)}, "its storage has 0 bytes, and its values need 16"),
    "cut": ({"a": cut(torch.ones(6)[1::2], 16)}, "its storage has 16 bytes, and its values need 24"),
    "meta": ({"a": torch.ones(2, device="meta")}, "the state at a is on the meta device and has no values"),
    "subclass": ({"a": torch.ones(2).as_subclass(Subclass)}, "the state at a is a tensor subclass Subclass"),
    "complex128": ({"a": torch.ones(2, dtype=torch.complex128)}, "tensor a has dtype torch.complex128"),
    "list": ([1, 2], "Held.state_dict() returned a list, not a dict"),
    "none": (None, "Held.state_dict() returned a NoneType, not a dict"),
    "user dict": (UserDict(a=1), "Held.state_dict() returned a UserDict, not a dict"),
    "tensor": (torch.ones(2), "Held.state_dict() returned a Tensor, not a dict"),
    "raises": (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    "raises a file": (lambda: Path("/nowhere/x").read_text(), "No such file or directory: /nowhere/x"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", STATES)
def test_state_that_cannot_be_stored(tmp_path: Path, case: str) -> None:
    value, part = STATES[case]
    run = Run(tmp_path)
    run.held.value = value
    run.fails(lambda: run.manager.save_checkpoint(2), "saving checkpoint-2: ", "component 'held'", part)


def test_an_asynchronous_save_refuses_state_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, async_save=True)
    for value, part in (STATES["set"], STATES["freed"]):
        run.held.value = value
        run.fails(lambda: run.manager.save_checkpoint(2), "component 'held'", part)


@pytest.mark.parametrize(
    ("metrics", "part"),
    [
        ({"a": True}, "metrics['a'] is a bool"),
        ({"a": "1"}, "metrics['a'] is a str"),
        ({"a": None}, "metrics['a'] is a NoneType"),
        ({"a": {"b": 1.0}}, "metrics['a'] is a dict"),
        ({"a": numpy.float32(1)}, "metrics['a'] is a float32, not an int or a float. Use float(value)"),
        ({1: 2.0}, "metrics has the key 1, which is not text. Use str(key)"),
        ([("a", 1.0)], "is a list. Give a dict of numbers by name"),
    ],
)
def test_metrics_that_cannot_be_stored(tmp_path: Path, metrics: object, part: str) -> None:
    run = Run(tmp_path)
    run.fails(lambda: run.manager.save_checkpoint(2, metrics=metrics), "saving checkpoint-2: metrics", part)  # type: ignore[arg-type]


def model(pattern: SharingPattern) -> StateComponent:
    return StateComponent(key="model", stateful=ModelState(Configured(2, 2)), sharing_pattern=pattern)


@pytest.mark.parametrize("pattern", [P.REPLICATED, P.SHARDED])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "held.json", "eval_metrics.json", "manifest.json"]
)
def test_a_preprocessor_cannot_replace_our_files(tmp_path: Path, pattern: SharingPattern, name: str) -> None:
    """Whoever writes first: none is overwritten, and what is committed has its checksums."""
    run = Run(tmp_path, model(pattern))
    run.manager._preprocessor = Preprocessor(lambda directory: (directory / name).write_text("{}"))
    run.fails(
        lambda: run.manager.save_checkpoint(2, metrics={"eval_loss": 1.0}),
        f"two parts of the checkpoint want to write {name}",
        "Rename the component key that clashes with another component or with a file of the preprocessor",
    )


def misbehave(directory: Path) -> None:
    raise RuntimeError("the vocabulary is gone")


@pytest.mark.parametrize(
    ("action", "parts"),
    [
        (
            misbehave,
            ["the preprocessor Preprocessor cannot be saved", "RuntimeError: the vocabulary is gone"],
        ),
        (lambda d: (d / "vocab.json").symlink_to("/etc/hostname"), ["'vocab.json'", "no links"]),
        (lambda d: (d / "all").symlink_to("/etc"), ["'all'", "no links"]),
        (lambda d: os.mkfifo(d / "pipe"), ["'pipe'", "plain files"]),
        (lambda d: (d / "a\\b.json").write_text("{}"), ["'a\\\\b.json'", "names without a backslash"]),
        (lambda d: (d / "held.json").mkdir(), ["want to write held.json"]),
        (
            lambda d: (d / "no" / "such" / "x").write_text(""),
            ["cannot be saved", "No such file or directory"],
        ),
    ],
    ids=["raises", "link", "link to directory", "pipe", "backslash", "directory", "file error"],
)
@pytest.mark.parametrize("settings", [{}, {"async_save": True}], ids=["sync", "async"])
def test_preprocessors_that_misbehave(
    tmp_path: Path, action: Callable[[Path], object], parts: list[str], settings: dict[str, bool]
) -> None:
    """In the background too, where the next call raises the error."""
    run = Run(tmp_path, **settings)
    run.manager._preprocessor = Preprocessor(action)

    def save() -> None:
        run.manager.save_checkpoint(2)
        run.manager.wait()

    run.fails(save, "saving checkpoint-2: ", *parts)
    run.manager._preprocessor = None
    save()
    assert run.manager.load_checkpoint().step == 2  # type: ignore[union-attr]


def broken(_: Path) -> None:
    raise OSError("no tokenizer today")


def test_a_save_or_export_does_its_work_before_it_raises_an_earlier_failure(tmp_path: Path) -> None:
    model = StateComponent(key="model", stateful=ModelState(Configured(2, 2)), sharing_pattern=P.REPLICATED)
    run = Run(tmp_path / "run", model, async_save=True)
    for step, call in {2: run.manager.save_checkpoint, 4: run.manager.save_model}.items():
        run.manager._preprocessor = Preprocessor(broken)
        run.manager.save_checkpoint(step)
        while run.manager._worker.pending:
            time.sleep(0.001)
        run.manager._preprocessor = None
        with pytest.raises(CheckpointError, match=rf"saving checkpoint-{step}: .*no tokenizer today"):
            call(3 if step == 2 else tmp_path / "export")  # type: ignore[operator]
        run.manager.wait()
    assert sorted(path.name for path in run.directory.iterdir()) == ["checkpoint-1", "checkpoint-3"]
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_when_the_next_save_fails_too_both_failures_are_told(tmp_path: Path) -> None:
    run = Run(tmp_path, async_save=True)
    run.manager._preprocessor = Preprocessor(broken)
    run.manager.save_checkpoint(2)
    run.held.value = {"a": {1}}
    with pytest.raises(CheckpointError, match=r"saving checkpoint-2: .*no tokenizer today") as caught:
        run.manager.save_checkpoint(3)
    assert "The next call failed as well: saving checkpoint-3" in caught.value.__notes__[-1]
    run.held.value = {}
    run.manager._preprocessor = None
    run.manager.save_checkpoint(4)
    run.manager.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-4"]


def test_a_preprocessor_with_directories_of_its_own(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "templates" / "empty").mkdir(parents=True)
        (directory / "templates" / "held.json").write_text("not ours, so no clash")

    run = Run(tmp_path)
    run.manager._preprocessor = Preprocessor(write)
    path = run.manager.save_checkpoint(2)
    assert "templates/held.json" in verify_checkpoint(path, checksums=True).files
    (path / "templates" / "held.json").write_text("something else, ok no cla")
    with pytest.raises(CheckpointError, match=r"templates/held\.json is damaged"):
        run.manager.load_checkpoint(path)


def test_load_state_dict_that_raises(tmp_path: Path) -> None:
    """What came before it is restored, as the documentation says; the message names how to continue."""
    run = Run(tmp_path)
    run.held.value = {"refuse": True}
    path = run.manager.save_checkpoint(2)
    with pytest.raises(CheckpointError) as caught:
        run.manager.load_checkpoint()
    for part in (
        str(path),
        "component 'held'",
        "Held.load_state_dict() failed (KeyError: 'momentum')",
        "delete held.json",
    ):
        assert part in str(caught.value)
    (path / "held.json").unlink()
    assert run.manager.load_checkpoint().missing == ("held",)  # type: ignore[union-attr]
