"""What the tests of the planner plan."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from trainer_fsdp2 import FSDP2Arguments, FSDP2TrainingArguments

WORKERS = Path(__file__).parent / "workers"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"plan_{name}", WORKERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    """The model of the workers."""
    model: Callable[..., nn.Module] = _module("tiny").Tiny
    return model


@pytest.fixture(scope="session")
def settings() -> Callable[..., FSDP2TrainingArguments]:
    """`settings(replicas=2, fused_loss="chunked")`: names of fsdp2 go there."""

    def make(**given: Any) -> FSDP2TrainingArguments:
        inner = {name: given.pop(name) for name in list(given) if hasattr(FSDP2Arguments(), name)}
        given.setdefault("per_device_train_batch_size", 2)
        return FSDP2TrainingArguments(fsdp2=FSDP2Arguments(**inner), **given)

    return make
