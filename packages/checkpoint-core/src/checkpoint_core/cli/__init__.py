"""The console script ``checkpoint-core``: look at, verify, compare, export and prune checkpoints."""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich_argparse import RawDescriptionRichHelpFormatter

from checkpoint_core.errors import CheckpointError, describe_error

_UNUSABLE = 2
_BROKEN_PIPE = 141
_INTERRUPTED = 130
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
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
    arguments = make_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names in a checkpoint may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, which must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (CheckpointError, OSError) as error:
        print(f"checkpoint-core {arguments.command}: {_one_line(error)}", file=sys.stderr)
        return _UNUSABLE
    return code


def _one_line(error: CheckpointError | OSError) -> str:
    if isinstance(error, PermissionError):
        text = f"{error.filename}: permission denied. Run the command as a user who may use that path."
    else:
        text = describe_error(error)
    from checkpoint_core.cli.checkpoints import printable

    return printable(" ".join(text.split()))


def _run(arguments: argparse.Namespace) -> int:
    # Each command is imported when it is called, so that help and usage errors come at once.
    match arguments.command:
        case "ls":
            from checkpoint_core.cli.checkpoints import list_checkpoints

            return list_checkpoints(arguments.directory)
        case "show":
            from checkpoint_core.cli.contents import show_checkpoint

            return show_checkpoint(arguments.checkpoint)
        case "verify":
            from checkpoint_core.cli.checkpoints import verify

            return verify(arguments.path)
        case "diff":
            from checkpoint_core.cli.contents import diff

            return diff(arguments.a, arguments.b)
        case "export":
            from checkpoint_core.cli.contents import export

            return export(
                arguments.checkpoint,
                arguments.out,
                dtype=arguments.dtype,
                max_shard_size=arguments.max_shard_size,
                overwrite=arguments.overwrite,
            )
        case _:
            from checkpoint_core.cli.checkpoints import BestRule, prune

            return prune(
                arguments.directory,
                keep=arguments.keep,
                best=BestRule.from_arguments(arguments),
                all_runs=arguments.all_runs,
                delete=arguments.yes,
            )


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Returns:
        The parser. Its result has ``command`` and the options of that command.
    """
    parser = argparse.ArgumentParser(
        prog="checkpoint-core",
        description="Look at checkpoints, prove them whole, compare, export and prune them.",
        epilog="Exit codes: 0 fine, 1 damage or difference found, 2 wrong usage or unreadable input.\n"
        "Nothing is ever unpickled.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_ls(commands)
    _add_show(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_export(commands)
    _add_prune(commands)
    return parser


class _Help(RawDescriptionRichHelpFormatter):
    text_markup = help_markup = False  # square brackets are text


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Imported here: it takes longer than all the rest of a help text.
        from importlib.metadata import version

        print(f"checkpoint-core {version('checkpoint-core')}")
        parser.exit()


def parse_size(text: str) -> int:
    """A size such as ``5GB``, ``500 MiB`` or ``1000000``.

    Args:
        text: A number, and a unit: KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB,
            TiB (powers of 1024) or none.

    Returns:
        Bytes, at least 1.

    Raises:
        argparse.ArgumentTypeError: The text is no such size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of 1 byte or more, such as 5GB or 500MiB")
    return size


_Commands = argparse._SubParsersAction  # argparse has no public name for it


def _add(
    commands: "_Commands[argparse.ArgumentParser]", name: str, text: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text.partition(".")[0].partition("\n")[0],
        description=text,
        epilog=f"Example:\n  checkpoint-core {example}",
        formatter_class=_Help,
    )


def _add_ls(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = _add(
        commands,
        "ls",
        "List the checkpoints of a directory.\n\n"
        "One line a checkpoint, highest step first: step, age, size, ranks that saved, metrics and state.\n"
        "The state is 'committed', 'torn' (no manifest) or 'damaged', by file sizes; 'verify' also compares\n"
        "checksums. What killed or running saves left is listed too. Nothing is changed. Exits with 1 when\n"
        "a checkpoint is torn or damaged.",
        "ls runs/small",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory that holds checkpoint-<step>")


def _add_show(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = _add(
        commands,
        "show",
        "Show what is in a checkpoint.\n\n"
        "Step, versions, metrics, components, and every tensor with dtype, shape and bytes. Only the\n"
        "manifest and the headers of the tensor files are read.",
        "show runs/small/checkpoint-300",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="one checkpoint-<step> directory")


def _add_verify(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = _add(
        commands,
        "verify",
        "Compare every file with the size and checksum in the manifest.\n\n"
        "Exits with 1 and names each damaged file when there is one. Also named are component files that\n"
        "were deleted, which is the way to start that component fresh, and files unknown to the manifest.",
        "verify runs/small/checkpoint-300",
    )
    parser.add_argument("path", type=Path, metavar="CKPT", help="a checkpoint, or a directory of checkpoints")


def _add_diff(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = _add(
        commands,
        "diff",
        "Compare two checkpoints tensor by tensor and entry by entry.\n\n"
        "Tensors are equal when their bits are, so NaN equals the same NaN and 0.0 differs from -0.0.\n"
        "'max rel' is |a-b| / max(|a|, |b|). Step, run id and versions are not compared, nor is the\n"
        "division of weights into files. Checksums are not verified first. Exits with 1 when something\n"
        "differs.",
        "diff runs/a/checkpoint-300 runs/b/checkpoint-300",
    )
    parser.add_argument("a", type=Path, metavar="A", help="a checkpoint")
    parser.add_argument("b", type=Path, metavar="B", help="the checkpoint to compare with it")


def _add_export(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = _add(
        commands,
        "export",
        "Write the weights of a checkpoint as a Hugging Face directory.\n\n"
        "With config.json and the tokenizer's files, and the dtype in config.json after a cast. The files\n"
        "are verified first. Tensors are streamed, so memory does not grow with the model.",
        "export runs/small/checkpoint-300 small-hf --dtype bf16",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="one checkpoint-<step> directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write; made if needed")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="keep", help="cast floating point tensors (default: keep)"
    )
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=parse_size("5GB"),
        metavar="SIZE",
        help="tensor data per file; larger models are divided and get an index (default: 5GB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace weights that are in OUT already")


def _add_prune(commands: "_Commands[argparse.ArgumentParser]") -> None:
    parser = _add(
        commands,
        "prune",
        "Delete old checkpoints.\n\n"
        "Without --yes nothing is deleted: what would go is printed, and why the others stay. Kept are the\n"
        "newest N, the best K, what is torn or damaged, and checkpoints of other runs than the newest\n"
        "one's. What counts as newest or best is verified with checksums first. A directory with a save in\n"
        "progress is refused.",
        "prune runs/small --keep 3 --keep-best 1 --metric eval_loss",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory that holds checkpoint-<step>")
    parser.add_argument(
        "--keep", type=_count, required=True, metavar="N", help="how many of the newest to keep, at least 1"
    )
    parser.add_argument("--keep-best", type=_count, metavar="K", help="how many of the best to keep as well")
    parser.add_argument("--metric", help="the metric that tells which are best")
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--greater-is-better",
        action="store_true",
        default=None,
        dest="greater_is_better",
        help="the best has the highest metric",
    )
    direction.add_argument(
        "--lower-is-better",
        action="store_false",
        default=None,
        dest="greater_is_better",
        help="the best has the lowest metric (default when its name contains 'loss' or 'perplexity')",
    )
    parser.add_argument("--all-runs", action="store_true", help="treat checkpoints of all runs alike")
    parser.add_argument("--yes", action="store_true", help="delete; without it this is a dry run")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)
