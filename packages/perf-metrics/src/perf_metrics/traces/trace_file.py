"""Reads the events of a torch.profiler trace one by one, so that a file need not fit in memory."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TypeAlias

Event: TypeAlias = Mapping[str, object]

_CHUNK = 1 << 20
_SPACE = re.compile(r"[\s,]*")
_GZIP_MAGIC = b"\x1f\x8b"


class TraceFileError(ValueError):
    """The file is not a trace in the chrome format."""


class TraceFile:
    """A trace of torch.profiler: JSON, or JSON packed by gzip, whatever the file is called.

    Attributes:
        header: What the file says beside the events. Complete once `events` has come to its end.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header: dict[str, object] = {}

    def events(self) -> Iterator[Event]:
        """Go through the events in the order of the file.

        Raises:
            TraceFileError: It is not JSON, is cut off, or has no events.
            OSError: It cannot be read.
        """
        with self._open() as file:
            reader = _Reader(file)
            try:
                yield from self._walk(reader)
            except json.JSONDecodeError as error:
                raise TraceFileError(
                    f"{self.path} is not a JSON trace, or is cut off, near character "
                    f"{reader.dropped + error.pos:,} ({error.msg})."
                ) from None
            except TraceFileError:
                raise
            except (RecursionError, ValueError) as error:  # brackets by thousands, or digits
                raise TraceFileError(f"{self.path} is not a trace that can be read ({error}).") from None
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise TraceFileError(f"{self.path} is a damaged gzip file ({error}).") from None

    def _open(self) -> IO[str]:
        with self.path.open("rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
        # Names of frames and modules may hold bytes of any encoding; the figures never do.
        if packed:
            return gzip.open(self.path, "rt", encoding="utf-8", errors="replace")
        return self.path.open(encoding="utf-8", errors="replace")

    def _walk(self, reader: _Reader) -> Iterator[Event]:
        opening = reader.next_character()
        if opening == "[":
            reader.skip()
            yield from self._array(reader)
            return
        if opening != "{":
            raise TraceFileError(f"{self.path} is not a trace, which must be a JSON object with traceEvents.")
        reader.skip()
        found = False
        while (character := reader.next_character()) != "}":
            if character != '"':
                raise json.JSONDecodeError("expected a key", "", reader.position)
            key = str(reader.value())
            if reader.next_character() != ":":
                raise json.JSONDecodeError("expected a colon", "", reader.position)
            reader.skip()
            if key == "traceEvents" and reader.next_character() == "[":
                found = True
                reader.skip()
                yield from self._array(reader)
            else:
                self.header[key] = reader.value()
        if not found:
            raise TraceFileError(
                f"{self.path} is not a trace of torch.profiler, because it has no list traceEvents."
            )

    @staticmethod
    def _array(reader: _Reader) -> Iterator[Event]:
        while reader.next_character() != "]":
            event = reader.value()
            if isinstance(event, dict):
                yield event
        reader.skip()


class _Reader:
    """JSON values out of a text that is read piece by piece."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self._text = ""
        self._ended = False
        self.position = 0
        self.dropped = 0

    def next_character(self) -> str:
        """The next character that is neither space nor comma, left in place; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self.position)
            self.position = match.end() if match else self.position
            if self.position < len(self._text):
                return self._text[self.position]
            if not self._fill():
                raise json.JSONDecodeError("the file ends too early", "", self.position)

    def skip(self) -> None:
        """Go past the character that `next_character` gave."""
        self.position += 1

    def value(self) -> object:
        """The next value."""
        self.next_character()
        while True:
            try:
                value, end = self._decode(self._text, self.position)
            except json.JSONDecodeError:
                if not self._fill():
                    raise
                continue
            # A number at the end of the piece may continue in the next one.
            if end == len(self._text) and self._fill():
                continue
            self.position = end
            return value

    def _fill(self) -> bool:
        """Read on; False at the end of the file. The piece doubles while one value does not fit."""
        if self._ended:
            return False
        left = self._text[self.position :]
        more = self._file.read(max(_CHUNK, len(left)))
        self._ended = not more
        self.dropped += self.position
        self._text, self.position = left + more, 0
        return bool(more)


def event_arguments(event: Event) -> Event:
    """What the event has under "args"; empty if it has nothing there."""
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}
