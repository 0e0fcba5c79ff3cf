"""Prints for people; a reader that has gone does not end the run."""

from __future__ import annotations

import sys
from typing import Literal, TextIO

from dist_env import get_logger

logger = get_logger(__name__)


def print_block(text: str, stream: TextIO | None, *, default: Literal["stdout", "stderr"]) -> None:
    """Print and flush; with no stream, to the standard stream as it is now."""
    # Looked up at each call: tests, notebooks and loggers replace the standard streams.
    target = stream if stream is not None else (sys.stdout if default == "stdout" else sys.stderr)
    try:
        print(text, file=target, flush=True)
    except BrokenPipeError:
        logger.warning("nobody reads %s any more; the run goes on without it", default)
