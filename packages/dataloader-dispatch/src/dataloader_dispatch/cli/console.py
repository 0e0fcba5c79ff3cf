"""Text for people: sizes, messages, and a progress bar."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_LOG_SECONDS = 30.0
_SCREEN_SECONDS = 0.2


def say(text: str) -> None:
    """Print a line on standard error, above a progress bar if there is one."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def one_line(message: object) -> str:
    """A message without line ends, and without anything that a terminal would obey."""
    words = " ".join(str(message).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in words)


def size_text(size: float) -> str:
    """Bytes with a unit, a power of 1000."""
    for unit, factor in _UNITS:
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


class Progress:
    """A bar on standard error: documents done, documents/s and MB/s of text.

    Where standard error is no terminal, it is written every 30 seconds.

    Args:
        documents: Documents in all.
        done: Documents done before.
    """

    def __init__(self, documents: int, done: int) -> None:
        self._began = time.monotonic()
        self._bytes = 0
        self._bar = tqdm(
            total=documents,
            initial=done,
            unit=" documents",
            unit_scale=True,
            file=sys.stderr,
            mininterval=_SCREEN_SECONDS if sys.stderr.isatty() else _LOG_SECONDS,
        )

    def advance(self, documents: int, size: int) -> None:
        """Count work that is done.

        Args:
            documents: Documents since the last call.
            size: Bytes of their text.
        """
        self._bytes += size
        rate = self._bytes / max(time.monotonic() - self._began, 1e-3) / 10**6
        self._bar.set_postfix_str(f"{rate:.2f} MB/s", refresh=False)
        self._bar.update(documents)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it is."""
        self._bar.close()
