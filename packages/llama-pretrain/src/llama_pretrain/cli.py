"""The command line: `llama-pretrain [train|plan|eval|generate|export|...]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from errno import EDQUOT, EFBIG, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC
from importlib.metadata import version
from typing import NoReturn

from .launch import has_launched, is_reporting, leave_exit_code, report_end
from .program import EXIT_ABORTED, EXIT_INTERRUPTED, EXIT_USER_ERROR, PROG

_MACHINE_ERRORS = (ENOSPC, EDQUOT, EFBIG, EIO, ENOMEM, EMFILE, ENFILE)
_OVERVIEW = f"""\
usage: {PROG} [train] [options]     train a Llama, or go on with a run that was stopped
       {PROG} recipes [NAME]        list settings of whole runs, or print one of them
       {PROG} plan [options]        say what memory training needs, and which layout fits the GPUs
       {PROG} eval [options]        score a trained model on text
       {PROG} generate [PROMPT]     let a trained model continue a text
       {PROG} export DIRECTORY      write a trained model for transformers
       {PROG} import HF DIRECTORY   take over a Hugging Face Llama
       {PROG} report [options]      show a run on one HTML page
       {PROG} bench [options]       time this trainer beside others

Without a word it trains: a byte-level model on the text of the Python standard library, in less than
three minutes on two CPU cores. Ctrl-C saves; the same command goes on.

options of train that are used most (all of them: {PROG} train --help):
  --output-dir DIR           checkpoints, logs, figures and config.yaml [runs/default]
  --model NAME               tiny, 160m, 1b, 7b, 13b, 34b, 70b, or a directory [tiny]
  --data PATH                directory, glob or file of text [the Python standard library]
  --max-steps N              optimizer steps [800]
  --learning-rate X          highest learning rate [0.002]
  --mesh AXES                processes of this machine: dp=2, shard=4, pp=2, dp=2,shard=2 ... [one]
  --trainer NAME             under torchrun: ddp, fsdp2 or pipeline [single]
  --config FILE              TOML or YAML file with any of the options, or a recipe
  --dry-run                  only show what a job of any size would build, hold and send
  --version                  print the version

The other commands have --help as well. Exit codes: 0 done, 1 aborted, 2 wrong input,
75 stopped early and saved (the same command goes on), 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words of the command line, without the program's name; those of the process when not given.

    Returns:
        Exit code: 0 done, 1 aborted (also when another process of the job failed), 2 wrong input, 75 stopped
        early and saved, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help"):
        print(_OVERVIEW)
        return 0
    if words and words[0] == "--version":
        print(f"{PROG} {version(PROG)}")
        return 0
    name, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else ("train", words)
    try:
        return leave_exit_code(_run(name, rest))
    except KeyboardInterrupt:
        goes_on = name == "train" and "--dry-run" not in rest
        command = "the same command without --fresh" if "--fresh" in rest else "the same command"
        saved = f"; checkpoints saved so far are whole, {command} goes on" * goes_on
        if not is_reporting():
            print(f"\n{PROG}: stopped at once{saved}.", file=sys.stderr)
        return leave_exit_code(EXIT_INTERRUPTED)


def run() -> NoReturn:
    """Run the command of this process, and end it with its exit code."""
    code = main()
    if has_launched():
        # Nothing is left to do. Python would look at every object of torch, for seconds on a busy machine.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(name: str, words: Sequence[str]) -> int:
    _let_waiting_threads_sleep()
    # Imported late: torch reads the setting above when it is loaded, and the overview needs no torch.
    from .commands.registry import COMMANDS, RANK_ERRORS, USER_ERRORS

    if name not in COMMANDS:
        print(f"{PROG}: error: unknown command {name!r}; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        return COMMANDS[name](words)
    except RANK_ERRORS as error:
        _complain(error, is_cause=False)
        return EXIT_ABORTED
    except USER_ERRORS as error:
        _complain(error, is_cause=True)
        return EXIT_ABORTED if _is_of_the_machine(error) else EXIT_USER_ERROR


def _let_waiting_threads_sleep() -> None:
    """Keep a small model fast on a machine that does other work too.

    By default OpenMP threads that wait for one another spin, and take the cores from the very thread they
    wait for: with two threads on two busy cores, `tiny` was 5 to 10 times slower. A value that the user has
    set wins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Whether a run broke, the system refused room or a device failed: other input would not change that."""
    from checkpoint_core import LeaseLostError

    from .train import BrokenRunError

    if isinstance(error, BrokenRunError | LeaseLostError):
        return True
    seen: set[int] = set()
    # An error that is raised again while it is handled elsewhere can be in its own context.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def _complain(error: BaseException, *, is_cause: bool) -> None:
    """Print one line; of several processes each says who it is, because each may have another reason."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"[rank {os.environ.get('RANK', '0')}] " if several else ""
    print(f"{PROG}: error: {who}{_one_line(error)}", file=sys.stderr)
    report_end(_one_line(error), is_cause=is_cause)


def _one_line(error: BaseException) -> str:
    """The message of an error, with the operating system's own words for its errors, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
