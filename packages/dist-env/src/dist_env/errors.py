"""The errors of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


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
