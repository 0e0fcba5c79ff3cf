"""The matrix of Pythons and torches puts another torch in the place of the pin, and tells all that failed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import version_matrix
from version_matrix import NIGHTLY, PINNED, Cell

ROOT = Path(__file__).parents[2]
OLDEST = version_matrix.oldest_torch()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
PIN = next(line for line in SETTINGS["constraint-dependencies"] if line.startswith("torch=="))


def run_small(place: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the matrix, on 3.12, in a workspace of one package with these tests."""
    root = place / "root"
    package = root / "packages" / "small"
    script = root / "tests" / "release" / "version_matrix.py"
    for folder in (package / "tests", script.parent):
        folder.mkdir(parents=True)
    shutil.copy(version_matrix.__file__, script)
    shutil.copy(ROOT / "pyproject.toml", root)
    (package / "pyproject.toml").write_text('dependencies = ["torch>=2.11"]\n')
    (package / "tests" / "test_small.py").write_text(body)
    # It runs the pytest of this environment; that the real sessions install, the matrix itself shows.
    (root / "noxfile.py").write_text(
        "import sys, nox\n"
        "@nox.session(name='tests-small', venv_backend='none')\n"
        "def tests(session):\n"
        "    session.run(sys.executable, '-m', 'pytest', 'packages', *session.posargs)\n"
    )
    command = [sys.executable, str(script), "--python", "3.12", "--out", str(place / "out"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_another_torch_takes_the_place_of_the_pin() -> None:
    told = tomllib.loads(version_matrix.uv_settings(OLDEST))
    others = [line for line in SETTINGS["constraint-dependencies"] if line != PIN]
    assert sorted(told["constraint-dependencies"]) == sorted([*others, f"torch=={OLDEST}"])
    assert told["exclude-newer"] == SETTINGS["exclude-newer"]
    pinned = tomllib.loads(version_matrix.uv_settings(PINNED))
    assert pinned["constraint-dependencies"] == SETTINGS["constraint-dependencies"]


def test_nightly_builds_have_neither_pin_nor_day() -> None:
    told = tomllib.loads(version_matrix.uv_settings(NIGHTLY))
    assert "torch>=0.dev0" in told["constraint-dependencies"]
    assert PIN not in told["constraint-dependencies"]
    assert "exclude-newer" not in told


def test_a_workspace_without_a_pin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.uv]\nconstraint-dependencies = ["torch>=2.11"]\n')
    with pytest.raises(ValueError, match=r"must pin torch once.*torch==VERSION"):
        version_matrix.uv_settings(OLDEST, tmp_path)


def test_every_setting_is_carried_over_or_is_about_the_project() -> None:
    about_the_project = {"package", "environments", "workspace", "sources"}
    assert set(SETTINGS) - about_the_project == set(version_matrix.SETTINGS)


@pytest.mark.parametrize(
    ("option", "text", "choices"),
    [
        ("--packages", "dist-env,dist_env", version_matrix.packages()),
        ("--python", "3.10", version_matrix.pythons()),
        ("--torch", "2.10.0", version_matrix.torches()),
    ],
)
def test_what_is_unknown_is_refused_with_the_choices(option: str, text: str, choices: list[str]) -> None:
    unknown = re.escape(repr(text.rpartition(",")[2]))
    with pytest.raises(
        SystemExit, match=rf"unknown {unknown}\. Choose from {re.escape(', '.join(choices))},"
    ):
        version_matrix.main([option, text])


def test_cells_that_fail_end_no_others_and_are_named(tmp_path: Path) -> None:
    """Two cells, with one Python; a test of the first fails, by the settings that uv would get."""
    body = (
        "import os, pathlib\n"
        "def test_settings():\n"
        f"    assert 'torch=={OLDEST}' not in pathlib.Path(os.environ['UV_CONFIG_FILE']).read_text()\n"
        "def test_python():\n"
        "    assert os.environ['NOX_PYTHONS'] == '3.12'\n"
    )
    done = run_small(tmp_path, body, "--torch", f"{OLDEST},{PINNED}")
    assert done.returncode == 1
    bad = f"small-3.12-torch-{OLDEST}"
    assert f"1 of 2 cells failed: {bad}. Their logs are in {tmp_path / 'out'}.\n" in done.stderr
    assert f"| small | 3.12 | {OLDEST} (none) | 1 | 1 | 0 |" in done.stdout
    assert f"| small | 3.12 | {PINNED} (none) | 2 | 0 | 0 |" in done.stdout
    assert "test_small::test_settings`" in done.stdout
    assert (tmp_path / "out" / "matrix.md").read_text() in done.stdout
    told = json.loads((tmp_path / "out" / "matrix.json").read_text())
    assert [(cell["passed"], cell["failed"]) for cell in told["cells"]] == [(1, 1), (2, 0)]
    assert [bool(cell["reason"]) for cell in told["cells"]] == [True, False]


def test_a_cell_without_tests_does_not_pass(tmp_path: Path) -> None:
    done = run_small(tmp_path, "def test(): pass\n", "--torch", PINNED, "--", "-k", "absent")
    assert done.returncode == 1
    assert "0 tests passed" in done.stdout
    assert "Only a part of the tests ran: `-k absent`." in done.stdout


def test_a_python_that_cannot_be_had_fails_its_cell_and_says_so(tmp_path: Path) -> None:
    cell = Cell("hardware-table", "3.1", PINNED)
    version_matrix.run_cell(cell, tmp_path, [])
    assert cell.passed == 0
    assert "Python interpreter 3.1 not found" in cell.reason
    assert "hardware-table | 3.1 | pinned (none) | 0 | 0 | 0 |" in version_matrix.table([cell], [])
