"""Generated text as a terminal can be given it: a model of bytes writes control characters, too."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with escapes such as `\\x1b` for all that would steer a terminal; lines and tabs stay."""
    return "".join(each if each.isprintable() or each in "\n\t" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
