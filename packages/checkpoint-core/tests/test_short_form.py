"""`CheckpointManager(directory, {"model": model, ...})`: the wrapper and the sharing follow from the type."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from checkpoint_core import (
    CheckpointError,
    CheckpointManager,
    OptimizerState,
    RNGState,
    SharingPattern,
    StateComponent,
)
from checkpoint_core.components import wrap_state


def made(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=seed + 3),
        "rng": RNGState(),
    }


def test_a_loop_saves_and_loads_what_it_has(tmp_path: Path) -> None:
    state, other = made(0), made(1)
    with CheckpointManager(str(tmp_path), state) as manager:
        saved = manager.save(7)
        drawn = torch.rand(3)
    assert saved == tmp_path / "checkpoint-7"
    with CheckpointManager(tmp_path, other) as manager:
        assert manager.load().step == 7
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(other["model"].weight, state["model"].weight)
    assert other["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"]
    moments = [each["optimizer"].state[each["model"].weight]["exp_avg"] for each in (state, other)]
    assert torch.equal(*moments)
    assert other["scheduler"].total_iters == 3


def test_a_component_stays_as_it_is(counter: Callable[..., Any]) -> None:
    mine = StateComponent(key="mine", stateful=counter(), sharing_pattern=SharingPattern.PER_RANK)
    assert wrap_state({"mine": mine, "count": counter()}, 1)[0] is mine
    with pytest.raises(CheckpointError, match="the StateComponent under 'other' has the key 'mine'"):
        wrap_state({"other": mine}, 1)


def test_an_optimizer_belongs_to_the_model_that_has_its_parameters() -> None:
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {"one": one, "two": two, "optimizer": torch.optim.SGD(two.parameters())}
    component = wrap_state(state, 1)[2]
    assert isinstance(component.stateful, OptimizerState)
    assert component.stateful.parts == (two,)
    both = torch.optim.SGD([*one.parameters(), *two.parameters()])
    with pytest.raises(CheckpointError, match=r"none of the models given \(one, two\) has all parameters"):
        wrap_state({**state, "optimizer": both}, 1)
    with pytest.raises(CheckpointError, match="component 'optimizer': no model is given"):
        wrap_state({"optimizer": both}, 1)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (DataLoader([1, 2]), "component 'x': the position of a DataLoader cannot be saved. Use torchdata's"),  # type: ignore[arg-type]
        (3, r"component 'x': a int has no state_dict\(\) and load_state_dict\(\)"),
        ([1, 2], r"component 'x': a list has no state_dict\(\)"),
    ],
)
def test_what_has_no_state_is_refused_by_name(value: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=told):
        CheckpointManager(tmp_path, {"x": value})


def test_either_objects_or_a_provider(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got neither of state and stateful_provider"):
        CheckpointManager(tmp_path)
    with pytest.raises(TypeError, match=r"state is a list\. Give a dictionary such as"):
        CheckpointManager(tmp_path, [nn.Linear(1, 1)])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="got both of state and stateful_provider"):
        CheckpointManager(tmp_path, {}, stateful_provider=[])


def test_two_ranks_share_each_object_as_its_type_says(run_worker: Callable[..., Any], tmp_path: Path) -> None:
    run_worker("short_form.py", tmp_path)
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name in ("copies", "shards"):
            assert seen[f"{name}, step"] == 4
            assert seen[name][1] == seen[name][0]
            assert seen[name][0][-1] == 3 + rank, "each rank has its own position"
        assert seen["copies into shards"] == 4
        assert seen["stage"].startswith("CheckpointError: ")
        assert "'model'" in seen["stage"]
        assert "does not tell how 2 ranks share it" in seen["count"]
    manifest = json.loads((tmp_path / "shards" / "checkpoint-4" / "manifest.json").read_text())
    assert '"sharded"' in json.dumps(manifest)


def test_a_model_alone(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with CheckpointManager(
        tmp_path, {"model": model, "more": torch.optim.SGD(model.parameters(), 0.1)}
    ) as saving:
        saved = saving.save(1)
    with CheckpointManager(tmp_path / "elsewhere", {"model": other}) as loading:
        loading.load_model(saved)
        (saved / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="its files of component 'model' are not there"):
            loading.load_model(saved)
    assert torch.equal(other.weight, model.weight)
    refused = pytest.raises(CheckpointError, match="no component 'model' is declared")
    with CheckpointManager(tmp_path, {"rng": RNGState()}) as without, refused:
        without.load_model(saved)
