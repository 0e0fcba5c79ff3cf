"""The default corpus, its division into training and evaluation, and tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dataloader_dispatch import DataError, StreamLoader
from dist_env import StaticDistributedEnvironment
from llama_pretrain import ByteTokenizer, PretrainArguments, Tokenizer, load_tokenizer
from llama_pretrain.data import evaluation_loader, open_data, split_data, standard_library, training_loader
from trainer_core import ConfigurationError


def test_the_standard_library_is_found_without_tests_and_packages() -> None:
    source = standard_library()
    assert len(source) > 300
    places = [str(source.where(index)) for index in range(len(source))]
    assert all(place.endswith(".py") for place in places)
    parts = {part for place in places for part in Path(place).parts}
    assert not parts & {"site-packages", "dist-packages", "test", "tests"}
    assert any(place.endswith("argparse.py") for place in places)


def _write(directory: Path, count: int) -> PretrainArguments:
    for number in range(count):
        (directory / f"{number:02d}.txt").write_text(f"document {number}: " + "word " * (5 * number + 40))
    return PretrainArguments(data=str(directory), sequence_length=32, held_out=0.25, seed=3)


def test_no_document_is_on_both_sides(tmp_path: Path) -> None:
    args = _write(tmp_path, 12)
    train, held_out = split_data(open_data(args), args)
    assert held_out is not None
    texts = [train[i] for i in range(len(train))], [held_out[i] for i in range(len(held_out))]
    assert (len(texts[0]), len(texts[1])) == (9, 3)
    assert len({*texts[0], *texts[1]}) == 12


def test_every_byte_and_one_separator_per_document_comes_once(tmp_path: Path) -> None:
    args = replace(_write(tmp_path, 12), shards=1)
    documents = open_data(args)
    loader = training_loader(documents, ByteTokenizer(), args)
    kept = torch.cat([batch["labels"].flatten() for batch in loader])
    kept = kept[kept != -100]
    texts = [documents[i] for i in range(12)]
    assert len(kept) == sum(len(text) + 1 for text in texts)
    assert int((kept == 257).sum()) == 12
    parts = bytes(i if i < 256 else 0 for i in kept.tolist()).split(b"\0")
    assert sorted(parts) == sorted([text.encode() for text in texts] + [b""])


def test_evaluation_rows_are_the_same_each_time(tmp_path: Path) -> None:
    args = _write(tmp_path, 12)
    documents = open_data(args)
    first, second = (
        [batch["input_ids"] for batch in evaluation_loader(documents, ByteTokenizer(), args)]
        for _ in range(2)
    )
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_as_many_rows_are_evaluated_as_asked_for_whatever_the_ranks(tmp_path: Path) -> None:
    args = replace(_write(tmp_path, 40), shards=4, trainer="ddp", dispatch_batches=False)
    everything = _rows_of(
        evaluation_loader, replace(args, max_eval_samples=None), StaticDistributedEnvironment()
    )
    few = replace(args, max_eval_samples=7)
    first = _rows_of(evaluation_loader, few, StaticDistributedEnvironment())
    assert first == everything[:7]
    assert len(everything) > 7
    shares = [
        _rows_of(evaluation_loader, few, StaticDistributedEnvironment(rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert sorted(shares[0] + shares[1]) == sorted(first)
    by_steps = replace(few, max_eval_samples=512, max_eval_steps=1)
    assert _rows_of(evaluation_loader, by_steps, StaticDistributedEnvironment()) == everything
    with pytest.raises(ConfigurationError, match="max_eval_samples=7 has no effect beside max_eval_steps=1"):
        replace(few, max_eval_steps=1).check()
    with pytest.raises(ConfigurationError, match="max_eval_samples=0 must be at least 1, or none"):
        replace(args, max_eval_samples=0).check()


def test_ranks_that_read_by_themselves_share_the_rows(tmp_path: Path) -> None:
    dispatched = replace(_write(tmp_path, 12), shards=4, trainer="ddp")
    own = replace(dispatched, dispatch_batches=False)
    ranks = [StaticDistributedEnvironment(rank=rank, world_size=2) for rank in range(2)]
    for make in (training_loader, evaluation_loader):
        whole = _rows_of(make, dispatched, ranks[1])
        shares = [_rows_of(make, own, rank) for rank in ranks]
        assert all(shares)
        assert sorted(shares[0] + shares[1]) == sorted(whole)
    divided = replace(own, mesh="shard=2,tp=2", trainer="fsdp2")
    pairs = [StaticDistributedEnvironment(rank=rank, world_size=4) for rank in range(4)]
    found = [_rows_of(training_loader, divided, env) for env in pairs]
    shares = [_rows_of(training_loader, own, rank) for rank in ranks]
    assert found == [shares[0], shares[0], shares[1], shares[1]]
    mixed = replace(own, dispatch_eval_batches=True)
    assert _rows_of(evaluation_loader, mixed, ranks[1]) == _rows_of(evaluation_loader, dispatched, ranks[1])


def _rows_of(make: Callable[..., StreamLoader], args: PretrainArguments, env: object) -> list[list[int]]:
    loader = make(open_data(args), ByteTokenizer(), args, env)
    return [row for batch in loader for row in batch["labels"].tolist()]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    args = _write(tmp_path, 3)
    (tmp_path / "odd.txt").write_bytes(b"caf\xe9 " * 30)
    with pytest.raises(DataError, match=r"odd\.txt: not UTF-8"):
        list(training_loader(open_data(args), ByteTokenizer(), args))
    replaced = PretrainArguments(data=str(tmp_path), sequence_length=32, undecodable="replace")
    rows = torch.cat(
        [b["input_ids"] for b in training_loader(open_data(replaced), ByteTokenizer(), replaced)]
    )
    assert "caf\ufffd" in ByteTokenizer().decode(rows.flatten().tolist())


@pytest.mark.parametrize("text", ["", "plain", "naïve ≤ 1\n\t🦙", "\x00\x7f"])
def test_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = list(tokenizer.encode(text))
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_ids_are_left_out_of_text_and_broken_bytes_show() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 104, 105, 257, 258]) == "hi"
    assert tokenizer.decode([0xC3, 104]) == "\ufffdh"
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert special == set(range(256, tokenizer.vocab_size))


def test_it_is_saved_and_found_again(tmp_path: Path) -> None:
    assert isinstance(ByteTokenizer(), Tokenizer)
    with pytest.raises(ConfigurationError, match=r"byte_tokenizer\.json"):
        ByteTokenizer.from_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    assert isinstance(ByteTokenizer.from_pretrained(tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)
