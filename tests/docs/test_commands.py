"""The commands on the pages exist, with every option that they are given there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])
# Blocks of commands, and those without a language: the pages that packages are published with have these.
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
SCRIPTS = {
    script.name
    for package in PACKAGES
    for script in metadata.distribution(package).entry_points.select(group="console_scripts")
}
MODULES = {package.replace("-", "_") for package in PACKAGES}


def commands(page: Path) -> list[list[str]]:
    """Return the commands of our programs on a page, each as its program, subcommand and options."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    blocks = [block.replace("\\\n", " ") for language, block in found if language in ("", "bash")]
    lines = [line for block in blocks for line in block.splitlines()]
    return [command for line in lines if (command := command_in(line))]


def command_in(line: str) -> list[str] | None:
    """Return program, subcommand and options of a line, if one of our programs is called in it."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None  # prose with an apostrophe
    for at, word in enumerate(words):
        before = words[:at]
        if word in SCRIPTS and before in ([], ["uv", "run"]):
            return program_of([word], words[at + 1 :])
        if word in MODULES and before[-1:] == ["-m"]:
            return program_of([sys.executable, "-m", word], words[at + 1 :])
    return None


def program_of(program: list[str], words: list[str]) -> list[str]:
    """Return a program with its subcommand and the options that follow."""
    sub = words[:1] if words and re.fullmatch(r"[a-z-]+", words[0]) and not words[0].startswith("-") else []
    return [
        " ".join(program),
        *(sub or [""]),
        *(word.partition("=")[0] for word in words if word[:2] == "--"),
    ]


@pytest.fixture(scope="module")
def help_of(run: Callable[..., list[subprocess.CompletedProcess[str]]]) -> Callable[[str, str], str]:
    """What a subcommand says about itself."""

    def help_of(program: str, sub: str) -> str:
        name, *module = program.split()
        start = module or [str(Path(sys.executable).parent / name)]
        (done,) = run(*start, *([sub] if sub else []), "--help")
        assert done.returncode == 0, f"{program} {sub} --help: {done.stderr}"
        return done.stdout

    return help_of


def options_by_command() -> dict[tuple[str, str], dict[str, Path]]:
    """Return, for each program and subcommand on any page, the options and a page where each stands."""
    found: dict[tuple[str, str], dict[str, Path]] = {}
    for page in PAGES:
        for program, sub, *options in commands(page):
            # Without a word llama-pretrain trains.
            known = found.setdefault((program, sub or ("train" if "llama" in program else "")), {})
            known.update(dict.fromkeys(options, page))
    return found


@pytest.mark.parametrize(("command", "options"), options_by_command().items(), ids=str)
def test_options_exist(
    command: tuple[str, str], options: dict[str, Path], help_of: Callable[[str, str], str]
) -> None:
    known = help_of(*command)
    for option, page in options.items():
        assert re.search(rf"{re.escape(option)}(?![\w.-])", known), f"{page}: no {option} in {command}"


def test_commands_are_found() -> None:
    found = options_by_command()
    assert len(found) > 25
    assert {program for program, _ in found} >= SCRIPTS


def test_an_option_that_does_not_exist_is_seen(help_of: Callable[[str, str], str]) -> None:
    assert command_in("uv run llama-pretrain --config notes.yaml --max-steps 2    # beats it") == [
        "llama-pretrain",
        "",
        "--config",
        "--max-steps",
    ]
    assert "--max-step " not in help_of("llama-pretrain", "train")
