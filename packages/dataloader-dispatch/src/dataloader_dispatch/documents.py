"""What a source of documents is, and what is made of one: subsets, fingerprints, token documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.shuffle import ShuffledIndex

Document: TypeAlias = str | Sequence[int] | torch.Tensor
"""A text, or its token ids (a sequence of ints or a 1-D integer tensor)."""

_SAMPLED_DOCUMENTS = 16
_PART = 1 << 20


@runtime_checkable
class DocumentSource(Protocol):
    """Documents with random access: anything with a length and integer indexing, a list included.

    A source may also have ``fingerprint() -> str``; see `data_fingerprint`.
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
            raise DataError("TokenDocuments: the list of documents is empty; give at least one document")
        for index, document in enumerate(documents):
            if getattr(document, "ndim", 1) != 1:
                raise DataError(
                    f"TokenDocuments: document {index} has {getattr(document, 'ndim', 0)} dimensions; "
                    "token ids of one document are one-dimensional"
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


class DocumentSubset:
    """A run of documents of another source, in the shuffled order of a seed. Nothing is copied or listed.

    Args:
        source: The documents to choose from.
        seed: Seed of the order.
        start: First position in the shuffled order.
        stop: Position after the last one.
    """

    def __init__(self, source: DocumentSource, seed: int, start: int, stop: int) -> None:
        self.source = source
        self._order = ShuffledIndex(len(source), seed)
        self._positions = range(len(source))[start:stop]

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int, /) -> Document:
        return self.source[self._order[self._positions[index]]]

    def where(self, index: int) -> str:
        """The place of a document in words, from the source if it can tell."""
        number = self._order[self._positions[index]]
        place = getattr(self.source, "where", None)
        return str(place(number)) if callable(place) else f"document {number} of {len(self._order)}"

    def fingerprint(self) -> str:
        """Digest of the source's fingerprint and of the choice made from it."""
        chosen = f"{data_fingerprint(self.source)} {self._order!r} {self._positions!r}"
        return hashlib.sha256(chosen.encode()).hexdigest()


def split_documents(
    source: DocumentSource, held_out: float, seed: int
) -> tuple[DocumentSubset, DocumentSubset]:
    """Set documents aside, for evaluation say. Every document falls on exactly one side.

    The choice depends on (number of documents, held_out, seed) only. Each part holds at least one document.
    Documents come in a shuffled order, so that neither part needs a list of its documents.

    Args:
        source: All documents.
        held_out: Share to hold out, between 0 and 1, both excluded. The count is rounded.
        seed: Seed of the choice.

    Returns:
        The documents that remain, and those held out.

    Raises:
        DataError: ``held_out`` is out of range, or there are fewer than two documents.
    """
    if not 0.0 < held_out < 1.0:
        raise DataError(
            f"held_out={held_out!r} is out of range; it is a share between 0 and 1, both excluded"
        )
    total = len(source)
    if total < 2:
        raise DataError(
            f"cannot hold out a share of {total} document(s): both parts need one; give at least two "
            "documents, or hold out nothing"
        )
    count = min(max(round(total * held_out), 1), total - 1)
    return DocumentSubset(source, seed, count, total), DocumentSubset(source, seed, 0, count)


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


def token_tensor(tokens: Sequence[int] | torch.Tensor, name: str) -> torch.Tensor:
    """Token ids as an int64 tensor of shape [n]; `DataError` names ``name`` when they are not token ids."""
    if not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) == 0 or isinstance(tokens, Mapping):
        entries = f" with the entries {sorted(map(str, tokens))}" if isinstance(tokens, Mapping) else ""
        hint = "; return its input_ids" if "input_ids" in entries else ""
        raise DataError(
            f"{name} does not hold token ids: expected a one-dimensional sequence of integers, got a "
            f"{type(tokens).__name__}{entries}{hint}"
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
        raise DataError(f"{name} does not hold token ids: {error}") from error
    if (
        tensor.ndim != 1
        or tensor.dtype.is_floating_point
        or tensor.dtype.is_complex
        or tensor.dtype == torch.bool
    ):
        raise DataError(
            f"{name} does not hold token ids: expected a one-dimensional sequence of integers, got shape "
            f"{list(tensor.shape)} and dtype {tensor.dtype}"
        )
    tensor = tensor.to(device="cpu", dtype=torch.int64)
    if int(tensor.amin()) < 0:
        raise DataError(f"{name} holds the token id {int(tensor.amin())}; token ids are not negative")
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
