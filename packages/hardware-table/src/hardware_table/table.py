"""Reading `accelerators.toml` into records, once and only when asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple, TypedDict

from hardware_table.dtypes import DTYPES
from hardware_table.names import normalise
from hardware_table.records import Accelerator, MemoryConfiguration, Peak


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
