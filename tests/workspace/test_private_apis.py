"""Each private name of torch that a package uses is on the page that says what is relied on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Package

PAGE = Path(__file__).parents[2] / "docs" / "private-apis.md"


def dotted(node: ast.expr) -> str:
    """`torch.a._b` of an expression, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    start = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{start}.{node.attr}" if start and isinstance(node, ast.Attribute) else ""


def private_names(source: str) -> Iterator[str]:
    """The names of torch with a part that begins with one underscore."""
    for node in ast.walk(ast.parse(source)):
        found = []
        if isinstance(node, ast.Attribute):
            found = [dotted(node)]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        for name in found:
            parts = name.split(".")
            if parts[0] == "torch" and any(re.match(r"_[^_]", part) for part in parts):
                yield name


def used(package: Package) -> set[str]:
    names = {name for path in package.source.rglob("*.py") for name in private_names(path.read_text())}
    # Of `torch._C._autograd._x` also the parts are expressions.
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_private_names_of_torch_are_on_the_page(package: Package) -> None:
    told = set(re.findall(r"`(torch\.[\w.]+)`", PAGE.read_text()))
    assert not used(package) - told


def test_the_page_names_nothing_that_is_not_used(packages: list[Package]) -> None:
    rows = re.findall(r"^\| `(torch\.[\w.]+)` \| `([\w-]+)`", PAGE.read_text(), re.MULTILINE)
    assert rows
    by_package = {package.name: used(package) for package in packages}
    assert not [(name, package) for name, package in rows if name not in by_package[package]]


def test_tests_that_the_page_names_exist(root: Path) -> None:
    named = set(re.findall(r"`((?:packages|tests)/[\w/.-]+\.py)`", PAGE.read_text()))
    assert named
    assert not [name for name in named if not (root / name).is_file()]


def test_each_row_of_the_page_names_what_watches_it() -> None:
    rows = re.findall(r"^\| `torch\.[\w.]+` \|.*$", PAGE.read_text(), re.MULTILINE)
    assert rows
    watched = re.compile(r"\| (?:`(?:packages|tests)/[\w/.-]+\.py`|the session `types`) \|$")
    assert not [row for row in rows if not watched.search(row)]
