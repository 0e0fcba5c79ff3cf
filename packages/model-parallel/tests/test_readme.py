"""The example of the README prints the same losses as one process and on two ranks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLE = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[0]


NOTED = """
import contextlib, io, json, os, runpy
with contextlib.redirect_stdout(io.StringIO()) as told:
    runpy.run_path({script!r})
with open(os.environ["NOTES"], "w") as notes:
    json.dump(told.getvalue(), notes)
"""
"""What a rank runs, to note what it prints. The launcher of the README runs it from the wheels."""


def test_two_ranks_print_what_one_process_prints(
    tmp_path: Path,
    alone: Callable[..., subprocess.CompletedProcess[str]],
    launch: Callable[..., list[str]],
) -> None:
    script, rank = tmp_path / "train.py", tmp_path / "rank.py"
    script.write_text(EXAMPLE.replace("model = torch", "torch.manual_seed(0)\nmodel = torch"))
    rank.write_text(NOTED.format(script=str(script)))
    done = alone(script)
    assert done.returncode == 0, done.stderr
    one, two = ([float(line) for line in text.split()] for text in (done.stdout, "".join(launch(rank, 2))))
    assert len(one) == 10
    assert one[-1] < one[0]
    assert two == pytest.approx(one, rel=1e-5, abs=1.1e-6)


def test_the_example_is_short() -> None:
    lines = EXAMPLE.partition("\n\n")[2].splitlines()
    assert len(lines) <= 12, "lines after the imports"


def test_the_table_has_every_style() -> None:
    from model_parallel import STYLES

    table = README.read_text().partition("## Plans")[2].partition("## What happens")[0]
    assert set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)))
    ) == set(STYLES)
