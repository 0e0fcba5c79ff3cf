"""The console script ``dataloader-dispatch``: make token ids of documents, once, for many runs."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dataloader_dispatch.cli.tasks import parse_task
from dist_env import HelpFormatter, add_version, leave_broken_pipe, parse_size

FINE = 0
"""Exit code: all is done."""
STOPPED = 1
"""Exit code: the run stopped before its end; the same command continues with it."""
UNUSABLE = 2
"""Exit code: wrong usage, or input or output that cannot be used."""
_INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Returns:
        The parser. Its result has ``command`` and the options of that command.
    """
    parser = argparse.ArgumentParser(
        prog="dataloader-dispatch",
        description="Make token ids of documents, once, for many training runs.",
        epilog="Exit codes: 0 done; 1 stopped before the end, and the same command resumes; 2 wrong usage,\n"
        "or input or output that cannot be used; 130 interrupted by Ctrl-C, and the same command resumes.",
        formatter_class=HelpFormatter,
    )
    add_version(parser, "dataloader-dispatch")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_tokenize(commands)
    return parser


def _add_tokenize(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tokenize",
        help="Write the token ids of documents into a directory",
        description="Write the token ids of documents into a directory.\n\n"
        "The documents are those of open_documents: .txt, .md and .py files are one document each, a line\n"
        "of a .jsonl file and a row of a .parquet or .arrow file are one. They keep their order. OUT is\n"
        "opened with open_documents or TokenBinary. No separators are written: DocumentStream puts exactly\n"
        "one between two documents, and the manifest in OUT records which.\n\n"
        "The work is cut into parts. A run that was stopped or killed continues when the same command is "
        "run\n"
        "again, and only unfinished parts are made again; the result is the same, byte for byte, for any\n"
        "number of workers. Other settings, or input that changed, are refused.\n\n"
        "IN and OUT may be in object stores (s3://, gs://, az://; extra remote), with credentials from the\n"
        "environment. Parts for a store are made in the directory of temporary files, and uploaded.",
        epilog="Examples:\n"
        "  dataloader-dispatch tokenize corpus/ notes.jsonl tokens/ --tokenizer bytes\n"
        "  dataloader-dispatch tokenize 'dump/**/*.parquet' tokens/ --tokenizer ./my-tokenizer --workers 8\n"
        "  dataloader-dispatch tokenize s3://bucket/corpus s3://bucket/tokens --tokenizer bytes\n"
        "  dataloader-dispatch tokenize corpus/ tokens/ --tokenizer bytes --task slurm",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="IN",
        help="a directory, a glob (in quotes), a file, or an address such as s3://bucket/path",
    )
    parser.add_argument("out", metavar="OUT", help="the directory to write; made if needed; or an address")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="bytes|NAME_OR_DIR",
        help="'bytes' for the bytes of the text as ids 0 to 255 with separator 256; or the directory of a "
        "Hugging Face tokenizer (extra hf), which is read without going online; or a name on the Hugging "
        "Face Hub, which is downloaded unless it is in the cache",
    )
    parser.add_argument(
        "--workers",
        type=_workers,
        metavar="N",
        help="worker processes; 0 works in the process itself (default: one a processor that it may use). "
        "With --ray: tasks at a time (default: one a processor of the cluster)",
    )
    parser.add_argument(
        "--text-column",
        default="text",
        metavar="NAME",
        help="key or column that holds the text (default: text)",
    )
    parser.add_argument(
        "--undecodable",
        choices=("error", "skip", "replace"),
        default="error",
        help="what to do with a document that is not UTF-8; 'skip' leaves an empty one (default: error)",
    )
    parser.add_argument(
        "--unreadable",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with a file or document that cannot be read; 'skip' leaves it out and counts it "
        "(default: stop)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="files and directories to leave out, such as '**/test/**' or '*.md'; may be given several times",
    )
    parser.add_argument(
        "--max-document-bytes",
        type=parse_size,
        default=parse_size("1GiB"),
        metavar="SIZE",
        help="size of the largest document to read (default: 1GiB)",
    )
    parser.add_argument(
        "--part-size",
        type=parse_size,
        metavar="SIZE",
        help="bytes of input files that make a part, about (default: a 32nd of the input, from 1MB to 64MB)",
    )
    parser.add_argument(
        "--task",
        type=parse_task,
        metavar="INDEX/COUNT|slurm",
        help="make a share of the parts, such as 0/64 to 63/64 on as many machines; the task that finds all "
        "parts made finishes OUT, which all of them can write. 'slurm' takes the element of a job array",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="make the parts as tasks of a Ray cluster (extra ray), whose machines share IN and OUT: 'auto' "
        "is the cluster of this machine, 'local' starts one of this machine alone, else the address of one",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="begin anew where OUT holds tokens already, finished or made with other settings or input",
    )


def _workers(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0 done, 1 stopped before the end, 2 input or output that cannot be used. As in a shell,
        141 when the reader of the output is gone, and 130 after Ctrl-C.

    Raises:
        SystemExit: With code 2 after a usage error, with code 0 after ``--help``.
    """
    arguments = make_parser().parse_args(argv)
    # Imported when they are needed, so that help and usage errors come at once.
    from dataloader_dispatch.cli.parts import StoppedError
    from dataloader_dispatch.cli.tokenize import one_line, say, tokenize
    from dataloader_dispatch.errors import DataError

    # Names of files may have letters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _warnings_on_stderr():
            tokenize(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return leave_broken_pipe()
    except KeyboardInterrupt:
        say(f"\n{arguments.command}: interrupted. Run the same command again to continue")
        return _INTERRUPTED
    except StoppedError as error:
        say(f"dataloader-dispatch {arguments.command}: {one_line(error)}")
        return STOPPED
    except (DataError, OSError) as error:
        say(f"dataloader-dispatch {arguments.command}: {one_line(error)}")
        return UNUSABLE
    return FINE


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from dataloader_dispatch.cli.tokenize import one_line, say

        say(f"{record.levelname.lower()}: {one_line(record.getMessage())}")


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    logger = logging.getLogger("dataloader_dispatch")
    handler = _ToStderr(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
