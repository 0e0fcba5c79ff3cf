"""Batches as bytes, with their dense tensors beside them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from importlib import import_module

import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.rank_group import one_line
from dist_env import decode_value, encode_value

_BATCH_ENCODING = "transformers.tokenization_utils_base.BatchEncoding"
_MAPPINGS = (
    _BATCH_ENCODING,
    "transformers.feature_extraction_utils.BatchFeature",
    "transformers.image_processing_base.BatchFeature",
)
"""Mappings that tokenizers and processors return. Only these are ever imported for a message."""
_PICKLE = "pickle"


class BatchCodec:
    """Writes batches as bytes and reads them.

    What `encode_value` takes travels, and what tokenizers and processors of transformers return, without a
    fast tokenizer's own encodings.

    Args:
        unpickle: Let all other values travel as pickles, which run whatever code the sender likes; None where
            there is no such setting.
    """

    def __init__(self, unpickle: bool | None = None) -> None:
        self._unpickle = unpickle

    def encode(self, batch: object, tensors: list[torch.Tensor] | None = None) -> bytes:
        """The bytes of a batch; its dense tensors are appended to ``tensors``, if that is given.

        Raises:
            DataError: A value cannot be sent; names the field.
        """
        try:
            return encode_value(batch, name="batch", tensors=tensors, extend=self._extend)
        except TypeError as error:
            advice = ", or trust all ranks and set unpickle_batches=True" if self._unpickle is False else ""
            raise DataError(
                f"a batch cannot be sent to other ranks: {error}. Let the collate function convert the value "
                f"or leave it out{advice}"
            ) from error

    def decode(self, data: bytes, tensors: Sequence[object] = ()) -> object:
        """The batch of some bytes.

        Args:
            data: The bytes.
            tensors: What to put in place of the tensors that `encode` collected.

        Raises:
            ValueError: The bytes cannot be read.
        """
        return decode_value(data, tensors=tensors, restore=self._restore)

    def _extend(self, value: object) -> tuple[str, object] | None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in _MAPPINGS:
            return name, (value.data, getattr(value, "n_sequences", None))  # type: ignore[attr-defined]
        if not self._unpickle:
            return None
        try:
            return _PICKLE, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(f"a {name} does not pickle: {one_line(error)}") from error

    def _restore(self, name: str, value: object) -> object:
        if name == _PICKLE and self._unpickle and isinstance(value, bytes):
            # The one place of all packages where bytes of another process are unpickled.
            try:
                return pickle.loads(value)
            except Exception as error:
                raise ValueError(f"a value does not unpickle here: {one_line(error)}") from error
        if name not in _MAPPINGS or not isinstance(value, tuple) or len(value) != 2:
            raise ValueError(f"the message holds a {name[:80]!r}, which is not read here")
        module, _, kind = name.rpartition(".")
        more = {"n_sequences": value[1]} if name == _BATCH_ENCODING else {}
        made: object = getattr(import_module(module), kind)(dict(value[0]), **more)
        return made
