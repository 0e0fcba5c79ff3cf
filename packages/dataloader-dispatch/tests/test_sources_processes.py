"""Several processes read the same documents at once, however they were started."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from torch.utils.data import ConcatDataset, DataLoader

from dataloader_dispatch import DocumentSource, open_documents

COUNT = 40


def make(root: Path, kind: str) -> DocumentSource:
    """A source of 40 documents, most of it in two files."""
    root.mkdir()
    texts = [f"document {number} " * 50 for number in range(COUNT)]
    for half, part in enumerate((texts[:25], texts[25:])):
        table = pyarrow.table({"text": part})
        if kind == "txt":
            for number, text in enumerate(part):
                (root / f"{half}-{number:02}.txt").write_text(text)
        elif kind == "jsonl":
            (root / f"{half}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in part))
        elif kind == "parquet":
            pyarrow.parquet.write_table(table, root / f"{half}.parquet", row_group_size=7)
        else:
            with (
                pyarrow.OSFile(str(root / f"{half}.arrow"), "wb") as file,
                pyarrow.ipc.new_stream(file, table.schema) as writer,
            ):
                writer.write_table(table, max_chunksize=7)
    return open_documents(root)


# Rows of spawned workers are those of test_stream_workers.py.
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_workers_read_at_once(tmp_path: Path, method: str) -> None:
    sources = [make(tmp_path / kind, kind) for kind in ("txt", "jsonl", "parquet", "arrow")]
    # What this process has read and mapped must do no harm to those it starts.
    expected = [[source[index] for index in range(COUNT)] for source in sources]
    everything = [document for documents in expected for document in documents]

    # A class of torch: a spawned process cannot import those of a test.
    loader = DataLoader(
        ConcatDataset(sources), batch_size=None, shuffle=False, num_workers=2, multiprocessing_context=method
    )
    assert list(loader) == everything
    assert all(len(pickle.dumps(source)) < 10_000 for source in sources)
