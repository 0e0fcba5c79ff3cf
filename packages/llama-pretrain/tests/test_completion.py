"""What bash and zsh complete: commands, options and the names of recipes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_pretrain.cli import main
from llama_pretrain.completion import completion_script

_BASH = """
source "$1"
read -ra COMP_WORDS <<< "$2"
[[ "$2" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE="$2"; COMP_POINT=${#2}
function_of() { complete -p llama-pretrain | sed 's/.*-F \\([^ ]*\\).*/\\1/'; }
$(function_of) llama-pretrain "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def in_bash(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    path = tmp_path_factory.mktemp("bash") / "llama-pretrain"
    path.write_text(completion_script("bash"))

    def complete(line: str) -> list[str]:
        words = ["bash", "--norc", "-c", _BASH, "bash", str(path), line]
        found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
        assert not found.stderr
        return found.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("llama-pretrain tr", ["train"]),
        ("llama-pretrain e", ["eval", "export"]),
        ("llama-pretrain train --learn", ["--learning-rate"]),
        ("llama-pretrain --learn", ["--learning-rate"]),
        ("llama-pretrain train --ddp.st", ["--ddp.static-graph"]),
        ("llama-pretrain eval --check", ["--checkpoint"]),
        ("llama-pretrain recipes tiny-c", ["tiny-cpu"]),
    ],
)
def test_bash_completes(in_bash: Callable[[str], list[str]], line: str, completed: list[str]) -> None:
    assert in_bash(line) == completed


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_script(tmp_path: Path) -> None:
    (tmp_path / "_llama-pretrain").write_text(completion_script("zsh"))
    script = "fpath=($1 $fpath); autoload -Uz compinit; compinit -D -u; print -r -- $_comps[llama-pretrain]"
    found = subprocess.run(
        ["zsh", "-f", "-c", script, "zsh", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.strip() == "_llama-pretrain"


def test_it_is_installed_where_the_shell_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert main(["--install-completion"]) == 0
    path = tmp_path / "bash-completion" / "completions" / "llama-pretrain"
    assert f"wrote {path}" in capsys.readouterr().out
    assert path.read_text() == completion_script("bash")
    assert main(["--install-completion", "zsh"]) == 0
    assert (tmp_path / "zsh" / "site-functions" / "_llama-pretrain").is_file()
    assert main(["completion", "fish"]) == 2
    assert "shell='fish' must be bash or zsh. Name one" in capsys.readouterr().err
