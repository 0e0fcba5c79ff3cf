"""`python -m llama_pretrain WORDS...` with a witness: `observed.py FOLDER WORDS...`.

The program runs unchanged. The witness stands at two places of torch: at `cross_entropy`, where it sees which
tokens the model is trained on, and behind the step of the optimizer, which counts the steps. For each rank it
leaves in FOLDER:

- `<rank>.pid`, the number of the process;
- `<rank>.steps`, a line of JSON for each optimizer step, written when the step is done: its number, and the
  targets of the losses that went into it (`-100` does not count);
- `<rank>.output`, what the rank prints;
- `<rank>.exit`, its exit code, if it lives to tell it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

cross_entropy = functional.cross_entropy


class Witness:
    """Writes down what the steps of this process were made of.

    Args:
        path: File of lines.
    """

    def __init__(self, path: Path) -> None:
        # Each line is one write, straight to the system: it is there whatever becomes of the process.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._targets: list[int] = []

    def see_loss(self, logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        """Stand in for `torch.nn.functional.cross_entropy`."""
        if torch.is_grad_enabled():  # evaluations have none
            self._targets += targets.flatten().tolist()
        return cross_entropy(logits, targets, **options)

    def see_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        """Write the line of a step; the number is the optimizer's own, which travels in checkpoints."""
        number = max(int(state["step"]) for state in optimizer.state.values())
        line = json.dumps({"step": number, "targets": self._targets})
        os.write(self._file, f"{line}\n".encode())
        self._targets = []


def main(folder: Path, words: list[str]) -> None:
    """Run the program under the witness's eyes."""
    rank = os.environ.get("RANK", "0")
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    witness = Witness(folder / f"{rank}.steps")
    functional.cross_entropy = witness.see_loss  # type: ignore[assignment]  # the same arguments by name
    register_optimizer_step_post_hook(witness.see_step)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    sys.argv[1:] = words
    try:
        runpy.run_module("llama_pretrain", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        (folder / f"{rank}.exit").write_text(str(end.code or 0))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
