"""What the root promises: settings and pages for every package, and nothing that ties it to a place."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Package

# Brackets keep these lines from finding themselves.
TIED_TO_A_PLACE = re.compile(
    r"[p]ypi\.org|[p]ythonhosted|download\.[p]ytorch|--(extra-)?[i]ndex-url|\[tool\.uv\.[i]ndex|"
    r"(?<![\w.~])/(?:[w]ork|[r]oot|[h]ome/\w+|opt/[w]heels)(?![\w-])"
)


def test_nothing_is_tied_to_a_registry_or_a_machine(repository_files: list[Path], root: Path) -> None:
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in repository_files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if TIED_TO_A_PLACE.search(line)
    ]
    assert repository_files
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line", ["https://[p]ypi.org/simple", "see /[w]ork/main", "--[i]ndex-url x", "/[r]oot/.cache"]
)
def test_such_ties_are_seen(line: str) -> None:
    assert TIED_TO_A_PLACE.search(re.sub(r"[\[\]]", "", line))


def test_lock_file_is_not_in_git(root: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, check=True, text=True)
    assert "uv.lock" not in tracked.stdout.splitlines()
    assert "uv.lock" in (root / ".gitignore").read_text().splitlines()


def test_settings_know_the_package(package: Package, settings: dict[str, Any]) -> None:
    tool = settings["tool"]
    assert tool["uv"]["sources"][package.name] == {"workspace": True}
    assert package.module in tool["ruff"]["lint"]["isort"]["known-first-party"]
    linter = tool["importlinter"]
    assert package.module in linter["root_packages"]
    floors = next(contract for contract in linter["contracts"] if contract["type"] == "layers")
    assert package.module in {name for floor in floors["layers"] for name in floor.split(" | ")}
    guarded = [
        contract["protected_modules"] for contract in linter["contracts"] if contract["type"] == "protected"
    ]
    assert [f"{package.module}.*"] in guarded


def test_settings_know_no_other_package(packages: list[Package], settings: dict[str, Any]) -> None:
    modules = {package.module for package in packages}
    tool = settings["tool"]
    assert {name.replace("-", "_") for name in tool["uv"]["sources"]} == modules
    assert set(tool["ruff"]["lint"]["isort"]["known-first-party"]) == modules
    assert set(tool["importlinter"]["root_packages"]) == modules


def table_rows(text: str) -> dict[str, str]:
    """Return {package: what it is} from the rows that begin with a linked package name."""
    return dict(re.findall(r"^\| \[`([\w-]+)`\]\([^)]*\) \| ([^|]*?) \|", text, flags=re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_table_of_packages(page: str, packages: list[Package], root: Path) -> None:
    expected = {package.name: package.project["description"] for package in packages}
    assert table_rows((root / page).read_text()) == expected


def test_documentation_has_the_pages_of_the_package(package: Package, root: Path) -> None:
    guide = (root / f"docs/packages/{package.name}.md").read_text()
    assert f'--8<-- "packages/{package.name}/README.md"' in guide
    assert f"packages/{package.name}.md" in (root / "mkdocs.yml").read_text()


def test_page_says_how_the_package_fits(package: Package, packages: list[Package], root: Path) -> None:
    told = (root / f"docs/packages/{package.name}.md").read_text().partition("## How it fits")[2]
    users = {other.name for other in packages if package.name in other.siblings(packages)}
    assert set(re.findall(r"`([\w-]+)`", told)) == users | package.siblings(packages)


def test_links_of_the_root_readme_lead_somewhere(root: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (root / "README.md").read_text())
    assert links
    missing = [link for link in links if not (root / link).exists()]
    assert not missing


def test_readme_and_ci_run_the_same_command(root: Path) -> None:
    assert "uv run nox" in (root / "README.md").read_text()
    script = (root / ".ci/run").read_text()
    assert re.findall(r"^uv=\((.*)\)$", script, flags=re.MULTILINE) == ["uv"]
    runs = re.findall(r"^.*\brun nox\b.*$", script.replace('"${uv[@]}"', "uv"), flags=re.MULTILINE)
    commands = [line for line in runs if not line.startswith("#")]
    assert len(commands) == 1
    assert commands[0].startswith('uv run nox "$@"')
