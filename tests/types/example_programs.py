"""Write the programs of the READMEs and pages into a folder: `example_programs.py FOLDER`.

A block that continues others stands below them, as the tests that run the pages have it. A line of a program
has the number that it has on its page, so that what is said of it can be looked up there. The settings of
pyright are those that an editor has without any.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["packages/*/README.md", "docs/start.md", "docs/guides/*.md"]
FENCE = re.compile(r"^```(?:\{\.)?python\b ?(?P<options>[^}]*)\}?$")


def blocks(page: Path) -> Iterator[tuple[str, int, list[str]]]:
    """The options, first line number from 1 and lines of each Python block of a page."""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        number += 1
        if fence:
            end = lines.index("```", number)
            yield fence["options"], number + 1, lines[number:end]
            number = end + 1


def programs(page: Path) -> dict[int, list[str]]:
    """The programs of a page by the number of their first line, each with empty lines for what is between."""
    found: dict[int, list[str]] = {}
    for options, first, lines in blocks(page):
        if "notest" in options:
            continue
        if "continuation" not in options:
            found[first] = []
        program = found[max(found)]
        program += [""] * (first - 1 - len(program)) + lines
    return found


def write_programs(folder: Path) -> list[Path]:
    """Write every program into a file of its own, named after its page and first line."""
    written = []
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            name = page.parent.name if page.name == "README.md" else page.stem
            for first, lines in programs(page).items():
                path = folder / f"{name.replace('-', '_')}_{first}.py"
                path.write_text("\n".join([*lines, ""]))
                written.append(path)
    return written


def main(folder: Path) -> None:
    """Write the programs as a package, and beside them the settings of pyright."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    # Not every library of the examples is installed where types are checked: mypy says which may be missing.
    settings = {"typeCheckingMode": "standard", "reportMissingImports": False, "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    written = write_programs(folder)
    if not written:
        raise SystemExit(f"no page of {PAGES} has a program: their blocks begin with ```python")
    print(f"{len(written)} programs of {len(PAGES)} kinds of pages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
