"""The console script ``checkpoint-core``: look at, verify, compare, export and prune checkpoints."""

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.store_path import locate
from dist_env import HelpFormatter, add_version, leave_broken_pipe, parse_size, printable

_UNUSABLE = 2
_INTERRUPTED = 130
DTYPES = ("keep", "bf16", "fp16", "fp32")
"""What ``export --dtype`` takes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0 fine, 1 damage or difference found, 2 input that cannot be read. As in a shell,
        141 when the reader of the output is gone, and 130 after Ctrl-C.

    Raises:
        SystemExit: With code 2 after a usage error, with code 0 after ``--help``.
    """
    arguments = vars(make_parser().parse_args(argv))
    command = arguments.pop("command")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names in a checkpoint may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Each command is imported when it is called, so that help and usage errors come at once.
        module, function = arguments.pop("function")
        code: int = getattr(import_module(f"checkpoint_core.cli.{module}"), function)(**arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return leave_broken_pipe()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (CheckpointError, OSError) as error:
        print(f"checkpoint-core {command}: {_one_line(error)}", file=sys.stderr)
        return _UNUSABLE
    return code


def _one_line(error: CheckpointError | OSError) -> str:
    if isinstance(error, PermissionError):
        text = f"{error.filename}: permission denied. Run the command as a user who may use that path."
    else:
        text = describe_error(error)
    return printable(" ".join(text.split()))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Returns:
        The parser. Its result has ``command``, the ``function`` to call and its arguments.
    """
    parser = argparse.ArgumentParser(
        prog="checkpoint-core",
        description="Look at checkpoints, prove them whole, compare, export and prune them.",
        epilog="Exit codes: 0 fine, 1 damage or difference found, 2 wrong usage or unreadable input.\n"
        "Nothing is ever unpickled. DIR and CKPT may be addresses in a store, such as s3://bucket/run.",
        formatter_class=HelpFormatter,
    )
    add_version(parser, "checkpoint-core")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(module: str, function: str, text: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            example.partition(" ")[0],
            help=text.partition(".")[0].partition("\n")[0],
            description=text,
            epilog=f"Example:\n  checkpoint-core {example}",
            formatter_class=HelpFormatter,
        )
        command.set_defaults(function=(module, function))
        return command

    ls = add(
        "checkpoints",
        "list_checkpoints",
        "List the checkpoints of a directory.\n\n"
        "One line a checkpoint, highest step first: step, age, size, ranks that saved, metrics and state.\n"
        "The state is 'committed', 'torn' (no manifest) or 'damaged', by file sizes; 'verify' also compares\n"
        "checksums. What killed or running saves left is listed too. Nothing is changed. Exits with 1 when\n"
        "a checkpoint is torn or damaged.",
        "ls runs/small",
    )
    ls.add_argument("directory", type=_place, metavar="DIR", help="directory that holds checkpoint-<step>")

    show = add(
        "contents",
        "show_checkpoint",
        "Show what is in a checkpoint.\n\n"
        "Step, versions, metrics, components, and every tensor with dtype, shape and bytes. Only the\n"
        "manifest and the headers of the tensor files are read.",
        "show runs/small/checkpoint-300",
    )
    show.add_argument("checkpoint", type=_place, metavar="CKPT", help="one checkpoint-<step> directory")

    verify = add(
        "checkpoints",
        "verify",
        "Compare every file with the size and checksum in the manifest.\n\n"
        "Exits with 1 and names each damaged file when there is one. Also named are component files that\n"
        "were deleted, which is the way to start that component fresh, and files unknown to the manifest.",
        "verify runs/small/checkpoint-300",
    )
    verify.add_argument(
        "path", type=_place, metavar="CKPT", help="a checkpoint, or a directory of checkpoints"
    )

    diff = add(
        "contents",
        "diff",
        "Compare two checkpoints tensor by tensor and entry by entry.\n\n"
        "Tensors are equal when their bits are, so NaN equals the same NaN and 0.0 differs from -0.0.\n"
        "'max rel' is |a-b| / max(|a|, |b|). Step, run id and versions are not compared, nor is the\n"
        "division of weights into files. Checksums are not verified first. Exits with 1 when something\n"
        "differs.",
        "diff runs/a/checkpoint-300 runs/b/checkpoint-300",
    )
    diff.add_argument("a", type=_place, metavar="A", help="a checkpoint")
    diff.add_argument("b", type=_place, metavar="B", help="the checkpoint to compare with it")

    export = add(
        "contents",
        "export",
        "Write the weights of a checkpoint as a Hugging Face directory.\n\n"
        "With config.json and the tokenizer's files, and the dtype in config.json after a cast. The files\n"
        "are verified first. Tensors are streamed, so memory does not grow with the model.",
        "export runs/small/checkpoint-300 small-hf --dtype bf16",
    )
    export.add_argument("checkpoint", type=_place, metavar="CKPT", help="one checkpoint-<step> directory")
    export.add_argument("out", type=_directory, metavar="OUT", help="the directory to write; made if needed")
    export.add_argument(
        "--dtype", choices=DTYPES, default="keep", help="cast floating point tensors (default: keep)"
    )
    export.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=parse_size("5GB"),
        metavar="SIZE",
        help="tensor data per file; larger models are divided and get an index (default: 5GB)",
    )
    export.add_argument("--overwrite", action="store_true", help="replace weights that are in OUT already")

    prune = add(
        "prune",
        "prune",
        "Delete old checkpoints.\n\n"
        "Without --yes nothing is deleted: what would go is printed, and why the others stay. Kept are the\n"
        "newest N, the best K, what is torn or damaged, parts of what other nodes keep, and checkpoints\n"
        "of other runs than the newest one's. What counts as newest or best is verified with checksums\n"
        "first. A directory with a save in progress is refused.",
        "prune runs/small --keep 3 --keep-best 1 --metric eval_loss",
    )
    prune.add_argument("directory", type=_place, metavar="DIR", help="directory that holds checkpoint-<step>")
    prune.add_argument(
        "--keep", type=_count, required=True, metavar="N", help="how many of the newest to keep, at least 1"
    )
    prune.add_argument("--keep-best", type=_count, metavar="K", help="how many of the best to keep as well")
    prune.add_argument("--metric", help="the metric that tells which are best")
    direction = prune.add_mutually_exclusive_group()
    direction.add_argument(
        "--greater-is-better",
        action="store_true",
        default=None,
        help="the best has the highest metric",
    )
    direction.add_argument(
        "--lower-is-better",
        action="store_false",
        default=None,
        dest="greater_is_better",
        help="the best has the lowest metric (default when its name contains 'loss' or 'perplexity')",
    )
    prune.add_argument("--all-runs", action="store_true", help="treat checkpoints of all runs alike")
    prune.add_argument(
        "--parts",
        action="store_true",
        help="treat parts, of which other nodes keep the other files, as whole; do the same on all nodes",
    )
    prune.add_argument("--yes", action="store_true", help="delete; without it this is a dry run")
    return parser


def _place(text: str) -> Path:
    try:
        return locate(text)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _directory(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError("an address; a directory is needed, which can be copied to a store")
    return Path(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)
