"""A small real run for the callbacks: arguments, state, and events fired as a trainer fires them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Arguments:
    logging_dir: str | None
    output_dir: str | None = None


@dataclass
class State:
    global_step: int = 0
    max_steps: int = 100
    epoch: float | None = 0.0
    is_world_process_zero: bool = True


@dataclass
class Run:
    args: Arguments
    state: State = field(default_factory=State)

    def fire(self, event: str, *callbacks: object, **keywords: object) -> None:
        always = {"model": None, "optimizer": None, "lr_scheduler": None, "trainer": None}
        for callback in callbacks:
            handler = getattr(callback, event, None)
            if handler is not None:
                handler(args=self.args, state=self.state, control=object(), **always, **keywords)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Arguments(str(tmp_path / "logs")))
