"""Print what an installed package weighs, as JSON: `python -I footprint.py DISTRIBUTION`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_MIB = 2**20
_IMPORTS = 3
# What torch asks for under `extra` conditions is not installed for it.
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")


def requirements(name: str) -> set[str]:
    """Return a distribution and all that it needs and that is installed, by normal names."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        each = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            asked = metadata.requires(each) or []
        except metadata.PackageNotFoundError:
            continue  # it is for another platform
        if each not in found:
            found.add(each)
            names = [_REQUIREMENT.match(text) for text in asked if "extra ==" not in text]
            waiting += [match[0] for match in names if match]
    return found


def installed_bytes(name: str) -> int:
    """Return the size of the files of a distribution, without bytecode."""
    files = [Path(str(file.locate())) for file in metadata.files(name) or [] if file.suffix != ".pyc"]
    return sum(file.stat().st_size for file in files if file.is_file())


def import_seconds(module: str) -> float:
    """Return how long a new interpreter takes to import a module, the shortest of some times."""
    code = f"import time; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
    command = [sys.executable, "-c", code]
    return min(float(subprocess.check_output(command, text=True)) for _ in range(_IMPORTS))


def imports_torch(module: str) -> bool:
    """Return whether importing a module imports torch."""
    code = f"import sys, {module}; print('torch' in sys.modules)"
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "True"


def main(name: str) -> None:
    """Print the figures of a distribution."""
    own = requirements(name)
    of_torch = requirements("torch")
    module = name.replace("-", "_")
    figures = {
        "package": name,
        "own_mib": installed_bytes(name) / _MIB,
        "without_torch_mib": sum(map(installed_bytes, own - of_torch)) / _MIB,
        "needs": sorted(own - of_torch - {name}),
        "import_s": import_seconds(module),
        "import_torch_s": import_seconds("torch") if imports_torch(module) else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
