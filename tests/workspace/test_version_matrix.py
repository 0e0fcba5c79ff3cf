"""The matrix of Pythons and torches puts another torch in the place of the pin, and tells all that failed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import version_matrix
from version_matrix import NIGHTLY, PINNED, Cell

ROOT = Path(__file__).parents[2]
OLDEST = version_matrix.oldest_torch()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
PIN = next(line for line in SETTINGS["constraint-dependencies"] if line.startswith("torch=="))


def small_workspace(root: Path, body: str) -> Path:
    """A workspace of one package, with a session of nox that runs its one test."""
    package = root / "packages" / "small"
    (package / "tests").mkdir(parents=True)
    (package / "pyproject.toml").write_text('dependencies = ["torch>=2.11"]\n')
    (package / "tests" / "test_small.py").write_text(body)
    # `pytest` is that of this environment: the real sessions install, which another test does.
    (root / "noxfile.py").write_text(
        "import sys, nox\n"
        "@nox.session(name='tests-small', venv_backend='none')\n"
        "def tests(session):\n"
        "    session.run(sys.executable, '-m', 'pytest', 'packages', *session.posargs)\n"
    )
    (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    return root


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


def test_cells_that_fail_end_no_others_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells of one Python and two torches; the test of the second fails, by the settings uv would get."""
    body = (
        "import os, pathlib\n"
        "def test_settings():\n"
        "    assert 'torch==2.11.0' not in pathlib.Path(os.environ['UV_CONFIG_FILE']).read_text()\n"
        "def test_python():\n"
        "    assert os.environ['NOX_PYTHONS'] == '3.12'\n"
    )
    monkeypatch.setattr(version_matrix, "ROOT", small_workspace(tmp_path / "root", body))
    cells = [Cell("small", "3.12", torch) for torch in ("2.11.0", PINNED)]
    for cell in cells:
        version_matrix.run_cell(cell, tmp_path, [])
    text = version_matrix.write(cells, tmp_path, [])
    assert [(cell.passed, cell.failed) for cell in cells] == [(1, 1), (2, 0)]
    assert "| small | 3.12 | 2.11.0 (none) | 1 | 1 |" in text
    assert "test_small::test_settings`" in text
    told = json.loads((tmp_path / "matrix.json").read_text())
    assert [bool(cell["reason"]) for cell in told["cells"]] == [True, False]


def test_a_python_that_cannot_be_had_fails_its_cell_and_says_so(tmp_path: Path) -> None:
    cell = Cell("hardware-table", "3.1", PINNED)
    version_matrix.run_cell(cell, tmp_path, [])
    assert cell.passed == 0
    assert "Python interpreter 3.1 not found" in cell.reason
    assert "hardware-table | 3.1 | pinned (none) | 0 | 0 | 0 |" in version_matrix.table([cell], [])


def test_a_cell_without_tests_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_matrix, "ROOT", small_workspace(tmp_path / "root", "def test(): pass\n"))
    cell = Cell("small", "3.12", PINNED)
    version_matrix.run_cell(cell, tmp_path, ["-k", "absent"])
    assert "0 tests passed" in cell.reason
