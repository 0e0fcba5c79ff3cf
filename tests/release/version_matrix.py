"""Run the tests of packages on several Pythons with several torches: `python version_matrix.py --help`.

A cell is the session `tests-PACKAGE` of noxfile.py, in an environment of its own, on one Python and with one
torch. The root pyproject.toml stays as it is: in place of its settings, the cell's uv reads a file with the
same ones and another pin of torch. After a cell that fails, or that cannot be installed, the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PINNED = "pinned"
NIGHTLY = "nightly"
# Of [tool.uv], what a uv.toml may say and `uv pip` reads. The rest is about the lock file and the workspace.
SETTINGS = ("required-version", "constraint-dependencies", "exclude-newer", "fork-strategy")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Lines of a cell's output that are kept where it gave no counts.
TAIL = 12


@dataclass
class Cell:
    """One package on one Python with one torch, and what came of it."""

    package: str
    python: str
    torch: str
    # The release of torch that was installed; empty without one.
    installed: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    # Why it did not pass; empty if it did.
    reason: str = ""
    failures: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How the cell is called in messages and files."""
        return f"{self.package}-{self.python}-torch-{self.torch}"


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file says."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def packages(root: Path = ROOT) -> list[str]:
    """Return the packages of the workspace."""
    return sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml"))


def pythons(root: Path = ROOT) -> list[str]:
    """Return the Pythons that the packages claim to run on."""
    told = "\n".join(read_toml(root / "pyproject.toml")["tool"]["release"]["classifiers"])
    return re.findall(r"^Programming Language :: Python :: (\d+\.\d+)$", told, re.MULTILINE)


def oldest_torch(root: Path = ROOT) -> str:
    """Return the oldest torch that the packages claim to run with.

    Raises:
        ValueError: They claim different ones.
    """
    texts = "\n".join(path.read_text(encoding="utf-8") for path in root.glob("packages/*/pyproject.toml"))
    oldest = sorted(set(re.findall(r'"torch>=(\d+\.\d+)"', texts)))
    if len(oldest) != 1:
        raise ValueError(
            f"The packages need different torches: {', '.join(oldest)}. They must agree, as the matrix tests "
            'one oldest torch. Write "torch>=2.11" everywhere.'
        )
    return f"{oldest[0]}.0"


def torches(root: Path = ROOT) -> list[str]:
    """Return what `--torch` takes."""
    return [PINNED, oldest_torch(root), NIGHTLY]


def uv_settings(torch: str, root: Path = ROOT) -> str:
    """Return the text of a uv.toml with the settings of the workspace and another pin of torch.

    Overrides do not do it: uv holds what they say against the constraints, which they contradict.

    Raises:
        ValueError: The workspace does not pin torch, so that nothing would be replaced.
    """
    told = read_toml(root / "pyproject.toml")["tool"]["uv"]
    settings = {name: told[name] for name in SETTINGS if name in told}
    constraints = settings["constraint-dependencies"]
    if sum(line.startswith("torch==") for line in constraints) != 1:
        raise ValueError(
            f"constraint-dependencies={constraints} of pyproject.toml must pin torch once, as the matrix "
            'puts another version in its place. Write "torch==VERSION".'
        )
    if torch != PINNED:
        pin = "torch>=0.dev0" if torch == NIGHTLY else f"torch=={torch}"
        settings["constraint-dependencies"] = [
            pin if line.startswith("torch==") else line for line in constraints
        ]
    if torch == NIGHTLY:
        # An index of nightly builds gives no dates, and uv would leave out what has none.
        settings.pop("exclude-newer", None)
    # JSON's strings and lists of strings are TOML, too.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def chosen(option: str, text: str | None, default: list[str], choices: list[str]) -> list[str]:
    """Return what an option chooses, in its order.

    Raises:
        SystemExit: It names something else.
    """
    if text is None:
        return default
    named = text.split(",")
    if unknown := [name for name in named if name not in choices]:
        raise SystemExit(
            f"{option} {text}: unknown {', '.join(map(repr, unknown))}. Choose from {', '.join(choices)}, "
            f"with commas between several: `{option} {','.join(choices[:2])}`."
        )
    return list(dict.fromkeys(named))


def read_counts(cell: Cell, report: Path) -> None:
    """Put the counts of a JUnit report of pytest into the cell."""
    suite = ET.parse(report).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{report} has no testsuite.")
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    cell.skipped = int(suite.get("skipped", 0))
    cell.failed = bad
    cell.passed = int(suite.get("tests", 0)) - bad - cell.skipped
    cell.failures = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]


def installed_torch(environment: Path) -> str:
    """Return the release of torch in an environment; empty without one."""
    found = [path.name for path in environment.glob("lib/python*/site-packages/torch-*.dist-info")]
    return found[0].removeprefix("torch-").removesuffix(".dist-info") if found else ""


def judge(cell: Cell, status: int, output: str) -> None:
    """Say in the cell why it did not pass, if it did not."""
    if cell.failed:
        cell.reason = f"{cell.failed} tests failed"
    elif status or not cell.passed:
        lines = [line for line in ANSI.sub("", output).splitlines() if line.strip()]
        said = "\n".join(["", "```text", *lines[-TAIL:], "```"])
        cell.reason = (
            f"the session ended with {status}, and {cell.passed} tests passed. It said at last:{said}"
        )
    elif cell.installed and re.match(r"\d", cell.torch) and cell.installed.split("+")[0] != cell.torch:
        cell.reason = f"torch {cell.installed} was installed"


def run_cell(cell: Cell, out: Path, options: Sequence[str]) -> None:
    """Install and test one cell; what it prints is kept in a file beside the table."""
    settings = out / f"uv-{cell.torch}.toml"
    settings.write_text(uv_settings(cell.torch), encoding="utf-8")
    report, log = out / f"{cell.name}.xml", out / f"{cell.name}.log"
    report.unlink(missing_ok=True)
    environments = out / "environments" / f"{cell.python}-torch-{cell.torch}"
    session = f"tests-{cell.package}"
    # One job, so that the log is written as the tests run.
    nox = (sys.executable, "-m", "nox", "-j", "1", "-f", str(ROOT / "noxfile.py"))
    told = (f"--junitxml={report}", "-n2", *options)
    env = {**os.environ, "NOX_PYTHONS": cell.python, "UV_CONFIG_FILE": str(settings)}
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            [*nox, "--envdir", str(environments), "-s", session, "--", *told],
            env=env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    cell.seconds = round(time.monotonic() - begin, 1)
    if report.exists():
        cell.installed = installed_torch(environments / session)
        read_counts(cell, report)
    judge(cell, done.returncode, log.read_text(encoding="utf-8", errors="replace"))


def table(cells: Sequence[Cell], options: Sequence[str]) -> str:
    """Return the Markdown table of the cells, and why some did not pass."""
    lines = [
        "| package | Python | torch | passed | failed | skipped | seconds | |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for cell in cells:
        torch = cell.torch if cell.installed == cell.torch else f"{cell.torch} ({cell.installed or 'none'})"
        counts = f"{cell.passed} | {cell.failed} | {cell.skipped} | {cell.seconds:.0f}"
        verdict = "FAILED" if cell.reason else "passed"
        lines.append(f"| {cell.package} | {cell.python} | {torch} | {counts} | {verdict} |")
    if options:
        lines += ["", f"Only a part of the tests ran: `{' '.join(options)}`."]
    for cell in cells:
        if cell.reason:
            names = [f"- `{name}`" for name in cell.failures]
            lines += ["", f"{cell.name}: {cell.reason}", *([""] if names else []), *names]
    return "\n".join([*lines, ""])


def write(cells: Sequence[Cell], out: Path, options: Sequence[str]) -> str:
    """Write the table as JSON and Markdown, and return the latter."""
    text = table(cells, options)
    told = {"options": list(options), "cells": [asdict(cell) for cell in cells]}
    (out / "matrix.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    (out / "matrix.md").write_text(text, encoding="utf-8")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen cells, print the table, and fail with the names of those that did.

    Raises:
        SystemExit: A cell failed, or an option names what is unknown.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    everything, versions, known = packages(), pythons(), torches()
    parser.add_argument("--packages", help=f"some of {', '.join(everything)}")
    parser.add_argument("--python", help=f"some of {', '.join(versions)}")
    parser.add_argument("--torch", help=f"some of {', '.join(known)}; by default all but {NIGHTLY}")
    parser.add_argument("--out", type=Path, default=ROOT / ".nox" / "matrix", help="where the table goes")
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="for pytest")
    told = parser.parse_args(arguments)
    released = [name for name in known if name != NIGHTLY]
    cells = [
        Cell(package, python, torch)
        # Packages last: the bytecode of a torch serves all of them.
        for torch in chosen("--torch", told.torch, released, known)
        for python in chosen("--python", told.python, versions, versions)
        for package in chosen("--packages", told.packages, everything, everything)
    ]
    out = told.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for done, cell in enumerate(cells, start=1):
        print(f"{done} of {len(cells)}: {cell.name} ...", end=" ", flush=True)
        run_cell(cell, out, told.options)
        print(f"{cell.passed} passed, {cell.failed} failed, {cell.seconds:.0f} s", flush=True)
        # After each: what is known stays if the rest is interrupted.
        text = write(cells[:done], out, told.options)
    print(f"\n{text}\nwritten to {out / 'matrix.md'} and {out / 'matrix.json'}", flush=True)
    if bad := [cell.name for cell in cells if cell.reason]:
        failed = f"{len(bad)} of {len(cells)} cells failed: {', '.join(bad)}."
        raise SystemExit(f"{failed} Their logs are in {out}.")


if __name__ == "__main__":
    main()
