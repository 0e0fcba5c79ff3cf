"""Errors that are raised on another rank than the one they happened on."""

from __future__ import annotations

import pickle
import traceback

from dataloader_dispatch.rank_group import one_line
from dist_env import RankFailedError, RankTimeoutError


def encode(error: BaseException, where: str) -> bytes:
    """An error as bytes.

    Args:
        error: What was raised.
        where: Rank and host it was raised on.
    """
    if isinstance(error, RankFailedError):
        return pickle.dumps(("failed", str(error), error.rank))
    if isinstance(error, RankTimeoutError):
        return pickle.dumps(("late", str(error), error.missing))
    trace = "".join(traceback.format_exception(error))
    return pickle.dumps(("raised", _pickled(error), one_line(error), where, trace))


def decode(payload: bytes) -> BaseException:
    """The error of `encode`: as itself if it pickles and is known here, else a RuntimeError with its text."""
    match pickle.loads(payload):
        case ("failed", str(text), rank):
            return RankFailedError(text, rank)
        case ("late", str(text), missing):
            return RankTimeoutError(text, missing)
        case ("raised", pickled, str(text), str(where), str(trace)):
            error = _unpickled(pickled) or RuntimeError(text)
            note_origin(error, where)
            error.add_note(f"Traceback of {where}:\n{trace}")
            return error
    raise ValueError("a failure of another rank cannot be read; do all ranks run the same release?")


def note_origin(error: BaseException, where: str) -> None:
    """Note on an error which rank's loader raised it."""
    error.add_note(f"Raised by the data loader of {where}")


def _pickled(error: BaseException) -> bytes | None:
    """The error pickled, if what comes out again is the same."""
    try:
        pickled = pickle.dumps(error)
    except Exception:  # noqa: BLE001  # whatever the class of the user's error does
        return None
    again = _unpickled(pickled)
    return pickled if type(again) is type(error) and str(again) == str(error) else None


def _unpickled(pickled: bytes | None) -> BaseException | None:
    if pickled is None:
        return None
    try:
        error = pickle.loads(pickled)
    except Exception:  # noqa: BLE001  # likewise; the caller has the text of the error
        return None
    return error if isinstance(error, BaseException) else None
