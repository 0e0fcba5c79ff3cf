"""The table of `accelerators.toml` by device name: read once, and only when asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple, TypedDict

from hardware_table.records import DTYPES, Accelerator, MemoryConfiguration, Peak

Modifier = Literal["MIG", "laptop", "Max-Q", "vGPU", "VF"]

_TRADEMARKS = re.compile(r"\((?:r|tm|c)\)")
_SUFFIXES: tuple[tuple[Modifier, re.Pattern[str]], ...] = (
    ("MIG", re.compile(r" mig (?:\d+c\.)?\d+g\.\d+gb(?:[+-][a-z.]+)*$")),
    ("laptop", re.compile(r" laptop gpu$")),
    ("Max-Q", re.compile(r" with max-q design$")),
    ("vGPU", re.compile(r"(?:-\d+)+[qcab]$")),
    ("VF", re.compile(r" vf$")),
)
_GRID = "grid "


class _MemoryEntry(TypedDict, total=False):
    gbs: float
    gb: float


class _Entry(TypedDict, total=False):
    name: str
    aliases: list[str]
    vendor: str
    category: str
    architecture: str
    chip: str
    compute_capability: str
    unit: str
    units: int
    clock_ghz: float
    clock: str
    boost_ghz: float
    flops_per_cycle: dict[str, int]
    published: dict[str, float]
    tflops: dict[str, float]
    memory: list[_MemoryEntry]
    source: str
    confidence: str
    why: str
    note: str


class Table(NamedTuple):
    """The whole table, indexed by normalised device name."""

    accelerators: tuple[Accelerator, ...]
    by_name: Mapping[str, tuple[Accelerator, ...]]
    excluded: Mapping[str, str]
    """Known names that have no figure on purpose, with the reason."""


@cache
def load_table() -> Table:
    """Read the table; later calls give the same object."""
    import tomllib
    from pathlib import Path

    data = tomllib.loads(Path(__file__).with_name("accelerators.toml").read_text(encoding="utf-8"))
    references: Mapping[str, str] = data["references"]
    accelerators = tuple(_record(entry, references) for entry in data["accelerator"])
    by_name: dict[str, tuple[Accelerator, ...]] = {}
    for accelerator in accelerators:
        for name in dict.fromkeys(map(normalise, (accelerator.name, *accelerator.aliases))):
            by_name[name] = (*by_name.get(name, ()), accelerator)
    excluded = {normalise(name): group["reason"] for group in data["excluded"] for name in group["names"]}
    return Table(accelerators, by_name, excluded)


class DeviceName(NamedTuple):
    """A device name taken apart.

    `base` is the normalised name of the whole device, `modifier` what the name says of the part in use.
    """

    base: str
    modifier: Modifier | None


def normalise(name: str) -> str:
    """Give the one spelling under which a name is looked up.

    Case, surrounding and repeated spaces, trademark signs and one leading "NVIDIA" do not count (old drivers
    leave the vendor out). Everything else does: names that differ in one letter are different devices.

    Args:
        name: Device name as torch, a driver or a person writes it.

    Returns:
        The normalised name.
    """
    text = _TRADEMARKS.sub(" ", name.casefold())
    return " ".join(text.split()).removeprefix("nvidia ")


def take_apart(name: str) -> DeviceName:
    """Split what marks a slice, a laptop part or a virtual device off a name.

    Args:
        name: Device name in any spelling. Products whose own name ends like a modifier are found before this
            is called: "Max-Q Workstation Edition" is a desktop card.

    Returns:
        The base name and the modifier.
    """
    base = normalise(name)
    for modifier, pattern in _SUFFIXES:
        match = pattern.search(base)
        if match:
            return DeviceName(base[: match.start()].removeprefix(_GRID), modifier)
    if base.startswith(_GRID):
        return DeviceName(base.removeprefix(_GRID), "vGPU")
    return DeviceName(base, None)


def _record(entry: _Entry, references: Mapping[str, str]) -> Accelerator:
    text = " ".join((entry["source"], entry.get("why", ""), entry.get("note", "")))
    return Accelerator(
        name=entry["name"],
        aliases=tuple(entry.get("aliases", ())),
        vendor=entry["vendor"],
        category=entry["category"],
        architecture=entry["architecture"],
        chip=entry.get("chip"),
        compute_capability=entry.get("compute_capability"),
        unit_kind=entry["unit"],
        units=entry.get("units"),
        clock_ghz=entry.get("clock_ghz"),
        clock_kind=entry["clock"],
        boost_ghz=entry.get("boost_ghz"),
        peaks=tuple(_peaks(entry)),
        memory=tuple(
            MemoryConfiguration(bandwidth=_exact(m["gbs"], 9), gigabytes=m.get("gb"))
            for m in entry.get("memory", ())
        ),
        source=entry["source"],
        references=tuple(f"[{key}] {references[key]}" for key in _cited(text)),
        confidence=entry["confidence"],
        why=entry.get("why"),
        note=entry.get("note"),
    )


def _peaks(entry: _Entry) -> Iterator[Peak]:
    for dtype in DTYPES:
        if dtype in entry["tflops"]:
            published = entry["published"].get(dtype)
            yield Peak(
                dtype=dtype,
                flops=_exact(entry["tflops"][dtype], 12),
                published=None if published is None else _exact(published, 12),
                flops_per_cycle=entry["flops_per_cycle"].get(dtype),
            )


def _cited(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"\[([a-z0-9-]+)\]", text)))


def _exact(value: float, exponent: int) -> float:
    # 330.3 * 1e12 is not the number that 330.3e12 spells; scaling the text is exact.
    return float(f"{value!r}e{exponent}")
