"""What all packages say alike: `python project_metadata.py [VERSION] [--root FOLDER]` writes it into them.

The version is the root project's, the rest stands in the root's `[tool.release]`. With VERSION all of it
moves there, and what the changelog has under "Unreleased" becomes its section. The address of the repository
goes into the start page, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

BEGIN = "# Written by `uv run nox -s metadata` from the root's [tool.release]."
END = "# End of what is written."
_BLOCK = re.compile(rf"^{re.escape(BEGIN)}\n.*?^{re.escape(END)}\n", re.MULTILINE | re.DOTALL)
_VERSION = re.compile(r'^version = "([^"]*)"$', re.MULTILINE)
# Of PEP 440 only what a release of this repository is called.
_RELEASE = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")

# The page that says how to install from git, and its line with the address.
START = "docs/start.md"
_ADDRESS = re.compile(r"^REPOSITORY=(\S+)$", re.MULTILINE)

ADDRESSES = ("repository", "documentation")
CONTACT = ("maintainer", "email")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def shared(root: Path) -> dict[str, Any]:
    """Return what the `[project]` table of every package has to say, as long as it is known."""
    release = read_toml(root / "pyproject.toml")["tool"]["release"]
    told: dict[str, Any] = {"classifiers": release["classifiers"]}
    if all(release[name] for name in CONTACT):
        told["maintainers"] = [{"name": release["maintainer"], "email": release["email"]}]
    if all(release[name] for name in ADDRESSES):
        repository, documentation = (release[name].rstrip("/") for name in ADDRESSES)
        told["urls"] = {
            "Homepage": documentation,
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{documentation}/changelog.html",
        }
    return told


def unset(root: Path) -> list[str]:
    """Return the settings of `[tool.release]` that are empty."""
    release = read_toml(root / "pyproject.toml")["tool"]["release"]
    return [name for name in (*ADDRESSES, *CONTACT) if not release[name]]


def packages(root: Path) -> list[str]:
    """Return the names of all packages."""
    return sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml"))


def differences(root: Path, package: str) -> list[str]:
    """Return in which parts a package says something else than the root."""
    expected = {"version": read_toml(root / "pyproject.toml")["project"]["version"], **shared(root)}
    told = read_toml(root / "packages" / package / "pyproject.toml")["project"]
    names = ("version", "maintainers", "classifiers", "urls")
    return [name for name in names if told.get(name) != expected.get(name)]


def told_address(root: Path) -> str:
    """Return the address of the repository that the start page says.

    Raises:
        SystemExit: It says none, or several.
    """
    found = _ADDRESS.findall((root / START).read_text(encoding="utf-8"))
    if len(found) != 1:
        raise SystemExit(f"{START} must have one line REPOSITORY=ADDRESS, and has {len(found)}. Write one.")
    return str(found[0])


def block(told: dict[str, Any]) -> str:
    """Return the lines that say it in TOML, whose strings and lists of strings are those of JSON."""
    lines = [BEGIN]
    for name, value in told.items():
        if name == "classifiers":
            lines += ["classifiers = [", *(f"    {json.dumps(each)}," for each in value), "]"]
        else:
            entries = value[0] if name == "maintainers" else value
            table = ", ".join(
                f"{key} = {json.dumps(text, ensure_ascii=False)}" for key, text in entries.items()
            )
            lines.append(f"{name} = [{{ {table} }}]" if name == "maintainers" else f"{name} = {{ {table} }}")
    return "\n".join([*lines, END]) + "\n"


def write(root: Path, version: str | None = None) -> None:
    """Write version, pins of siblings and the shared lines into every package."""
    now = read_toml(root / "pyproject.toml")["project"]["version"]
    address = told_address(root)  # before anything is written
    if version is not None:
        release_changelog(root / "docs" / "changelog.md", version)
    names = packages(root)
    pin = re.compile(rf'("(?:{"|".join(names)})(?:\[[^\]]*\])?)==[^"]*"')
    for name in (None, *names):
        path = (root if name is None else root / "packages" / name) / "pyproject.toml"
        text = _VERSION.sub(f'version = "{version or now}"', path.read_text(encoding="utf-8"), count=1)
        if name is not None:
            # A function, for in a text backslashes would count.
            text = _BLOCK.sub(lambda _: block(shared(root)), pin.sub(rf'\1=={version or now}"', text))
        path.write_text(text, encoding="utf-8")
    if repository := read_toml(root / "pyproject.toml")["tool"]["release"]["repository"].rstrip("/"):
        page = root / START
        text = page.read_text(encoding="utf-8").replace(
            f"REPOSITORY={address}\n", f"REPOSITORY={repository}\n"
        )
        page.write_text(text, encoding="utf-8")


def release_changelog(path: Path, version: str) -> None:
    """Make what is unreleased the section of a version, unless it has one."""
    if f"\n## {version} - " in path.read_text(encoding="utf-8"):
        return
    heading = f"## {version} - {datetime.datetime.now(datetime.UTC).date()}"
    text, found = re.subn(
        r"^## Unreleased$",
        f"## Unreleased\n\n{heading}",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    if found != 1:
        raise SystemExit(
            f"{path.name} must have one section `## Unreleased`, and has {found}. Add it on top."
        )
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", help="the next version, such as 0.2.0")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    if options.version is not None and not _RELEASE.fullmatch(options.version):
        parser.error(f"the version must be like 0.2.0 or 0.2.0rc1, got {options.version}")
    write(options.root, options.version)
    missing = unset(options.root)
    if missing:
        print(
            f"not known yet, and so in no package: {', '.join(missing)} in [tool.release] of pyproject.toml"
        )


if __name__ == "__main__":
    main()
