"""The user's `hardware.yaml`: peaks that win over the table, and what was detected, for the user to see.

The section `detected` is never read back: a figure written there cannot go stale and win over the table. What
the user wrote elsewhere in the file is left as it is, to the letter.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_table.detection import DetectedDevice
from hardware_table.matching import match
from hardware_table.records import DTYPES, canonical_dtype
from hardware_table.table import normalise

if TYPE_CHECKING:
    import yaml


Overrides = Mapping[tuple[str, str], float]
"""Peak in FLOP/s by normalised device name and number format."""

_SECTIONS = ("overrides", "detected")
_LAYOUT = (
    "such as overrides: {device name: {bf16: 165.2e12}}",
    "such as device name: {bf16: 165.2e12}",
    "such as bf16: 165.2e12",
)
LOCK_SECONDS = 5.0
"""How long to wait for another process that is writing the file."""

_NEW_FILE = """\
# Peak FLOP/s of this user's accelerators, for MFU: dense, per device.
#
# `overrides` wins over the built-in table. It is keyed by the device name, exactly as torch gives it, and by
# number format: {dtypes}. Remove the # from the lines below to change a figure.
overrides:
#  {name}:
#    bf16: 165.2e12

# `detected` is what hardware-table found. It is rewritten and never read: change figures in `overrides`.
"""


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
    rule = "Give the dense peak of one device in FLOP/s, such as 165.2e12."
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{setting}={value!r} is not a number. {rule}")
    try:
        flops = float(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{setting}={value!r} is not a number. {rule}") from error
    if not math.isfinite(flops) or flops <= 0:
        raise ValueError(f"{setting}={value!r} must be finite and above 0. {rule}")
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
        raise HardwareFileError(f"{path} cannot be read: {error}. Correct or delete the file.") from error


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


def record_detected(path: Path, device: DetectedDevice) -> None:
    """Write a device and its peaks into the section `detected` of a `hardware.yaml`.

    Several processes may do this at once: the file is replaced as a whole, under a lock, and only when its
    content changes.

    Args:
        path: The file; it is created if it does not exist, with its directory.
        device: The device.

    Raises:
        HardwareFileError: If the file is there and is not valid.
        OSError: If it cannot be written.
        TimeoutError: If another process holds the lock for more than `LOCK_SECONDS`.
    """
    if sys.platform == "win32":
        raise OSError(errno.ENOTSUP, "writing the file under a lock needs Linux or macOS.")
    path = path.resolve()  # a link stays a link
    old = read_text(path)
    if old is not None and _with_device(old, path, device) == old:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f".{path.name}.lock")):
        old = read_text(path)
        text = old
        if text is None:
            text = _NEW_FILE.format(dtypes=", ".join(DTYPES), name=_quoted(device.name))
        new = _with_device(text, path, device)
        if new != old:
            _replace(path, new)


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
                    raise _error(path, value_node, key, "is given twice. Keep one")
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
        raise HardwareFileError(f"{path} is not valid YAML: {detail}. Correct or delete the file.") from error
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
                path, key_node, " > ".join(filter(None, (key, key_node.value))), "is given twice. Keep one"
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
    return HardwareFileError(f"{path}, line {node.start_mark.line + 1}: {key}: {problem.removesuffix('.')}.")


def _with_device(text: str, path: Path, device: DetectedDevice) -> str:
    import yaml

    overrides = parse_overrides(text, path)
    root = compose(text, path)
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    first = last = len(lines)
    entries: dict[str, str] = {}
    indent = 2
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == "detected":
            first, last = key.start_mark.line, _last_line(value) + 1
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                indent = value.value[0][0].start_mark.column
                entries = dict(_entry_texts(value, lines))
    entries[device.name] = _entry(device, indent)
    new = "".join([*lines[:first], "detected:\n", *entries.values(), *lines[last:]])
    _require_same_overrides(new, path, overrides)
    return new


def _entry_texts(section: yaml.MappingNode, lines: list[str]) -> Iterator[tuple[str, str]]:
    for key, value in section.value:
        yield str(key.value), "".join(lines[key.start_mark.line : _last_line(value) + 1])


def _require_same_overrides(text: str, path: Path, overrides: Overrides) -> None:
    # An unusual layout (one {...} mapping, an end marker) leaves no room for a section of ours.
    try:
        same = parse_overrides(text, path) == overrides
    except HardwareFileError:
        same = False
    if not same:
        raise OSError(
            errno.EINVAL, "this layout has no room for a section. Write its keys on lines of their own."
        )


def _last_line(node: yaml.Node) -> int:
    import yaml

    # A block mapping's own end lies behind the comments that follow it, which may belong to the next key.
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1])
    return int(node.end_mark.line)


def _entry(device: DetectedDevice, indent: int) -> str:
    found = match(device.name, device.units)
    fields: dict[str, object] = {"backend": device.backend, "units": device.units}
    if found.accelerator is None:
        fields["unknown"] = found.reason
    else:
        if found.accelerator.scaled_from is not None:
            fields["scaled_from_units"] = found.accelerator.scaled_from
        fields["confidence"] = found.accelerator.confidence
        fields["peak_flops"] = {peak.dtype: peak.flops for peak in found.accelerator.peaks}
    lines = [f"{' ' * indent}{_quoted(device.name)}:"]
    lines += [f"{' ' * indent * 2}{key}: {_value(value)}" for key, value in fields.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, float):
        # A point and a signed exponent: every YAML reader takes this for a number.
        return f"{float(f'{value / 1e12:.7g}')!r}e+12"
    return json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    import fcntl

    with lock.open("a") as file:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(errno.ETIMEDOUT, f"{lock} is held by another process") from None
                time.sleep(0.01)
        yield


def _replace(path: Path, text: str) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(handle)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
