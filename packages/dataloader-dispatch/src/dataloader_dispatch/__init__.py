"""Every document exactly once an epoch, resumable in constant time, for any training loop."""

from dataloader_dispatch.documents import (
    DocumentSource,
    DocumentSubset,
    TokenDocuments,
    data_fingerprint,
    split_documents,
)
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.files import FileDocuments, open_documents
from dataloader_dispatch.loader import ResumableDataLoader, build_loader
from dataloader_dispatch.packed_loader import PackedLoader
from dataloader_dispatch.packing import PackedDocuments
from dataloader_dispatch.shuffle import ShuffledIndex

__all__ = [
    "DataError",
    "DocumentSource",
    "DocumentSubset",
    "FileDocuments",
    "PackedDocuments",
    "PackedLoader",
    "ResumableDataLoader",
    "ShuffledIndex",
    "TokenDocuments",
    "build_loader",
    "data_fingerprint",
    "open_documents",
    "split_documents",
]
