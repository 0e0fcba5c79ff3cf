"""What could not be audited is not called clean, and the floors of coverage only rise."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import audit
import coverage_floor
import pytest

KNOWN = [{"name": "urllib3", "version": "1.24.1", "vulns": [{"id": "A-1", "fix_versions": ["1.24.2"]}]}]
CLEAN = {"name": "rich", "version": "14.0", "vulns": []}


def test_vulnerabilities_are_named() -> None:
    bad = {"name": "yaml", "version": "1.0", "vulns": [{"id": "B-2", "fix_versions": []}]}
    assert audit.judge(KNOWN, [CLEAN]) == []
    assert audit.judge(KNOWN, [CLEAN, bad]) == ["yaml 1.0: B-2, mended in no version"]


@pytest.mark.parametrize(
    ("known", "told", "message"),
    [
        ([{**CLEAN, "name": "urllib3"}], [CLEAN], "knows no advisory of urllib3"),
        ([], [CLEAN], "knows no advisory of urllib3"),
        (
            KNOWN,
            [CLEAN, {"name": "torch", "skip_reason": "could not be audited"}],
            "skipped: torch: could not",
        ),
        (KNOWN, [], "is empty"),
    ],
)
def test_what_could_not_be_audited_is_not_clean(
    known: list[dict[str, Any]], told: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(audit.UnauditedError, match=message):
        audit.judge(known, told)


def test_without_an_answer_nothing_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="the service cannot be reached\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        SystemExit, match=r"could not be audited.*ended with 1: the service cannot be reached"
    ):
        audit.main(tmp_path / "requirements.txt")


def test_a_floor_rises_when_asked_and_never_falls(tmp_path: Path) -> None:
    floors = tmp_path / "floors.toml"
    floors.write_text("# why\nb = 70.0\n")
    assert "could be 89.5%" in coverage_floor.compare("a", 90.04, floors, may_raise=False)
    assert tomllib.loads(floors.read_text()) == {"b": 70.0}
    assert "89.5% from now on" in coverage_floor.compare("a", 90.04, floors, may_raise=True)
    assert floors.read_text() == "# why\na = 89.5\nb = 70.0\n"
    # As high, within what runs differ: nothing is written.
    assert coverage_floor.compare("a", 89.8, floors, may_raise=True) == "a: 89.8%, the floor is 89.5%"
    with pytest.raises(
        SystemExit, match=r"a: the tests execute 89\.4% of the lines, and the floor is 89\.5%"
    ):
        coverage_floor.compare("a", 89.4, floors, may_raise=True)
    assert tomllib.loads(floors.read_text()) == {"a": 89.5, "b": 70.0}


def test_each_package_has_a_floor_and_none_was_ever_lowered(root: Path, packages: list[Any]) -> None:
    """Of the commits that are here: a shallow clone shows only the last one."""
    name = str(coverage_floor.FLOORS.relative_to(root))

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout

    commits = git("log", "--reverse", "--format=%H", "--diff-filter=AM", "--", name).split()
    states = [git("show", f"{commit}:{name}") for commit in commits] + [coverage_floor.FLOORS.read_text()]
    highest: dict[str, float] = {}
    for floors in map(tomllib.loads, states):
        assert not {package for package, floor in highest.items() if floors.get(package, 0.0) < floor}
        highest |= floors
    assert set(highest) == {package.name for package in packages}
