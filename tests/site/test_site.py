"""The built documentation, in site/: complete, and readable with no other host in reach."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Package

SITE = Path(__file__).parents[2] / "site"

# A browser fetches these on its own; a link in the text waits for the reader.
FETCHED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "input": ("src",),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "track": ("src",),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
OUTSIDE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
OUTSIDE_IN_STYLE = re.compile(
    r"""(?:url\(|@import)\s*["']?\s*((?:[a-z][a-z0-9+.-]*:)?//[^"')\s]+)""", re.IGNORECASE
)


class Page(HTMLParser):
    """Collects what a browser would fetch from other hosts to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in FETCHED.get(tag, ()) and OUTSIDE.match(value):
                self.outside.append(f"<{tag} {name}={value}>")
            if value and name == "style":
                self.outside.extend(OUTSIDE_IN_STYLE.findall(value))


def fetched_from_outside(html: str) -> list[str]:
    """Return what a page, its style blocks included, would fetch from other hosts."""
    page = Page()
    page.feed(html)
    return page.outside + OUTSIDE_IN_STYLE.findall(html)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Return {path in the site: HTML}."""
    assert (SITE / "index.html").is_file(), "build the site first: uv run --group docs mkdocs build"
    return {str(path.relative_to(SITE)): path.read_text(encoding="utf-8") for path in SITE.rglob("*.html")}


def test_no_page_fetches_from_another_host(pages: dict[str, str]) -> None:
    assert not {path: found for path, html in pages.items() if (found := fetched_from_outside(html))}


def test_no_style_fetches_from_another_host() -> None:
    styles = list(SITE.rglob("*.css"))
    assert styles
    assert not {path: found for path in styles if (found := OUTSIDE_IN_STYLE.findall(path.read_text()))}


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://host.example/a.js"></script>',
        '<link rel="stylesheet" href="//host.example/a.css">',
        "<style>@import 'https://host.example/a.css'</style>",
        '<p style="background: url(https://host.example/a.png)">',
    ],
)
def test_a_fetch_from_another_host_is_seen(html: str) -> None:
    assert fetched_from_outside(html)


def test_the_page_of_a_package_says_how_to_install_it(package: Package, pages: dict[str, str]) -> None:
    assert f"pip install {package.name}" in pages[f"packages/{package.name}.html"]


def reference(package: Package, pages: dict[str, str]) -> dict[str, str]:
    """The pages of a package's reference, `index.html` among them."""
    folder = f"api/{package.name}/"
    return {path.removeprefix(folder): html for path, html in pages.items() if path.startswith(folder)}


def entries(package: Package, html: str) -> list[str]:
    """The names that a page has entries of, in their order."""
    found: list[str] = re.findall(rf'<h\d id="{package.module}\.(\w+)" class="doc doc-heading">', html)
    return found


def test_every_public_name_has_an_entry_and_a_row(package: Package, pages: dict[str, str]) -> None:
    found = reference(package, pages)
    named = [name for html in found.values() for name in entries(package, html)]
    assert sorted(named) == sorted(package.public_names())
    linked = rf'<td><a [^>]*href="[^"#]*#{package.module}\.(\w+)"><code>\1</code></a></td>\n<td>(?!</td>)'
    # What a package begins with stands once more where it belongs.
    assert set(re.findall(linked, found["index.html"])) == set(named)


def test_the_reference_begins_with_what_the_readme_shows(package: Package, pages: dict[str, str]) -> None:
    code = re.findall(r"```python\n(.*?)```", (package.folder / "README.md").read_text(), re.DOTALL)[0]
    (imported,) = re.findall(rf"from {package.module} import (?:\(([^)]*)\)|(.*))\n", code)
    shown = re.findall(r"\w+", "".join(imported))
    html = reference(package, pages)["index.html"]
    first = re.findall(r"<td><a [^>]*><code>(\w+)</code></a></td>", html)[: len(shown)]
    assert first == shown
    here = entries(package, html)
    assert here[: len(set(shown) & set(here))] == [name for name in shown if name in here]


def test_constants_come_last(package: Package, pages: dict[str, str]) -> None:
    for html in reference(package, pages).values():
        constants = [name.isupper() for name in entries(package, html)]
        assert constants == sorted(constants)


def test_no_page_is_too_long_to_read(pages: dict[str, str]) -> None:
    """The longest is that of the training arguments."""
    assert {path: len(html) for path, html in pages.items() if len(html) > 400_000} == {}
