"""The console script ``dataloader-dispatch``: make token ids of documents, once, for many runs."""

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dataloader_dispatch.cli.arguments import make_parser
from dataloader_dispatch.cli.console import one_line, say
from dataloader_dispatch.cli.stopped import StoppedError
from dataloader_dispatch.errors import DataError

FINE = 0
"""Exit code: all is done."""
STOPPED = 1
"""Exit code: the run stopped before its end; the same command goes on with it."""
UNUSABLE = 2
"""Exit code: wrong usage, or input or output that cannot be used."""
_BROKEN_PIPE = 141
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0 done, 1 stopped before the end, 2 input or output that cannot be used. As in a shell,
        141 when the reader of the output is gone, and 130 after Ctrl-C.

    Raises:
        SystemExit: With code 2 after a usage error, with code 0 after ``--help``.
    """
    arguments = make_parser().parse_args(argv)
    # Names of files may have letters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _warnings_on_stderr():
            # Imported here, so that help and usage errors come at once.
            from dataloader_dispatch.cli.tokenize import tokenize

            tokenize(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, which must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        say(f"\n{arguments.command}: interrupted; run the same command again to go on")
        return _INTERRUPTED
    except StoppedError as error:
        say(f"dataloader-dispatch {arguments.command}: {one_line(error)}")
        return STOPPED
    except (DataError, OSError) as error:
        say(f"dataloader-dispatch {arguments.command}: {one_line(error)}")
        return UNUSABLE
    return FINE


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {one_line(record.getMessage())}")


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    logger = logging.getLogger("dataloader_dispatch")
    handler = _ToStderr(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
