"""The scenario sees documents that are left out, or come twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resilience.documents import (
    IGNORED,
    ROW,
    Passes,
    Word,
    count_passes,
    words_of,
    words_to_train_on,
    write_documents,
)

from dataloader_dispatch import DocumentStream, StreamLoader, open_documents
from llama_pretrain import ByteTokenizer

DOCUMENTS = 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_documents(tmp_path / "documents.jsonl", DOCUMENTS, seed=1)
    return tmp_path / "documents.jsonl"


def epoch_of(path: Path, epoch: int) -> list[list[int]]:
    """The targets of each batch of an epoch, as a loss sees them."""
    tokenizer = ByteTokenizer()
    rows = DocumentStream(
        open_documents(str(path)),
        sequence_length=ROW,
        encode=tokenizer.encode,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        shards=3,
        seed=2,
    )
    rows.set_epoch(epoch)
    labels = [batch["labels"] for batch in StreamLoader(rows, 4)]
    return [torch.nn.functional.pad(each[:, 1:], (0, 1), value=IGNORED).flatten().tolist() for each in labels]


def test_each_epoch_of_the_data_pipeline_has_every_word_once(path: Path) -> None:
    words = words_to_train_on(path, 0.1, 1)
    held_out = {word.document for word in words} ^ set(range(DOCUMENTS))
    assert len(held_out) == 2
    steps = dict(enumerate([words_of(batch) for epoch in (0, 1) for batch in epoch_of(path, epoch)], 1))
    every = frozenset(word for batch in steps.values() for word in batch)
    assert every > words
    assert count_passes(steps, every) == Passes(2, 0)
    last = max(steps)
    assert count_passes({step: found for step, found in steps.items() if step < last}, every) == Passes(
        1, len(every) - len(steps[last])
    )


def test_a_batch_that_is_left_out_or_repeated_is_seen(path: Path) -> None:
    batches = [words_of(batch) for epoch in (0, 1) for batch in epoch_of(path, epoch)]
    every = frozenset(word for batch in batches for word in batch)
    without = dict(enumerate(batches[:3] + batches[4:], 1))
    with pytest.raises(ValueError, match=r"comes a second time in epoch 0, in which \d+ have not come"):
        count_passes(without, every)
    twice = dict(enumerate(batches[:4] + batches[3:], 1))
    with pytest.raises(ValueError, match=r"step 5: Word\(.*\) comes a second time in epoch 0"):
        count_passes(twice, every)
    with pytest.raises(ValueError, match="is not a word to train on"):
        count_passes({1: [Word(DOCUMENTS, 0)]}, every)


def test_targets_that_are_not_whole_words_are_refused(path: Path) -> None:
    targets = epoch_of(path, 0)[0]
    with pytest.raises(ValueError, match="are not a word"):
        words_of(targets[1:] + targets[:1])
    with pytest.raises(ValueError, match="are not rows of 64"):
        words_of(targets[1:])
    masked = list(targets)
    masked[8:15] = [IGNORED] * 7
    with pytest.raises(ValueError, match="follows targets that do not count"):
        words_of(masked)


def test_targets_that_do_not_count_are_no_words(path: Path) -> None:
    targets = epoch_of(path, 0)[0]
    assert words_of([IGNORED] * ROW) == []
    assert words_of(targets + [IGNORED] * ROW) == words_of(targets)
