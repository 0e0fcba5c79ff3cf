"""Every kind of log file is read, and what is none is refused."""

import json
import logging
from pathlib import Path

import pytest

from perf_metrics import load_logs

HF_STATE = {  # as transformers 5.23 writes it
    "best_metric": None,
    "epoch": 2.0,
    "global_step": 10,
    "log_history": [
        {"loss": 3.9, "grad_norm": 0.79, "learning_rate": 5e-05, "epoch": 1.0, "step": 5},
        {"eval_loss": 3.8, "eval_runtime": 0.5, "eval_samples_per_second": 9.0, "epoch": 1.0, "step": 5},
        {"loss": 3.7, "grad_norm": 0.81, "learning_rate": 4e-05, "epoch": 2.0, "step": 10},
        {"epoch": 2.0, "step": 10, "total_flos": 12718080.0, "train_loss": 3.8, "train_runtime": 0.1},
    ],
    "max_steps": 10,
}


def test_the_state_file_of_hugging_faces_trainer(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps(HF_STATE, indent=2))
    entries = load_logs(tmp_path)
    assert [entry["global_step"] for entry in entries] == [5, 5, 10, 10]
    assert entries[0]["loss"] == 3.9
    assert entries[0]["step"] == 5
    assert entries == load_logs(tmp_path / "trainer_state.json")


def test_in_a_directory_with_both_ours_is_read(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps(HF_STATE))
    (tmp_path / "trainer_logs.json").write_text('[{"global_step": 7, "loss": 1.0}]')
    assert load_logs(tmp_path) == [{"global_step": 7, "loss": 1.0}]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n\n{"global_step": 2, "step": 9, "loss": NaN}\n')
    first, second = load_logs(path)
    assert first == {"global_step": 1, "step": 1, "loss": 2.0}
    assert second["global_step"] == 2
    path.write_text('{"step": 1, "loss": 2.0}\n')
    assert len(load_logs(path)) == 1


def test_a_torn_last_line_is_no_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [entry["global_step"] for entry in load_logs(path)] == [1]
    assert not caplog.records


def test_a_torn_line_in_the_middle_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo{"step": 2}\n{"step": 3}\n')
    with caplog.at_level(logging.WARNING):
        assert [entry["global_step"] for entry in load_logs(path)] == [1, 3]
    assert caplog.messages == [f"{path}: left out what is not a JSON object, on line 2"]


@pytest.mark.parametrize(
    "text", ['{"hidden_size": 64}', "step,loss\n1,2.0\n", "[1, 2]", '{\n  "a": 1\n}', '"text"', "\x89PNG\r\n"]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"other is not a log file, which is a JSON array"):
        load_logs(path)


def test_a_directory_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no trainer_logs.json"):
        load_logs(tmp_path)


ENTRIES = [{"global_step": step, "loss": 3.0 - step, "note": "größe"} for step in range(1, 5)]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("kind", ["array", "lines", "torn array"])
def test_files_with_a_mark_of_their_encoding_are_read_whole(
    tmp_path: Path, encoding: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps(entry, ensure_ascii=False) for entry in ENTRIES]
    texts = {
        "array": json.dumps(ENTRIES),
        "lines": "\n".join(lines),
        "torn array": "[\n" + ",\n".join(lines) + ",\n{",
    }
    path = tmp_path / "log.json"
    path.write_bytes(texts[kind].encode(encoding))
    assert load_logs(path) == ENTRIES
    assert not caplog.records
    if kind != "array":
        # Torn within a letter.
        path.write_bytes(path.read_bytes()[:-1])
        assert load_logs(path)[:3] == ENTRIES[:3]


def test_entries_after_a_damaged_line_of_an_array_are_kept_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A page of zeros is what a machine leaves that lost power; two writers leave half lines and brackets."""
    path = tmp_path / "trainer_logs.json"
    first, second, third, fourth = (json.dumps(entry) for entry in ENTRIES)
    path.write_text(f"[\n{first},\n\0\0\0\n{second}\n]\n{third[:9]}{third},\n{fourth}\n]\n")
    with caplog.at_level(logging.WARNING):
        assert [entry["global_step"] for entry in load_logs(path)] == [1, 2, 4]
    assert caplog.messages == [f"{path}: left out what is not a JSON object, on line 3, 6"]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '[{"global_step": 1, "loss": ' + "9" * 5000 + "}]"], ids=["deep", "digits"]
)
def test_what_no_parser_reads_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a log file"):
        load_logs(path)
    path.write_text(f'{{"step": 1}}\n{text}\n{{"step": 2}}\n')
    assert [entry["global_step"] for entry in load_logs(path)] == [1, 2]
