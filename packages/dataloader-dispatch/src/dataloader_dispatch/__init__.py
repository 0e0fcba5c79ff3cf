"""Every document exactly once an epoch, resumable in constant time, for any training loop."""

from dataloader_dispatch.dispatch.dispatcher import DataloaderDispatcher
from dataloader_dispatch.documents import (
    DocumentSource,
    DocumentSubset,
    TokenDocuments,
    data_fingerprint,
    split_documents,
)
from dataloader_dispatch.dummy import ignored_like, is_ignored, masked_dummy
from dataloader_dispatch.epochs import set_loader_epoch
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import ResumableDataLoader, build_loader
from dataloader_dispatch.shuffle import ShuffledIndex
from dataloader_dispatch.sources.column_documents import ColumnDocuments
from dataloader_dispatch.sources.files import FileDocuments, SkippedFile, open_documents
from dataloader_dispatch.sources.token_binary import TokenBinary
from dataloader_dispatch.stream.document_stream import DocumentStream
from dataloader_dispatch.stream.loader import StreamLoader
from dataloader_dispatch.stream.mixing import MixedDocuments, mix_documents, passes_for_shares
from dataloader_dispatch.stream.skipping import RowSpan
from dataloader_dispatch.synchronized.evaluation import EvaluationBatch, EvaluationLoader
from dataloader_dispatch.synchronized.evaluation_shard import EvaluationShard, shard_for_evaluation
from dataloader_dispatch.synchronized.global_mean import GlobalMean
from dataloader_dispatch.synchronized.loader import SynchronizedDataLoader
from dataloader_dispatch.worker_state import end_workers, sync_dataset_state_from_dataloader

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
    "FileDocuments",
    "GlobalMean",
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
    "shard_for_evaluation",
    "split_documents",
    "sync_dataset_state_from_dataloader",
]
