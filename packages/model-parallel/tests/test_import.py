"""What divides nothing needs no DTensor, which takes a second to import, and no compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Python = Callable[..., subprocess.CompletedProcess[str]]
SLOW = ("torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy", "transformers")


def test_attention_of_one_rank_is_imported_quickly(python: Python) -> None:
    done = python(
        "-c",
        "import sys\n"
        "from model_parallel import CausalAttention, SequencePart, attention_kernel, undivided\n"
        f"print([name for name in {SLOW!r} if name in sys.modules])",
    )
    assert done.stdout.strip() == "[]", done.stderr
