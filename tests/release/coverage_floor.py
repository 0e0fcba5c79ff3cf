"""Hold a coverage against the floor of a package: `python coverage_floor.py PACKAGE REPORT [--raise]`."""

from __future__ import annotations

import argparse
import json
import math
import re
import tomllib
from pathlib import Path

FLOORS = Path(__file__).parent / "coverage_floors.toml"
# Percent by which runs of the same tests differ, as they are cut off by signals at other lines.
SCATTER = 0.5


def compare(package: str, percent: float, floors: Path, *, may_raise: bool) -> str:
    """Return how a package stands, and raise its floor if asked.

    Raises:
        SystemExit: It is below the floor.
    """
    floor = tomllib.loads(floors.read_text(encoding="utf-8")).get(package, 0.0)
    if percent < floor:
        raise SystemExit(
            f"{package}: the tests execute {percent:.1f}% of the lines, and the floor is {floor}%. Test what "
            "is new, or remove what is not needed; a floor is not lowered."
        )
    reached = math.floor((percent - SCATTER) * 10) / 10
    if reached <= floor:
        return f"{package}: {percent:.1f}%, the floor is {floor}%"
    if not may_raise:
        return (
            f"{package}: {percent:.1f}%, the floor is {floor}% and could be {reached}%: `--raise` writes it"
        )
    lines = floors.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not re.match(rf"{re.escape(package)} = ", line)]
    head = [line for line in kept if line.startswith("#")]
    told = sorted([*(line for line in kept if line and line not in head), f"{package} = {reached}"])
    floors.write_text("\n".join([*head, *told, ""]), encoding="utf-8")
    return f"{package}: {percent:.1f}%, the floor is {reached}% from now on, it was {floor}%"


def main() -> None:
    """Compare, and say it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("report", type=Path, help="what `coverage json` wrote")
    parser.add_argument(
        "--raise", dest="may_raise", action="store_true", help="write a floor that is higher now"
    )
    options = parser.parse_args()
    percent = json.loads(options.report.read_text())["totals"]["percent_covered"]
    print(compare(options.package, percent, FLOORS, may_raise=options.may_raise))


if __name__ == "__main__":
    main()
