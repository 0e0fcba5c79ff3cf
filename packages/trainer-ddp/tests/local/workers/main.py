"""Two ranks, and then four. Usage: main.py DIRECTORY. They write into DIRECTORY/two and DIRECTORY/four."""

import sys
from pathlib import Path

from four import Four
from ranks import run_world
from two import SCENARIOS, Two

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    run_world(2, directory / "two", Two, SCENARIOS)
    run_world(4, directory / "four", Four, ["nodes"])
