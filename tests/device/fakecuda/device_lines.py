"""Which lines of the packages that name a device were executed, and by which tests.

With `FAKECUDA_LINES=DIRECTORY` every process of a run writes what it executed into the directory, and this
script lists what no process did. `--check` holds this against `not_executed.toml`, which gives a reason for
each line that the fake device cannot or need not run: it fails for a line that is neither executed nor
listed, and for a listed one that has gone or was executed.

Hooks of autograd run on threads that torch starts, which Python does not trace. In runs of one process the
backward pass stays on the thread that begins it instead; what hooks of ranks and callbacks of process groups
execute is not seen.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import re
import sys
import threading
import tomllib
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SOURCES = Path(__file__).parents[3] / "packages"
LISTED = Path(__file__).parents[1] / "not_executed.toml"
NAMES_A_DEVICE = re.compile(
    r"cuda|torch\.accelerator|_accelerator\b|accelerator is|accelerator\.type|pin_memory|pinned|non_blocking|"
    r"record_stream|torch\.Event|current_stream|device_type|device\.type|DeviceCache"
)
MESSAGE = re.compile(r'^f?"')
Executed = dict[str, dict[str, set[int]]]
"""Numbers of executed lines, by file and by test."""


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
    declares = code.startswith(("def ", "class ", "import ", "from ")) or MESSAGE.match(code)
    return not declares and NAMES_A_DEVICE.search(code) is not None


class Collector:
    """Notes the executed lines of the packages.

    Args:
        directory: Where they are written at the end of the process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # A process that a test starts has the test's name in its environment, from pytest.
        self.test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        self._executed: Executed = {}
        self._inside = f"{SOURCES}{os.sep}"

    def start(self) -> None:
        """Trace this thread and those that Python starts from now on."""
        sys.settrace(self._call)
        threading.settrace(self._call)
        atexit.register(self.write)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._inside):
            return None
        seen = self._executed.setdefault(self.test, {}).setdefault(name, set())

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            seen.add(frame.f_lineno)
            return line

        return line

    def write(self) -> None:
        """Write what was executed so far; a worker of pytest ends without running what is registered."""
        self._directory.mkdir(parents=True, exist_ok=True)
        executed = {
            test: {name: sorted(numbers) for name, numbers in files.items()}
            for test, files in self._executed.items()
        }
        (self._directory / f"lines-{os.getpid()}.json").write_text(json.dumps(executed))


def executed_lines(directory: Path) -> Executed:
    """What the processes of a run wrote into the directory."""
    executed: Executed = {}
    for part in directory.glob("lines-*.json"):
        for test, files in json.loads(part.read_text()).items():
            for name, numbers in files.items():
                executed.setdefault(test, {}).setdefault(name, set()).update(numbers)
    return executed


def compare(missed: dict[tuple[str, str], list[int]], executed: set[tuple[str, str]]) -> list[str]:
    """What the list of lines without a test says wrongly.

    Args:
        missed: Numbers of the lines that were not executed, by file and text.
        executed: File and text of the lines that were.

    Returns:
        A complaint for each missed line that is not listed, and each listed one that has gone or was
        executed.
    """
    wrong, listed = [], set()
    for entry in tomllib.loads(LISTED.read_text())["lines"]:
        for text in entry["text"]:
            listed.add(key := (entry["file"], text))
            if key not in missed:
                why = "was executed" if key in executed else "has gone"
                wrong.append(f"{entry['file']}: {text}\n    {why}: remove it from {LISTED.name}")
    for (file, text), numbers in missed.items():
        if (file, text) not in listed:
            wrong.append(
                f"{file}:{numbers[0]}: {text}\n    was not executed: test it on the fake device, or add it "
                f"to {LISTED.name} with the reason"
            )
    return wrong


def main() -> int:
    """Print how many lines were executed, and the others, or hold these against the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="that of FAKECUDA_LINES")
    parser.add_argument("--check", action="store_true", help=f"compare with {LISTED.name}; 1 if it differs")
    options = parser.parse_args()
    by_file: dict[str, set[int]] = {}
    for files in executed_lines(options.directory).values():
        for name, numbers in files.items():
            by_file.setdefault(name, set()).update(numbers)
    missed: dict[tuple[str, str], list[int]] = {}
    executed: set[tuple[str, str]] = set()
    for path in sorted(SOURCES.glob("*/src/**/*.py")):
        file = str(path.relative_to(SOURCES))
        for number, text in device_lines(path).items():
            if number in by_file.get(str(path), set()):
                executed.add((file, text))
            else:
                missed.setdefault((file, text), []).append(number)
    num_missed = sum(map(len, missed.values()))
    # A text that stands in a file twice and was executed once is missed, so it is listed as missed.
    print(f"fake device: {num_missed} lines that name a device were not executed; {len(executed)} texts were")
    if not options.check:
        print(*(f"{file}:{n}: {text}" for (file, text), ns in missed.items() for n in ns), sep="\n")
        return 0
    wrong = compare(missed, executed)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
