"""Rules for the settings of a stream."""

from __future__ import annotations

from collections.abc import Mapping

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.position import is_count

_USUAL_SHARDS = 64
_DOCUMENTS_A_SHARD = 16


def check_settings(sequence_length: int, eos_token_id: int | None, pad_token_id: int, seed: int) -> None:
    """Refuse numbers that are out of range.

    Raises:
        DataError: Names the setting.
        TypeError: ``seed`` is not an integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} must be an int")
    if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 2:
        raise DataError(
            f"sequence_length={sequence_length!r} is out of range; it must be an integer of at least 2, "
            "one token to predict the other from"
        )
    if eos_token_id is not None:
        _check_token("eos_token_id", eos_token_id)
    _check_token("pad_token_id", pad_token_id)


def check_source(source: object) -> None:
    """Refuse one text, which would count as a sequence of letters, and what has no numbered documents.

    Raises:
        DataError: The source is a string or bytes, or has no length or no numbers.
    """
    if isinstance(source, str | bytes):
        raise DataError(
            f"source={source!r:.60} is one text, and would be read letter by letter; give a list of texts, "
            "or open_documents(path) for files"
        )
    if isinstance(source, Mapping) and len(source) and 0 not in source:
        raise DataError(
            f"source is a {type(source).__name__} with the keys {sorted(map(str, source))[:9]}, such as one "
            "of splits; give one of them, as in source['train']"
        )
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise DataError(
            f"source is a {type(source).__name__}, without a length or without numbered documents; give a "
            "list of documents, or anything else that has both"
        )


def check_encode(encode: object) -> None:
    """Refuse what is no function.

    Raises:
        DataError: ``encode`` is neither callable nor None.
    """
    if encode is not None and not callable(encode):
        raise DataError(
            f"encode={encode!r:.60} is not a function; pass one from text to token ids, such as "
            "tokenizer.encode, or None for documents that are token ids"
        )


def logical_shards(shards: int | None, documents: int, rank: int, world_size: int) -> int:
    """The number of logical shards to use.

    Args:
        shards: The setting; None for a number that suits the documents.
        documents: Documents in an epoch.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        DataError: A number is out of range, there is no document, or a rank would have no shard.
    """
    if documents == 0:
        raise DataError("source has no documents; give at least one")
    if not (is_count(rank) and is_count(world_size) and rank < world_size):
        raise DataError(
            f"rank={rank!r} is out of range; it must be an integer of at least 0 and below "
            f"world_size={world_size!r}"
        )
    if documents < world_size:
        raise DataError(
            f"{documents} document(s) cannot be divided among {world_size} ranks; give more documents, or "
            "let fewer ranks read (DataloaderDispatcher reads on one rank for all)"
        )
    if shards is None:
        shards = min(_USUAL_SHARDS, max(1, documents // _DOCUMENTS_A_SHARD))
    elif isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise DataError(f"shards={shards!r} is out of range; it must be an integer of at least 1")
    if shards > documents:
        raise DataError(
            f"shards={shards} is out of range; there are {documents} documents, and each shard needs one"
        )
    check_takers(shards, world_size, 1)
    return shards


def check_takers(shards: int, world_size: int, workers: int) -> None:
    """Refuse more ranks and workers than shards.

    Raises:
        DataError: A rank or worker would have no shard.
    """
    takers = world_size * workers
    if shards < takers:
        who = f"{world_size} rank(s)" + (f" of {workers} workers each" if workers > 1 else "")
        raise DataError(
            f"shards={shards} cannot be divided among {who}; set shards to a multiple of {takers}, and at "
            "most to the number of documents"
        )


def check_workers(num_workers: int, prefetch_factor: int | None) -> None:
    """Refuse settings of worker processes that make no sense.

    Raises:
        DataError: Names the setting.
    """
    if not is_count(num_workers):
        raise DataError(f"num_workers={num_workers!r} is out of range; it must be an integer of at least 0")
    if prefetch_factor is None:
        return
    if not is_count(prefetch_factor) or prefetch_factor == 0:
        raise DataError(
            f"prefetch_factor={prefetch_factor!r} is out of range; it must be an integer of at least 1, "
            "or None"
        )
    if num_workers == 0:
        raise DataError(
            f"prefetch_factor={prefetch_factor} has no effect with num_workers=0; leave it out or "
            "set num_workers"
        )


def _check_token(name: str, token: int) -> None:
    if not is_count(token) or token >= 2**63:
        raise DataError(f"{name}={token!r} is out of range; token ids are int64 integers and not negative")
