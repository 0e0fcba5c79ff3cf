"""The scripted libnvidia-ml.so.1, compiled once, and programs that run against it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fake_nvml" / "nvml.c"


@dataclass(frozen=True)
class FakeNvml:
    """Runs programs in processes of their own, for which the compiled library is the driver's.

    Attributes:
        libraries: Folder by driver: "gpm", "no_gpm" from before GPM, and "none", whose file is not a library
            and so keeps the loader from finding the driver of a machine that has one.
        folder: For the script and the report.
    """

    libraries: Mapping[str, Path]
    folder: Path

    @property
    def report(self) -> dict[str, int]:
        """How often the library was opened and closed, and GPM samples were allocated and freed."""
        return json.loads((self.folder / "report.json").read_text())

    def environment(self, script: str, driver: str = "gpm") -> dict[str, str]:
        path = self.folder / "script.txt"
        path.write_text(script)
        return os.environ | {
            "LD_LIBRARY_PATH": str(self.libraries[driver]),
            "FAKE_NVML_SCRIPT": str(path),
            "FAKE_NVML_REPORT": str(self.folder / "report.json"),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, program: str, script: str = "gpus 1\n", driver: str = "gpm") -> object:
        """Run Python code that prints one line of JSON, and return that."""
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command,
            env=self.environment(script, driver),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)


@pytest.fixture(scope="session")
def nvml_libraries(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.fail("the tests of the NVML path compile a scripted libnvidia-ml.so.1, which needs gcc")
    folders = {name: tmp_path_factory.mktemp(name) for name in ("gpm", "no_gpm", "none")}
    for name, options in (("gpm", []), ("no_gpm", ["-DNO_GPM"])):
        output = folders[name] / "libnvidia-ml.so.1"
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
        subprocess.run([compiler, *flags, *options, "-o", str(output), str(SOURCE)], check=True)
    (folders["none"] / "libnvidia-ml.so.1").touch()
    return folders


@pytest.fixture
def fake_nvml(nvml_libraries: Mapping[str, Path], tmp_path: Path) -> FakeNvml:
    return FakeNvml(nvml_libraries, tmp_path)
