"""What the pages say of installing works: it is run against this clone, in fresh environments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Package

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start.md"
SECTION = START.read_text().partition("## Install one package")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
ADDRESS, *WAYS = BLOCKS


def line_of(package: str) -> str:
    """How to install a package today, as its README says it."""
    return f'uv pip install "{package} @ git+$REPOSITORY#subdirectory=packages/{package}"'


def run_in_fresh_environment(words: str, place: Path) -> Path:
    """Run what a page says, in a clone and with a new environment; returns the environment's Python."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is not on PATH: `python3 -m pip install uv`"
    home = place / "environment"
    subprocess.run([uv, "venv", "-q", "--seed", "--python", sys.executable, home], check=True)
    clone = place / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    tools = place / "tools"
    tools.mkdir()
    (tools / "uv").symlink_to(uv)
    # What a session of nox says of its own environment would go before the new one, and so would what
    # `python -m uv` says of the Python that it was started with.
    foreign = ("PYTHON", "UV_PYTHON", "UV_INTERNAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env = kept | {
        "REPOSITORY": ROOT.as_uri(),
        "VIRTUAL_ENV": str(home),
        "PATH": os.pathsep.join((str(home / "bin"), str(tools), os.environ["PATH"])),
    }
    done = subprocess.run(
        ["bash", "-ec", words], cwd=clone, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return home / "bin" / "python"


def says(python: Path, code: str) -> str:
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_address_of_the_repository_is_said_in_one_place() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    places = [
        name for name in tracked.stdout.split() if re.search(r"^REPOSITORY=", (ROOT / name).read_text(), re.M)
    ]
    assert places == [str(START.relative_to(ROOT))]
    assert ADDRESS.startswith("REPOSITORY=")


def test_each_readme_says_what_works_today_and_at_release(package: Package) -> None:
    fence = re.search(r"```\n(uv pip .*?)```", (package.folder / "README.md").read_text(), re.DOTALL)
    assert fence, "the README has no lines on how to install"
    today, release, *_ = fence[1].splitlines()
    assert today.partition("  #")[0] == line_of(package.name)
    assert release.startswith(f"pip install {package.name}  # once released")


def test_the_line_of_a_readme_installs_from_git(tmp_path: Path) -> None:
    python = run_in_fresh_environment(line_of("perf-metrics"), tmp_path)
    told = says(
        python,
        "import perf_metrics, hardware_table, sys; print('torch' in sys.modules, perf_metrics.__name__)",
    )
    assert told == "False perf_metrics"


@pytest.mark.full
@pytest.mark.parametrize("words", WAYS)
def test_each_way_to_install_works(words: str, tmp_path: Path) -> None:
    python = run_in_fresh_environment(words, tmp_path)
    assert (
        says(
            python,
            "from hardware_table import peak_flops; import perf_metrics; print(peak_flops('none', 'bf16'))",
        )
        == "None"
    )
