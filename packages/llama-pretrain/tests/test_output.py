"""What is drawn and wrapped for a terminal, and the exit codes of errors."""

from __future__ import annotations

import math

import pytest

from checkpoint_core import CheckpointError, LeaseLostError
from dist_env import RankFailedError, StoreError
from llama_pretrain.console import exit_code_of, text_plot, wrapped
from trainer_core import ConfigurationError


def test_a_curve_goes_from_corner_to_corner_and_has_its_points_on_it() -> None:
    line = [(step, 10.0 - step) for step in range(0, 11, 2)]
    rows = text_plot(line, [(5, 5.0)], width=11, height=11)
    assert rows[0] == "10 |*"
    assert rows[5] == "   |     o"
    assert rows[10] == " 0 |          *"
    assert rows[11:] == ["   +-----------", "    0        10"]
    # No column is left out between two points of the line, and a point is drawn over it.
    assert sum(row.count("*") for row in rows[:11]) == 10


def test_what_is_not_finite_is_left_out_and_a_level_line_is_drawn() -> None:
    rows = text_plot([(1, 2.0), (2, math.nan), (3, 2.0)], [(2, math.inf)], width=5, height=3)
    assert rows[0] == "2 |*****"
    assert text_plot([(1, 2.0)]) == text_plot([]) == []


def test_long_lines_are_wrapped_and_lose_nothing_but_spaces() -> None:
    text = "def f(x):\n    return x\n\n" + "word " * 30 + "x" * 100
    shown = wrapped(text, width=40)
    assert max(map(len, shown.splitlines())) <= 44
    assert shown.splitlines()[:3] == ["    def f(x):", "        return x", ""]
    assert "".join(shown.split()) == "".join(text.split())


def passing(error: Exception) -> Exception:
    error.may_pass = True  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("seed", -1, "must be at least 0", "set it to 0"), 2),
        (CheckpointError("is damaged"), 2),
        (FileNotFoundError(2, "gone"), 2),
        (StoreError("the credentials do not permit it"), 2),
        (passing(StoreError("the store cannot be reached")), 1),
        (passing(CheckpointError("rank 1 could not reach the store")), 1),
        (passing(ConfigurationError("output_dir", "s3://a/b", "cannot be asked", "look at it")), 1),
        (OSError(28, "no space left"), 1),
        (LeaseLostError("another run took it"), 1),
        (RankFailedError("rank 1 is lost", 1), 1),
        (RuntimeError("a mistake of ours"), None),
    ],
    ids=lambda value: None if isinstance(value, int | None) else f"{type(value).__name__}: {value}",
)
def test_what_may_pass_is_not_wrong_input(error: Exception, code: int | None) -> None:
    assert exit_code_of(error) == code
