"""Makes one part: reads its documents, and writes their token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dataloader_dispatch.cli.encoders import Encoder, load_encoder
from dataloader_dispatch.cli.output import FinishedPart, Output
from dataloader_dispatch.cli.plan import Chunk
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.files import FileDocuments
from dataloader_dispatch.sources.token_binary import Integers
from dataloader_dispatch.sources.token_manifest import TokenType
from dataloader_dispatch.sources.token_writer import PartWriter
from dataloader_dispatch.stream import pieces as text_pieces
from dataloader_dispatch.stream.pieces import TextPieces

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20


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

    def load_encoder(self) -> Encoder:
        """The tokenizer, from the disk.

        Raises:
            DataError: It is another one than was planned with.
        """
        encoder = load_encoder(self.tokenizer, offline=True)
        if encoder.fingerprint != self.tokenizer_fingerprint:
            raise DataError(f"the tokenizer {self.tokenizer!r} was changed while it was in use; run again")
        return encoder


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

    def encode(text: str) -> torch.Tensor:
        return torch.from_numpy(encoder.encode([text])[0].astype(np.int64))

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


def _encoded(texts: list[str], encoder: Encoder, pieces: TextPieces) -> Iterator[tuple[Integers, list[int]]]:
    """Token ids, and the lengths of the documents that end with them; a large text comes in pieces."""
    if len(texts) > 1 or pieces.unit == "document" or not pieces.fit(texts[0], "a document"):
        documents = encoder.encode(texts)
        yield np.concatenate(documents), list(map(len, documents))
        return
    length = 0
    for _, piece in pieces(texts[0], 0):
        length += len(piece)
        yield piece.numpy(), []
    yield np.empty(0, dtype=np.int64), [length]


def _batches(source: FileDocuments, chunk: Chunk) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for index in range(*chunk):
        text = source[index]
        if not isinstance(text, str):
            raise DataError(f"{source.where(index)} holds token ids, not text; there is nothing to tokenize")
        if texts and len(text) >= text_pieces.PIECE:
            yield texts
            texts, characters = [], 0
        texts.append(text)
        characters += len(text)
        if len(texts) == _BATCH_DOCUMENTS or characters >= min(_BATCH_CHARACTERS, text_pieces.PIECE):
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


def _skipped(source: FileDocuments) -> int:
    return sum(skipped.documents for skipped in source.skipped.values())
