"""Run the examples of installed wheels' own READMEs: `python -I run_readme.py DISTRIBUTION...`.

Several are run in a process each, forked from this one, which has imported torch for all of them.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from importlib import metadata

# The text between a line that begins a Python block and the next fence.
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def description(name: str) -> str:
    """The README that travels inside the wheel."""
    fields = metadata.metadata(name)
    return fields.get("Description") or str(fields.get_payload())  # type: ignore[attr-defined]


def main(names: list[str]) -> None:
    """Run the examples of each distribution."""
    if len(names) == 1:
        run_example(names[0])
        return
    importlib.import_module("torch")
    failed = [name for name in names if in_child(name) != 0]
    if failed:
        raise SystemExit(f"the README's example of these ended badly: {failed}")


def in_child(name: str) -> int:
    """Run the examples of a distribution in a process of its own, and return its exit code."""
    child = os.fork()
    if child == 0:
        run_example(name)
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_example(name: str) -> None:
    """Run every Python block, one after the other, in an empty folder."""
    blocks = PYTHON_BLOCK.findall(description(name))
    if not blocks:
        raise SystemExit(f"{name}: the wheel's description has no example")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in blocks:
            exec(compile(block, f"README of {name}", "exec"), {"__name__": "__main__"})
        os.chdir("/")
    print(f"{name}: its README's example runs")


if __name__ == "__main__":
    main(sys.argv[1:])
