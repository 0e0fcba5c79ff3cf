"""The page of recipes, run once on one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "tasks.md"


@pytest.fixture(scope="session")
def page() -> dict[str, Any]:
    """What the recipes have defined in the end, with the losses of each task in `curves`."""
    blocks = re.findall(r"```(?:python|\{\.python continuation\})\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = "\n\n".join(blocks).replace("trainer_ddp", "trainer_core").replace("DDPTrainer", "Trainer")
    found: dict[str, Any] = {"__name__": "tasks"}
    exec(compile(code, str(PAGE), "exec"), found)
    return found
