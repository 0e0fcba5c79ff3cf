import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from perf_metrics import plot_logs
from perf_metrics.logs.heat_map import loads_of
from perf_metrics.logs.summary import read_run

BLUE = "#0072b2"


def write_log(directory: Path, losses: list[float | None], **more: object) -> Path:
    directory.mkdir(parents=True)
    entries = [
        {"global_step": 10 * i, "loss": loss, "total_tokens": 5000 * i, **more}
        for i, loss in enumerate(losses, start=1)
    ]
    entries.append({"global_step": 20, "eval_loss": 2.5})
    path = directory / "trainer_logs.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "baseline", [3.0, 2.0, 1.5], learning_rate=1e-3)


@pytest.fixture
def full_log(tmp_path: Path) -> Path:
    gib = 2**30
    figures = {"tok_per_sec": 52_000.0, "mfu": 0.41, "hfu": 0.52, "learning_rate": 3e-4, "grad_norm": 0.9}
    memory = {"peak_mem_allocated": [60 * gib, 74 * gib]}
    return write_log(tmp_path / "full", [3.0, 2.0, 1.5], **figures, **memory)


def texts(svg: Path) -> list[str]:
    """The comments in matplotlib's SVG: the text of each label, in the order of drawing."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    tree = ET.parse(svg, parser)
    return [(node.text or "").strip() for node in tree.iter() if node.tag is ET.Comment]


def panels_drawn(svg: Path) -> int:
    return svg.read_text().count('<g id="axes_')


def paths_in_panel(svg: Path, number: int, style: str) -> int:
    """How many paths of a style a panel has; the legend is not a panel."""
    panel = next(node for node in ET.parse(svg).iter() if node.get("id") == f"axes_{number}")
    return sum(style in (node.get("style") or "") for node in panel.iter())


def curves(svg: Path, colour: str) -> list[str]:
    """The paths drawn in a colour, longest first."""
    nodes = [node for node in ET.parse(svg).iter() if colour in (node.get("style") or "")]
    return sorted((node.get("d") or "" for node in nodes), key=len, reverse=True)


def test_png_replaces_what_was_there(log: Path, tmp_path: Path) -> None:
    output = plot_logs(log, tmp_path / "new" / "curve.png")
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == 1275
    assert 700 < height < 1000  # loss and learning rate
    assert plot_logs(log, output, panels=["loss"]) == output
    assert output.read_bytes() != data
    assert [path.name for path in output.parent.iterdir()] == ["curve.png"]


def test_every_panel_that_has_numbers_and_no_other(log: Path, full_log: Path, tmp_path: Path) -> None:
    few = plot_logs([log], tmp_path / "few.svg")
    assert panels_drawn(few) == 2
    assert {"step", "loss", "learning rate", "Training curve: baseline", "evaluation loss"} <= {*texts(few)}
    every = plot_logs(full_log, tmp_path / "every.svg")
    assert panels_drawn(every) == 5
    shown = texts(every)
    labels = [text for text in shown if text in ("loss", "tokens/s", "MFU", "memory (GiB)", "learning rate")]
    assert labels == ["loss", "tokens/s", "MFU", "memory (GiB)", "learning rate"]
    assert {"HFU", "memory, all ranks", "40%", "3e-4", "40K", "60"} <= {*shown}
    assert "80" not in shown  # 74 GiB are 79.5e9 bytes
    assert paths_in_panel(every, 4, "fill-opacity: 0.2") == 1


def test_hfu_is_drawn_only_where_it_differs_from_mfu(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a", [3.0, 2.0, 1.5], mfu=0.4, hfu=0.4)
    output = plot_logs(log, tmp_path / "a.svg", panels=["mfu"])
    assert "HFU" not in texts(output)
    assert paths_in_panel(output, 1, f"stroke: {BLUE}") == 1


def test_chosen_panels_in_their_order_and_keys_of_the_log(full_log: Path, tmp_path: Path) -> None:
    output = plot_logs(full_log, tmp_path / "m.svg", panels=["learning_rate", "grad_norm+mfu", "loss"])
    assert panels_drawn(output) == 3
    shown = texts(output)
    assert shown.index("learning rate") < shown.index("grad norm") < shown.index("loss")
    assert {"grad_norm", "mfu"} <= {*shown[shown.index("loss") :]}  # in the legend


def test_the_map_of_experts_has_a_row_for_each_and_a_column_for_each_entry(tmp_path: Path) -> None:
    loads = {"model.layers.1.mlp.gate": [0.5, 1.5, 1.0], "model.layers.7.mlp.gate": [2.0, 0.0, 1.0]}
    log = write_log(tmp_path / "a", [3.0, 2.0], expert_load=loads)
    run = read_run(log)
    assert loads_of(run, "expert_load") == {10.0: loads, 20.0: loads}
    shown = texts(plot_logs(log, tmp_path / "a.svg", panels=["loss", "experts"], x="tokens"))
    assert {"experts by layer", "1", "7", "even", "2x"} <= {*shown}
    assert panels_drawn(plot_logs(log, tmp_path / "default.svg")) == 3  # loss, the map, and its scale
    with pytest.raises(ValueError, match="'experts' is a map of one run, but there are 2"):
        plot_logs([log, log], tmp_path / "two.svg", panels=["experts"])
    assert panels_drawn(plot_logs([log, log], tmp_path / "two.svg")) == 1


@pytest.mark.parametrize("table", [{}, [1.0], {"a": []}, {"a": ["x"]}, {"a": 1.0}, {"a": [True]}])
def test_tables_that_are_none_are_not_drawn(table: object, tmp_path: Path) -> None:
    log = write_log(tmp_path / "a", [3.0], expert_load=table)
    with pytest.raises(ValueError, match=r"'experts': no entry of .* has a number under expert_load"):
        plot_logs(log, tmp_path / "a.svg", panels=["experts"])


def test_several_runs_have_one_legend(log: Path, full_log: Path, tmp_path: Path) -> None:
    output = plot_logs([log.parent, full_log], tmp_path / "curves.svg", title="Two for $5 and $6")
    shown = texts(output)
    assert shown.count("baseline") == shown.count("full") == 1
    assert "Two for $5 and $6" in [text.replace("\\", "") for text in shown]
    named = texts(plot_logs([log, full_log], tmp_path / "named.svg", labels=["_a", "b"], panels=["loss"]))
    assert {"_a", "b"} <= {*named}


def test_more_runs_than_colours_are_still_told_apart(tmp_path: Path) -> None:
    logs = [write_log(tmp_path / f"run-{index}", [3.0, 2.0]) for index in range(9)]
    output = plot_logs(logs, tmp_path / "nine.svg", panels=["loss"])
    lines = [node.get("style") or "" for node in ET.parse(output).iter() if node.get("style")]
    thick = {style for style in lines if "stroke-width: 2.5" in style}
    assert len(thick) == 9


def test_runs_of_the_same_name_are_told_apart(log: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "again" / "baseline", [4.0, 3.0])
    shown = texts(plot_logs([log, other], tmp_path / "curves.svg"))
    assert {f"{tmp_path.name}/baseline", "again/baseline"} <= {*shown}


def test_a_missing_value_is_a_gap_and_a_lonely_one_a_dot(tmp_path: Path) -> None:
    whole = plot_logs(write_log(tmp_path / "a", [3.0, 2.5, 2.0, 1.5, 1.4]), tmp_path / "a.svg")
    gaps = plot_logs(write_log(tmp_path / "b", [3.0, None, 2.0, 1.5, 1.4]), tmp_path / "b.svg")
    assert curves(whole, BLUE)[0].count("M") == 1
    assert gaps.read_text().count("M") > whole.read_text().count("M")
    dots = [svg.read_text().count("<use xlink:href") for svg in (whole, gaps)]
    assert dots[1] == dots[0] + 1


def test_of_steps_done_twice_the_later_ones_are_drawn(tmp_path: Path) -> None:
    once = tmp_path / "once.jsonl"
    twice = tmp_path / "twice.jsonl"
    first = [(10, 5.0), (20, 4.0)]
    void, second = [(30, 9.0), (40, 9.5)], [(30, 3.0), (40, 2.0)]

    def lines(points: list[tuple[int, float]]) -> str:
        return "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in points)

    once.write_text(lines(first + second))
    twice.write_text(lines(first + void + second))
    pictures = [plot_logs(path, path.with_suffix(".svg"), title="t") for path in (once, twice)]
    assert curves(pictures[0], BLUE) == curves(pictures[1], BLUE)


def test_smoothing_keeps_the_values_as_logged_pale_behind(log: Path, tmp_path: Path) -> None:
    plain = plot_logs(log, tmp_path / "plain.svg", panels=["loss"])
    smooth = plot_logs(log, tmp_path / "smooth.svg", panels=["loss"], smooth=0.9)
    assert {"training loss, smoothed (0.9)", "training loss as logged"} <= {*texts(smooth)}
    for style, drawn in ((f"stroke: {BLUE}; stroke-opacity: 0.3", [0, 1]), (f"stroke: {BLUE}", [1, 2])):
        assert [paths_in_panel(picture, 1, style) for picture in (plain, smooth)] == drawn


def test_the_axis_of_tokens(log: Path, tmp_path: Path) -> None:
    output = plot_logs(log, tmp_path / "tokens.svg", x="tokens")
    assert {"tokens", "10K", "evaluation loss"} <= {*texts(output)}
    assert "step" not in texts(output)


def test_the_users_matplotlib_is_left_alone(log: Path, tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_logs(log, tmp_path / "curve.png")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "curve.jpg"}, r"must end in .png or .svg"),
        ({"panels": ["mfu"]}, r"panel 'mfu': no entry of .*trainer_logs.json has a number under mfu or hfu"),
        (
            {"panels": ["learning_rat"]},
            "Did you mean 'learning_rate'.* The panels are loss, tok_per_sec, mfu",
        ),
        ({"panels": ["loss+accuracy"]}, "'accuracy', which is neither a panel nor a key of these logs"),
        ({"panels": "loss"}, "must be a list"),
        ({"panels": []}, "must be a list"),
        ({"labels": ["a", "b"]}, "labels has 2 names for 1 log files"),
        ({"log_paths": []}, "no entry of no file"),
        ({"smooth": 1.0}, "smooth=1.0 must be at least 0, for no smoothing, and below 1"),
        ({"smooth": float("nan")}, "smooth=nan"),
        ({"x": "epoch"}, "x='epoch' must be 'step' or 'tokens'"),
    ],
)
def test_bad_input(log: Path, tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_logs(**{"log_paths": log, "output": tmp_path / "curve.png", **arguments})  # type: ignore[arg-type]
    assert not (tmp_path / "curve.png").exists()


def test_tokens_that_were_not_logged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(
        ValueError, match=r"number under total_tokens .*no entry of .*a.jsonl has one.*x='step'"
    ):
        plot_logs(path, tmp_path / "curve.png", x="tokens")


def test_without_matplotlib_the_error_says_what_to_install(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'perf-metrics\[plot\]'"):
        plot_logs(log, tmp_path / "curve.png")
