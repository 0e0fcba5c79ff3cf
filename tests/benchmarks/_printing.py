"""What contenders print, kept away from the terminal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path


@contextmanager
def printing_into(path: Path) -> Iterator[None]:
    """What is printed goes to the end of a file, and nobody sees a terminal; warnings are left out."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with (
        path.open("a") as printed,
        redirect_stdout(printed),
        redirect_stderr(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
