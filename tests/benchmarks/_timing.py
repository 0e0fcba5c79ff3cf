"""What every benchmark here shares: clocks, the state of memory pages, peak memory, syncing, and the machine.

The state of memory pages decides more than the code under test. A page that the operating system has never
handed out, or that a virtual machine has given back to its host (free page reporting does so about two
seconds after a page becomes free), costs a fault of the host when it is written first: the same write can
take ten times as long. :func:`normalise_pages` therefore runs immediately before everything that is timed.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class Stopwatch:
    """Wall and CPU seconds of this process, all of its threads included, since it was made."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def wall(self) -> float:
        """Seconds that have passed."""
        return time.perf_counter() - self._wall

    def cpu(self) -> float:
        """Seconds of processor time that were used."""
        return time.process_time() - self._cpu


class PeakMemory:
    """Context manager for the highest resident memory inside it, above what was resident at the start.

    The kernel keeps the maximum (``VmHWM``), and writing 5 to ``/proc/self/clear_refs`` resets it, so nothing
    is missed between samples. Page cache does not count; pages of mapped files do.

    Args:
        above: Resident bytes to subtract; by default those on entry.
    """

    METHOD = "VmHWM after a reset through /proc/self/clear_refs, less VmRSS before"

    def __init__(self, above: int | None = None) -> None:
        self.extra_bytes: int | None = None
        """Known after the block; None where the system cannot tell."""
        self._above = above

    def __enter__(self) -> PeakMemory:
        """Reset the maximum."""
        if _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text("5")
        if self._above is None:
            self._above = resident_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        """Read the maximum."""
        if self._above is not None:
            self.extra_bytes = max(0, _status_bytes("VmHWM") - self._above)


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes; None where the system cannot tell."""
    return _status_bytes("VmRSS") if _STATUS.exists() else None


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no field {field}")


def can_drop_caches() -> bool:
    """Whether this process may drop the page cache of the machine."""
    return os.access(_DROP_CACHES, os.W_OK)


def normalise_pages(num_bytes: int, *, drop_caches: bool) -> None:
    """Make the next ``num_bytes`` of memory that anyone asks for cost the same each time.

    Writes dirty pages to the disk, gives freed memory back to the system, and then touches and frees a block.
    The pages of the block are the ones handed out next, and they are known to the host of a virtual machine.

    Args:
        num_bytes: Size of the block, at most half of the memory that is available.
        drop_caches: Empty the page cache first. Needs :func:`can_drop_caches`. Without it, cached files stay.
    """
    gc.collect()
    _trim_heap()
    os.sync()
    if drop_caches:
        _DROP_CACHES.write_text("3")
    _touch(min(num_bytes, _available_bytes() // 2))


def _touch(num_bytes: int) -> None:
    with private_memory(num_bytes) as block:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)  # Whole 2 MB blocks: it is these that a host takes back.
        fill(block, num_bytes)


def private_memory(num_bytes: int) -> mmap.mmap:
    """Return memory straight from the system, not yet touched. To be closed; works in a ``with`` block.

    It does not pass through malloc, which might hand out memory that was touched before.
    """
    return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def fill(block: mmap.mmap, num_bytes: int) -> None:
    """Write to the first ``num_bytes`` of a block, so that every page of them exists."""
    view = (ctypes.c_char * len(block)).from_buffer(block)
    ctypes.memset(view, 1, num_bytes)


def _trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines() if _STATUS.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2


def files_below(directory: Path) -> list[Path]:
    """Every file in a directory and the directories below it, sorted."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def sync_tree(directory: Path) -> None:
    """Sync every file and directory to the disk. Costs next to nothing for those that are synced already."""
    for path in [*sorted(directory.rglob("*")), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one value or more."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], baselines: Sequence[float]) -> Spread:
        """Summarise the ratios of each value to the baseline measured beside it."""
        return cls.of([value / baseline for value, baseline in zip(values, baselines, strict=True)])


def machine(directory: Path, distributions: Sequence[str]) -> dict[str, object]:
    """Describe where a benchmark runs: processor, memory, system, file system of ``directory``, versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": _file_system(directory),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "versions": {"python": platform.python_version(), **_versions(distributions)},
    }


def _versions(distributions: Sequence[str]) -> Mapping[str, str]:
    return {name: metadata.version(name) for name in distributions}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(directory: Path) -> str:
    """The kind of file system that holds a directory: the mount with the longest path above it."""
    mounts = Path("/proc/mounts")
    rows = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    above = [row for row in rows if directory.resolve().is_relative_to(row[1])]
    return max(above, key=lambda row: len(row[1]))[2] if above else "unknown"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells under a heading row; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
