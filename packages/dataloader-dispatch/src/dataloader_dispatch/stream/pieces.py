"""Long texts in pieces whose token ids, one after the other, are those of the whole."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch

from dataloader_dispatch.documents import token_tensor
from dataloader_dispatch.errors import DataError

logger = logging.getLogger("dataloader_dispatch.stream")

Encode: TypeAlias = Callable[[str], Sequence[int] | torch.Tensor]
"""Text to token ids."""

TextUnit: TypeAlias = Literal["document", "word", "character"]
"""The most text that an encoder looks at as a whole; see `DocumentStream`."""

PIECE = 1 << 18
"""Characters of a piece, about. Texts of up to one and a half pieces are encoded whole."""
LARGE = 16 << 20
"""Characters of a text from which on it is said that it cannot be cut."""

_WINDOW = 256  # characters on either side of a cut whose encoding shows whether tokens cross it
_TRIES = 32  # places looked at before the piece becomes larger instead
# Word tokenizers begin a new word at white space, and take a single space together with the word behind it.
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?=\s\S)")
_ANYWHERE = re.compile("")


def text_unit_of(encode: Encode, unit: TextUnit | None) -> TextUnit:
    """The unit of an encoder: the one declared, or the one known of bytes and of Hugging Face tokenizers.

    Raises:
        DataError: ``unit`` is none of the choices.
    """
    if unit is not None:
        if unit not in get_args(TextUnit):
            raise DataError(f"text_unit={unit!r} is unknown; choose one of {get_args(TextUnit)}, or None")
        return unit
    if encode is str.encode:
        return "character"
    backend = getattr(getattr(encode, "__self__", None), "backend_tokenizer", None)
    return "word" if _splits_words(getattr(backend, "pre_tokenizer", None)) else "document"


def _splits_words(pre_tokenizer: Any) -> bool:
    """Whether a ``tokenizers.pre_tokenizers`` object lets no token reach from one word into the next."""
    if pre_tokenizer is None:
        return False
    text = "ab cd, 12 34"
    spans = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
    return not any(
        start < place < stop for start, stop in spans for place, letter in enumerate(text) if letter == " "
    )


class TextPieces:
    """Encodes texts in pieces.

    A declared unit is not taken on trust: a cut is made only where the text around it, encoded whole, has the
    tokens of its two halves, and before the first cut a whole piece is compared with its halves. Where no cut
    is found a piece grows, up to the whole text. A cut depends on the text and on where its piece begins.

    Args:
        encode: Text to token ids.
        unit: The most text that ``encode`` looks at as a whole.
        eos_token_id: A token that must not stand at a cut; None for none.
    """

    def __init__(self, encode: Encode, unit: TextUnit, eos_token_id: int | None) -> None:
        self.unit = unit
        self._encode = encode
        self._eos = eos_token_id
        self._places = _ANYWHERE if unit == "character" else _BETWEEN_WORDS
        self._around: tuple[list[int], list[int]] = [], []
        self._fit: bool | None = None if unit != "document" else False
        self._said = False

    def fit(self, text: str, where: str) -> bool:
        """Whether a text is to be cut; says once where one should be and cannot."""
        if len(text) <= PIECE * 3 // 2:
            return False
        if self._fit is None:
            self._fit = self._compare(text, where)
        elif not self._fit and len(text) > LARGE:
            self._say(where, "it is not known whether the tokens of its pieces are those of the whole")
        return bool(self._fit)

    def __call__(self, text: str, start: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Where each piece begins, and its token ids, from the piece that begins at ``start`` on.

        The token ids that the encoder puts around a text stand before the first and behind the last piece.
        """
        before, after = self._around
        while start < len(text):
            stop = self._stop(text, start)
            tokens = token_tensor(self._encode(text[start:stop]), "encode's result")
            first = len(before) if start else 0
            last = len(tokens) - (len(after) if stop < len(text) else 0)
            yield start, tokens[first:last]
            start = stop

    def _compare(self, text: str, where: str) -> bool | None:
        """Whether a first piece has the tokens of its halves; None if the text cannot be cut."""
        edge = self._places.search(text, _WINDOW, PIECE)
        around = tokens_around(self._encode, text[: edge.start() if edge else _WINDOW])
        self._around = around or ([], [])
        head = text[: self._stop(text, 0)]
        places = self._candidates(head, len(head) // 2, len(head))
        middle = next((place for place in places if self._is_cut(head, place)), None)
        if len(head) == len(text) or middle is None:
            self._say(where, "there is no place at which the tokens of two parts are those of the whole")
            return None
        whole = self._bare(head)
        if whole and whole == [*self._bare(head[:middle]), *self._bare(head[middle:])]:
            return True
        self._say(where, "encode gives other tokens for it than for its two halves, one after the other")
        return False

    def _stop(self, text: str, start: int) -> int:
        """Where the piece ends that begins at a place."""
        target = start + PIECE
        while len(text) - target > PIECE // 2:
            for place in self._candidates(text, target, target + PIECE):
                if self._is_cut(text, place):
                    return place
            target += PIECE
        return len(text)

    def _candidates(self, text: str, start: int, stop: int) -> Iterator[int]:
        for _ in range(_TRIES):
            found = self._places.search(text, start, stop)
            if found is None:
                return
            yield found.start()
            start = found.start() + 1

    def _is_cut(self, text: str, place: int) -> bool:
        """Whether no token reaches over a place, and no separator stands at it."""
        # The windows begin and end where a piece may: an encoder of words need not know halves of them.
        first = self._places.search(text, max(place - 2 * _WINDOW, 0), place)
        last = self._places.search(text, place + _WINDOW, place + 2 * _WINDOW)
        if not first or not (last or len(text) < place + 2 * _WINDOW):
            return False
        stop = last.start() if last else len(text)
        left, right = self._bare(text[first.start() : place]), self._bare(text[place:stop])
        if not left or not right or self._eos in (left[-1], right[0]):
            return False
        return left + right == self._bare(text[first.start() : stop])

    def _bare(self, text: str) -> list[int]:
        """Token ids without those around every text; none if the encoder refuses the text."""
        before, after = self._around
        tokens = tokens_if_taken(self._encode, text) or []
        last = len(tokens) - len(after)
        return tokens[len(before) : last] if (tokens[: len(before)], tokens[last:]) == self._around else []

    def _say(self, where: str, why: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "%s is encoded at once (text_unit=%r), as %s. A large document takes many times its size in "
                "memory then, and a resume encodes it anew. If encode looks at single words or characters, "
                "as most tokenizers do, pass text_unit='word' to DocumentStream; or tokenize ahead",
                where,
                self.unit,
                why,
            )


def tokens_around(encode: Encode, text: str) -> tuple[list[int], list[int]] | None:
    """Token ids that an encoder puts before and behind every text; None if it cannot be told.

    They are what it makes of an empty text, if a text begins and ends with them.

    Args:
        encode: Text to token ids.
        text: One that it encodes.
    """
    around, tokens = tokens_if_taken(encode, ""), tokens_if_taken(encode, text)
    if around is None or tokens is None or len(tokens) <= len(around):
        return None
    for count in range(len(around), -1, -1):
        before, after = around[:count], around[count:]
        if tokens[:count] == before and tokens[len(tokens) - len(after) :] == after:
            return before, after
    return None


def tokens_if_taken(encode: Encode, text: str) -> list[int] | None:
    """Token ids of a text that an encoder need not take: an empty one, or a part of a document."""
    try:
        encoded = encode(text)
    except Exception as error:  # noqa: BLE001  (an encoder may raise anything)
        # What is wrong with a document is said, with its name, when that is encoded.
        logger.debug("encode refuses %.40r: %r", text, error)
        return None
    tokens: list[int] = token_tensor(encoded, "encode's result").tolist()
    return tokens
