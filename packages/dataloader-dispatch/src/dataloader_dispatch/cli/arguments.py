"""The command line: commands, options and their help."""

import argparse
import os
import re
from pathlib import Path

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Returns:
        The parser. Its result has ``command`` and the options of that command.
    """
    parser = argparse.ArgumentParser(
        prog="dataloader-dispatch",
        description="Make token ids of documents, once, for many training runs.",
        epilog="Exit codes: 0 done; 1 stopped before the end, and the same command goes on; 2 wrong usage,\n"
        "or input or output that cannot be used; 130 interrupted by Ctrl-C, and the same command goes on.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_tokenize(commands)
    return parser


def parse_size(text: str) -> int:
    """A size such as ``64MB``, ``1 GiB`` or ``1000000``.

    Args:
        text: A number, and a unit: KB, MB, GB (powers of 1000), KiB, MiB, GiB (powers of 1024) or none.

    Returns:
        Bytes, at least 1.

    Raises:
        argparse.ArgumentTypeError: The text is no such size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of 1 byte or more, such as 64MB or 1GiB")
    return size


def _add_tokenize(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "tokenize",
        help="Write the token ids of documents into a directory",
        description="Write the token ids of documents into a directory.\n\n"
        "The documents are those of open_documents: .txt, .md and .py files are one document each, a line\n"
        "of a .jsonl file and a row of a .parquet or .arrow file are one. They keep their order. OUT is\n"
        "opened with open_documents or TokenBinary. No separators are written: DocumentStream puts exactly\n"
        "one between two documents, and the manifest in OUT records which.\n\n"
        "The work is cut into parts. A run that was stopped or killed goes on when the same command is run\n"
        "again, and only unfinished parts are made again; the result is the same, byte for byte, for any\n"
        "number of workers. Other settings, or input that changed, are refused.",
        epilog="Examples:\n"
        "  dataloader-dispatch tokenize corpus/ notes.jsonl tokens/ --tokenizer bytes\n"
        "  dataloader-dispatch tokenize 'dump/**/*.parquet' tokens/ --tokenizer ./my-tokenizer --workers 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="a directory, a glob (in quotes) or a file")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write; made if needed")
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
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        metavar="N",
        help="worker processes; 0 works in the process itself (default: one a processor, here %(default)s)",
    )
    _add_reading(parser)
    parser.add_argument(
        "--part-size",
        type=parse_size,
        default=parse_size("64MB"),
        metavar="SIZE",
        help="bytes of input files that make a part, about (default: 64MB)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="begin anew where OUT holds tokens already, finished or made with other settings or input",
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
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


def _workers(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return int(text)
