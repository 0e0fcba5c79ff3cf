"""Which lines of the packages that name a device were executed.

With `FAKECUDA_LINES=DIRECTORY` every process of a run writes what it executed into the directory, and this
script lists what no process did. Hooks of autograd run on threads that torch starts, which Python does not
trace: their lines are listed though they may have been executed.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SOURCES = Path(__file__).parents[3] / "packages"
NAMES_A_DEVICE = re.compile(
    r"cuda|accelerator|pin_memory|pinned|non_blocking|record_stream|torch\.Event|current_stream|"
    r"device_type|device\.type|DeviceCache"
)


def device_lines(path: Path) -> dict[int, str]:
    """Executable lines of a file that name a device, by number."""
    source = path.read_text()
    lines, numbers, left = source.splitlines(), set(), [compile(source, str(path), "exec")]
    while left:
        code = left.pop()
        numbers |= {line for _, _, line in code.co_lines() if line}
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {number: lines[number - 1].strip() for number in sorted(numbers) if _wanted(lines[number - 1])}


def _wanted(line: str) -> bool:
    code = line.partition("#")[0].strip()
    declares = code.startswith(("def ", "class ", "import ", "from ", '"'))
    return not declares and NAMES_A_DEVICE.search(code) is not None


class Collector:
    """Notes the executed lines of the packages.

    Args:
        directory: Where they are written at the end of the process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._executed: dict[str, set[int]] = {}
        self._inside = f"{SOURCES}{os.sep}"

    def start(self) -> None:
        """Trace this thread and those that Python starts from now on."""
        sys.settrace(self._call)
        threading.settrace(self._call)
        atexit.register(self._write)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._inside):
            return None
        seen = self._executed.setdefault(name, set())

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            seen.add(frame.f_lineno)
            return line

        return line

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        executed = {name: sorted(numbers) for name, numbers in self._executed.items()}
        (self._directory / f"lines-{os.getpid()}.json").write_text(json.dumps(executed))


def main(directory: str) -> None:
    """Print how many lines were executed, by package, and the others."""
    executed: dict[str, set[int]] = {}
    for part in Path(directory).glob("lines-*.json"):
        for name, numbers in json.loads(part.read_text()).items():
            executed.setdefault(name, set()).update(numbers)
    missed: list[str] = []
    total = 0
    for path in sorted(SOURCES.glob("*/src/**/*.py")):
        found = device_lines(path)
        total += len(found)
        seen = executed.get(str(path), set())
        missed += [
            f"{path.relative_to(SOURCES)}:{number}: {text}"
            for number, text in found.items()
            if number not in seen
        ]
    print(f"fake device: {total - len(missed)} of {total} lines that name a device were executed; not these:")
    print("\n".join(missed))


if __name__ == "__main__":
    main(sys.argv[1])
