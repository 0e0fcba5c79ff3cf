"""The diagram as text, as a picture and from the command line."""

import importlib
import sys
from pathlib import Path

import pytest

from trainer_core import ConfigurationError
from trainer_pipeline.__main__ import main
from trainer_pipeline.diagram import Timeline, draw_schedule, drawing, simulate
from trainer_pipeline.diagram.drawing import timeline_text

PNG = b"\x89PNG\r\n\x1a\n"

ONE_F_ONE_B = """\
1f1b, 2 ranks, 3 microbatches
rank 0: F0 F1 .  .  B0--- F2 B1--- .  B2---
rank 1: .  F0 B0--- F1 B1--- F2 B2--- .  .
"""

ZBV = """\
zbv, 2 ranks, 3 microbatches, 2 stages per rank
rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
rank 1: .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
"""


def texts(svg: Path) -> list[str]:
    """The comments in matplotlib's SVG: the text of each label, in the order of drawing."""
    lines = svg.read_text().splitlines()
    return [line.strip()[5:-4] for line in lines if line.strip().startswith("<!-- ")]


def measured_1f1b() -> Timeline:
    predicted = simulate("1f1b", 2, 3, forward=0.02, backward_input=0.03, backward_weight=0.02, transfer=0.01)
    work = [
        [(bar.stage, bar.kind, bar.microbatch, 7 + bar.start, 7 + bar.end) for bar in predicted.of_rank(rank)]
        for rank in range(2)
    ]
    return Timeline.of_work("1f1b", work)


def test_text_of_1f1b() -> None:
    assert timeline_text(simulate("1f1b", 2, 3)) == ONE_F_ONE_B


def test_text_with_two_stages_names_the_stage() -> None:
    assert timeline_text(simulate("zbv", 2, 3)) == ZBV


def test_text_of_uneven_times_keeps_every_pass_in_order() -> None:
    timeline = measured_1f1b()
    for rank, line in enumerate(timeline_text(timeline).splitlines()[1:]):
        labels = [word.rstrip("-") for word in line.split(": ")[1].split() if word != "."]
        assert labels == [f"{bar.kind}{bar.microbatch}" for bar in timeline.of_rank(rank)]


def test_picture_shows_ranks_microbatches_and_bubble(tmp_path: Path) -> None:
    output = draw_schedule("zbv", 2, 3, tmp_path / "new" / "zbv.svg")
    shown = texts(output)
    assert "zbv, 2 ranks, 3 microbatches, 2 stages per rank" in shown
    assert "predicted bubble 5.3 %" in shown
    assert shown.count("rank 0") == shown.count("rank 1") == 1
    # Each microbatch: F, I and W on four stages. The axis may have such numbers too.
    assert all(shown.count(number) >= 12 for number in ("0", "1", "2"))
    assert {"forward", "backward for inputs", "backward for weights", "waiting"} <= set(shown)
    assert "backward" not in shown
    assert list(output.parent.iterdir()) == [output]


def test_measured_is_drawn_below_on_the_same_axis(tmp_path: Path) -> None:
    timeline = measured_1f1b()
    shown = texts(draw_schedule("1f1b", 2, 3, tmp_path / "both.svg", measured=timeline))
    assert "predicted bubble 25.0 % (textbook formula 25.0 %)" in shown
    assert f"measured bubble {100 * timeline.bubble:.1f} %" in shown
    assert timeline.bubble > 0.26
    assert shown.count("rank 0") == 2
    assert "time (s)" in shown
    assert "time (forward passes of a rank)" not in shown


def test_measured_must_be_of_this_schedule(tmp_path: Path) -> None:
    output = tmp_path / "both.svg"
    with pytest.raises(ConfigurationError, match=r"measured.microbatches=3 differs from the 4 for which"):
        draw_schedule("1f1b", 2, 4, output, measured=measured_1f1b())
    with pytest.raises(ConfigurationError, match=r"measured.ranks=2 differs from the 3 for which"):
        draw_schedule("1f1b", 3, 3, output, measured=measured_1f1b())
    with pytest.raises(ConfigurationError, match=r"both.pdf.*\.png or \.svg"):
        draw_schedule("1f1b", 2, 3, tmp_path / "both.pdf")
    assert list(tmp_path.iterdir()) == []


def test_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "1f1b.png"
    counts = ["--ranks", "2", "--microbatches", "3"]
    assert main(["diagram", "--schedule", "1f1b", *counts, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(ONE_F_ONE_B)
    assert printed[len(ONE_F_ONE_B) :].splitlines() == [
        "predicted bubble: 25.0 % (between each rank's first and last pass: 14.3 %)",
        "textbook formula: 25.0 %",
        "microbatches in flight at most, by rank: 2, 1",
        str(output),
    ]
    assert output.read_bytes().startswith(PNG)
    assert main(["diagram", "--schedule", "interleaved_1f1b", *counts, "--stages-per-rank", "3"]) == 0
    assert "3 stages per rank" in capsys.readouterr().out


def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diagram", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "3"])
    assert ended.value.code == 2
    assert "3 microbatches on 4 ranks" in capsys.readouterr().err


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # Only drawing needs it, not the import.
    importlib.reload(drawing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'trainer-pipeline\[plot\]'"):
        draw_schedule("gpipe", 2, 2, tmp_path / "gpipe.png")
    output = str(tmp_path / "gpipe.png")
    with pytest.raises(SystemExit):
        main(["diagram", "--schedule", "gpipe", "--ranks", "2", "--microbatches", "2", "--output", output])
    assert "trainer-pipeline[plot]" in capsys.readouterr().err
