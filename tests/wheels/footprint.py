"""Print what an installed package weighs, as JSON: `python -I footprint.py DISTRIBUTION`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_MIB = 2**20
_IMPORTS = 2
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


def import_seconds(module: str) -> tuple[float, float | None]:
    """Return how long a new interpreter takes to import a module, and how much of it is for torch.

    Both are the shortest of several times; the second is None where torch is not imported.
    """
    alone, _, loads_torch = _imported("time", module)
    if not loads_torch:
        return min(alone, *(_imported("time", module)[0] for _ in range(_IMPORTS - 1))), None
    whole, of_torch, _ = zip(*(_imported("torch", module) for _ in range(_IMPORTS)), strict=True)
    return min(alone, *whole), min(of_torch)


def _imported(first: str, module: str) -> tuple[float, float, bool]:
    """Seconds for both of two modules and for the first, and whether torch is there then."""
    code = (
        f"import sys, time; began = time.perf_counter(); import {first}; between = time.perf_counter(); "
        f"import {module}; ended = time.perf_counter(); "
        "print(ended - began, between - began, int('torch' in sys.modules))"
    )
    told = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    return float(told[0]), float(told[1]), told[2] == "1"


def main(name: str) -> None:
    """Print the figures of a distribution."""
    own = requirements(name)
    of_torch = requirements("torch")
    module = name.replace("-", "_")
    seconds, of_torch_seconds = import_seconds(module)
    figures = {
        "package": name,
        "own_mib": installed_bytes(name) / _MIB,
        "without_torch_mib": sum(map(installed_bytes, own - of_torch)) / _MIB,
        "needs": sorted(own - of_torch - {name}),
        "import_s": seconds,
        "import_torch_s": of_torch_seconds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
