"""Peak FLOP/s and memory bandwidth of accelerators, looked up by exact device name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardware_table.detection import DetectedDevice, detect
    from hardware_table.dtypes import DTYPES
    from hardware_table.matching import accelerators, lookup, peak_flops
    from hardware_table.messages import HardwareTableWarning
    from hardware_table.records import Accelerator, MemoryConfiguration, Peak
    from hardware_table.resolve import ResolvedPeak, get_peak_hardware_flops, resolve_peak
    from hardware_table.userfile import HardwareFileError, default_config_path

__all__ = [
    "DTYPES",
    "Accelerator",
    "DetectedDevice",
    "HardwareFileError",
    "HardwareTableWarning",
    "MemoryConfiguration",
    "Peak",
    "ResolvedPeak",
    "accelerators",
    "default_config_path",
    "detect",
    "get_peak_hardware_flops",
    "lookup",
    "peak_flops",
    "resolve_peak",
]

# A name loads its module when it is first used, so that importing the package costs next to nothing.
_HOME = {
    "DTYPES": "dtypes",
    "Accelerator": "records",
    "DetectedDevice": "detection",
    "HardwareFileError": "userfile",
    "HardwareTableWarning": "messages",
    "MemoryConfiguration": "records",
    "Peak": "records",
    "ResolvedPeak": "resolve",
    "accelerators": "matching",
    "default_config_path": "userfile",
    "detect": "detection",
    "get_peak_hardware_flops": "resolve",
    "lookup": "matching",
    "peak_flops": "matching",
    "resolve_peak": "resolve",
}


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds a misspelt one

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
