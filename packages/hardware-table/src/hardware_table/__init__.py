"""Peak FLOP/s and memory bandwidth of accelerators, looked up by exact device name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardware_table.detection import DetectedDevice, HardwareTableWarning, detect
    from hardware_table.hardware_file import HardwareFileError, default_config_path
    from hardware_table.matching import accelerators, lookup, peak_flops
    from hardware_table.records import DTYPES, Accelerator, MemoryConfiguration, Peak
    from hardware_table.resolve import ResolvedPeak, get_peak_hardware_flops, resolve_peak

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
    "DTYPES": "records",
    "Accelerator": "records",
    "DetectedDevice": "detection",
    "HardwareFileError": "hardware_file",
    "HardwareTableWarning": "detection",
    "MemoryConfiguration": "records",
    "Peak": "records",
    "ResolvedPeak": "resolve",
    "accelerators": "matching",
    "default_config_path": "hardware_file",
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
