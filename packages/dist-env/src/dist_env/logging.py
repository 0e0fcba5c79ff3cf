"""Loggers that speak once per job instead of once per process."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import OrderedDict
from dataclasses import dataclass

from dist_env.errors import DistributedEnvironmentError

_REMEMBERED_WARNINGS = 1024


@dataclass
class _State:
    """Who speaks, and from which level on."""

    rank: int | None = None
    world_size: int = 1
    level: int = logging.INFO


_state = _State()
_managed: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """A standard logger that knows its rank.

    * Below WARNING only rank 0 speaks.
    * From WARNING on every rank speaks, with rank and host in front when there are several ranks.
    * A WARNING that repeats word for word is given once per process.

    Records go to the handlers that the program configured; without any they go to standard error. The level
    is that of `DistributedEnvironment(log_level=...)`, unless the program sets one on the logger.

    Args:
        name: Name of the logger, usually `__name__`.

    Returns:
        The logger of that name; calling again gives the same one.
    """
    logger = logging.getLogger(name)
    if _filter not in logger.filters:
        logger.addFilter(_filter)
        logger.addHandler(_handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(_state.level)
        _managed.add(name)
    return logger


def forget_warnings() -> None:
    """Let each warning be given anew, as at the start of the process; for tests that look for one."""
    _filter.forget()


def parse_level(level: str | int) -> int:
    """The number of a level.

    Raises:
        DistributedEnvironmentError: There is no such level.
    """
    if isinstance(level, int):
        return level
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise DistributedEnvironmentError(f"log_level={level!r} is not one of {', '.join(known)}.")
    return known[level.upper()]


def set_speaker(rank: int | None, world_size: int, level: int) -> tuple[int | None, int, int]:
    """Set who speaks and from which level on; returns the values before, to restore them."""
    before = (_state.rank, _state.world_size, _state.level)
    for name in _managed:
        logger = logging.getLogger(name)
        if logger.level == _state.level:
            logger.setLevel(level)
    _state.rank, _state.world_size, _state.level = rank, world_size, level
    return before


def _speaker() -> tuple[int, int]:
    """Rank and world size; from the launcher's variables while no environment is open."""
    if _state.rank is not None:
        return _state.rank, _state.world_size
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() else 0, int(size) if size.isdecimal() else 1


class _RankFilter(logging.Filter):
    """Silences, prefixes and deduplicates as `get_logger` describes."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def forget(self) -> None:
        self._seen.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        rank, world_size = _speaker()
        if record.levelno < logging.WARNING:
            return rank == 0
        message = record.getMessage()
        if record.levelno == logging.WARNING and self._repeats((record.name, message)):
            return False
        if world_size > 1:
            record.msg, record.args = f"[rank {rank} {socket.gethostname()}] {message}", ()
        return True

    def _repeats(self, key: tuple[str, str]) -> bool:
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > _REMEMBERED_WARNINGS:
            self._seen.popitem(last=False)
        return False


class _FallbackHandler(logging.Handler):
    """Writes to standard error what no handler of the program takes."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "_dist_env_written", False) or _program_handles(record.name):
            return
        record._dist_env_written = True
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except OSError:
            self.handleError(record)


def _program_handles(name: str) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(handler is not _handler for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


_filter = _RankFilter()
_handler = _FallbackHandler()
