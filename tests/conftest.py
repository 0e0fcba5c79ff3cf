"""What the tests of the repository read: its root, its packages and its files."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Package:
    """One package of the workspace, as its files describe it."""

    name: str

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def folder(self) -> Path:
        return ROOT / "packages" / self.name

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module

    @cached_property
    def project(self) -> dict[str, Any]:
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @property
    def scripts(self) -> list[str]:
        return sorted(self.project.get("scripts", {}))

    @property
    def requirements(self) -> list[str]:
        """Every requirement, those of the extras included."""
        extras = self.project.get("optional-dependencies", {})
        return [*self.project["dependencies"], *(entry for extra in extras.values() for entry in extra)]

    def siblings(self, packages: list[Package]) -> set[str]:
        """The packages of this workspace that it declares."""
        declared = {re.split(r"[^A-Za-z0-9._-]", requirement)[0] for requirement in self.requirements}
        return declared & {package.name for package in packages}

    def public_names(self) -> list[str]:
        """The names in `__all__`, read without importing the package."""
        for node in ast.parse((self.source / "__init__.py").read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                    return list(ast.literal_eval(node.value))
        return []


PACKAGES = [Package(path.parent.name) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a `package` once for each package."""
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", PACKAGES, ids=[package.name for package in PACKAGES])


@pytest.fixture(scope="session")
def packages() -> list[Package]:
    return PACKAGES


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    """The root pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def repository_files() -> list[Path]:
    """Every file that git tracks or would add, with no binary ones among them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]
