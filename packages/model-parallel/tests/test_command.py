"""`python -m model_parallel`: help without torch, and one line for what is wrong."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("words", [["-h"], ["plan", "-h"], ["--version"]])
def test_help_needs_no_torch(words: list[str], python: Python) -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv[0] = 'model_parallel'\n"
        "try:\n    runpy.run_module('model_parallel', run_name='__main__')\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    done = python("-c", code, *words)
    assert done.returncode == 0
    assert done.stderr == "False\n"
    assert done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not a JSON file"), ("[]", "must be a JSON object"), (None, "No such file")],
)
def test_a_file_that_is_no_configuration(
    tmp_path: Path, text: str | None, message: str, python: Python
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    done = python("-m", "model_parallel", "plan", str(path), "--tensor", "2")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_transformers_is_missing(tmp_path: Path, python: Python) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code = (
        "import sys, runpy\n"
        "sys.modules['transformers'] = None\n"
        "runpy.run_module('model_parallel', run_name='__main__', alter_sys=True)"
    )
    done = python("-c", code, "plan", str(tmp_path), "--tensor", "2")
    assert done.returncode == 1
    assert "pip install 'model-parallel[hf]'" in done.stderr
