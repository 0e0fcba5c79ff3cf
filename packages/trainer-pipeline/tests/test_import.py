"""What carries out schedules, and what draws them, is imported by those who use it: it takes seconds."""

from __future__ import annotations

import subprocess
import sys

SLOW = (
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch.fx",
    "torch._dynamo",
    "torch._inductor",
    "matplotlib",
    "transformers",
    "torchao",
)


def imported(code: str) -> set[str]:
    """The slow modules that are there after some lines, in a new process."""
    code = f"import sys\n{code}\nprint(*[name for name in {SLOW!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_is_quick() -> None:
    brought = imported("import trainer_pipeline, trainer_pipeline.diagram")
    assert brought <= imported("import torch, torch.distributed")
    assert brought.isdisjoint({"torch.distributed.pipelining", "torch._dynamo", "matplotlib", "transformers"})


def test_help_comes_without_torch() -> None:
    code = (
        "import contextlib, sys\n"
        "from trainer_pipeline.__main__ import main\n"
        "for words in (['-h'], ['--version'], ['diagram', '-h']):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(words)\n"
        "assert 'torch' not in sys.modules\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "diagram" in told.stdout
    assert "trainer-pipeline 0" in told.stdout
