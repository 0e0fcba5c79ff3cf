"""Each package is complete, and all of them agree with each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Package

MOST_LINES = 600


def test_complete(package: Package) -> None:
    for path in (
        package.folder / "README.md",
        package.folder / "LICENSE",
        package.source / "__init__.py",
        package.source / "py.typed",
    ):
        assert path.is_file(), f"{path} is missing"
    assert list(package.folder.glob("tests/**/test_*.py")), f"{package.name} has no tests"


def test_licence_is_the_same_everywhere(package: Package, root: Path) -> None:
    assert package.project["license"] == "Apache-2.0"
    assert (package.folder / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()


def test_public_names(package: Package) -> None:
    names = package.public_names()
    assert names, f"{package.module} has no __all__"
    assert len(names) == len(set(names)), f"{package.module}.__all__ repeats a name"
    assert not [name for name in names if name.startswith("_") and name != "__version__"]


def test_versions_move_together(packages: list[Package]) -> None:
    versions = {package.name: package.project["version"] for package in packages}
    assert len(set(versions.values())) == 1, versions


def test_siblings_are_pinned_to_this_version(package: Package, packages: list[Package]) -> None:
    siblings = {sibling.name for sibling in packages}
    for requirement in package.requirements:
        parts = re.fullmatch(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*(.*)", requirement)
        assert parts is not None, requirement
        if parts[1] in siblings:
            assert parts[3] == f"=={package.project['version']}", f"{package.name} asks for {requirement}"


def test_source_files_are_short(package: Package) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in package.source.rglob("*.py")}
    too_long = {str(path): lines for path, lines in lengths.items() if lines > MOST_LINES}
    assert not too_long


def test_readme(package: Package) -> None:
    text = (package.folder / "README.md").read_text()
    assert text.startswith(f"# {package.name}\n"), "the README begins with the name of the package"
    assert f"pip install {package.name}" in text, "the README says how to install the package"
    assert text.count("```python\n") == 1, "the README has one example in Python, which the tests run"
    # It is shown outside the repository too, where such a link leads nowhere.
    relative = re.findall(r"\]\((?!https?://|#)[^)]*\)", text)
    assert not relative, f"relative links: {relative}"


def test_console_scripts_are_documented(package: Package) -> None:
    blocks = (package.folder / "README.md").read_text().split("\n```")[1::2]
    missing = [
        script
        for script in package.scripts
        if not any(re.search(rf"^(uv run )?{script}\b", block, flags=re.MULTILINE) for block in blocks)
    ]
    assert not missing, f"no example in the README runs {missing}"


def test_torch_is_imported_before_its_parts(package: Package) -> None:
    """`import torch.distributed` first, while another thread begins with `import torch`, ends in an abort.

    Each thread waits for the lock of the module that the other one imports (torch 2.13), and names of these
    packages are imported by whichever thread uses them first.
    """
    wrong = []
    for path in package.source.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if first := [name for name in names if name.split(".")[0] == "torch"]:
                wrong += [f"{path.name}:{node.lineno}"] if first[0] != "torch" else []
                break
    assert not wrong
