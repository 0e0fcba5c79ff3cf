"""The command line: `llama-pretrain [train|recipes|plan|eval|generate|export|import|report|...]`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

from .console import EXIT_INTERRUPTED, EXIT_USER_ERROR, PROG, exit_code_of, is_of_another_rank
from .launch import has_launched, is_launched, is_reporting, launch, leave_exit_code, report_end

if TYPE_CHECKING:
    from .settings import Parser

_OVERVIEW = f"""\
usage: {PROG} [train] [options]     train a Llama, or continue with a run that was stopped
       {PROG} recipes [NAME]        list settings of whole runs, or print one of them
       {PROG} plan [options]        say what memory training needs, and which layout fits the GPUs
       {PROG} eval [options]        score a trained model on text
       {PROG} generate [PROMPT]     let a trained model continue a text
       {PROG} export DIRECTORY      write a trained model for transformers
       {PROG} import HF DIRECTORY   take over a Hugging Face Llama
       {PROG} report [options]      show a run on one HTML page
       {PROG} watch [RUN ...]       show runs while they train, on a page of this machine
       {PROG} bench [options]       time this trainer beside others
       {PROG} verify [options]      prove on this machine what the tests prove elsewhere

Without a word it trains: a byte-level model on the text of the Python standard library, in about
a minute on two CPU cores. Ctrl-C saves; the same command continues.

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
  --install-completion       let this shell, bash or zsh, complete commands and options

The other commands have --help as well. Exit codes: 0 done, 1 aborted, 2 wrong input,
75 stopped early and saved (the same command continues), 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words of the command line, without the program's name; those of the process when not given.

    Returns:
        Exit code: 0 done, 1 aborted (also when another process of the job failed), 2 wrong input, 75 stopped
        early and saved, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help", "--version"):
        return _show(_OVERVIEW if words[0] != "--version" else f"{PROG} {version(PROG)}")
    if words and words[0] == "--install-completion":
        words[0] = "completion"
    name, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else ("train", words)
    try:
        return leave_exit_code(_run(name, rest))
    except KeyboardInterrupt:
        goes_on = name == "train" and "--dry-run" not in rest
        command = "the same command without --fresh" if "--fresh" in rest else "the same command"
        saved = f"; checkpoints saved so far are whole, {command} continues" * goes_on
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
    # The collection at the end of the interpreter would look at them all as well, for most of a second.
    gc.freeze()
    sys.exit(code)


def _show(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _leave_stdout()
    except OSError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _leave_stdout() -> None:
    """The reader, such as `head`, has seen enough: keep the interpreter from flushing into the pipe again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _limit_spinning() -> None:
    """Let OpenMP threads that wait for one another spin for microseconds, and sleep then.

    By default those of GNU's library spin for milliseconds, and take the cores from the very threads that
    they wait for. A step of the default run, two threads on two cores, in ms: 56 to 71 by default, 60 to 61
    so, 81 to 85 if they sleep at once; with the same run beside it 275 to 390, 134 to 142 and 110 to 125.
    What the user has set wins.
    """
    if not os.environ.get("OMP_WAIT_POLICY", "").strip():  # which torch's library reads when it is loaded
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # no spinning, in other libraries than GNU's
        # Beats the policy in GNU's, where a process has no more of its threads than cores.
        if not os.environ.get("GOMP_SPINCOUNT", "").strip():
            os.environ["GOMP_SPINCOUNT"] = "1000"


def _run(name: str, words: Sequence[str]) -> int:
    _limit_spinning()
    if name not in COMMANDS:
        from trainer_core import suggest

        hint = f"{suggest(name, COMMANDS, otherwise='')} The commands are {', '.join(COMMANDS)}.".strip()
        print(f"{PROG}: error: unknown command {name!r}. {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        done = COMMANDS[name](words)
        if name in _ONLY_PRINT:
            sys.stdout.flush()
        return done
    except Exception as error:
        if name in _ONLY_PRINT and isinstance(error, BrokenPipeError):
            _leave_stdout()
            return 0
        code = exit_code_of(error)
        if code is None:
            raise
        _complain(error, code)
        return code


def _complain(error: Exception, code: int) -> None:
    """Print one line; of several processes each says who it is, because each may have another reason."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"[rank {os.environ.get('RANK', '0')}] " if several else ""
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"{PROG}: error: {who}{message}", file=sys.stderr)
    if is_reporting():
        report_end(message, is_cause=not is_of_another_rank(error), code=code)


# What a command imports is imported when it runs: torch takes seconds, and help needs none of it.
def _train(words: Sequence[str]) -> int:
    from .arguments import check_restarts
    from .mesh import parse_mesh
    from .settings import resolve, train_parser

    given = train_parser().parse_args_strictly(words)
    only_looks = given.pop("dry_run", False)
    args = resolve(given)
    if only_looks:
        from .commands.dry_run import dry_run

        refuse_several_processes("train --dry-run")
        dry_run(args)
        return 0
    processes = parse_mesh(args.mesh).world_size
    check_restarts(args, given, launches=not is_launched(), is_launcher=is_reporting())
    if (processes > 1 or args.max_restarts) and not is_launched():
        return launch(
            ["train", *words],
            processes,
            str(args.run_path),
            max_restarts=args.max_restarts,
            hot_spares=args.hot_spares,
            fresh=args.starts_fresh,
        )

    with _collection_paused():
        import torch._dynamo  # noqa: F401 - which torch's optimizers import when they are made

        from .train import train

    return train(args)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Import without looking for garbage: modules of torch are half a million objects, and none of it.

    An eighth of the time from the command to the first step went into looking at them again and again.
    """
    gc.disable()
    try:
        yield
    finally:
        # All of it goes to the oldest generation; as young objects they would be looked at twice more.
        gc.freeze()
        gc.unfreeze()
        gc.enable()


def parser_of(name: str) -> Parser:
    """The parser of the options of a command."""
    from .commands.arguments import plan_parser
    from .settings import train_parser

    command = COMMANDS[name]
    if isinstance(command, _Command):
        return command.parser()
    return {"train": train_parser, "plan": plan_parser}[name]()


def _plan(words: Sequence[str]) -> int:
    from .commands.arguments import plan_arguments, plan_parser

    given = plan_parser().parse_args_strictly(words)
    refuse_several_processes("plan")
    if "config" in given:
        from .commands.plan_config import show_plan

        show_plan(given)
    else:
        from .commands.plan import show_plans

        show_plans(plan_arguments(given))
    return 0


@dataclass(frozen=True)
class _Command:
    """A command whose options are the fields of a dataclass.

    Attributes:
        summary: What it does, in a sentence.
        arguments: Name of the dataclass.
        function: Module and name of the function that is called with it; what it returns, if that is a
            number, is the exit code.
        positional: Fields that are given without their names.
        keeps_words: Whether the function is given the words too, to write them down.
        anywhere: Whether it may run in each process that a launcher has started.
    """

    name: str
    summary: str
    arguments: str
    function: str
    positional: tuple[str, ...] = ()
    keeps_words: bool = False
    anywhere: bool = False

    def parser(self) -> Parser:
        """The parser of its options."""
        from .settings import Parser, add_field_options

        parser = Parser(prog=f"{PROG} {self.name}", description=self.summary)
        add_field_options(parser, self._class(), {}, positional=self.positional)
        return parser

    def __call__(self, words: Sequence[str]) -> int:
        """Do it."""
        from trainer_core import arguments_from_dict

        given = self.parser().parse_args_strictly(words)
        if not self.anywhere:
            refuse_several_processes(self.name)
        args: object = arguments_from_dict(self._class(), given)
        place, _, function = self.function.rpartition(".")
        with _collection_paused():
            module = import_module(place, __package__)
        code = getattr(module, function)(args, *([words] if self.keeps_words else []))
        return code if isinstance(code, int) else 0

    def _class(self) -> type:
        found: type = getattr(import_module(".commands.arguments", __package__), self.arguments)
        return found


def refuse_several_processes(command: str) -> None:
    """Refuse to do the same thing in each of the processes that a launcher has started.

    Raises:
        ConfigurationError: If it has started several.
    """
    from dist_env import DistributedEnvironment
    from trainer_core import ConfigurationError

    processes = DistributedEnvironment().world_size
    if processes > 1:
        raise ConfigurationError(
            "WORLD_SIZE",
            processes,
            f"is more than one process, and {command} runs in one",
            f"use `{PROG} {command}` without a launcher",
        )


_SIMPLE = (
    _Command(
        "recipes",
        "List settings of whole runs, or print one of them.",
        "RecipesArguments",
        ".commands.recipes.show_recipes",
        ("name",),
        anywhere=True,
    ),
    _Command(
        "completion",
        "Let bash or zsh complete commands and options.",
        "CompletionArguments",
        ".completion.complete",
        ("shell",),
        anywhere=True,
    ),
    _Command("eval", "Score a trained model on text.", "EvalArguments", ".commands.trained_model.evaluate"),
    _Command(
        "generate",
        "Let a trained model continue a text.",
        "GenerateArguments",
        ".commands.trained_model.generate_text",
        ("prompt",),
    ),
    _Command(
        "export",
        "Write a trained model as a directory that transformers reads.",
        "ExportArguments",
        ".commands.trained_model.export",
        ("directory",),
    ),
    _Command(
        "import",
        "Take over a Hugging Face Llama, checked, as one directory.",
        "ImportArguments",
        ".commands.trained_model.import_model",
        ("source", "directory"),
    ),
    _Command(
        "report",
        "Show a run on one page that needs nothing else.",
        "ReportArguments",
        ".commands.run_report.write_report",
    ),
    _Command(
        "watch",
        "Show runs while they train, on a page that this command serves.",
        "WatchArguments",
        ".commands.watch.watch",
        ("runs",),
        anywhere=True,
    ),
    _Command(
        "bench",
        "Time this trainer beside others, on the same model and rows.",
        "BenchArguments",
        ".bench.command.bench",
        keeps_words=True,
    ),
    _Command(
        "verify",
        "Prove on the devices of this machine what the tests prove elsewhere; run it first on a new cluster.",
        "VerifyArguments",
        ".commands.verify.verify_here",
        keeps_words=True,
        anywhere=True,
    ),
)
_ONLY_PRINT = ("recipes", "completion")
"""Commands whose reader may stop reading."""
COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "plan": _plan,
    **{command.name: command for command in _SIMPLE},
}
