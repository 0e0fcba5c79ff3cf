"""Print the table of `footprint.py`'s figures: `python footprint_table.py JSON`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

_HEAD = ("package", "its files", "with all it needs but torch", "import", "of which torch")


def row(figures: Mapping[str, object]) -> tuple[str, ...]:
    """Return the cells of a package."""
    torch = figures["import_torch_s"]
    return (
        str(figures["package"]),
        f"{figures['own_mib']:.2f} MiB",
        f"{figures['without_torch_mib']:.1f} MiB",
        f"{figures['import_s']:.2f} s",
        "not imported" if torch is None else f"{torch:.2f} s",
    )


def main(text: str) -> None:
    """Print the table."""
    rows = [_HEAD, tuple("---" if n == 0 else "---:" for n in range(len(_HEAD)))]
    rows += [row(figures) for figures in json.loads(text)]
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
