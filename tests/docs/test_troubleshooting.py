"""What `troubleshooting.md` quotes is what the packages print: said here, or found in their sources."""

from __future__ import annotations

import ast
import functools
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from provoked import SAID, Products, train

from dist_env import forget_warnings
from perf_metrics import DefaultMetrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
CODE = re.compile(r"(`+)(.+?)\1")
LEAST = 12  # characters that tell one message from another


def quotes() -> list[str]:
    """The first cell of each row below `| message |`, and the printed lines."""
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    found = [match[2] for cell in cells if (match := CODE.search(cell)) is not None]
    assert len(found) == len(cells)
    return found + [
        line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
    ]


def pattern(quote: str) -> re.Pattern[str]:
    """`...` stands for anything; spaces and line ends are alike."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in quote.split("..."))
    return re.compile(r".*?".join(parts), re.DOTALL)


@functools.cache
def templates() -> list[str]:
    """Every string of the sources with fixed words in it; what is filled in is NUL."""
    found = set()
    for file in ROOT.glob("packages/*/src/**/*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                values = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                found.add("".join(map(str, values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%(?:[sdr]|\.?\d*g)", "\0", node.value))
    return [text for text in found if has_words(text)]


def is_in_sources(quote: str) -> bool:
    """Whether each piece of a quote follows a template, to its end or to where the quote was cut."""
    return any(
        all(any(follows(piece, text) for text in templates()) for piece in pieces)
        for pieces in ways_to_cut(quote)
    )


def ways_to_cut(quote: str) -> list[list[str]]:
    """A refused setting is put together from a rule and a fix; in others a cut is all that divides."""
    ways = [quote.split("...")]
    if found := re.fullmatch(r"[\w.]+=\S+ (.*)", quote):
        rule, *fix = re.split(r"\. |\.\.\.", found[1])
        ways.append([part.strip(" .") for part in (rule, *(each[:1].lower() + each[1:] for each in fix))])
    return [[part.strip(" ;") for part in way if part.strip(" ;")] for way in ways]


def follows(piece: str, template: str) -> bool:
    if len(piece) >= LEAST and piece in template:
        return True
    if not any(part.strip() in piece or piece in part for part in template.split("\0") if len(part) >= LEAST):
        return False
    cuts = [template[:end] for end in range(LEAST, len(template) + 1)]
    return any(re.fullmatch(re.escape(cut).replace("\0", ".+"), piece) for cut in cuts if has_words(cut))


def has_words(template: str) -> bool:
    return max(map(len, template.split("\0"))) >= LEAST


@pytest.fixture
def told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[Callable[[], object]], str]:
    """All that an action says: what it returns, logs and prints, its error, and the notes of that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    forget_warnings()
    caplog.set_level(logging.INFO)

    def told(action: Callable[[], object]) -> str:
        try:
            said = [str(action())]
        except (ValueError, RuntimeError, TimeoutError, ArithmeticError, SystemExit) as error:
            said = [str(error), *getattr(error, "__notes__", [])]
        text = "\n".join([*said, *caplog.messages, *capsys.readouterr()])
        return text.replace("timeout=3 s", "timeout=300 s").replace("timeout=0.01 s", "timeout=60 s")

    return told


@pytest.mark.parametrize("quote", quotes())
def test_the_packages_say_so(quote: str, told: Callable[[Callable[[], object]], str]) -> None:
    known = [action for words, action in SAID.items() if words in quote]
    assert len(known) <= 1
    if known:
        text = told(known[0])
        assert pattern(quote).search(text) is not None, text
    else:
        assert is_in_sources(quote)


def test_nothing_is_said_that_is_not_quoted() -> None:
    unused = {words for words in SAID if not any(words in quote for quote in quotes())}
    assert not unused


@pytest.mark.parametrize(
    "quote",
    [
        "rank 1 on node1 is lost: no reply from its process for 5 s (ended, frozen or cut off); ...",
        "model_splitter='BlockSplitter': does not suit this model: a later stage needs more ...",
        "waiting for a batch: rank 0 (node0) gave none for 600 s, though its connection is open. ...",
    ],
)
def test_a_message_that_has_changed_is_not_found(quote: str) -> None:
    assert not is_in_sources(quote)


def test_the_log_has_the_entries_that_tell_what_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.split("\n## It is slow\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(data_wait_share|recompiles|mfu|hfu)`", section))
    assert len(named) == 4
    settings: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager", "logging_steps": 1}
    trainer = train("runs", DefaultMetrics(peak_hardware_flops=1e12), model=Products, **settings)
    assert named <= trainer.state.log_history[0].keys()
