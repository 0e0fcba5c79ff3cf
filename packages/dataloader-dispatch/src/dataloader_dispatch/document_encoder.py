"""Token ids of documents, with exactly one separator between two, a large document piece by piece."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from dataloader_dispatch.documents import (
    DocumentSource,
    Encode,
    TextPieces,
    TextUnit,
    text_unit_of,
    token_tensor,
    tokens_around,
    tokens_if_taken,
)
from dataloader_dispatch.errors import DataError

logger = logging.getLogger("dataloader_dispatch.stream")

_PROBED_DOCUMENTS = 4
_SAMPLE = 4096  # characters of a document

# What releases up to 0.1 encoded to tell encoders apart; only their positions are compared with it.
_FORMER_PROBES = ("The quick brown fox, 1", "7 zebras and a gnu")


class Piece(NamedTuple):
    """Consecutive tokens of a document.

    Attributes:
        tokens: int64 [n].
        start: First character of the text that they are made of.
        before: Tokens of the document before them.
    """

    tokens: torch.Tensor
    start: int = 0
    before: int = 0


class DocumentEncoder:
    """Token ids of the documents of a source.

    Between two documents stands exactly one separator. One or several that an encoder, or whoever made token
    documents, put at the edges of a document are taken off first; that is said once.

    Args:
        source: Texts or token ids.
        encode: Text to token ids; for texts only.
        eos_token_id: The separator; None for none.
        text_unit: The most text that ``encode`` looks at as a whole; None to find out.

    Attributes:
        left_out: Documents without tokens met so far.
        fingerprint: Digests of the beginnings of a few documents, and of what the encoder makes of them, by
            the documents' numbers; None without an encoder.
    """

    def __init__(
        self,
        source: DocumentSource,
        encode: Encode | None,
        eos_token_id: int | None,
        text_unit: TextUnit | None = None,
    ) -> None:
        self.source = source
        self.encode = encode
        self.eos_token_id = eos_token_id
        self._separator = torch.tensor([] if eos_token_id is None else [eos_token_id], dtype=torch.int64)
        self._said = False
        self.left_out = 0
        self.fingerprint: dict[str, str] | None = None
        if encode is not None:
            unit = text_unit_of(encode, text_unit)
            self._pieces = TextPieces(partial(_tensor_of, encode), unit, eos_token_id)
            self.fingerprint = self._sample(encode)

    def __call__(self, index: int, start: int = 0, before: int = 0) -> Iterator[Piece]:
        """Token ids of a document with its separator; nothing for a document without tokens.

        Args:
            index: Number of the document.
            start: That of a piece to begin with. A document that is not cut comes from its beginning.
            before: That of the same piece.

        Raises:
            DataError: The document is neither what ``encode`` needs nor token ids.
            Exception: What the source or the encoder raises, with a note that names the document.
        """
        try:
            yield from self._separated(index, self._encoded(index, start), before)
        except Exception as error:
            error.add_note(f"while reading document {index}{self._where(index)}")
            raise

    def accepts(self, fingerprint: object) -> bool:
        """Whether the fingerprint in a saved position is that of this encoder, as far as it tells.

        Documents whose text has changed, or could be encoded at only one of the two times, tell nothing of
        the encoder. That a text has changed is said: files whose size has not changed count as the same data.
        """
        if self.encode is None or self.fingerprint is None:
            return fingerprint is None
        if isinstance(fingerprint, str):
            return fingerprint == _former_fingerprint(self.encode)
        if not isinstance(fingerprint, dict):
            return False
        changed = []
        for index, digest in self.fingerprint.items():
            saved, text = str(fingerprint.get(index, "")), digest.partition(" ")[0]
            if saved and saved.partition(" ")[0] != text:
                changed.append(index)
            elif saved and saved != digest:
                return False
        if changed:
            logger.warning(
                "document %s has another text than when the position was saved (of %d documents that were "
                "looked at, %d): the data continue behind the same documents, as they are now. For the curve "
                "of the data as they were, put these back",
                changed[0],
                len(self.fingerprint),
                len(changed),
            )
        return True

    def _encoded(self, index: int, start: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Where each piece begins, and its tokens."""
        name = f"document {index}"
        document = self.source[index]
        if not isinstance(document, str):
            if self.encode is not None:
                raise DataError(f"{name} holds token ids, to which encode does not apply. Leave encode out.")
            yield 0, token_tensor(document, name)
        elif not document:
            # What sources give for a document that they leave out, whatever the others are.
            yield 0, token_tensor((), name)
        elif self.encode is None:
            raise DataError(f"{name} is text and encode is None. Pass the tokenizer's encode function.")
        elif self._pieces.fit(document, f"{name}{self._where(index)}"):
            yield from self._pieces(document, start)
        else:
            yield 0, token_tensor(self.encode(document), name)

    def _separated(
        self, index: int, pieces: Iterator[tuple[int, torch.Tensor]], before: int
    ) -> Iterator[Piece]:
        last = None
        for start, tokens in pieces:
            if last is not None:
                yield last
            # No separator stands where a text is cut, so this takes off those at the document's edges.
            bare = tokens if self.eos_token_id is None else self._bare(tokens, self.eos_token_id)
            if bare.numel() < tokens.numel():
                self._say_separators(f"document {index}{self._where(index)} holds")
            before = before if start else 0
            last = Piece(bare, start, before)
            before += bare.numel()
        if before == 0:
            self.left_out += 1
        elif last is not None:
            yield last._replace(tokens=torch.cat((last.tokens, self._separator)))

    def _bare(self, tokens: torch.Tensor, eos: int) -> torch.Tensor:
        start, stop = 0, tokens.numel()
        while start < stop and int(tokens[start]) == eos:
            start += 1
        while start < stop and int(tokens[stop - 1]) == eos:
            stop -= 1
        return tokens[start:stop]

    def _sample(self, encode: Encode) -> dict[str, str]:
        """Digests of what the encoder makes of the beginnings of a few documents; says what it puts around.

        Nothing else is given to it: an encoder may know the letters or words of its own texts only.
        """
        digests: dict[str, str] = {}
        total = len(self.source)
        for index in sorted({total * part // _PROBED_DOCUMENTS for part in range(_PROBED_DOCUMENTS)}):
            text = self._beginning(index)
            tokens = tokens_if_taken(encode, text) if text else None
            if tokens is not None:
                if not digests:
                    self._say_around(tokens_around(encode, text))
                digests[str(index)] = f"{_short_digest(text)} {_short_digest(repr(tokens))}"
        return digests

    def _beginning(self, index: int) -> str:
        """The first words of a document; nothing if it is not text, or cannot be read."""
        try:
            text = self.source[index]
        except Exception as error:  # noqa: BLE001  (a source may raise anything)
            # It is said, with the document's name, when that is read in its turn.
            logger.debug("document %d tells nothing of the encoder: %r", index, error)
            return ""
        if not isinstance(text, str) or len(text) <= _SAMPLE:
            return text if isinstance(text, str) else ""
        return next(iter(text[:_SAMPLE].rsplit(None, 1)), "")

    def _say_around(self, around: tuple[list[int], list[int]] | None) -> None:
        tokens = [token for side in around or () for token in side]
        if self.eos_token_id in tokens:
            self._say_separators("encode gives each text")
        others = [token for token in tokens if token != self.eos_token_id]
        if others and self.eos_token_id is not None:
            logger.warning(
                "encode puts the token(s) %s around every text. If they are separators too, several stand "
                "between two documents, with eos_token_id=%d; turn them off in the tokenizer "
                "(add_special_tokens=False) or pass eos_token_id=None",
                others,
                self.eos_token_id,
            )

    def _say_separators(self, who: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "%s a separator (eos_token_id=%s) of its own: it is taken off, so that exactly one stands "
                "between two documents",
                who,
                self.eos_token_id,
            )

    def _where(self, index: int) -> str:
        where = getattr(self.source, "where", None)
        return f" ({where(index)})" if callable(where) else ""


def _former_fingerprint(encode: Encode) -> str | None:
    first, second = (tokens_if_taken(encode, text) for text in _FORMER_PROBES)
    if first is None or second is None:
        return None  # a position with such a fingerprint was saved with an encoder that took these texts
    return _short_digest(repr((first, second)))


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _tensor_of(encode: Encode, text: str) -> torch.Tensor:
    return token_tensor(encode(text), "encode's result")
