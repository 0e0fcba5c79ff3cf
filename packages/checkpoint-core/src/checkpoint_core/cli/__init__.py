"""The console script ``checkpoint-core``: look at, verify, compare, export and prune checkpoints."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from checkpoint_core.cli.arguments import make_parser
from checkpoint_core.cli.console import printable
from checkpoint_core.errors import CheckpointError, describe_error

FINE = 0
"""Exit code: nothing to report."""
FINDING = 1
"""Exit code: something is damaged or differs."""
UNUSABLE = 2
"""Exit code: wrong usage, or input that cannot be read."""
_BROKEN_PIPE = 141
_INTERRUPTED = 130


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
        return UNUSABLE
    return code


def _one_line(error: CheckpointError | OSError) -> str:
    if isinstance(error, PermissionError):
        text = f"{error.filename}: permission denied; run the command as a user who may use that path"
    else:
        text = describe_error(error)
    return printable(" ".join(text.split()))


def _run(arguments: argparse.Namespace) -> int:
    # Each command is imported when it is called, so that help and usage errors come at once.
    match arguments.command:
        case "ls":
            from checkpoint_core.cli.ls import list_checkpoints

            return list_checkpoints(arguments.directory)
        case "show":
            from checkpoint_core.cli.show import show_checkpoint

            return show_checkpoint(arguments.checkpoint, as_json=arguments.json)
        case "verify":
            from checkpoint_core.cli.verify import verify

            return verify(arguments.path)
        case "diff":
            from checkpoint_core.cli.diff import diff

            return diff(arguments.a, arguments.b)
        case "export":
            from checkpoint_core.cli.export import export

            return export(
                arguments.checkpoint,
                arguments.out,
                dtype=arguments.dtype,
                max_shard_size=arguments.max_shard_size,
                overwrite=arguments.overwrite,
            )
        case _:
            from checkpoint_core.cli.prune import BestRule, prune

            return prune(
                arguments.directory,
                keep=arguments.keep,
                best=BestRule.from_arguments(arguments),
                all_runs=arguments.all_runs,
                delete=arguments.yes,
            )
