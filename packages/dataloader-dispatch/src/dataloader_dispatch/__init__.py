"""Every document exactly once an epoch, resumable in constant time, for any training loop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataloader_dispatch.batches import masked_dummy
    from dataloader_dispatch.dispatch.dispatcher import DataloaderDispatcher
    from dataloader_dispatch.document_stream import DocumentStream, StreamLoader
    from dataloader_dispatch.documents import DocumentSource, TokenDocuments, data_fingerprint
    from dataloader_dispatch.errors import DataError
    from dataloader_dispatch.loader import (
        ResumableDataLoader,
        build_loader,
        end_workers,
        set_loader_epoch,
        sync_dataset_state_from_dataloader,
    )
    from dataloader_dispatch.order import (
        DocumentSubset,
        MixedDocuments,
        ShuffledIndex,
        mix_documents,
        passes_for_shares,
        split_documents,
    )
    from dataloader_dispatch.other_trainers import FabricLoader, LightningLoader, set_train_loader
    from dataloader_dispatch.rows import ignored_like, is_ignored
    from dataloader_dispatch.settings import RowSpan
    from dataloader_dispatch.sources.columns import ColumnDocuments
    from dataloader_dispatch.sources.files import FileDocuments, SkippedFile
    from dataloader_dispatch.sources.open_documents import open_documents
    from dataloader_dispatch.sources.token_binary import TokenBinary
    from dataloader_dispatch.synchronized.evaluation import (
        EvaluationBatch,
        EvaluationLoader,
        EvaluationShard,
        GlobalMean,
        shard_for_evaluation,
    )
    from dataloader_dispatch.synchronized.loader import SynchronizedDataLoader

__all__ = [
    "ColumnDocuments",
    "DataError",
    "DataloaderDispatcher",
    "DocumentSource",
    "DocumentStream",
    "DocumentSubset",
    "EvaluationBatch",
    "EvaluationLoader",
    "EvaluationShard",
    "FabricLoader",
    "FileDocuments",
    "GlobalMean",
    "LightningLoader",
    "MixedDocuments",
    "ResumableDataLoader",
    "RowSpan",
    "ShuffledIndex",
    "SkippedFile",
    "StreamLoader",
    "SynchronizedDataLoader",
    "TokenBinary",
    "TokenDocuments",
    "build_loader",
    "data_fingerprint",
    "end_workers",
    "ignored_like",
    "is_ignored",
    "masked_dummy",
    "mix_documents",
    "open_documents",
    "passes_for_shares",
    "set_loader_epoch",
    "set_train_loader",
    "shard_for_evaluation",
    "split_documents",
    "sync_dataset_state_from_dataloader",
]

# A name loads its module when it is first used: the help of the command needs no torch.
_NAMES = {
    "batches": ("masked_dummy",),
    "dispatch.dispatcher": ("DataloaderDispatcher",),
    "document_stream": (
        "DocumentStream",
        "StreamLoader",
    ),
    "documents": (
        "DocumentSource",
        "TokenDocuments",
        "data_fingerprint",
    ),
    "errors": ("DataError",),
    "loader": (
        "ResumableDataLoader",
        "build_loader",
        "end_workers",
        "set_loader_epoch",
        "sync_dataset_state_from_dataloader",
    ),
    "order": (
        "DocumentSubset",
        "MixedDocuments",
        "ShuffledIndex",
        "mix_documents",
        "passes_for_shares",
        "split_documents",
    ),
    "other_trainers": (
        "FabricLoader",
        "LightningLoader",
        "set_train_loader",
    ),
    "rows": (
        "ignored_like",
        "is_ignored",
    ),
    "settings": ("RowSpan",),
    "sources.columns": ("ColumnDocuments",),
    "sources.files": (
        "FileDocuments",
        "SkippedFile",
    ),
    "sources.open_documents": ("open_documents",),
    "sources.token_binary": ("TokenBinary",),
    "synchronized.evaluation": (
        "EvaluationBatch",
        "EvaluationLoader",
        "EvaluationShard",
        "GlobalMean",
        "shard_for_evaluation",
    ),
    "synchronized.loader": ("SynchronizedDataLoader",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds a misspelt one

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
