"""The same weights give the same logits here and in transformers; run with the extra `hf`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig as HuggingFaceConfig
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from llama_pretrain import Llama, LlamaConfig, load_pretrained, load_tokenizer, save_pretrained
from trainer_core import ConfigurationError

MakeConfig = Callable[..., LlamaConfig]
IDS = torch.randint(0, 61, (2, 100), generator=torch.Generator().manual_seed(1))


def _largest_difference(ours: Llama, theirs: LlamaForCausalLM) -> float:
    with torch.no_grad():
        return float((ours.eval()(IDS) - theirs.eval()(IDS).logits).abs().max())


@pytest.fixture(params=["grouped-untied", "grouped-tied", "full-untied"])
def config(request: pytest.FixtureRequest, small_config: MakeConfig) -> LlamaConfig:
    heads, tied = request.param.split("-")
    return small_config(
        num_key_value_heads=2 if heads == "grouped" else 6, tie_word_embeddings=tied == "tied"
    )


def test_transformers_reads_our_export(config: LlamaConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = Llama(config)
    save_pretrained(ours, tmp_path / "export")
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32
    assert _largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_we_read_what_transformers_saves(config: LlamaConfig, shard_size: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(HuggingFaceConfig.from_dict(config.to_dict()))
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    ours = load_pretrained(tmp_path)
    assert ours.config == config
    assert _largest_difference(ours, theirs) < 1e-5


def test_a_lower_dtype_is_written_and_read(
    small_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Llama(small_config())
    save_pretrained(ours, tmp_path, dtype="bfloat16")
    assert ours.lm_head.weight.dtype == torch.float32
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    with caplog.at_level(logging.ERROR):
        again = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(again.lm_head.weight, ours.lm_head.weight.bfloat16())


def test_greedy_continuations_agree(small_config: MakeConfig, tmp_path: Path) -> None:
    from llama_pretrain import generate

    torch.manual_seed(0)
    ours = Llama(small_config())
    save_pretrained(ours, tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    prompt = IDS[:1, :5]
    expected = theirs.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(ours, prompt, max_new_tokens=30, temperature=0), expected)


def test_scaling_by_the_length_of_a_row_is_refused(small_config: MakeConfig, tmp_path: Path) -> None:
    values = small_config().to_dict() | {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0}
    }
    HuggingFaceConfig.from_dict(values).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"rope_parameters.rope_type='dynamic' is not supported"):
        LlamaConfig.load(tmp_path)


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of transformers that puts special tokens around every text by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "?": 2, "one": 3, "two": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="?"
    )
    assert wrapped("one two")["input_ids"] == [0, 3, 4, 1]
    wrapped.save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def test_a_tokenizer_adds_no_special_tokens_by_itself(word_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_tokenizer))
    assert list(tokenizer.encode("one two one")) == [3, 4, 3]
    assert tokenizer.decode([0, 4, 3, 1]) == "two one"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (5, 0, 1)
    assert tokenizer.pad_token_id is None
    (tmp_path / "copy").mkdir()
    tokenizer.save_pretrained(tmp_path / "copy")
    assert list(load_tokenizer(str(tmp_path / "copy")).encode("two")) == [4]


def test_a_run_with_such_a_tokenizer(word_tokenizer: Path, tmp_path: Path) -> None:
    from llama_pretrain.cli import main

    data = tmp_path / "data"
    data.mkdir()
    for number in range(8):
        (data / f"{number}.txt").write_text("one two two one " * (20 + number))
    settings = f"--data {data} --tokenizer {word_tokenizer} --output-dir {tmp_path / 'run'} --max-steps 2"
    assert (
        main([*settings.split(), "--sequence-length", "32", "--prompt", "one", "--sample-tokens", "5"]) == 0
    )
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert theirs.config.eos_token_id == 1
    assert theirs.config.vocab_size == 64


@pytest.mark.parametrize("content", [{}, {"config.json": "{}"}])
def test_a_directory_without_tokenizer_is_named(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match="tokenizer="):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigurationError, match="neither 'byte' nor a directory"):
        load_tokenizer(str(tmp_path / "missing"))
