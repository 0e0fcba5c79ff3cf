"""Compile the fake device against the installed torch, unless that was done before."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = (HERE / "fakecuda.cpp", HERE / "runtime.h")
FLAGS = ("-O0", "-std=c++20", "-shared", "-fPIC")
WITHOUT_COMPILER = (
    "The fake device needs a C++ compiler, and g++ was not found. Install it (Debian: apt-get install g++; "
    "Fedora: dnf install gcc-c++), or name another one in CXX."
)


def torch_folder() -> Path:
    """The folder of the installed torch, found without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("The fake device needs torch, which is not installed.")
    return Path(found.origin).parent


def library() -> Path:
    """Where the library for this torch and these sources is, or will be."""
    told = hashlib.sha256(" ".join(FLAGS).encode())
    for source in SOURCES:
        told.update(source.read_bytes())
    # The path, too: an environment may hold another build of the same version.
    told.update(str(torch_folder()).encode())
    version = importlib.metadata.version("torch")
    cache = Path(os.environ.get("FAKECUDA_CACHE", HERE.parents[2] / ".nox" / ".fakecuda"))
    return cache / f"torch-{version}-{told.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the library if it is not there.

    Raises:
        SystemExit: The compiler is missing, or failed.
    """
    target = library()
    if target.exists():
        print(f"fake device: {target.name} is there already")
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise SystemExit(WITHOUT_COMPILER)
    torch = torch_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(f".{os.getpid()}")
    include = torch / "include"
    command = (
        *(compiler, *FLAGS, str(SOURCES[0]), "-o", str(made)),
        *(f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"),
        *(f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"),
    )
    began = time.monotonic()
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(
            "The fake device did not compile against this torch; the compiler's messages are above."
        )
    # Other processes see the whole file or none.
    made.replace(target)
    print(f"fake device: compiled in {time.monotonic() - began:.0f} s as {target.name}")
    return target


if __name__ == "__main__":
    build()
    sys.exit(0)
