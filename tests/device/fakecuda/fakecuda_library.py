"""The compiled library, loaded before torch is imported."""

from __future__ import annotations

import ctypes
import os

from fakecuda_build import library, torch_folder

Report = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def load() -> ctypes.CDLL:
    """Load it, and the two libraries of torch whose symbols it needs.

    Raises:
        ImportError: It has not been compiled for this torch and these sources.
    """
    path = library()
    if not path.exists():
        raise ImportError(
            f"The fake device is not compiled: {path.name} is missing. "
            "Run `uv run nox -s device`, or python tests/device/fakecuda/fakecuda_build.py."
        )
    # torch warns of kernels that are registered twice, which is what this library is for.
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
    loaded.fakecuda_report.argtypes = [Report, Report]
    loaded.fakecuda_host_register.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    loaded.fakecuda_host_unregister.argtypes = [ctypes.c_size_t]
    loaded.fakecuda_set_limit.argtypes = [ctypes.c_int, ctypes.c_int64]
    loaded.fakecuda_limit.restype = ctypes.c_int64
    loaded.fakecuda_blocks.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    loaded.fakecuda_blocks.restype = ctypes.c_int64
    loaded.fakecuda_elapsed.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    loaded.fakecuda_elapsed.restype = ctypes.c_double
    return loaded


lib = load()
