"""Saves and loads where numpy cannot be imported. Usage: without_numpy.py DIRECTORY."""

# ruff: noqa: E402 - numpy must be out of reach before torch is imported.

import sys

sys.modules["numpy"] = None  # type: ignore[assignment]

import torch

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    RNGState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
)
from dist_env import StaticDistributedEnvironment

model = torch.nn.Linear(3, 3).bfloat16()
provider = StaticStatefulProvider(
    [
        StateComponent(key="model", stateful=ModelState(model), sharing_pattern=SharingPattern.GLOBAL),
        StateComponent(key="rng", stateful=RNGState(), sharing_pattern=SharingPattern.PER_RANK),
    ]
)
manager = CheckpointManager(
    CheckpointConfig(sys.argv[1]), dist=StaticDistributedEnvironment(), stateful_provider=provider
)
manager.save_checkpoint(1)
expected = model.weight.tolist()
torch.nn.init.zeros_(model.weight)
loaded = manager.load_checkpoint()
if loaded is None or model.weight.tolist() != expected:
    raise SystemExit("the weights did not come back")
heavy = sorted({"torch._dynamo", "sympy", "transformers", "matplotlib"} & set(sys.modules))
if heavy:
    raise SystemExit(f"imported for nothing: {heavy}")
