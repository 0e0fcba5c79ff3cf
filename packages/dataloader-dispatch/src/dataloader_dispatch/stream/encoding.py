"""Documents as token ids, each closed by exactly one separator."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from itertools import takewhile

import torch

from dataloader_dispatch.documents import DocumentSource, token_tensor
from dataloader_dispatch.errors import DataError

logger = logging.getLogger("dataloader_dispatch.stream")

# Two texts that begin and end differently: what an encoder puts around both is its own.
_PROBES = ("The quick brown fox, 1", "7 zebras and a gnu")


class DocumentEncoder:
    """Token ids of the documents of a source.

    Between two documents stands exactly one separator. One or several that an encoder, or whoever made token
    documents, put at the edges of a document are taken off first; that is said once.

    Args:
        source: Texts or token ids.
        encode: Text to token ids; for texts only.
        eos_token_id: The separator; None for none.

    Attributes:
        left_out: Documents without tokens met so far.
        fingerprint: Differs between encoders; None without one.
    """

    def __init__(
        self,
        source: DocumentSource,
        encode: Callable[[str], Sequence[int] | torch.Tensor] | None,
        eos_token_id: int | None,
    ) -> None:
        self.source = source
        self.encode = encode
        self.eos_token_id = eos_token_id
        self._separator = torch.tensor([] if eos_token_id is None else [eos_token_id], dtype=torch.int64)
        self._said = False
        self.left_out = 0
        self.fingerprint = None if encode is None else self._probe(encode)

    def __call__(self, index: int) -> torch.Tensor:
        """Token ids of a document with its separator, int64 [n]; none for a document without tokens.

        Raises:
            DataError: The document is neither what ``encode`` needs nor token ids.
            Exception: What the source or the encoder raises, with a note that names the document.
        """
        name = f"document {index}"
        try:
            tokens = self._tokens(self.source[index], name)
        except Exception as error:
            error.add_note(f"while reading {name}{self._where(index)}")
            raise
        if self.eos_token_id is not None and tokens.numel():
            bare = self._without_separators(tokens, self.eos_token_id)
            if bare.numel() < tokens.numel():
                self._say_separators(f"{name}{self._where(index)} holds")
            tokens = torch.cat((bare, self._separator)) if bare.numel() else bare
        self.left_out += not tokens.numel()
        return tokens

    def _tokens(self, document: object, name: str) -> torch.Tensor:
        if isinstance(document, str):
            if self.encode is None:
                raise DataError(f"{name} is text and encode is None; pass the tokenizer's encode function")
            return token_tensor(self.encode(document) if document else (), name)
        # "" is what sources give for a document that they leave out, whatever the others are.
        if self.encode is not None:
            raise DataError(f"{name} holds token ids, to which encode does not apply; leave encode out")
        return token_tensor(document, name)  # type: ignore[arg-type]  # it says what is wrong

    def _without_separators(self, tokens: torch.Tensor, eos: int) -> torch.Tensor:
        start, stop = 0, tokens.numel()
        while start < stop and int(tokens[start]) == eos:
            start += 1
        while start < stop and int(tokens[stop - 1]) == eos:
            stop -= 1
        return tokens[start:stop]

    def _probe(self, encode: Callable[[str], Sequence[int] | torch.Tensor]) -> str:
        """Digest of what the encoder makes of two texts; says what it puts around them."""
        first, second = (token_tensor(encode(text), "encode's result").tolist() for text in _PROBES)
        if first == second:
            return _digest(first, second)  # it does not look at the text
        before = _shared(first, second)
        after = _shared(first[::-1], second[::-1])[::-1]
        if self.eos_token_id in before or self.eos_token_id in after:
            self._say_separators("encode gives each text")
        others = [token for token in (*before, *after) if token != self.eos_token_id]
        if others and self.eos_token_id is not None:
            logger.warning(
                "encode puts the token(s) %s around every text. If they are separators too, several stand "
                "between two documents, with eos_token_id=%d; turn them off in the tokenizer "
                "(add_special_tokens=False) or pass eos_token_id=None",
                others,
                self.eos_token_id,
            )
        return _digest(first, second)

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


def _digest(first: Sequence[int], second: Sequence[int]) -> str:
    return hashlib.sha256(repr((first, second)).encode()).hexdigest()[:16]


def _shared(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """What two sequences begin with alike."""
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
