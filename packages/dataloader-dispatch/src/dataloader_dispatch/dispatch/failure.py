"""Errors that are raised on another rank than the one they happened on."""

from __future__ import annotations

import builtins
import traceback

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.rank_group import one_line
from dist_env import RankFailedError, RankTimeoutError, decode_value, encode_value

# Those that end an iteration would end it in silence, and the roots of all say nothing that others can catch.
_NOT_SENT = (StopIteration, StopAsyncIteration, GeneratorExit, BaseException, Exception)
_KINDS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (*vars(builtins).values(), DataError)
    if isinstance(kind, type) and issubclass(kind, BaseException) and kind not in _NOT_SENT
}


def encode(error: BaseException, where: str) -> bytes:
    """An error as bytes.

    Args:
        error: What was raised.
        where: Rank and host it was raised on.
    """
    if isinstance(error, RankFailedError):
        return encode_value(("failed", str(error), error.rank))
    if isinstance(error, RankTimeoutError):
        return encode_value(("late", str(error), error.missing))
    trace = "".join(traceback.format_exception(error))
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return encode_value(("raised", *_kind_and_arguments(error), notes, where, trace))


def decode(payload: bytes) -> BaseException:
    """The error of `encode`.

    One of Python's own comes as itself, another one as the nearest of these that it is derived from, with its
    type and text: no code of a class is run that another rank has named.

    Raises:
        ValueError: The bytes are not those of an error.
    """
    match decode_value(payload):
        case ("failed", str(text), int() | None as rank):
            return RankFailedError(text, rank)
        case ("late", str(text), dict() as missing):
            return RankTimeoutError(text, missing)
        case ("raised", str(kind), tuple(arguments), list(notes), str(where), str(trace)) if kind in _KINDS:
            error = _made(kind, arguments)
            for note in notes:
                error.add_note(str(note))
            note_origin(error, where)
            error.add_note(f"Traceback of {where}:\n{trace}")
            return error
    raise ValueError("the failure of another rank cannot be read; do all ranks run the same release?")


def note_origin(error: BaseException, where: str) -> None:
    """Note on an error which rank's loader raised it."""
    error.add_note(f"Raised by the data loader of {where}")


def _kind_and_arguments(error: BaseException) -> tuple[str, tuple[object, ...]]:
    """The kind to raise an error as, and the arguments to make one that says the same."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind in _KINDS.values()), "RuntimeError")
    if type(error) is _KINDS[name]:
        # Not `args`, beside which an OSError keeps the name of its file.
        arguments = tuple(error.__reduce__()[1])
        try:
            encode_value(arguments)
            if str(_KINDS[name](*arguments)) == str(error):
                return name, arguments
        except TypeError:
            pass  # An argument is an object that stays here; its text is sent.
    told = (one_line(error),)
    return (name, told) if type(_made(name, told)) is _KINDS[name] else ("RuntimeError", told)


def _made(name: str, arguments: tuple[object, ...]) -> BaseException:
    try:
        return _KINDS[name](*arguments)
    except TypeError:  # One that takes other arguments, such as a UnicodeDecodeError.
        return RuntimeError(*arguments)
