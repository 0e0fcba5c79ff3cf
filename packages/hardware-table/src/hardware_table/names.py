"""Device names: one spelling for each, and the parts of a name that change what the device can do."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

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
