"""The command `report`: a page of a real, very small run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from llama_pretrain.cli import main


class Page(HTMLParser):
    """Collects the texts of a page and the addresses that it would ask."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _train(work: Path, steps: int, *more: str) -> int:
    settings = {
        "model": work / "shape",
        "data": work / "data",
        "output-dir": work / "run",
        "sequence-length": 32,
        "max-steps": steps,
        "logging-steps": 2,
        "held-out": 0.2,
        "eval-steps": 5,
        "save-steps": 5,
        "sample-tokens": 8,
        "lr-scheduler-type": "constant",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return main(["train", *words, *more])


@pytest.fixture(scope="module")
def run(write_inputs: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two starts."""
    work = write_inputs(tmp_path_factory.mktemp("work"))
    assert _train(work, 10) == 0
    assert _train(work, 20) == 0
    return work / "run"


def test_the_page_tells_the_run_and_asks_nobody(run: Path) -> None:
    assert main(["report", "--output-dir", str(run)]) == 0
    text = (run / "report.html").read_text()
    page = Page(text)
    assert [address for address in page.addresses if not address.startswith(("#", "data:"))] == []
    for heading in (
        "Figures",
        "Curves",
        "Held-out loss",
        "Settings that are not at their defaults",
        "Starts",
    ):
        assert heading in page.texts
    assert "Samples (temperature 0.8, from checkpoint-20)" in page.texts
    assert text.count("<pre>") == 3 + 1, "samples, and what the time was spent on"
    assert "Effective training time: " in text
    assert page.texts.count("unavailable") >= 2  # MFU and OFU of a CPU
    assert "sequence_length" in page.texts
    assert "logging_steps" in page.texts
    assert len(re.findall(r"<td>single</td>", text)) == 2


def test_a_page_elsewhere_without_samples(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert main(["report", "--output-dir", str(run), "--page", str(target), "--samples", "0"]) == 0
    assert "Samples" not in target.read_text()


def test_a_run_that_was_moved_is_shown_with_its_own_log(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    log = json.loads((moved / "trainer_logs.json").read_text())
    kept = [entry for entry in log if entry.get("global_step", 0) <= 10]
    (moved / "trainer_logs.json").write_text(json.dumps(kept))
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--output-dir", "moved", "--samples", "0"]) == 0
    texts = Page((moved / "report.html").read_text()).texts
    assert texts[texts.index("steps") + 1] == "10"


def test_wrong_settings_are_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--smooth", "2"], "smooth=2.0 must be at least 0 and below 1"),
        (["--samples", "-1"], "samples=-1 must be 0 or more"),
        (["--page", str(tmp_path)], f"page='{tmp_path}' is a directory"),
        (["--page", str(tmp_path / "no" / "page.html")], "which is not a directory"),
    ):
        assert main(["report", "--output-dir", str(run), *words]) == 2
        assert message in capsys.readouterr().err


def test_each_start_is_kept_with_what_it_was_made_on(run: Path) -> None:
    sessions = json.loads((run / "sessions.json").read_text())
    assert [(one["trainer"], one["processes"]) for one in sessions] == [("single", 1), ("single", 1)]
    assert all(one["torch"] and one["python"] and one["started"] for one in sessions)


def test_no_run_and_damaged_files_are_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--output-dir", str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err
    (run / "goodput" / "9.jsonl").write_text('{"event": "save"}\n')
    assert main(["report", "--output-dir", str(run), "--samples", "0"]) == 0
    assert "is not the account of a session" in (run / "report.html").read_text()
    (run / "goodput" / "9.jsonl").unlink()
    sessions = (run / "sessions.json").read_text()
    (run / "sessions.json").write_text("[")
    assert main(["report", "--output-dir", str(run), "--samples", "0"]) == 2
    assert "has a damaged sessions.json" in capsys.readouterr().err
    (run / "sessions.json").write_text(sessions)
