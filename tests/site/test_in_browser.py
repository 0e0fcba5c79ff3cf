"""The built documentation in a browser, from disk, as one opens it without a server."""

from __future__ import annotations

import json
import re
import shutil
import urllib.parse
from pathlib import Path

import pytest
from browser import chromium_or_skip, visit

SITE = Path(__file__).parents[2] / "site"
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
# Lays each page out in a frame of its own, and says what of it cannot be reached, or is covered.
LOOK = """<script>
const cut = (page, root) => {
  const width = root.clientWidth;
  const parts = [...root.querySelectorAll(".md-content :is(p, li, td, th, code, h1, h2, h3, img, svg)")];
  const scrolls = (part) => {
    for (; part !== root; part = part.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(part).overflowX)) return true;
    return false;
  };
  const outside = parts.filter((part) => part.getBoundingClientRect().right > width + 1 && !scrolls(part));
  return outside.slice(0, 3).map((part) => `${page} cuts ${part.outerHTML.slice(0, 80)}`);
};
const covered = (page, root) => {
  const found = [...root.querySelectorAll(".md-code__nav")].filter((nav) => {
    const button = nav.getBoundingClientRect();
    const code = nav.parentElement.querySelector("code").getBoundingClientRect();
    const beside = button.right <= code.left || button.left >= code.right;
    return !beside && button.top < code.bottom && button.bottom > code.top;
  });
  return found.slice(0, 1).map((nav) => `${page} covers ${nav.nextElementSibling.textContent.slice(0, 50)}`);
};
const pages = PAGES;
(async () => {
  let buttons = 0;
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style = "height: 800px; border: 0";
    frame.width = 400;
    frame.src = page;
    const loaded = new Promise((resolve) => { frame.onload = resolve; });
    document.body.append(frame);
    await loaded;
    await new Promise((resolve) => setTimeout(resolve, 50));
    const root = frame.contentDocument.documentElement;
    buttons += root.querySelectorAll(".md-code__nav").length;
    for (frame.width of [400, 1280])
      for (const fault of [...cut(page, root), ...covered(page, root)])
        console.log(`${frame.width}: ${fault}`);
    frame.remove();
  }
  console.log(`looked at ${pages.length} pages, found buttons: ${buttons > 100}`);
})();
</script>"""


BAD = """<!doctype html><style>pre { position: relative } nav { position: absolute; top: 0 }</style>
<div class="md-content"><p style="width: 900px">wide</p>
<pre><nav class="md-code__nav">x</nav><code>y</code>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    return chromium_or_skip()


def results(chromium: str, query: str, folder: Path) -> list[str]:
    """The addresses that a search finds, best first, as the page shows them."""
    address = f"{(SITE / 'start.html').as_uri()}?q={urllib.parse.quote(query)}"
    seen = visit(chromium, address, folder, "--virtual-time-budget=20000")
    assert seen.requests == [], "another host was asked"
    found: list[str] = re.findall(r'href="([^"]*)" class="md-search-result__link"', seen.html)
    return [re.sub(r".*/site/|\\?h=[^#]*", "", address) for address in found]


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("DivergenceDetector", "api/trainer-core/callbacks.html#trainer_core.DivergenceDetector"),
        ("Slurm", "guides/multi-node.html"),
    ],
)
def test_the_search_works_without_a_server(chromium: str, tmp_path: Path, query: str, page: str) -> None:
    assert any(page in address for address in results(chromium, query, tmp_path)[:6])


def test_nothing_is_cut_off_or_covered_on_a_phone_or_a_screen(chromium: str, tmp_path: Path) -> None:
    shutil.copytree(SITE, tmp_path / "site")
    # Without words to find: each page would read all of them.
    empty = {"config": {"lang": ["en"], "separator": " ", "pipeline": [], "fields": {}}, "docs": []}
    (tmp_path / "site/search/search_index.js").write_text(f"var __index = {json.dumps(empty)}")
    (tmp_path / "site/bad.html").write_text(BAD)
    look = tmp_path / "site/look.html"
    look.write_text(f"<body>{LOOK.replace('PAGES', json.dumps([*PAGES, 'bad.html']))}")
    options = ("--allow-file-access-from-files", "--virtual-time-budget=30000", "--window-size=1400,900")
    *faults, last = visit(chromium, look, tmp_path, *options).console
    assert last == f"looked at {len(PAGES) + 1} pages, found buttons: true"
    assert [fault.partition("<")[0] for fault in faults] == [
        "400: bad.html cuts ",
        "400: bad.html covers y",
        "1280: bad.html covers y",
    ]
