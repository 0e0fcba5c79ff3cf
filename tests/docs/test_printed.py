"""Rows that an example prints stand in the table below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# `notest` is for what takes a minute: `pytest --markdown-docs` leaves it out, and here it is left to `full`.
EXAMPLE = re.compile(r"```(?:python|\{\.python (\w+)\})\n(.*?)```", re.DOTALL)
PAGES = (
    "guides/pipeline.md",
    "guides/utilization.md",
    "guides/which-parallelism.md",
    "performance/memory-plan.md",
)


def printing_examples() -> list[tuple[str, str, str]]:
    """Return page, option and code of every example that prints a table; these need no other example."""
    found = [(page, *block) for page in PAGES for block in EXAMPLE.findall((DOCS / page).read_text())]
    return [example for example in found if 'print(f"|' in example[2]]


def as_tests() -> list[object]:
    marks = {True: (pytest.mark.full,), False: ()}
    return [
        pytest.param(page, code, id=f"{page} {number}", marks=marks[option == "notest"])
        for number, (page, option, code) in enumerate(printing_examples())
    ]


def test_every_page_has_such_examples() -> None:
    assert {page for page, *_ in printing_examples()} == set(PAGES)


@pytest.mark.parametrize(("page", "code"), as_tests())
def test_the_table_is_what_the_example_prints(
    page: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code, page, "exec"), {"__name__": "example"})
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert printed
    assert "\n".join(["", *printed, "", ""]) in (DOCS / page).read_text()
