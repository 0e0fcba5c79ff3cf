import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from perf_metrics import plot_logs


def write_log(directory: Path, losses: list[float | None], **more: object) -> Path:
    directory.mkdir(parents=True)
    entries = [{"global_step": 10 * i, "loss": loss, **more} for i, loss in enumerate(losses, start=1)]
    entries.append({"global_step": 20, "eval_loss": 2.5})
    path = directory / "trainer_logs.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "baseline", [3.0, 2.0, 1.5], learning_rate=1e-3, peak_mem_allocated=[1, 3])


def texts(svg: Path) -> str:
    """The comments in matplotlib's SVG: the text of each label, in the order of drawing."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    tree = ET.parse(svg, parser)
    return "\n".join(node.text or "" for node in tree.iter() if node.tag is ET.Comment)


def lines_drawn(svg: Path) -> int:
    return svg.read_text().count('id="line2d_')


def test_png(log: Path, tmp_path: Path) -> None:
    output = plot_logs(log, tmp_path / "new" / "curve.png")
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1275, 900)
    assert [path.name for path in output.parent.iterdir()] == ["curve.png"]


def test_svg_says_what_it_shows(log: Path, tmp_path: Path) -> None:
    shown = texts(plot_logs([log], tmp_path / "curve.svg"))
    for text in ("step", "loss", "eval_loss", "learning rate", "Training curve: baseline"):
        assert f" {text} " in shown


def test_several_runs_have_names(log: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "wide", [4.0, None, 2.0])
    shown = texts(plot_logs([log.parent, other], tmp_path / "curves.svg", title="Two widths"))
    for text in ("baseline: loss", "wide: eval_loss", "Two widths"):
        assert f" {text} " in shown
    named = texts(plot_logs([log, other], tmp_path / "named.svg", labels=["a", "b"], keys=["loss"]))
    assert " a " in named
    assert " b " in named


def test_runs_of_the_same_name_are_told_apart(log: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "again" / "baseline", [4.0, 3.0])
    shown = texts(plot_logs([log, other], tmp_path / "curves.svg", keys=["loss"]))
    assert f" {log} " in shown
    assert f" {other} " in shown


def test_other_keys_lists_and_no_learning_rate(log: Path, tmp_path: Path) -> None:
    output = plot_logs(log, tmp_path / "m.svg", keys=["peak_mem_allocated"], learning_rate=False)
    shown = texts(output)
    assert " peak mem allocated " in shown
    assert "learning rate" not in shown


def test_a_missing_value_is_a_gap_and_not_a_point(tmp_path: Path) -> None:
    whole = plot_logs(write_log(tmp_path / "a", [3.0, 2.5, 2.0, 1.5]), tmp_path / "a.svg", keys=["loss"])
    gap = plot_logs(write_log(tmp_path / "b", [3.0, None, 2.0, 1.5]), tmp_path / "b.svg", keys=["loss"])

    def curve(svg: Path) -> str:
        paths = [
            node.get("d") or "" for node in ET.parse(svg).iter() if "#0072b2" in (node.get("style") or "")
        ]
        return max(paths, key=len)

    assert curve(whole).count("M") == 1
    assert curve(gap).count("M") == 2


def test_the_users_matplotlib_is_left_alone(log: Path, tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_logs(log, tmp_path / "curve.png")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "curve.jpg"}, r"the suffix must be .png or .svg"),
        ({"keys": ["accuracy"]}, r"no entry of .*trainer_logs.json has a number under accuracy"),
        ({"labels": ["a", "b"]}, "labels has 2 names for 1 log files"),
        ({"log_paths": []}, "no entry of no file"),
    ],
)
def test_bad_input(log: Path, tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_logs(**{"log_paths": log, "output": tmp_path / "curve.png", **arguments})  # type: ignore[arg-type]
    assert not (tmp_path / "curve.png").exists()


def test_without_matplotlib_the_error_says_what_to_install(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'perf-metrics\[plot\]'"):
        plot_logs(log, tmp_path / "curve.png")
