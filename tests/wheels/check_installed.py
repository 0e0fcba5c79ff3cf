"""Check installed wheels: `python -I check_installed.py DISTRIBUTION...` in their environment."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def check_import(name: str) -> None:
    """Import a distribution's package and check that it is the installed copy and carries its type marker."""
    module = importlib.import_module(name.replace("-", "_"))
    if module.__file__ is None:
        raise SystemExit(f"{name}: imports as a bare namespace, without an __init__.py")
    folder = Path(module.__file__).parent
    if not folder.is_relative_to(sys.prefix):
        raise SystemExit(f"{name}: imported from {folder}, not from the environment {sys.prefix}")
    if not (folder / "py.typed").is_file():
        raise SystemExit(f"{name}: the wheel has no py.typed")
    missing = [public for public in getattr(module, "__all__", ["__all__"]) if not hasattr(module, public)]
    if missing:
        raise SystemExit(f"{name}: the package promises names that are not there: {missing}")


def check_licence(name: str) -> None:
    """Check that a distribution carries its licence text."""
    files = metadata.files(name) or []
    if not any(file.name == "LICENSE" for file in files):
        raise SystemExit(f"{name}: the wheel has no LICENSE")


def run_scripts(name: str) -> None:
    """Run each console script of a distribution with --help."""
    for script in metadata.distribution(name).entry_points.select(group="console_scripts"):
        command = [str(Path(sys.prefix) / "bin" / script.name), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0 or "usage" not in done.stdout.lower():
            said = done.stdout + done.stderr
            raise SystemExit(f"{name}: `{script.name} --help` ended with {done.returncode}:\n{said}")
        print(f"{name}: {script.name} --help is fine")


def main(names: list[str]) -> None:
    """Check each named distribution."""
    if not names:
        raise SystemExit("name the distributions to check")
    for name in names:
        check_import(name)
        check_licence(name)
        run_scripts(name)
        print(f"{name}: {metadata.version(name)} is fine")


if __name__ == "__main__":
    main(sys.argv[1:])
