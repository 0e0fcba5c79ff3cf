"""Run the example of an installed wheel's own README: `python -I run_readme.py DISTRIBUTION`."""

from __future__ import annotations

import re
import sys
import tempfile
from importlib import metadata
from os import chdir

# The text between a line that begins a Python block and the next fence.
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def description(name: str) -> str:
    """The README that travels inside the wheel."""
    fields = metadata.metadata(name)
    return fields.get("Description") or str(fields.get_payload())  # type: ignore[attr-defined]


def main(name: str) -> None:
    """Run every Python block, one after the other, in an empty folder."""
    blocks = PYTHON_BLOCK.findall(description(name))
    if not blocks:
        raise SystemExit(f"{name}: the wheel's description has no example")
    with tempfile.TemporaryDirectory() as folder:
        chdir(folder)
        for block in blocks:
            exec(compile(block, f"README of {name}", "exec"), {"__name__": "__main__"})
        chdir("/")
    print(f"{name}: its README's example runs")


if __name__ == "__main__":
    main(sys.argv[1])
