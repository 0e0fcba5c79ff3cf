"""The errors of this package, and which errors of any package other input would not change."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping

_OF_THE_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT),  # of devices, and of file systems on a network
}


class DistributedEnvironmentError(ValueError):
    """A variable or argument that describes the environment is wrong.

    The message is one line: the variable, its value, the rule it breaks and what to set instead.
    """


class RankTimeoutError(TimeoutError):
    """Some ranks did not arrive in time.

    Attributes:
        missing: The host of each rank that did not arrive, keyed by global rank; `"unknown host"` for a rank
            that was never heard of.
    """

    def __init__(self, message: str, missing: Mapping[int, str]) -> None:
        super().__init__(message)
        self.missing = dict(missing)


class RankFailedError(RuntimeError):
    """Another rank failed, so that waiting for it is pointless.

    Attributes:
        rank: The global rank that failed or is lost, the first that the message names; None when only the
            lost connection is known.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


def may_pass(error: BaseException | None) -> bool:
    """Whether the same may succeed later, or elsewhere, so that a job is worth starting again.

    It may if the error, or one that it came of, says so by an attribute `may_pass`, as a `StoreError` does,
    or is one of the system's: no room, no memory, too many open files, a device or network file system
    that fails. Other input would not change these.
    """
    seen: set[int] = set()
    # An error that is raised again while it is handled elsewhere can be in its own context.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "may_pass", False) is True:
            return True
        if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
            return True
        error = error.__cause__ or error.__context__
    return False


_MOST_NAMED = 16


def listed(names: Iterable[str]) -> str:
    """Names for a message, the first 16 of them: a job may miss thousands of ranks at once."""
    several = list(names)
    more = len(several) - _MOST_NAMED
    return ", ".join(several[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def one_line(reason: object) -> str:
    """A reason without line breaks and full stop, at most 500 characters of it; of an error with its type."""
    text = " ".join(str(reason).split())[:500].removesuffix(".")
    if not isinstance(reason, BaseException):
        return text
    return f"{type(reason).__name__}: {text}" if text else type(reason).__name__
