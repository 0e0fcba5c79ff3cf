"""Patterns over parameter names: which one takes which parameter."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import translate

from ..errors import ConfigurationError

REGEX_PREFIX = "re:"


def assign(patterns: Sequence[str], trainable: Mapping[str, bool]) -> dict[str, str | None]:
    """Give every trainable parameter to the first pattern that matches its whole name.

    Args:
        patterns: Shell patterns (`*`, `?`, `[...]`; `*` crosses dots), or regular expressions after `re:`.
        trainable: Names of all parameters, and whether each is trainable.

    Returns:
        The pattern of each trainable parameter; None for those that none matches.

    Raises:
        ConfigurationError: For a pattern that is no regular expression, or that gets no parameter.
    """
    compiled = {pattern: compile_pattern(pattern) for pattern in patterns}
    owner: dict[str, str | None] = {}
    for name in (name for name, is_trainable in trainable.items() if is_trainable):
        owner[name] = next((p for p, matcher in compiled.items() if matcher.fullmatch(name)), None)
    for pattern, matcher in compiled.items():
        if pattern not in owner.values():
            matched = [name for name in trainable if matcher.fullmatch(name)]
            raise _gets_nothing(pattern, matched, owner, trainable)
    return owner


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern; its `fullmatch` decides.

    Raises:
        ConfigurationError: If what follows `re:` is no regular expression.
    """
    if not pattern.startswith(REGEX_PREFIX):
        return re.compile(translate(pattern))
    try:
        return re.compile(pattern.removeprefix(REGEX_PREFIX))
    except re.error as error:
        raise ConfigurationError(
            "optimizer_groups", pattern, f"is no regular expression ({error})", "correct it"
        ) from error


def _gets_nothing(
    pattern: str, matched: Sequence[str], owner: Mapping[str, str | None], trainable: Mapping[str, bool]
) -> ConfigurationError:
    taken = [name for name in matched if trainable[name]]
    if taken:
        earlier = owner[taken[0]]
        return ConfigurationError(
            "optimizer_groups",
            pattern,
            f"comes too late: {taken[0]} and all else that it matches go to {earlier!r} before",
            "write the narrower pattern first",
        )
    if matched:
        return ConfigurationError(
            "optimizer_groups",
            pattern,
            f"matches only frozen parameters, such as {matched[0]}",
            "set requires_grad on them, or take the pattern out",
        )
    return ConfigurationError(
        "optimizer_groups",
        pattern,
        "matches no parameter; it has to match the whole name",
        f"the nearest names are: {', '.join(_nearest(pattern, trainable))}",
    )


def _nearest(pattern: str, names: Mapping[str, bool]) -> list[str]:
    literal = re.sub(r"\\(.)", r"\1", pattern.removeprefix(REGEX_PREFIX)).strip("*^$")
    near = difflib.get_close_matches(literal, list(names), n=3, cutoff=0.3)
    return near or list(names)[:3]
