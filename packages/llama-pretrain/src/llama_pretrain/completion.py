"""The command `completion`: bash and zsh complete commands and options."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import shtab

from trainer_core import ConfigurationError, suggest

from .cli import COMMANDS, parser_of
from .commands.arguments import CompletionArguments
from .config_files import recipe_names
from .console import PROG
from .settings import PATHS

_PLACES = {
    "bash": (
        "bash-completion/completions",
        PROG,
        "The package bash-completion finds it there. Without that package, add to ~/.bashrc: source {path}",
    ),
    "zsh": (
        "zsh/site-functions",
        f"_{PROG}",
        "Add to ~/.zshrc, before compinit is called: fpath=({folder} $fpath)",
    ),
}
"""By shell: the folder below $XDG_DATA_HOME, the name of the file, and what loads it."""


def complete(args: CompletionArguments) -> None:
    """Write the script that completes commands and options where the shell looks for it, or print it.

    Raises:
        ConfigurationError: For a shell other than bash and zsh.
        OSError: If the script cannot be written.
    """
    shell = args.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in _PLACES:
        hint = suggest(shell, _PLACES, otherwise=f"name one, as in `{PROG} completion bash`")
        raise ConfigurationError("shell", shell, "must be bash or zsh", hint)
    script = completion_script(shell)
    if args.show:
        print(script)
        return
    below, name, how_loaded = _PLACES[shell]
    folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / below
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(script, encoding="utf-8")
    print(f"wrote {path}, which new shells read. {how_loaded.format(path=path, folder=folder)}")


def completion_script(shell: str) -> str:
    """The script for bash or zsh. It holds all names, so that a completion starts no Python."""
    parser = argparse.ArgumentParser(prog=PROG, parents=[_parser("train")], add_help=False)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    for name in COMMANDS:
        of_command = _parser(name)
        commands.add_parser(name, help=of_command.description, parents=[of_command], add_help=False)
    return str(shtab.complete(parser, shell))


def _parser(name: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parser_of(name)
    for action in parser._actions:  # argparse has no other way to reach them
        if action.dest in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
        elif name == "recipes" and action.dest == "name":
            action.choices = recipe_names()
    return parser
