"""Makes token ids of JSON lines by one contender, as its documentation advises, with a number of processes.

    python _tokenizing_worker.py CONTENDER CORPUS OUT TOKENIZER WORKERS

It runs in the environment of the others, and imports nothing of this repository. All leave out separators.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK_DOCUMENTS = 32
_loaded: dict[str, Any] = {}


def _tokenizer(place: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, local_files_only=True)


def datasets(corpus: Path, out: Path, place: str, workers: int) -> None:
    """`datasets.map` of batches, into Arrow files."""
    from datasets import load_dataset

    tokenizer = _tokenizer(place)
    files = sorted(map(str, corpus.glob("*.jsonl")))
    read = load_dataset("json", data_files=files, split="train", cache_dir=str(out))
    read.map(
        lambda batch: {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        num_proc=workers if workers > 1 else None,
        remove_columns=read.column_names,
    )


def datatrove(corpus: Path, out: Path, place: str, workers: int) -> None:
    """A reader and a `DocumentTokenizer`, with one task for each worker."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(corpus), glob_pattern="*.jsonl"),
            DocumentTokenizer(str(out / "tokens"), f"{place}/tokenizer.json", shuffle_documents=False),
        ],
        tasks=workers,
        workers=workers,
        logging_dir=str(out / "logs"),
    ).run()


def megatron(corpus: Path, out: Path, place: str, workers: int) -> None:
    """A pool that encodes lines, and this process, which writes: as `preprocess_data.py` of Megatron-LM."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    vocabulary = len(_tokenizer(place))
    builder = IndexedDatasetBuilder(str(out / "text.bin"), dtype=DType.optimal_dtype(vocabulary))
    with multiprocessing.Pool(workers, _load, (place,)) as pool:
        for ids in pool.imap(_encode, _lines(corpus), _CHUNK_DOCUMENTS):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
    builder.finalize(str(out / "text.idx"))


def _load(place: str) -> None:
    _loaded["tokenizer"] = _tokenizer(place)


def _encode(line: str) -> list[int]:
    ids: list[int] = _loaded["tokenizer"](json.loads(line)["text"], add_special_tokens=False)["input_ids"]
    return ids


def _lines(corpus: Path) -> Iterator[str]:
    for path in sorted(corpus.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            yield from lines


if __name__ == "__main__":
    contender, corpus, out, place, workers = sys.argv[1:]
    contenders = {"datasets": datasets, "datatrove": datatrove, "megatron": megatron}
    contenders[contender](Path(corpus), Path(out), place, int(workers))
