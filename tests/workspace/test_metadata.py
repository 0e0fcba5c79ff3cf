"""Every package says of the project what the root says, and one command moves all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import project_metadata
import pytest

if TYPE_CHECKING:
    from conftest import Package

SET = {
    "repository": "https://git.example.com/you/training",
    "documentation": "https://docs.example.com/training/",
    "maintainer": 'Ada "Lovelace"',
    "email": "ada@example.com",
}


def test_package_says_what_the_root_says(package: Package, root: Path) -> None:
    assert not project_metadata.differences(root, package.name), "run `uv run nox -s metadata`"
    assert len(package.project["keywords"]) >= 3


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """The files that the command writes."""
    names = [f"packages/{name}/pyproject.toml" for name in project_metadata.packages(root)]
    for name in ("pyproject.toml", "docs/changelog.md", project_metadata.START, *names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, project_metadata.__file__, *words, "--root", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def projects(folder: Path) -> dict[str, dict[str, Any]]:
    paths = folder.glob("packages/*/pyproject.toml")
    return {path.parent.name: tomllib.loads(path.read_text())["project"] for path in paths}


def test_the_version_moves_in_all_packages_and_their_pins(copied: Path) -> None:
    before = projects(copied)
    done = run(copied, "7.8.9rc1")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((copied / "pyproject.toml").read_text())["project"]["version"] == "7.8.9rc1"
    after = projects(copied)
    old = before["dist-env"]["version"]
    for name, project in after.items():
        assert project["version"] == "7.8.9rc1"
        assert f"=={old}" not in str(project)
        # Nothing but the version is another one.
        assert json.loads(json.dumps(project).replace("7.8.9rc1", old)) == before[name]
    assert "dist-env[remote]==7.8.9rc1" in after["checkpoint-core"]["optional-dependencies"]["remote"]
    changelog = (copied / "docs/changelog.md").read_text()
    assert re.search(r"\n## Unreleased\n\n## 7\.8\.9rc1 - \d{4}-\d\d-\d\d\n", changelog)


def test_addresses_and_contact_reach_every_package_and_the_start_page(copied: Path, root: Path) -> None:
    told = project_metadata.told_address(root)
    path = copied / "pyproject.toml"
    text = path.read_text()
    for name, value in SET.items():
        text = re.sub(rf'^{name} = ""$', f"{name} = {value!r}", text, flags=re.MULTILINE)
    path.write_text(text)
    names = project_metadata.packages(copied)
    assert all("urls" in project_metadata.differences(copied, name) for name in names)
    assert run(copied).returncode == 0
    assert not project_metadata.unset(copied)
    assert not {name: found for name in names if (found := project_metadata.differences(copied, name))}
    project = projects(copied)["trainer-core"]
    assert project["maintainers"] == [{"name": SET["maintainer"], "email": SET["email"]}]
    assert project["urls"]["Changelog"] == "https://docs.example.com/training/changelog.html"
    start = (copied / project_metadata.START).read_text()
    assert start == (root / project_metadata.START).read_text().replace(told, SET["repository"])


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3.dev0"])
def test_a_version_of_another_form_is_refused(version: str, copied: Path) -> None:
    done = run(copied, version)
    assert done.returncode == 2
    assert f"got {version}" in done.stderr


def test_a_start_page_without_an_address_is_refused(copied: Path) -> None:
    path = copied / project_metadata.START
    path.write_text(path.read_text().replace("REPOSITORY=", "REPO="))
    before = projects(copied)
    with pytest.raises(SystemExit, match="must have one line REPOSITORY=ADDRESS, and has 0"):
        project_metadata.write(copied, "7.8.9")
    assert projects(copied) == before


def test_a_changelog_without_a_place_for_news_is_refused(copied: Path) -> None:
    path = copied / "docs/changelog.md"
    path.write_text(path.read_text().replace("## Unreleased", "## News"))
    done = run(copied, "7.8.9")
    assert done.returncode != 0
    assert "must have one section `## Unreleased`, and has 0" in done.stderr
