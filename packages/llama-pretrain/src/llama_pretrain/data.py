"""The text a run learns from: the user's files, or the Python standard library found on the machine."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from dataloader_dispatch import (
    DocumentSource,
    DocumentStream,
    RowSpan,
    StreamLoader,
    open_documents,
    split_documents,
)
from dist_env import DistributedEnvInterface, ParallelLayout, StaticDistributedEnvironment

from .arguments import UNDECODABLE, PretrainArguments
from .tokenizer import ByteTokenizer, Tokenizer

# Some distributions leave the tests out, and installed packages may lie inside. Without them the corpus is
# much the same everywhere. The last two are generated: help texts and tables of character codes.
_NO_LIBRARY_TEXT = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "pydoc_data",
    "encodings",
)
_EVALUATION_SHARDS = 32
_EVERYTHING = StaticDistributedEnvironment()


def standard_library() -> DocumentSource:
    """Open the Python files of the standard library of this interpreter, without tests: about 11 MB of text.

    Raises:
        DataError: If the interpreter came without them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    return open_documents(
        str(Path(glob.escape(str(root))) / "**" / "*.py"), exclude=_NO_LIBRARY_TEXT, undecodable="replace"
    )


def open_data(args: PretrainArguments) -> DocumentSource:
    """Open the documents that the setting `data` names.

    Raises:
        DataError: If there is nothing to read, or it cannot be read.
    """
    if args.data is None:
        return standard_library()
    return open_documents(
        args.data,
        undecodable=next(each for each in UNDECODABLE if each == args.undecodable),
        text_column=args.text_column,
    )


def split_data(
    documents: DocumentSource, args: PretrainArguments
) -> tuple[DocumentSource, DocumentSource | None]:
    """Divide documents into those to train on and those held out for evaluation; None when `held_out` is 0.

    Whole documents are held out, so that no piece of one is trained on while another is evaluated on.

    Raises:
        DataError: If there are too few documents to divide.
    """
    if args.held_out == 0:
        return documents, None
    return split_documents(documents, args.held_out, args.seed)


def training_loader(
    documents: DocumentSource,
    tokenizer: Tokenizer,
    args: PretrainArguments,
    env: DistributedEnvInterface = _EVERYTHING,
) -> StreamLoader:
    """Return batches of packed rows, in an order that the seed and the epoch decide.

    All rows, where one process reads for all; otherwise the share of this rank.
    """
    reader = _EVERYTHING if args.dispatch_batches else _reader(args, env)
    rows = _rows(documents, tokenizer, args, args.seed, args.shards, reader)
    return StreamLoader(rows, args.per_device_train_batch_size, pin_memory=env.device_type != "cpu")


def evaluation_loader(
    documents: DocumentSource,
    tokenizer: Tokenizer,
    args: PretrainArguments,
    env: DistributedEnvInterface = _EVERYTHING,
) -> StreamLoader:
    """Return batches of packed rows, always the same ones in the same order; divided as for training.

    Many documents are read side by side, so that few rows sample many of them. Which rows these are does not
    depend on the number of processes.
    """
    shards = min(len(documents), _EVALUATION_SHARDS)
    reader = _EVERYTHING if args.dispatches_evaluation else _reader(args, env)
    most = args.rows_evaluated
    rest = [] if most is None else [RowSpan(epoch=0, start=most, stop=None)]
    rows = _rows(documents, tokenizer, args, 0, shards, reader, rest)
    return StreamLoader(rows, args.per_device_eval_batch_size, pin_memory=env.device_type != "cpu")


def _reader(args: PretrainArguments, env: DistributedEnvInterface) -> DistributedEnvInterface:
    """Which part of the data a rank reads: ranks that divide tensors among them read the same."""
    if not args.mesh:
        return env
    layout = ParallelLayout.parse(args.mesh, env.world_size)
    return StaticDistributedEnvironment(rank=layout.data_rank(env.rank), world_size=layout.data_count)


def _rows(
    documents: DocumentSource,
    tokenizer: Tokenizer,
    args: PretrainArguments,
    seed: int,
    shards: int | None,
    reader: DistributedEnvInterface,
    skip: Sequence[RowSpan] = (),
) -> DocumentStream:
    pad = tokenizer.pad_token_id
    return DocumentStream(
        documents,
        sequence_length=args.sequence_length,
        encode=tokenizer.encode,
        eos_token_id=tokenizer.eos_token_id,
        seed=seed,
        pad_token_id=tokenizer.eos_token_id if pad is None else pad,
        shards=shards,
        rank=reader.rank,
        world_size=reader.world_size,
        boundaries=args.document_attention,
        skip=skip,
        text_unit="character" if isinstance(tokenizer, ByteTokenizer) else None,
    )
