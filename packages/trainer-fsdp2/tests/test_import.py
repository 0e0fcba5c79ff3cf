"""What shards, and what plans, is imported by those who use it: it takes seconds."""

from __future__ import annotations

import subprocess
import sys

SLOW = ("torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy", "torchao", "transformers")


def test_importing_the_package_is_quick() -> None:
    code = f"import sys, trainer_fsdp2; print([name for name in {SLOW!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_planner_is_there_nevertheless() -> None:
    code = "import trainer_fsdp2 as t; print([name for name in t.__all__ if not hasattr(t, name)])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
