"""Every document exactly once an epoch, resumable in constant time, for any training loop."""

from typing import TYPE_CHECKING

from dist_env import lazy_names

if TYPE_CHECKING:
    from dataloader_dispatch.batches import masked_dummy
    from dataloader_dispatch.dispatch.dispatcher import DataloaderDispatcher
    from dataloader_dispatch.document_stream import DocumentStream, StreamLoader
    from dataloader_dispatch.documents import DocumentSource, TokenDocuments, data_fingerprint
    from dataloader_dispatch.errors import DataError
    from dataloader_dispatch.loader import (
        Indexed,
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
    from dataloader_dispatch.other_trainers import (
        FabricLoader,
        LightningLoader,
        ResumableLoader,
        set_train_loader,
    )
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
    from dataloader_dispatch.torchdata_loaders import begin_pass, load_loader_state, loader_state

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
    "Indexed",
    "LightningLoader",
    "MixedDocuments",
    "ResumableDataLoader",
    "ResumableLoader",
    "RowSpan",
    "ShuffledIndex",
    "SkippedFile",
    "StreamLoader",
    "SynchronizedDataLoader",
    "TokenBinary",
    "TokenDocuments",
    "begin_pass",
    "build_loader",
    "data_fingerprint",
    "end_workers",
    "ignored_like",
    "is_ignored",
    "load_loader_state",
    "loader_state",
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)
