"""Leaves the time that torch.compile takes out of a meter's windows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from .throughput import ThroughputMeter

_log = logging.getLogger("perf_metrics")

COMPILE_PHASE = "compile"
"""The excluded phase of `exclude_compilation`."""


@contextmanager
def exclude_compilation(meter: ThroughputMeter) -> Iterator[None]:
    """Leave whatever torch.compile compiles meanwhile out of the net time of a meter.

    Warm-up and recompilations alike, forward and backward, appear as the phase "compile". The rest of the
    step that caused them counts. Nothing is measured of kernels that are tuned when they first run.

    torch reports compilations in `torch._dynamo.callback`. With a torch that has no such reports this raises,
    rather than letting warm-up pass for training.

    Args:
        meter: The meter. Compilations of other models in this process are left out of it as well.

    Raises:
        RuntimeError: This torch does not report when it compiles.
    """
    try:
        # Not at the top: this loads the compiler's front end.
        from torch._dynamo.callback import callback_handler
    except ImportError as error:
        raise RuntimeError(
            "exclude_compilation needs torch._dynamo.callback, which this torch does not have; "
            "leave the first window out of your figures instead"
        ) from error
    compiling = _Compiling(meter)
    callback_handler.register_start_callback(compiling.begin)
    callback_handler.register_end_callback(compiling.end)
    try:
        yield
    finally:
        if compiling.begin in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(compiling.begin)
        else:
            _log.warning(
                "torch._dynamo.reset() was called meanwhile: what was compiled after it counts as training"
            )
        if compiling.end in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(compiling.end)
        compiling.end()


class _Compiling:
    """The open phase, while something is being compiled."""

    def __init__(self, meter: ThroughputMeter) -> None:
        self._meter = meter
        self._phase: AbstractContextManager[None] | None = None

    def begin(self, _: object) -> None:
        if self._phase is None:
            self._phase = self._meter.exclude(COMPILE_PHASE)
            self._phase.__enter__()

    def end(self, _: object = None) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None
