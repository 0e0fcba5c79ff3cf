"""Hugging Face tokenizers give a text in pieces the tokens of the whole; run with the extra `hf`."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dataloader_dispatch import DocumentStream, documents
from dataloader_dispatch.document_encoder import DocumentEncoder

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))
WORDS = [
    "the",
    "quick",
    "brown fox",
    "12345",
    "7.50",
    "don't",
    "naïve",
    "日本語の文",
    "end.",
    "(x)",
    "e\u0301",
    "</s>",
]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def text_of(chance: random.Random, words: int) -> str:
    joints = [" "] * 9 + ["\n", "  ", "\n\n", " \n", "\t"]
    return "".join(chance.choice(WORDS) + chance.choice(joints) for _ in range(words))


def split(pattern: str) -> Any:
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# Name: model, normalizer, pre-tokenizer, tokens put around, whether words are known to be apart.
KINDS: dict[str, tuple[str, Any, Any, str, bool]] = {
    "gpt2": ("BPE", None, pre_tokenizers.ByteLevel(add_prefix_space=False), "$A", True),
    "gpt2 with a space before": ("BPE", None, pre_tokenizers.ByteLevel(add_prefix_space=True), "$A", True),
    "llama 3": ("BPE", None, split(LLAMA), "<s> $A", True),
    "qwen": ("BPE", normalizers.NFC(), split(LLAMA), "$A", True),
    "bert": (
        "WordPiece",
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        "<s> $A </s>",
        True,
    ),
    "t5": ("Unigram", normalizers.NFKC(), pre_tokenizers.Metaspace(), "$A </s>", True),
    "metaspace first": ("BPE", None, pre_tokenizers.Metaspace(prepend_scheme="first"), "$A", True),
    "llama 2": (
        "BPE",
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        "<s> $A",
        False,
    ),
    "lines": ("BPE", None, pre_tokenizers.Split("\n", "isolated"), "$A", False),
}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    model, normalizer, pre_tokenizer, template, _ = KINDS[kind]
    unknown = {} if model == "Unigram" else {"unk_token": "<unk>"}
    tokenizer = Tokenizer(getattr(models, model)(**unknown))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    special: dict[str, Any] = {"special_tokens": ["<s>", "</s>", "<unk>"], "show_progress": False}
    if model == "Unigram":
        special["unk_token"] = "<unk>"
    tokenizer.train_from_iterator(
        [text_of(random.Random(seed), 200) for seed in range(10)],
        getattr(trainers, f"{model.replace('BPE', 'Bpe')}Trainer")(vocab_size=400, **special),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("kind", list(KINDS))
def test_pieces_have_the_tokens_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, known = tokenizer_of(kind), KINDS[kind][-1]
    monkeypatch.setattr(documents, "PIECE", 300)
    monkeypatch.setattr(documents, "_WINDOW", 40)
    assert documents.text_unit_of(tokenizer.encode, None) == ("word" if known else "document")
    cut = 0
    for seed in range(8 * EXAMPLES):
        text = text_of(random.Random(f"{kind} {seed}"), 200)
        found = list(DocumentEncoder([text], tokenizer.encode, None)(0))
        assert [token for piece in found for token in piece.tokens.tolist()] == tokenizer.encode(text)
        for piece in found[1:]:
            ahead = next(DocumentEncoder([text], tokenizer.encode, None)(0, piece.start, piece.before))
            assert ahead.tokens.equal(piece.tokens)
        cut += len(found) > 1
    assert (cut > 5 * EXAMPLES) == known


def test_a_tokenizer_that_cuts_texts_off_is_not_given_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("gpt2")
    monkeypatch.setattr(documents, "PIECE", 300)
    text = text_of(random.Random(0), 300)
    stream = DocumentStream(
        [text],
        sequence_length=8,
        encode=lambda text: tokenizer.encode(text, truncation=True, max_length=60),
        text_unit="word",
        eos_token_id=None,
    )
    found = [token for row in stream for token in row["labels"].tolist() if token != -100]
    assert found == tokenizer.encode(text)[:60]
