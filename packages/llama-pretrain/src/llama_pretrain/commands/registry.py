"""The commands: words of the command line to arguments, arguments to work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from checkpoint_core import CheckpointError, LostRankError
from dataloader_dispatch import DataError
from dist_env import DistributedEnvironmentError, RankFailedError, RankTimeoutError
from trainer_core import ConfigurationError, arguments_from_dict
from trainer_core import DataError as TrainerDataError

from ..launch import is_launched, launch
from ..mesh import parse_mesh
from ..program import PROG
from ..train import BrokenRunError, train
from ..trainers import refuse_several_processes
from .command_line import Parser, add_field_options
from .conversion import ExportArguments, ImportArguments, export, import_model
from .recipes import show_recipes
from .results import EvalArguments, GenerateArguments, evaluate, generate_text
from .run_report import ReportArguments, write_report
from .train_command_line import resolve, train_parser

USER_ERRORS = (
    ConfigurationError,
    DataError,
    TrainerDataError,
    CheckpointError,
    DistributedEnvironmentError,
    OSError,
    BrokenRunError,
)
RANK_ERRORS = (RankFailedError, RankTimeoutError, LostRankError)
"""Another process of the job is why this one cannot go on."""


def _train(words: Sequence[str]) -> int:
    given = train_parser().parse_args_strictly(words)
    only_looks = given.pop("dry_run", False)
    args = resolve(given)
    if only_looks:
        from .dry_run import dry_run  # what only this needs

        refuse_several_processes("train --dry-run")
        dry_run(args)
        return 0
    processes = parse_mesh(args.mesh).world_size
    if processes > 1 and not is_launched():
        return launch(["train", *words], processes, args.output_dir)
    return train(args)


def _eval(words: Sequence[str]) -> int:
    parser = Parser(prog=f"{PROG} eval", description="Score a trained model on text.")
    add_field_options(parser, EvalArguments, {})
    refuse_several_processes("eval")
    evaluate(arguments_from_dict(EvalArguments, parser.parse_args_strictly(words)))
    return 0


def _generate(words: Sequence[str]) -> int:
    parser = Parser(prog=f"{PROG} generate", description="Let a trained model continue a text.")
    parser.add_argument("prompt", nargs="?", help="text to continue [def ]")
    add_field_options(parser, GenerateArguments, {}, leave_out=("prompt",))
    refuse_several_processes("generate")
    generate_text(arguments_from_dict(GenerateArguments, parser.parse_args_strictly(words)))
    return 0


def _export(words: Sequence[str]) -> int:
    parser = Parser(
        prog=f"{PROG} export", description="Write a trained model as a directory that transformers reads."
    )
    parser.add_argument("directory", help="where to write; must be new or empty")
    add_field_options(parser, ExportArguments, {}, leave_out=("directory",))
    refuse_several_processes("export")
    export(arguments_from_dict(ExportArguments, parser.parse_args_strictly(words)))
    return 0


def _import(words: Sequence[str]) -> int:
    parser = Parser(
        prog=f"{PROG} import", description="Take over a Hugging Face Llama, checked, as one directory."
    )
    parser.add_argument("source", help="directory of the Hugging Face Llama")
    parser.add_argument("directory", help="where to write; must be new or empty")
    add_field_options(parser, ImportArguments, {}, leave_out=("source", "directory"))
    refuse_several_processes("import")
    import_model(arguments_from_dict(ImportArguments, parser.parse_args_strictly(words)))
    return 0


def _report(words: Sequence[str]) -> int:
    parser = Parser(prog=f"{PROG} report", description="Show a run on one page that needs nothing else.")
    add_field_options(parser, ReportArguments, {})
    refuse_several_processes("report")
    write_report(arguments_from_dict(ReportArguments, parser.parse_args_strictly(words)))
    return 0


def _plan(words: Sequence[str]) -> int:
    from . import plan, plan_config  # what plans takes seconds to import

    refuse_several_processes("plan")
    given = plan.plan_parser().parse_args_strictly(words)
    if "config" in given:
        plan_config.show_plan(given)
    else:
        plan.show_plans(plan.resolve(given))
    return 0


def _recipes(words: Sequence[str]) -> int:
    parser = Parser(prog=f"{PROG} recipes", description="List settings of whole runs, or print one of them.")
    parser.add_argument("name", nargs="?", help="recipe to print; none: a table of all")
    name = parser.parse_args_strictly(words).get("name")
    show_recipes(None if name is None else str(name))
    return 0


def _bench(words: Sequence[str]) -> int:
    from ..bench.command import bench  # what only this command needs
    from ..bench.options import BenchArguments

    parser = Parser(
        prog=f"{PROG} bench", description="Time this trainer beside others, on the same model and rows."
    )
    add_field_options(parser, BenchArguments, {})
    refuse_several_processes("bench")
    return bench(arguments_from_dict(BenchArguments, parser.parse_args_strictly(words)), words)


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "recipes": _recipes,
    "plan": _plan,
    "eval": _eval,
    "generate": _generate,
    "export": _export,
    "import": _import,
    "report": _report,
    "bench": _bench,
}
