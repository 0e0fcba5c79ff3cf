"""`tokenize` with Hugging Face tokenizers; run with the extra `hf`."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dataloader_dispatch import DocumentStream, open_documents
from dataloader_dispatch.cli import main
from dataloader_dispatch.cli.parts import HuggingFaceEncoder
from dataloader_dispatch.sources.token_binary import TokenBinary

TEXTS = ["the quick brown fox", "", "jumps over the lazy dog " * 30, "ünïcode ☃", "</s>", "fox"]


def save_tokenizer(
    directory: Path, *, adds: str = "", eos: str | None = "</s>", vocabulary: int = 300
) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=adds, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos).save_pretrained(
        directory
    )
    return directory


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def tokenize(corpus: Path, out: Path, tokenizer: object, *options: object) -> int:
    fixed = ["tokenize", corpus, out, "--tokenizer", tokenizer, "--part-size", "100"]
    return main([str(one) for one in (*fixed, *(options or ("--workers", 0)))])


def test_ids_are_those_of_the_tokenizer(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer")
    assert tokenize(corpus, tmp_path / "out", directory) == 0
    said = capsys.readouterr().err
    assert "around texts" not in said
    assert "warning: the separator 1 stands 1 times in documents" in said
    source = open_documents(tmp_path / "out")
    assert isinstance(source, TokenBinary)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    found = [source[index].tolist() for index in range(len(source))]
    assert found == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
    assert found[1] == []
    assert (source.eos_token_id, source.vocabulary_size) == (1, len(theirs))
    assert source.manifest.dtype == "uint16"
    # Workers, which have the tokenizer of the command, write the same files.
    assert tokenize(corpus, tmp_path / "two", directory, "--workers", 2) == 0
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()


WITHOUT_TORCH = """
import sys
from dataloader_dispatch.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


def test_a_tokenizer_file_is_read_without_torch(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer")
    corpus = tmp_path / "large.jsonl"  # larger than what is encoded at once
    corpus.write_text(json.dumps({"text": "the quick brown fox " * 30_000}) + "\n")
    words = ["tokenize", str(corpus), str(tmp_path / "out"), "--tokenizer", str(directory), "--workers", "0"]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], check=True)
    auto = AutoTokenizer.from_pretrained(directory)
    encoder = HuggingFaceEncoder(str(directory), offline=True)
    assert type(encoder._tokenizer) is type(auto)
    assert encoder._tokenizer.backend_tokenizer.to_str() == auto.backend_tokenizer.to_str()
    expected = auto("the quick brown fox " * 30_000, add_special_tokens=False)["input_ids"]
    assert open_documents(tmp_path / "out")[0].tolist() == expected


def test_nothing_is_cut_or_padded_as_the_files_of_a_tokenizer_say(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer")
    inner = Tokenizer.from_file(str(directory / "tokenizer.json"))
    inner.enable_truncation(3)
    inner.enable_padding(length=9)
    inner.save(str(directory / "tokenizer.json"))
    encoder = HuggingFaceEncoder(str(directory), offline=True)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert max(map(len, expected)) > 9
    assert [ids.tolist() for ids in encoder.encode(TEXTS)] == expected


def test_a_model_that_encodes_by_itself_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversing(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _encode_plus(self, text: list[str], **options: object) -> object:
            turned = text[::-1] if isinstance(text, str) else [one[::-1] for one in text]
            return super()._encode_plus(turned, **options)

    directory = save_tokenizer(tmp_path / "tokenizer")
    reversing = Reversing.from_pretrained(directory)
    monkeypatch.setattr("dataloader_dispatch.cli.parts._load", lambda name, offline: reversing)
    encoder = HuggingFaceEncoder(str(directory), offline=True)
    expected = PreTrainedTokenizerFast.from_pretrained(directory).encode("dlrow", add_special_tokens=False)
    assert encoder.encode(["world"])[0].tolist() == expected


@pytest.mark.parametrize(("adds", "said"), [("$A </s>", "</s>"), ("<s> $A </s>", "<s>, </s>")])
def test_separators_of_the_tokenizer_are_left_out_and_named(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], adds: str, said: str
) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer", adds=adds)
    assert tokenize(corpus, tmp_path / "out", directory) == 0
    assert f"puts {said} around texts by itself; left out here" in capsys.readouterr().err
    plain = save_tokenizer(tmp_path / "plain")
    assert tokenize(corpus, tmp_path / "expected", plain) == 0
    source, expected = open_documents(tmp_path / "out"), open_documents(tmp_path / "expected")
    assert [source[i].tolist() for i in range(6)] == [expected[i].tolist() for i in range(6)]
    stream = DocumentStream(
        source, sequence_length=4, eos_token_id=1, shuffle=False, shards=1, pad_token_id=9999
    )
    tokens = [token for row in stream for token in row["input_ids"].tolist() if token != 9999]
    # A document that is nothing but a separator is an empty one.
    assert tokens.count(1) == 4
    assert all(pair != (1, 1) for pair in itertools.pairwise(tokens))


def test_another_tokenizer_under_the_same_name_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer")
    assert tokenize(corpus, tmp_path / "out", directory) == 0
    assert tokenize(corpus, tmp_path / "out", directory) == 0
    save_tokenizer(directory, vocabulary=310)
    assert tokenize(corpus, tmp_path / "out", directory) == 2
    assert "tokenizer_fingerprint was '" in capsys.readouterr().err


def test_a_tokenizer_without_a_separator_is_said(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize(corpus, tmp_path / "out", save_tokenizer(tmp_path / "tokenizer", eos=None)) == 0
    said = capsys.readouterr()
    assert "has no end-of-text token" in said.err
    assert "separator none" in said.out


def test_the_fingerprint_does_not_depend_on_use(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer")
    first = HuggingFaceEncoder(str(directory), offline=True)
    first._tokenizer(["a", "bb"], truncation=True, max_length=1)
    assert (
        first._digest() == first.fingerprint == HuggingFaceEncoder(str(directory), offline=True).fingerprint
    )


def test_tokenizers_that_cannot_be_loaded(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert tokenize(corpus, tmp_path / "out", tmp_path / "empty") == 2
    assert (
        "cannot be loaded: there is none in that directory, or its files are damaged"
        in capsys.readouterr().err
    )
    assert tokenize(corpus, tmp_path / "out", corpus) == 2
    assert "is a file. Name the directory" in capsys.readouterr().err
    damaged = save_tokenizer(tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{")
    assert tokenize(corpus, tmp_path / "out", damaged) == 2
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_no_path_is_looked_for_on_the_hub(corpus: Path, tmp_path: Path) -> None:
    command = ["tokenize", str(corpus), str(tmp_path / "out"), "--tokenizer", "nobody/has-this-tokenizer"]
    done = subprocess.run(
        [sys.executable, "-m", "dataloader_dispatch", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 2
    assert "no such directory here; looking for it on the Hugging Face Hub" in done.stderr
    assert "'nobody/has-this-tokenizer' cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr


def test_code_beside_a_tokenizer_is_not_run(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked whether to run it: a pipe into the command might answer."""
    monkeypatch.setattr("builtins.input", lambda text="": "y")
    directory = save_tokenizer(tmp_path / "tokenizer")
    ran = tmp_path / "ran"
    (directory / "own.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    config = directory / "tokenizer_config.json"
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **named}))
    assert tokenize(corpus, tmp_path / "out", directory) == 2
    assert "contains custom code which must be executed" in capsys.readouterr().err
    assert not ran.exists()
