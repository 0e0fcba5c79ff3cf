"""Reading the user's `hardware.yaml`: peaks that win over the table, by device name and number format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hardware_table.dtypes import canonical_dtype
from hardware_table.names import normalise

if TYPE_CHECKING:
    from pathlib import Path

    import yaml

Overrides = Mapping[tuple[str, str], float]
"""Peak in FLOP/s by normalised device name and number format."""

_SECTIONS = ("overrides", "detected")
_LAYOUT = (
    "such as overrides: {device name: {bf16: 165.2e12}}",
    "such as device name: {bf16: 165.2e12}",
    "such as bf16: 165.2e12",
)


class HardwareFileError(ValueError):
    """`hardware.yaml` cannot be used. The message names the file, the line, the key and what to write."""


def default_config_path() -> Path:
    """Give the path of the user's `hardware.yaml`, in the configuration directory of the platform.

    On Linux `$XDG_CONFIG_HOME/hardware-table/hardware.yaml`, by default under `~/.config`.

    Returns:
        The path; the file need not exist.
    """
    import platformdirs

    return platformdirs.user_config_path("hardware-table", appauthor=False) / "hardware.yaml"


def parse_flops(value: float | str, setting: str) -> float:
    """Read a peak given as a number or as text.

    YAML reads `165.2e12` (no sign in the exponent) as text; it is a number here all the same.

    Args:
        value: FLOP/s.
        setting: What the value is called, for the error message.

    Returns:
        FLOP/s, finite and above zero.

    Raises:
        TypeError: If the value is neither a number nor text.
        ValueError: If it does not spell a finite number above zero.
    """
    rule = "give the dense peak of one device in FLOP/s, such as 165.2e12"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{setting}={value!r} is not a number; {rule}")
    try:
        flops = float(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{setting}={value!r} is not a number; {rule}") from error
    if not math.isfinite(flops) or flops <= 0:
        raise ValueError(f"{setting}={value!r} must be finite and above 0; {rule}")
    return flops


def read_text(path: Path) -> str | None:
    """Read the file, or give None if it does not exist.

    Raises:
        HardwareFileError: If it cannot be read or is not UTF-8 text.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareFileError(f"{path} cannot be read: {error}; correct or delete the file") from error


def load_overrides(path: Path) -> Overrides:
    """Read the `overrides` of a `hardware.yaml`.

    Args:
        path: The file. Where it does not exist there are no overrides.

    Returns:
        Peaks in FLOP/s by normalised device name and number format.

    Raises:
        HardwareFileError: If the file is not YAML, or a key or a value in it is wrong.
    """
    text = read_text(path)
    return {} if text is None else parse_overrides(text, path)


def parse_overrides(text: str, path: Path) -> Overrides:
    """Read the overrides from the text of `path`; see `load_overrides`."""
    overrides: dict[tuple[str, str], float] = {}
    for section, section_node in _entries(compose(text, path), path, "", 0):
        if section not in _SECTIONS:
            raise _error(path, section_node, section, f"is not a known key; known are {', '.join(_SECTIONS)}")
        if section != "overrides":
            continue
        for device, device_node in _entries(section_node, path, section, 1):
            where = f"{section} > {device}"
            for dtype, value_node in _entries(device_node, path, where, 2):
                key = f"{where} > {dtype}"
                entry = (normalise(device), _dtype(dtype, value_node, path, key))
                if entry in overrides:
                    raise _error(path, value_node, key, "is given twice; keep one")
                overrides[entry] = _flops(value_node, path, key)
    return overrides


def compose(text: str, path: Path) -> yaml.Node | None:
    """Parse YAML into nodes, which know their line and keep `165.2e12` as it is written."""
    import yaml

    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        detail = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            detail = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise HardwareFileError(f"{path} is not valid YAML: {detail}; correct or delete the file") from error
    return node


def _entries(node: yaml.Node | None, path: Path, key: str, level: int) -> Iterator[tuple[str, yaml.Node]]:
    import yaml

    if node is None or node.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(node, yaml.MappingNode):
        raise _error(path, node, key or "the file", f"must be a mapping, {_LAYOUT[level]}")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _error(path, key_node, key or "the file", "has a key that is not plain text")
        if key_node.value in seen:
            raise _error(
                path, key_node, " > ".join(filter(None, (key, key_node.value))), "is given twice; keep one"
            )
        seen.add(key_node.value)
        yield key_node.value, value_node


def _dtype(dtype: str, node: yaml.Node, path: Path, key: str) -> str:
    try:
        return canonical_dtype(dtype)
    except ValueError as error:
        raise _error(path, node, key, str(error)) from error


def _flops(node: yaml.Node, path: Path, key: str) -> float:
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        raise _error(path, node, key, "must be one number, in FLOP/s, such as 165.2e12")
    try:
        return parse_flops(node.value, "the value")
    except ValueError as error:
        raise _error(path, node, key, str(error)) from error


def _error(path: Path, node: yaml.Node, key: str, problem: str) -> HardwareFileError:
    return HardwareFileError(f"{path}, line {node.start_mark.line + 1}: {key}: {problem}")
