"""Rows that an example prints stand in the table below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
# `notest` keeps what takes a minute from being run twice: `pytest --markdown-docs` leaves it out.
EXAMPLE = re.compile(r"```(?:python|\{\.python \w+\})\n(.*?)```", re.DOTALL)
PAGES = ("pipeline.md", "utilization.md", "which-parallelism.md")


def printing_examples() -> list[tuple[str, str]]:
    """Return (page, code) of every example that prints rows of a table; these need no other example."""
    found = [(page, code) for page in PAGES for code in EXAMPLE.findall((GUIDES / page).read_text())]
    return [(page, code) for page, code in found if 'print(f"|' in code]


def test_every_page_has_such_examples() -> None:
    assert {page for page, _ in printing_examples()} == set(PAGES)


@pytest.mark.parametrize(("page", "code"), printing_examples())
def test_the_table_is_what_the_example_prints(
    page: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code, page, "exec"), {"__name__": "example"})
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert printed
    assert "\n".join(["", *printed, "", ""]) in (GUIDES / page).read_text()
