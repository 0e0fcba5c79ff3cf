"""Count how often torch.compile compiles the same code again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

    from ..arguments import TrainingArguments


class RecompileCounter(AbstractContextManager["RecompileCounter"]):
    """Counts, in its context, compilations of code that was compiled before in it.

    Torch calls it when a compilation starts, so it costs nothing while nothing is compiled. Torch's compiler
    is imported only if the arguments ask for compilation.

    Args:
        args: torch_compile.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._on = args.torch_compile
        self._seen: set[str] = set()
        self._recompiles = 0

    def __enter__(self) -> Self:
        if self._on:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._started)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._on:
            return
        from torch._dynamo.callback import callback_handler

        # torch._dynamo.reset() and others may have cleared the list.
        if self._started in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._started)

    def count(self) -> int | None:
        """Return the number of recompilations since the last call; None when nothing is to be compiled."""
        taken, self._recompiles = self._recompiles, 0
        return taken if self._on else None

    def _started(self, compilation: CallbackArgs) -> None:
        # A backward graph or an autotuning run belongs to a compilation that was counted already.
        if compilation.callback_trigger.name != "DYNAMO":
            return
        code, _, _ = compilation.compile_id.rpartition("/")
        if code in self._seen:
            self._recompiles += 1
        self._seen.add(code)
