"""Refuse a release that a stranger could not install or trust: `python release_check.py DIST`.

DIST holds a wheel and an sdist of every package. All refusals are said at the end, not only the first.
"""

from __future__ import annotations

import argparse
import email
import email.message
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from install_alone import pythons_of, try_installing
from project_metadata import ROOT, START, differences, packages, read_toml, told_address, unset

# Seconds for an answer of the index.
TIMEOUT = 20


class TakenError(Exception):
    """A name on the index belongs to others."""


def refused_settings(root: Path) -> Iterator[str]:
    """What of the project is not said, or not by every package."""
    if missing := unset(root):
        yield (
            f"[tool.release] of pyproject.toml leaves {', '.join(missing)} empty, and packages must say "
            "where they come from and whom to write to. Fill it in, and run `uv run nox -s metadata`."
        )
    for name in packages(root):
        if different := differences(root, name):
            yield (
                f"{name} and the root say different {' and '.join(different)}. Run `uv run nox -s metadata`."
            )
    repository = read_toml(root / "pyproject.toml")["tool"]["release"]["repository"].rstrip("/")
    if repository and told_address(root) != repository:
        yield (
            f"{START} installs from {told_address(root)}, and the repository is {repository}. Run "
            "`uv run nox -s metadata`."
        )
    version = version_of(root)
    changelog = (root / "docs" / "changelog.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        yield (
            f"docs/changelog.md has no section `## {version} - DATE`. `uv run nox -s metadata -- VERSION` "
            "moves the version and makes one of what is unreleased."
        )


def version_of(root: Path) -> str:
    """Return the version of all packages."""
    return str(read_toml(root / "pyproject.toml")["project"]["version"])


def archives(dist: Path, name: str, version: str) -> tuple[Path, Path]:
    """Return where the wheel and the sdist of a package are."""
    stem = f"{name.replace('-', '_')}-{version}"
    return dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"


def contents(archive: Path) -> dict[str, bytes]:
    """Return the files of a wheel or an sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as sdist:
        opened = ((member.name, sdist.extractfile(member)) for member in sdist.getmembers())
        return {name: file.read() for name, file in opened if file is not None}


def refused_archives(root: Path, dist: Path) -> Iterator[str]:
    """What is wrong within wheels and sdists."""
    licence = (root / "LICENSE").read_bytes()
    for name in packages(root):
        for archive in archives(dist, name, version_of(root)):
            if not archive.is_file():
                yield f"{archive.name} was not built."
                continue
            files = contents(archive)
            if licence not in [text for path, text in files.items() if PurePosixPath(path).name == "LICENSE"]:
                yield f"{archive.name} does not contain the text of LICENSE."
            tests = [path for path in files if is_test(PurePosixPath(path))]
            if tests:
                yield f"{archive.name} contains files of tests, which must stay out: {', '.join(tests[:3])}."
            described = [
                path for path in files if re.fullmatch(r"[^/]+(\.dist-info/METADATA|/PKG-INFO)", path)
            ]
            if len(described) != 1:
                yield f"{archive.name} must have one file of metadata, and has {described}."
                continue
            for fault in refused_metadata(files[described[0]]):
                yield f"{archive.name}: {fault}"


def is_test(path: PurePosixPath) -> bool:
    """Whether a file belongs to tests: `tests/`, `test_*.py`, `conftest.py`."""
    return "tests" in path.parts or path.name == "conftest.py" or bool(re.match(r"test_.*\.py$", path.name))


def refused_metadata(told: bytes) -> Iterator[str]:
    """What an index or its readers would miss in the metadata of a distribution."""
    from packaging.metadata import Metadata
    from trove_classifiers import classifiers

    try:
        Metadata.from_email(told)
    except ExceptionGroup as faults:
        yield from (f"{fault}." for fault in faults.exceptions)
        return
    fields = email.message_from_bytes(told)
    for field in ("Summary", "License-Expression", "Keywords", "Requires-Python", "Classifier"):
        if not fields.get(field):
            yield f"the field {field} is missing."
    if unknown := sorted(set(fields.get_all("Classifier", [])) - classifiers):
        yield f"no index knows the classifiers {unknown}."
    yield from refused_description(fields)


def refused_description(fields: email.message.Message) -> Iterator[str]:
    """What readers of the index would not see of the README."""
    from readme_renderer import markdown

    kind = fields.get_content_type() if fields["Description-Content-Type"] is None else None
    kind = kind or fields["Description-Content-Type"].partition(";")[0]
    if kind != "text/markdown":
        yield f"the long description is {kind}, and must be text/markdown."
        return
    page = markdown.render(fields.get_payload())
    if page is None:
        yield "the long description cannot be rendered."
    elif "<h1" not in page or "<pre" not in page:
        yield "the long description, once rendered, lacks its heading or its example."


def index_address() -> str:
    """Return the address of the index that uv asks by default."""
    if told := os.environ.get("UV_DEFAULT_INDEX"):
        return told.rstrip("/")
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is not on PATH: `python3 -m pip install uv`.")
    # uv says it only beside what it has resolved: here nothing.
    done = subprocess.run(
        [uv, "pip", "compile", "-q", "--no-header", "--emit-index-url", "-"],
        input="",
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"^--index\S* (\S+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit("uv does not say which index it asks. Name it by UV_DEFAULT_INDEX.")
    return found[1].rstrip("/")


def refused_names(root: Path, index: str, say: Callable[[str], object] = print) -> Iterator[str]:
    """Which names the index gives to others, or would not tell about."""
    repository = read_toml(root / "pyproject.toml")["tool"]["release"]["repository"].rstrip("/")
    for name in packages(root):
        try:
            say(f"{name}: {standing(name, index, repository)}")
        except TakenError as taken:
            yield str(taken)
        except (OSError, ValueError, KeyError) as error:
            yield (
                f"the index could not be asked about {name}: {type(error).__name__}: {error}. Ask again, or "
                "leave the question out with --offline, which does not allow a release."
            )


def standing(name: str, index: str, repository: str) -> str:
    """Return how a name stands on an index; raises TakenError where it belongs to others."""
    if fetched(f"{index}/{name}/", "application/vnd.pypi.simple.v1+json, text/html;q=0.1") is None:
        return "the index has nothing under this name, which the first upload takes"
    # The simple API does not tell whose a project is.
    told = fetched(f"{index.removesuffix('/simple')}/pypi/{name}/json", "application/json")
    if told is None:
        raise ValueError("it has the project, but no JSON that says whose it is")
    addresses = (json.loads(told)["info"].get("project_urls") or {}).values()
    if not repository or repository not in {address.rstrip("/") for address in addresses}:
        ours = repository or "not known: [tool.release] names no repository"
        raise TakenError(
            f"the index has a project {name} whose addresses do not name this repository ({ours}). Rename "
            f"the package, and take `pip install {name}` out of its README."
        )
    return "ours on the index"


def fetched(address: str, accept: str) -> bytes | None:
    """Return an answer, or None for "not found"."""
    request = urllib.request.Request(address, headers={"Accept": accept, "User-Agent": "release-check"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def main() -> None:
    """Check everything, and say all that is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--tag", help="the tag of the release, which must be v and the version")
    parser.add_argument(
        "--offline", action="store_true", help="do not ask the index about names; refuses at the end"
    )
    parser.add_argument(
        "--pythons", default=",".join(pythons_of(ROOT)), help="which install it (%(default)s)"
    )
    parser.add_argument(
        "--packages", default=",".join(packages(ROOT)), help="which are installed alone (all)"
    )
    options = parser.parse_args()
    refused = [*refused_settings(ROOT), *refused_archives(ROOT, options.dist)]
    if options.tag not in (None, f"v{version_of(ROOT)}"):
        refused.append(f"the tag {options.tag} is not v{version_of(ROOT)}, the version of the packages.")
    if options.offline:
        refused.append("whether the names on the index are ours was not checked, because of --offline.")
    else:
        refused += refused_names(ROOT, index_address())
    with tempfile.TemporaryDirectory() as place:
        chosen = options.packages.split(",")
        for python in filter(None, options.pythons.split(",")):
            refused += try_installing(ROOT, options.dist, python, chosen, Path(place))
    left_out = sorted(set(packages(ROOT)) - set(chosen)) if options.pythons else packages(ROOT)
    if left_out:
        refused.append(f"not installed alone, as asked: {', '.join(left_out)}.")
    for fault in refused:
        print(f"refused: {fault}")
    if refused:
        raise SystemExit(f"{len(refused)} refusals: do not release this")
    print(f"{len(packages(ROOT))} packages of version {version_of(ROOT)} can be released")


if __name__ == "__main__":
    main()
