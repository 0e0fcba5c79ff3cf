"""The parts of a directory of token ids: tokenizers, making one part, and the processes that do."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dataloader_dispatch import documents
from dataloader_dispatch.cli.output import Chunk, FinishedPart, Output
from dataloader_dispatch.documents import Integers, TextPieces, TextUnit, text_unit_of
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.files import FileDocuments
from dataloader_dispatch.sources.part_writer import PartWriter
from dataloader_dispatch.sources.token_binary import TokenType
from dist_env import StoreError, die_with_parent_context

BYTES = "bytes"
_PROBE = "The quick brown fox, 1"
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20
_JOIN_SECONDS = 5.0


class StoppedError(Exception):
    """Something ended the run that is not the fault of its input. What is finished is kept."""


class Encoder(Protocol):
    """Makes token ids of texts, without anything put around them."""

    name: str
    vocabulary_size: int
    eos_token_id: int | None
    fingerprint: str
    added: tuple[str, ...]
    """Tokens that the tokenizer would put around a text by itself."""
    text_unit: TextUnit
    """The most text that it looks at as a whole."""

    def encode(self, texts: Sequence[str]) -> list[Integers]:
        """Token ids of each text."""
        ...


class ByteEncoder:
    """The bytes of the text in UTF-8, ids 0 to 255; the separator is 256."""

    name = BYTES
    vocabulary_size = 257
    eos_token_id: int | None = 256
    fingerprint = "utf-8"
    added: tuple[str, ...] = ()
    text_unit: TextUnit = "character"

    def encode(self, texts: Sequence[str]) -> list[Integers]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class HuggingFaceEncoder:
    """A tokenizer of transformers.

    Args:
        name: Its directory, or its name on the Hub.
        offline: Never go online for it.

    Raises:
        DataError: transformers is not installed, the tokenizer cannot be loaded, or it puts tokens around
            every text that cannot be turned off.
    """

    def __init__(self, name: str, offline: bool) -> None:
        self.name = name
        self._tokenizer = _load(name, offline)
        self._backend = _plain_backend(self._tokenizer)
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        ids = [*self._tokenizer.get_vocab().values(), len(self._tokenizer) - 1]
        self.vocabulary_size = max(ids) + 1
        self.fingerprint = self._digest()
        self.text_unit: TextUnit = text_unit_of(self._tokenizer.encode, None)
        usual: list[int] = self._tokenizer(_PROBE)["input_ids"]
        bare = self.encode([_PROBE])[0].tolist()
        self.added = tuple(
            self._tokenizer.convert_ids_to_tokens(sorted(set(usual) - set(bare))) if usual != bare else ()
        )
        if around := self.encode([""])[0].tolist():
            raise DataError(
                f"the tokenizer {name!r} puts the token ids {around} around every text even with "
                "add_special_tokens=False, but documents are stored without separators. Turn this off in "
                "the tokenizer's files."
            )

    def encode(self, texts: Sequence[str]) -> list[Integers]:
        if self._backend is not None:
            # Without the places of tokens in the text, which take a fifth of the time.
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.asarray(one.ids, dtype=np.int64) for one in found]
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def _digest(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = json.loads(backend.to_str())
            # Set by whoever called the tokenizer last.
            content = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
        else:
            content = [self._tokenizer.get_vocab(), self.encode([_PROBE])[0].tolist()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain_backend(tokenizer: Any) -> Any | None:
    """What encodes for a tokenizer of transformers that adds nothing of its own to it; None for another."""
    from transformers import PreTrainedTokenizerFast

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    # The second is private, in transformers 5: what a call comes to. A model that overrides one of them
    # answers by itself; in a version without it, all do.
    usual = all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, type)
        for name in ("__call__", "_encode_plus")
    )
    if not usual or not hasattr(backend, "encode_batch_fast"):
        return None
    # As a call without these arguments leaves them; the files may say otherwise.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def is_remote(name: str) -> bool:
    """Whether a tokenizer is looked for on the Hub: it is not 'bytes' and there is no such path."""
    return name != BYTES and not Path(name).expanduser().exists()


def load_encoder(name: str, offline: bool = False) -> Encoder:
    """The encoder of a name.

    Args:
        name: "bytes", a directory, or a name on the Hub.
        offline: Never go online, as everything is in the cache already.

    Raises:
        DataError: It cannot be loaded.
    """
    return ByteEncoder() if name == BYTES else HuggingFaceEncoder(name, offline)


def smallest_type(vocabulary_size: int) -> TokenType:
    """The smallest type that holds all token ids below ``vocabulary_size``."""
    if vocabulary_size <= 1 << 16:
        return "uint16"
    return "uint32" if vocabulary_size <= 1 << 32 else "int64"


def _load(name: str, offline: bool) -> Any:
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise DataError(
            f"tokenizer {name!r} needs transformers, as all Hugging Face tokenizers do, which is not "
            "installed. Install it with `pip install 'dataloader-dispatch[hf]'`, or use --tokenizer bytes."
        ) from error
    local = not is_remote(name)
    place = str(Path(name).expanduser()) if local else name
    if local and not Path(place).is_dir():
        raise DataError(f"tokenizer {name!r} is a file. Name the directory that holds the tokenizer's files.")
    try:
        if local and _is_plain(Path(place)):
            return PreTrainedTokenizerFast.from_pretrained(place, local_files_only=True)
        from transformers import AutoTokenizer

        # False, not None: with code beside the tokenizer transformers would ask whether to run it.
        return AutoTokenizer.from_pretrained(
            place, local_files_only=local or offline, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        where = "in that directory" if local else "on the Hugging Face Hub or in its cache, nor a directory"
        raise DataError(
            f"tokenizer {name!r} cannot be loaded: there is none {where}, or its files are damaged ({error})."
        ) from error


def _is_plain(directory: Path) -> bool:
    """Whether a directory asks for the class of a tokenizer.json that stands for itself.

    AutoTokenizer would choose that class too, and imports torch to do so. Beside a config.json, which names a
    model, it may choose another one.
    """
    config = directory / "tokenizer_config.json"
    if (directory / "config.json").exists() or not (directory / "tokenizer.json").is_file():
        return False
    settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    classes = ("TokenizersBackend", "PreTrainedTokenizerFast")  # its names since transformers 5, and before
    return settings.get("tokenizer_class") in classes and "auto_map" not in settings


@dataclass(frozen=True, slots=True)
class Job:
    """All that a process needs to make parts; fit to be sent to one.

    Attributes:
        source: The documents.
        output: Where the parts go.
        chunks: The documents of each part.
        tokenizer: Name of the tokenizer.
        tokenizer_fingerprint: That of the tokenizer that was planned with.
        vocabulary_size: That of the tokenizer.
        dtype: Type of the token ids in the files.
    """

    source: FileDocuments
    output: Output
    chunks: list[Chunk]
    tokenizer: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    dtype: TokenType

    def writing_to(self, output: Output) -> Job:
        """The same job with another output."""
        return replace(self, output=output)

    def load_encoder(self) -> Encoder:
        """The tokenizer, from the disk.

        Raises:
            DataError: It is another one than was planned with.
        """
        encoder = load_encoder(self.tokenizer, offline=True)
        if encoder.fingerprint != self.tokenizer_fingerprint:
            raise DataError(f"the tokenizer {self.tokenizer!r} was changed while it was in use. Run again.")
        return encoder


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def part_name(number: int) -> str:
    """Name of a part, without ending."""
    return f"part-{number:05d}"


def make_part(job: Job, encoder: Encoder, number: int, advance: Callable[[int, int], None]) -> FinishedPart:
    """Make a part and put it on the disk.

    Args:
        job: What to do.
        encoder: The tokenizer of the job.
        number: Which part.
        advance: Told the documents that are done, and the bytes of their text, again and again.

    Raises:
        DataError: A document cannot be used.
        OSError: The part cannot be written.
    """
    source = job.source
    skipped, undecodable = _skipped(source), source.undecodable
    text_bytes = empty = separators = 0
    output = job.output

    def encode(text: str) -> Integers:
        return encoder.encode([text])[0].astype(np.int64)

    pieces = TextPieces(encode, encoder.text_unit, None)
    with PartWriter(output.path, part_name(number), job.dtype, job.vocabulary_size, output.scratch) as writer:
        for texts in _batches(source, job.chunks[number]):
            size = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
            lengths = []
            for tokens, counts in _encoded(texts, encoder, pieces):
                writer.append(tokens, counts)
                lengths += counts
                if encoder.eos_token_id is not None:
                    separators += int((tokens == encoder.eos_token_id).sum())
            empty += lengths.count(0)
            text_bytes += size
            advance(len(texts), size)
        part = writer.finish()
    finished = FinishedPart(
        part,
        text_bytes,
        empty,
        separators,
        skipped=_skipped(source) - skipped,
        undecodable=source.undecodable - undecodable,
    )
    output.record(finished)
    return finished


def _encoded(
    texts: list[str], encoder: Encoder, pieces: TextPieces[Integers]
) -> Iterator[tuple[Integers, list[int]]]:
    """Token ids, and the lengths of the documents that end with them; a large text comes in pieces."""
    if len(texts) > 1 or pieces.unit == "document" or not pieces.fit(texts[0], "a document"):
        encoded = encoder.encode(texts)
        yield np.concatenate(encoded), list(map(len, encoded))
        return
    length = 0
    for _, piece in pieces(texts[0], 0):
        length += len(piece)
        yield piece, []
    yield np.empty(0, dtype=np.int64), [length]


def _batches(source: FileDocuments, chunk: Chunk) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for index in range(*chunk):
        text = source[index]
        if not isinstance(text, str):
            raise DataError(
                f"{source.where(index)} holds token ids, not text, so there is nothing to tokenize."
            )
        if texts and len(text) >= documents.PIECE:
            yield texts
            texts, characters = [], 0
        texts.append(text)
        characters += len(text)
        if len(texts) == _BATCH_DOCUMENTS or characters >= min(_BATCH_CHARACTERS, documents.PIECE):
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


def _skipped(source: FileDocuments) -> int:
    return sum(skipped.documents for skipped in source.skipped.values())


@dataclass(frozen=True, slots=True)
class _Advance:
    documents: int
    size: int


@dataclass(frozen=True, slots=True)
class _Warning:
    text: str


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    unusable: bool


@dataclass(slots=True)
class _Worker:
    number: int
    process: BaseProcess
    connection: Connection
    part: int | None = None

    def death(self) -> StoppedError:
        """The error for a worker that has gone without a word."""
        self.process.join(_JOIN_SECONDS)
        code = self.process.exitcode
        how = f"ended with exit code {code}"
        advice = "What it printed above may tell why."
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            advice = "If memory was short, use fewer --workers."
        part = "" if self.part is None else f" while it made {part_name(self.part)}"
        return StoppedError(
            f"worker {self.number} (process {self.process.pid}) {how}{part}. {advice} Finished parts are "
            "kept. Run the same command again to continue."
        )


def make_parts(
    job: Job,
    encoder: Encoder,
    numbers: Sequence[int],
    workers: int,
    advance: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> Iterator[FinishedPart]:
    """Make parts in several processes, or in this one.

    Args:
        job: What to do.
        encoder: The tokenizer of the job.
        numbers: Which parts.
        workers: Number of processes; 0 for none but this.
        advance: Told the documents that are done, and the bytes of their text.
        warn: Told the warnings of the processes.

    Yields:
        The parts, as they are finished.

    Raises:
        DataError: A document cannot be used.
        StoppedError: A process died, or a part cannot be written.
    """
    if workers == 0:
        for number in numbers:
            with no_room_for(number):
                finished = make_part(job, encoder, number, advance)
            yield finished
        return
    # The processes are as many as the user wants processors to be busy. Set before they are forked, as the
    # threads of a tokenizer that has used some are not in them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool: list[_Worker] = []
    try:
        for number in range(min(workers, len(numbers))):
            pool.append(_start(job, encoder, number))
        yield from _share_out(pool, list(reversed(numbers)), advance, warn)
    finally:
        _end(pool)


def _share_out(
    pool: Sequence[_Worker],
    waiting: list[int],
    advance: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> Iterator[FinishedPart]:
    busy: dict[object, _Worker] = {worker.connection: worker for worker in pool}
    for worker in pool:
        _give(worker, waiting)
    while busy:
        for connection in wait([worker.connection for worker in busy.values()]):
            worker = busy[connection]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise worker.death() from error
            match message:
                case _Advance():
                    advance(message.documents, message.size)
                case _Warning():
                    warn(message.text)
                case _Failure():
                    raise (DataError if message.unusable else StoppedError)(message.text)
                case FinishedPart():
                    yield message
                    if not _give(worker, waiting):
                        del busy[worker.connection]


def _give(worker: _Worker, waiting: list[int]) -> bool:
    """Give a worker its next part; False if none is left."""
    worker.part = waiting.pop() if waiting else None
    try:
        worker.connection.send(worker.part)
    except OSError as error:
        raise worker.death() from error
    return worker.part is not None


def _start(job: Job, encoder: Encoder, number: int) -> _Worker:
    # A worker whose parent is killed must not write on beside a later run.
    # Forked, it has the imports, the tokenizer and the index of the documents at once, and shares their
    # memory. The threads of a store's library do not survive that, nor do those that macOS has begun.
    forked = job.output.can_be_forked and sys.platform == "linux"
    context = die_with_parent_context("fork" if forked else "spawn")
    ours, theirs = context.Pipe()
    what = (theirs, job, encoder if forked else None)
    process = context.Process(target=_work, args=what, name=f"tokenize-{number}", daemon=True)
    # Ctrl-C reaches the processes of a terminal all at once; this one alone is to say so. Workers
    # inherit that they do not hear it, also while they start.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # With the last copy of their end gone, the death of the process ends the connection.
    theirs.close()
    return _Worker(number, process, ours)


def _end(pool: Sequence[_Worker]) -> None:
    for worker in pool:
        if worker.part is not None:
            worker.process.terminate()
    for worker in pool:
        worker.connection.close()
        worker.process.join(_JOIN_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _work(connection: Connection, job: Job, encoder: Encoder | None) -> None:
    """What a worker process does; a tokenizer is given to one that was forked."""
    _hand_warnings_to(lambda text: connection.send(_Warning(text)))
    try:
        if encoder is None:
            encoder = job.load_encoder()
        else:
            job.output.leave_lock()
        while (number := connection.recv()) is not None:
            with no_room_for(number):
                finished = make_part(
                    job, encoder, number, lambda documents, size: connection.send(_Advance(documents, size))
                )
            connection.send(finished)
    except EOFError:
        return  # given up before there was a part
    except (DataError, StoppedError) as error:
        connection.send(_Failure(str(error), isinstance(error, DataError)))


class _ToFunction(logging.Handler):
    def __init__(self, function: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._function = function

    def emit(self, record: logging.LogRecord) -> None:
        self._function(record.getMessage())


def _hand_warnings_to(function: Callable[[str], object]) -> None:
    logger = logging.getLogger("dataloader_dispatch")
    # Without what a parent that it was forked from has set, such as a filter by the number of the process.
    logger.filters.clear()
    logger.handlers[:] = [_ToFunction(function)]
    logger.propagate = False


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """The warnings that this process gives meanwhile, and has given, for a process that makes parts only."""
    warnings: list[str] = []
    _hand_warnings_to(warnings.append)
    yield warnings


@contextmanager
def no_room_for(number: int) -> Iterator[None]:
    """What the system refuses while a part is written is not a fault of the input."""
    try:
        yield
    except MemoryError as error:
        raise StoppedError(
            f"{part_name(number)}: no memory is left. Run the command again with fewer --workers to "
            "continue, or begin anew with a lower --max-document-bytes and --unreadable skip."
        ) from error
    except StoreError as error:
        raise StoppedError(
            f"{part_name(number)}: {error}. Finished parts are kept. Run the same command again to continue."
        ) from error
    except OSError as error:
        raise StoppedError(
            f"{part_name(number)} cannot be written: {error.strerror or error}. Make room or mend what is "
            "wrong. Finished parts are kept. Run the same command again to continue."
        ) from error
