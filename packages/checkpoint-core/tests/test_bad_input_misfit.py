"""State that does not fit its object, or is not there: an error, and no object changes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    ModelState,
    OptimizerState,
    SharingPattern,
    StateComponent,
    Stateful,
)

REPLICATED, GLOBAL, SHARDED = SharingPattern.REPLICATED, SharingPattern.GLOBAL, SharingPattern.SHARDED


def component(key: str, stateful: Stateful, pattern: SharingPattern, **fields: bool) -> StateComponent:
    return StateComponent(key=key, stateful=stateful, sharing_pattern=pattern, **fields)


def manager(directory: Path, *components: StateComponent) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(output_dir=directory), stateful_provider=components)


@pytest.mark.parametrize(
    ("key", "reason"), [("model", "model.safetensors was deleted"), ("extra", "saved without")]
)
def test_missing_components_that_are_required(job, counter, key: str, reason: str) -> None:
    path = job().manager.save_checkpoint(1)
    (path / "model.safetensors").unlink()
    other = job(seed=1)
    if key == "extra":
        other.components[:] = [component("extra", counter(), GLOBAL, required=True)]
    before = other.model[0].weight.tolist()
    with pytest.raises(CheckpointError) as caught:
        other.manager.load_checkpoint()
    for part in (str(path), f"required component '{key}'", reason, "Restore its files", "required=False"):
        assert part in str(caught.value)
    assert other.model[0].weight.tolist() == before


@pytest.mark.parametrize("pattern", [REPLICATED, GLOBAL, SHARDED])
@pytest.mark.parametrize("case", ["shape", "names", "optimizer shape", "optimizer groups"])
def test_what_does_not_fit_changes_nothing(
    counter, tmp_path: Path, pattern: SharingPattern, case: str
) -> None:
    """Neither in the object itself, nor in the components before it."""

    def make(width: int, name: str, rates: list[float]) -> tuple[list[StateComponent], Callable[[], str]]:
        model = nn.ModuleDict({"first": nn.Linear(2, 2), name: nn.Linear(2, width)})
        parameters = list(model.parameters())
        groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)]
        if len(set(rates)) == 1:
            groups = [{"params": parameters, "lr": rates[0]}]
        optimizer = torch.optim.AdamW(groups)
        sum(layer(torch.ones(1, 2)).sum() for layer in model.values()).backward()
        optimizer.step()
        before, after = counter(int(rates[0] * 10)), counter(int(rates[0] * 10))
        optimizer_state = OptimizerState(optimizer, model)
        components = [
            component("before", before, pattern),
            component("model", ModelState(model), pattern),
            component("optimizer", optimizer_state, pattern),
            component("after", after, GLOBAL),
        ]
        return components, lambda: repr(
            [before.value, after.value, model.state_dict(), optimizer.state_dict()]
        )

    saved, _ = make(3, "second", [0.1, 0.1, 0.2, 0.2])
    path = manager(tmp_path, *saved).save_checkpoint(1)
    other = {
        "shape": (4, "second", [0.5, 0.5, 0.3, 0.3]),
        "names": (3, "third", [0.5, 0.5, 0.3, 0.3]),
        "optimizer shape": (4, "second", [0.5, 0.5, 0.3, 0.3]),
        "optimizer groups": (3, "second", [0.5, 0.5, 0.5, 0.5]),
    }[case]
    components, state = make(*other)
    if case == "optimizer shape":
        components = [each for each in components if each.key != "model"]
    before = state()
    with pytest.raises(CheckpointError) as caught:
        manager(tmp_path, *components).load_checkpoint()
    message = str(caught.value)
    assert str(path) in message
    for part in {
        "shape": [
            "component 'model'",
            "second.weight ([3, 2] in the file, [4, 2] in the model)",
            "Build the model",
        ],
        "names": ["component 'model'", "missing: third.weight", "unexpected: second.", "Build the model"],
        "optimizer shape": [
            "component 'optimizer'",
            "second.weight has shape [3, 2], but the parameter has [4, 2]",
        ],
        "optimizer groups": ["component 'optimizer'", "different lr", "Group the parameters as when"],
    }[case]:
        assert part in message
    assert state() == before
