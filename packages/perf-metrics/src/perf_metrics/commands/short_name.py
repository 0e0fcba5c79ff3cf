"""Kernels' names in a column of a table."""

_WIDTH = 72


def short_name(name: str) -> str:
    """The name in the width of a table. The middle of a long one says least."""
    if len(name) <= _WIDTH:
        return name
    half = (_WIDTH - 3) // 2
    return f"{name[:half]}...{name[-half:]}"
