"""Documents and their token ids: what a source is, and how its texts are encoded."""

from __future__ import annotations

import hashlib
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    get_args,
    runtime_checkable,
)

import numpy as np

from dataloader_dispatch.errors import DataError

if TYPE_CHECKING:  # for tokenize, which begins in a third of the time without it
    import torch

logger = logging.getLogger("dataloader_dispatch.stream")

Document: TypeAlias = "str | Sequence[int] | torch.Tensor"
"""A text, or its token ids (a sequence of ints or a 1-D integer tensor)."""

Encode: TypeAlias = "Callable[[str], Sequence[int] | torch.Tensor]"
"""Text to token ids."""

Integers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.integer]]

Ids = TypeVar("Ids", "torch.Tensor", Integers)
"""Token ids, of shape [n]."""

TextUnit: TypeAlias = Literal["document", "word", "character"]
"""The most text that an encoder looks at as a whole; see `DocumentStream`."""

_SAMPLED_DOCUMENTS = 16
_PART = 1 << 20
PIECE = 1 << 18
"""Characters of a piece, about. Texts of up to one and a half pieces are encoded whole."""
LARGE = 16 << 20
"""Characters of a text from which on it is said that it cannot be cut."""
_WINDOW = 256  # characters on either side of a cut whose encoding shows whether tokens cross it
_TRIES = 32  # places looked at before the piece becomes larger instead

# Word tokenizers begin a new word at white space, and take a single space together with the word behind it.
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?=\s\S)")
_ANYWHERE = re.compile("")


@runtime_checkable
class DocumentSource(Protocol):
    """Documents with random access: anything with a length and integer indexing, a list included.

    A source may also have ``fingerprint() -> str``; see `data_fingerprint`. And it may have
    ``will_read(indices)``: a `DocumentStream` tells it which documents it asks for soon, in order, so that it
    may fetch them. It need not, and nothing else depends on it; None in its place means that it does not.
    """

    def __len__(self) -> int:
        """Number of documents."""
        ...

    def __getitem__(self, index: int, /) -> Document:
        """Document number ``index``, 0 <= index < len."""
        ...


@runtime_checkable
class _Fingerprinted(Protocol):
    def fingerprint(self) -> str: ...


class TokenDocuments:
    """Documents that are token ids already, held in memory or in a memory map.

    Args:
        documents: One sequence of ints, 1-D integer tensor or 1-D integer array (numpy, ``array.array``)
            per document.

    Raises:
        DataError: There is no document, or a tensor or array is not one-dimensional.
    """

    def __init__(self, documents: Sequence[Sequence[int] | torch.Tensor]) -> None:
        if len(documents) == 0:
            raise DataError("TokenDocuments: the list of documents is empty. Give at least one document.")
        for index, document in enumerate(documents):
            if getattr(document, "ndim", 1) != 1:
                raise DataError(
                    f"TokenDocuments: document {index} has {getattr(document, 'ndim', 0)} dimensions, but "
                    "token ids of one document are one-dimensional."
                )
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int, /) -> torch.Tensor:
        """Token ids of one document.

        Returns:
            int64 tensor of shape [number of tokens].

        Raises:
            DataError: The document holds something other than integers.
        """
        return token_tensor(self._documents[index], f"document {index}")

    def fingerprint(self) -> str:
        """Digest of the number of documents, their lengths, and the content of a few of them."""
        digest = hashlib.sha256(f"{len(self)} token documents".encode())
        for document in self._documents:
            digest.update(len(document).to_bytes(8, "little"))
        _add_samples(digest, self)
        return digest.hexdigest()


def data_fingerprint(source: DocumentSource) -> str:
    """A digest that differs when the data differ, cheap enough to compute at every start.

    A source that has ``fingerprint()`` answers itself: for files the digest covers names relative to the
    given directory, sizes and numbers of documents, so moving a directory as a whole does not change it, and
    neither does an edit that keeps the size. For any other source it covers the number of
    documents and the content of 16 of them, evenly spaced.

    Args:
        source: The documents.

    Returns:
        64 hexadecimal digits.
    """
    if isinstance(source, _Fingerprinted):
        return source.fingerprint()
    digest = hashlib.sha256(f"{len(source)} documents".encode())
    _add_samples(digest, source)
    return digest.hexdigest()


def locate(starts: Sequence[int], index: int, what: str = "source") -> tuple[int, int]:
    """Number of the part that holds a document, and of the document in it.

    Args:
        starts: First document of each part, and the number of all documents.
        index: Number of the document among all.
        what: What consists of the parts, for the message.

    Raises:
        IndexError: There is no such document.
    """
    if not 0 <= index < starts[-1]:
        raise IndexError(f"document {index} is outside a {what} of {starts[-1]} documents.")
    # Parts without documents repeat a start; the last of equal starts is the part that has some.
    number = bisect_right(starts, index) - 1
    return number, index - starts[number]


def token_tensor(tokens: Sized, name: str) -> torch.Tensor:
    """Token ids as an int64 tensor of shape [n]; `DataError` names ``name`` when they are not token ids."""
    import torch

    if not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) == 0 or isinstance(tokens, Mapping):
        entries = f" with the entries {sorted(map(str, tokens))}" if isinstance(tokens, Mapping) else ""
        hint = " Return its input_ids." if "input_ids" in entries else ""
        raise DataError(
            f"{name} does not hold token ids: expected a one-dimensional sequence of integers, got a "
            f"{type(tokens).__name__}{entries}.{hint}"
        )
    if len(tokens) == 0:
        return torch.empty(0, dtype=torch.int64)
    if isinstance(tokens, bytes | bytearray):
        return torch.frombuffer(bytearray(tokens), dtype=torch.uint8).to(torch.int64)
    try:
        # Arrays are copied: they may be read-only (a memory map), which tensors are not.
        # Torch has no negative strides, which a reversed array has.
        values = np.ascontiguousarray(tokens) if isinstance(tokens, np.ndarray) else tokens
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} does not hold token ids: {error}.") from error
    if (
        tensor.ndim != 1
        or tensor.dtype.is_floating_point
        or tensor.dtype.is_complex
        or tensor.dtype == torch.bool
    ):
        raise DataError(
            f"{name} does not hold token ids: expected a one-dimensional sequence of integers, got shape "
            f"{list(tensor.shape)} and dtype {tensor.dtype}."
        )
    tensor = tensor.to(device="cpu", dtype=torch.int64)
    if int(tensor.amin()) < 0:
        raise DataError(f"{name} holds the token id {int(tensor.amin())}, but token ids are not negative.")
    return tensor


def _add_samples(digest: hashlib._Hash, source: DocumentSource) -> None:
    """Add up to 16 evenly spaced documents to a digest."""
    total = len(source)
    for index in sorted(
        {total * part // _SAMPLED_DOCUMENTS for part in range(_SAMPLED_DOCUMENTS)} if total else ()
    ):
        document = source[index]
        kind = "text" if isinstance(document, str) else "tokens"
        # With its length, so that no two lists of documents read the same end to end.
        digest.update(f"{kind} {sum(map(len, _as_bytes(document, index)))} ".encode())
        for part in _as_bytes(document, index):
            digest.update(part)


def _as_bytes(document: Document, index: int) -> Iterator[bytes]:
    """The content of a document, part by part: no copy is made of a large one."""
    if not isinstance(document, str):
        yield repr(token_tensor(document, f"document {index}").tolist()).encode()
        return
    for start in range(0, len(document), _PART):
        yield document[start : start + _PART].encode("utf-8", "surrogatepass")


def text_unit_of(encode: Encode, unit: TextUnit | None) -> TextUnit:
    """The unit of an encoder: the one declared, or the one known of bytes and of Hugging Face tokenizers.

    Raises:
        DataError: ``unit`` is none of the choices.
    """
    if unit is not None:
        if unit not in get_args(TextUnit):
            raise DataError(f"text_unit={unit!r} is unknown. Choose one of {get_args(TextUnit)}, or None.")
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


class TextPieces(Generic[Ids]):
    """Encodes texts in pieces.

    A declared unit is not taken on trust: a cut is made only where the text around it, encoded whole, has the
    tokens of its two halves, and before the first cut a whole piece is compared with its halves. Where no cut
    is found a piece grows, up to the whole text. A cut depends on the text and on where its piece begins.

    Args:
        encode: Text to token ids.
        unit: The most text that ``encode`` looks at as a whole.
        eos_token_id: A token that must not stand at a cut; None for none.
    """

    def __init__(self, encode: Callable[[str], Ids], unit: TextUnit, eos_token_id: int | None) -> None:
        self.unit = unit
        self._encode: Callable[[str], Ids] = encode
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

    def __call__(self, text: str, start: int) -> Iterator[tuple[int, Ids]]:
        """Where each piece begins, and its token ids, from the piece that begins at ``start`` on.

        The token ids that the encoder puts around a text stand before the first and behind the last piece.
        """
        before, after = self._around
        while start < len(text):
            stop = self._stop(text, start)
            tokens = self._encode(text[start:stop])
            first = len(before) if start else 0
            last = len(tokens) - (len(after) if stop < len(text) else 0)
            yield start, tokens[first:last]
            start = stop

    def _compare(self, text: str, where: str) -> bool | None:
        """Whether a first piece has the tokens of its halves; None if the text cannot be cut."""
        edge = self._places.search(text, _WINDOW, PIECE)
        around = tokens_around(self._encode, text[: edge.start() if edge else _WINDOW])
        self._around = around or ([], [])
        head: str = text[: self._stop(text, 0)]
        places = self._candidates(head, len(head) // 2, len(head))
        middle: int | None = next((place for place in places if self._is_cut(head, place)), None)
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


def tokens_around(
    encode: Encode | Callable[[str], Integers], text: str
) -> tuple[list[int], list[int]] | None:
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


def tokens_if_taken(encode: Encode | Callable[[str], Integers], text: str) -> list[int] | None:
    """Token ids of a text that an encoder need not take: an empty one, or a part of a document."""
    try:
        encoded = encode(text)
    except Exception as error:  # noqa: BLE001  (an encoder may raise anything)
        # What is wrong with a document is said, with its name, when that is encoded.
        logger.debug("encode refuses %.40r: %r", text, error)
        return None
    if isinstance(encoded, np.ndarray) and encoded.dtype == np.int64 and encoded.ndim == 1:
        ids: list[int] = encoded.tolist()  # those of tokenize, which does without torch
        if min(ids, default=0) >= 0:
            return ids
    tokens: list[int] = _result(encoded).tolist()
    return tokens


def _result(encoded: Sequence[int] | torch.Tensor | Integers) -> torch.Tensor:
    return token_tensor(encoded, "encode's result")
