"""Reading trace files and the shapes in them: piece by piece, and refusing what is none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from perf_metrics.ofu.trace import matmul_sizes, trace_overhead
from perf_metrics.traces.trace_file import TraceFile, TraceFileError


@pytest.mark.parametrize(
    "shapes",
    [
        None,
        [],
        [[8, 8]],
        [[8, 8], [9, 8]],
        [[0, 8], [8, 8]],
        [[8, 8], "x"],
        [[8], [8, 8]],
        [[8.0, 8], [8, 8]],
    ],
)
def test_unusable_shapes(shapes: object) -> None:
    assert matmul_sizes("aten::mm", shapes) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a JSON trace"),
        (b"[1, 2", "cut off"),
        (b"3", "must be a JSON object"),
        (b'{"a": 1}', "no list traceEvents"),
        (b'{"traceEvents": [{"cat": "kernel"}', "cut off"),
        (b'{"traceEvents": [{"cat": "kernel",}]}', "not a JSON trace"),
        (b'{"traceEvents" [', "expected a colon"),
        (b"{1: 2}", "expected a key"),
        (b"\x1f\x8bnothing", "is a damaged gzip file"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "is a damaged gzip file"),
        (b'{"traceEvents": []}', "no kernels of a GPU"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=message) as error:
        trace_overhead(path)
    assert str(path) in str(error.value)


def test_a_file_is_read_in_pieces_as_json_reads_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, object]] = [
        {"name": f"ké\\nel {index} ]}}", "dur": index * 1.5e-3, "args": {"Input Dims": [[index, 2], []]}}
        for index in range(50)
    ]
    events.append({"name": "long", "args": {"text": "x" * 3000}})
    # A number of many digits first, so that the pieces cut through it.
    first = {"baseTimeNanoseconds": 1743521598000000000}
    header = first | {"schemaVersion": 1, "deviceProperties": [{"id": 0, "numSms": 132}], "traceName": "t"}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**first, "traceEvents": events, **header}, indent=1))
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr("perf_metrics.traces.trace_file._CHUNK", size)
        file = TraceFile(path)
        assert list(file.events()) == events
        assert file.header == header
    path.write_text(json.dumps(events))
    assert list(TraceFile(path).events()) == events


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "9" * 5000 + "]"], ids=["deep", "digits"])
def test_what_no_parser_reads_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"args": ' + text)
    with pytest.raises(TraceFileError, match=r"trace\.json is not a"):
        list(TraceFile(path).events())
