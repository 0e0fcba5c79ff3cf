"""`perf-metrics trace`: what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf_metrics.commands import OneLineParser
from perf_metrics.commands.trace import fill_trace

TILE = "nvjet_tst_256x160_64x4_2x1"


def write(path: Path, *kernels: tuple[str, float, list[list[int]] | None, list[int]]) -> str:
    """Kernels with name, microseconds, the shapes of an `aten::mm` or None, and grid; on an H100."""
    events: list[dict[str, object]] = []
    for identity, (name, microseconds, shapes, grid) in enumerate(kernels, start=1):
        arguments: dict[str, object] = {"External id": identity}
        if shapes is not None:
            events.append({"cat": "cpu_op", "name": "aten::mm", "args": arguments | {"Input Dims": shapes}})
        events.append(
            {
                "cat": "kernel",
                "name": name,
                "dur": microseconds,
                "args": arguments | {"device": 0, "grid": grid},
            }
        )
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "numSms": 132}], "traceEvents": events}))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    parser = OneLineParser(prog="perf-metrics")
    fill_trace(parser)
    parsed = parser.parse_args(options)
    assert parsed.run(parsed) == 0
    return capsys.readouterr().out


def test_overhead_and_adjusted_ofu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "trace.json",
        (TILE, 750.0, [[4000, 4000], [4000, 4000]], [17, 1, 1]),
        ("flash_fwd_kernel", 150.0, None, [1, 1, 1]),
        ("void at::native::vectorized_elementwise_kernel<4>", 100.0, None, [1, 1, 1]),
    )
    out = run(capsys, path, "--ofu", "0.45")
    assert "75.0% of 1.000 ms of kernels counted; 15.0% with a tile that is not known; 0.0% without" in out
    assert "tile overhead: 3.22% (128.00GFLOP asked, 132.12GFLOP computed)" in out
    assert f"adjusted OFU: {0.45 / 1.032192:.2%} (OFU 45.00%), as if the kernels not counted" in out
    answer = json.loads(run(capsys, path, "--ofu", "0.45", "--json"))
    assert answer["overhead"] == pytest.approx(0.032192)
    assert answer["adjusted_ofu"] == pytest.approx(0.45 / 1.032192)
    assert answer["unreadable"][0]["time_share"] == pytest.approx(0.15)
    assert answer["kernels"][0]["grids"] == {"agree": 0, "differ": 0, "unchecked": 1, "example": None}
    with pytest.raises(ValueError, match=r"ofu=45.0"):
        run(capsys, path, "--ofu", "45")


def test_nothing_to_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "trace.json", (TILE, 1.0, [], [200, 1, 1]))
    out = run(capsys, path, "--ofu", "0.45")
    assert "tile overhead: unavailable" in out
    assert "adjusted OFU: unavailable" in out
    assert "record_shapes=True" in out
    answer = json.loads(run(capsys, path, "--json"))
    assert answer["overhead"] is answer["adjusted_ofu"] is answer["exact"] is None


def test_a_split_k_is_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "nvjet_hss_64x8_64x16_1x1_h_bz_splitK_NNT"
    out = run(
        capsys, write(tmp_path / "trace.json", (name, 1.0, [[8, 100], [100, 64]], [1, 2, 1])), "--ofu", "0.32"
    )
    assert "tile overhead: at least 28.00%" in out
    assert "adjusted OFU: at most 25.00% (OFU 32.00%)" in out
    assert "no: k is split" in out
    assert "1 agree" in out


def test_grids_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "nvjet_tst_128x128_64x8_1x1_TNT"
    out = run(capsys, write(tmp_path / "trace.json", (name, 1.0, [[512, 8], [8, 512]], [15, 1, 1])))
    assert "1 DIFFER" in out
    assert "in doubt: launched grids contradict the formula for kernels of 100.0% of the time" in out
    assert "1 of 1, such as grid (15, 1, 1) where the formula gives 16 blocks" in out
