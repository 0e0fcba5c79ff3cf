"""Makes the pages of the API reference, and their places in the navigation, from `__all__` and docstrings.

A package has one page with all its names in tables, those that the example of its README imports first. What
it defines in a folder has a page of its own if there is enough of it; the rest follows on the package's page.
So names are listed in `__all__` alone. `mkdocs.yml` names this file as a hook.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
ENOUGH = 4
"""Names of a folder that make a page."""
CODE = re.compile(r"```(?:python|\{\.python[^}]*\})\n(.*?)```", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those in `docs/`, and to the tab "API reference"."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "packages" / package / "src" for package in PACKAGES])
    modules = {package: loader.load(package.replace("-", "_")) for package in PACKAGES}
    loader.resolve_aliases(external=False)
    tab: list[Any] = [{"Overview": "api/index.md"}]
    overview = ["# API reference", "", "| package | what it is |", "|---|---|"]
    for package, module in modules.items():
        pages = pages_of(package, module)
        for path, text in pages.items():
            files.append(File.generated(config, path, content=text))
        main, *others = pages
        tab.append({module.name: [main, *({Path(path).stem: path} for path in others)] if others else main})
        overview.append(f"| [`{module.name}`]({package}/index.md) | {first_line(module)} |")
    files.append(File.generated(config, "api/index.md", content="\n".join([*overview, ""])))
    next(entry for entry in config.nav or [] if "API reference" in entry)["API reference"] = tab
    return files


def pages_of(package: str, module: Any) -> dict[str, str]:
    """Return {path: text} of a package, its own page first."""
    readme = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
    first = [name for name in imported(readme, module.name) if name in module.exports]
    groups: dict[str, list[str]] = {}
    for name in module.exports:
        groups.setdefault(folder_of(module, name), []).append(name)
    for folder in [folder for folder, names in groups.items() if folder and len(names) < ENOUGH]:
        groups[""] += groups.pop(folder)
    own = in_order(module, groups.pop(""), first)

    text = [f"# `{module.name}`", "", first_line(module), ""]
    text += [f"To install it, and a first example: [{package}](../../packages/{package}.md).", ""]
    text += table(module, first, "to begin with")
    pages = {}
    for folder, names in sorted(groups.items()):
        pages[folder] = page(module, module[folder], in_order(module, names, first))
    for folder in public_folders(module):
        pages[folder] = page(
            module[folder], module[folder], in_order(module[folder], module[folder].exports, [])
        )
    rest = [name for name in own if name not in first]
    if rest:
        text += ["## On this page", "", *table(module, rest)] if pages else table(module, rest, "also")
    for folder, (about, _) in pages.items():
        text += [f"## [{folder}]({folder}.md)", "", *about]
    text += ["## Reference", "", *entries(module, own)]
    others = {f"api/{package}/{folder}.md": "\n".join(whole) for folder, (_, whole) in pages.items()}
    return {f"api/{package}/index.md": "\n".join(text), **others}


def page(holder: Any, folder: Any, names: list[str]) -> tuple[list[str], list[str]]:
    """Return what the package's page says of a folder, and its own page."""
    about = [first_line(folder)] + [f"Import from `{folder.path}`."] * (holder is folder)
    short = [" ".join(about), "", *table(holder, names)]
    return short, [f"# `{folder.path}`", "", *short, "## Reference", "", *entries(holder, names)]


def table(module: Any, names: Iterable[str], title: str = "name") -> list[str]:
    """Return a row for each name: what it is, in a line."""
    rows = [f"| [`{name}`][{module.path}.{name}] | {first_line(module[name])} |" for name in names]
    return [f"| {title} | what it is |", "|---|---|", *rows, ""]


def entries(module: Any, names: Iterable[str]) -> list[str]:
    """Return what mkdocstrings makes entries of."""
    return [f"::: {module.path}.{name}\n" for name in names]


def in_order(module: Any, names: Iterable[str], first: list[str]) -> list[str]:
    """Sort names: those to begin with, classes, functions, and constants last."""
    kinds = ("class", "function", "attribute")

    def place(name: str) -> tuple[int, int, str]:
        rank = first.index(name) if name in first else len(first)
        return rank, kinds.index(module[name].kind.value), name.lower()

    return sorted(names, key=place)


def folder_of(module: Any, name: str) -> str:
    """Return the folder of its package that defines a name; none for what other packages or files define."""
    member = module.members[name]
    package, _, rest = (member.target_path if member.is_alias else "").partition(".")
    folder = rest.split(".")[0]
    is_folder = package == module.name and folder in module.members and module[folder].is_subpackage
    return folder if is_folder else ""


def public_folders(module: Any) -> list[str]:
    """Return the folders that the pages of the documentation import from; their names are public there."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    found = {
        each
        for text in texts
        for each in re.findall(rf"^from {module.name}\.(\w+) import", text, re.MULTILINE)
    }
    return sorted(found)


def imported(text: str, package: str) -> list[str]:
    """Return the names that the examples of a page import from a package, in their order."""
    block = "\n".join(CODE.findall(text))
    found = re.findall(rf"^from {package} import (?:\(([^)]*)\)|(.*))$", block, re.MULTILINE)
    return list(dict.fromkeys(re.findall(r"\w+", " ".join("".join(each) for each in found))))


def first_line(thing: Any) -> str:
    """Return the first paragraph of a docstring as the cell of a table."""
    if thing.is_alias:
        thing = thing.final_target
    paragraph = thing.docstring.value.split("\n\n")[0] if thing.docstring else ""
    return " ".join(paragraph.split()).replace("|", "\\|")
