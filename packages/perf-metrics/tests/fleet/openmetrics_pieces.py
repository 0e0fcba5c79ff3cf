"""Samples as OpenMetrics files for promtool, one for each stretch of time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TextIO

from .prometheus_server import BLOCK_HOURS

_PIECE_MS = BLOCK_HOURS * 3600 * 1000


class Pieces:
    """Files in a folder that take series as they come, each file for the time of one block.

    A context manager; after it the files are complete. promtool reads a file once to find its times and once
    for each block, so that files of one block are read twice. It wants the samples of each series in the
    order of their times, and series in any order.

    Args:
        folder: Exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, TextIO] = {}
        self._closing = ExitStack()
        self.samples = 0
        """Lines written so far."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in the order of their times."""
        return tuple(self._path(piece) for piece in sorted(self._files))

    def write(self, name: str, labels: str, times_ms: Sequence[int], values: Sequence[float]) -> None:
        """Write some time of one series.

        Args:
            name: Name of the metric.
            labels: As between the braces.
            times_ms: Unix times in milliseconds, ascending, and after those of the series so far.
            values: At these times.
        """
        start = f"{name}{{{labels}}}"
        for time_ms, value in zip(times_ms, values, strict=True):
            self._file(time_ms // _PIECE_MS).write(f"{start} {value!r} {time_ms / 1000:.3f}\n")
        self.samples += len(times_ms)

    def _path(self, piece: int) -> Path:
        return self._folder / f"fleet-{piece}.om"

    def _file(self, piece: int) -> TextIO:
        file = self._files.get(piece)
        if file is None:
            file = self._files[piece] = self._closing.enter_context(self._path(piece).open("w"))
        return file

    def __enter__(self) -> Pieces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.write("# EOF\n")
        self._closing.close()
