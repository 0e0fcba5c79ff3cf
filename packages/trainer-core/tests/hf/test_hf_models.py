"""Blocks, checkpointing, construction and compilation of Hugging Face models."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trainer_core import TrainingArguments
from trainer_core.errors import ConfigurationError
from trainer_core.model import (
    checkpoint_activations,
    compile_model,
    construct,
    construct_deferred,
    find_blocks,
    verify_initialised,
)

CPU = torch.device("cpu")


def llama(tied: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=37, n_positions=64, n_embd=16, n_layer=4, n_head=2))


BLOCKS = {llama: "model.layers", gpt2: "transformer.h"}


def backward(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(4)
    ids = torch.randint(0, 37, (2, 12))
    model.zero_grad()
    logits = model(input_ids=ids).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.autograd.backward(loss)
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("build", BLOCKS)
def test_blocks_are_found(build: Any) -> None:
    names = [name for name, _ in find_blocks(build(), None, needed_by="activation_checkpointing")]
    assert names == [f"{BLOCKS[build]}.{k}" for k in range(4)]


@pytest.mark.parametrize("build", BLOCKS)
@pytest.mark.parametrize("mode", ["full", "operators", "every_n"])
def test_checkpointed_blocks_run_again_with_the_same_numbers(
    build: Any, mode: str, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    plain = build().train()
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    every = 2 if mode == "every_n" else None
    args = TrainingArguments(activation_checkpointing=mode, activation_checkpointing_every=every)
    names = checkpoint_activations(model, args)
    runs: Counter[str] = Counter()
    for name, block in find_blocks(model, None, needed_by="x"):
        norm = next(iter(block.children()))
        norm.register_forward_pre_hook(lambda module, args, name=name: runs.update([name]))
    loss, gradients = backward(model)
    plain.config.use_cache = (
        False  # A cache lays keys and values out in another way, which may round otherwise.
    )
    plain_loss, plain_gradients = backward(plain)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[name], value) for name, value in plain_gradients.items())
    assert runs == {f"{BLOCKS[build]}.{k}": 1 + (f"{BLOCKS[build]}.{k}" in names) for k in range(4)}
    assert len(names) == (2 if every else 4)
    assert list(model.state_dict()) == keys
    assert model(torch.arange(5).unsqueeze(0)).past_key_values is None
    assert model.config.use_cache
    assert "cache" not in caplog.text
    assert not [w for w in recwarn if "cache" in str(w.message)]


@pytest.mark.parametrize("build", BLOCKS)
def test_generation_keeps_its_cache(build: Any) -> None:
    plain = build()
    model = copy.deepcopy(plain)
    checkpoint_activations(model, TrainingArguments(activation_checkpointing="full"))
    ids = torch.arange(5).unsqueeze(0)
    expected = plain.eval().generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert model(ids).past_key_values is not None


def test_own_switch_of_the_model_is_refused() -> None:
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable()
    with pytest.raises(ConfigurationError, match="model's own switch, gradient_checkpointing"):
        checkpoint_activations(model, TrainingArguments(activation_checkpointing="full"))


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_checkpointed_and_compiled(scope: str) -> None:
    torch._dynamo.reset()
    plain = llama()
    plain.config.attention_dropout = 0.0
    for layer in plain.model.layers:
        layer.self_attn.attention_dropout = 0.0
    model = copy.deepcopy(plain.train())
    args = TrainingArguments(
        activation_checkpointing="full",
        torch_compile=True,
        torch_compile_backend="aot_eager",
        torch_compile_scope=scope,
    )
    checkpoint_activations(model, args)
    compile_model(model, args)
    loss, gradients = backward(model)
    plain_loss, plain_gradients = backward(plain)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    for name, value in plain_gradients.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-5, atol=1e-7)
    torch._dynamo.reset()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("build", [llama, lambda: llama(tied=False), gpt2])
def test_meta_and_load_equals_default_and_load(build: Any, dtype: str | None) -> None:
    models = []
    saved = construct(build, TrainingArguments(default_dtype=dtype), CPU, weights_will_be_loaded=False)
    for where in ("default", "meta"):
        args = TrainingArguments(construct_model_on=where, default_dtype=dtype)
        model = construct(build, args, CPU, weights_will_be_loaded=True)
        model.load_state_dict(saved.state_dict())
        verify_initialised(model, saved.state_dict())
        models.append(model)
    default, meta = models
    assert_same(dict(meta.named_parameters()), dict(default.named_parameters()))
    assert_same(dict(meta.named_buffers()), dict(default.named_buffers()))
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(meta.eval()(ids).logits, default.eval()(ids).logits)
    tied = meta.get_output_embeddings().weight is meta.get_input_embeddings().weight
    assert tied == (default.get_output_embeddings().weight is default.get_input_embeddings().weight)


@pytest.mark.parametrize("build", BLOCKS)
def test_initial_values_are_computed_one_at_a_time(
    build: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Deferred construction gives the very numbers of the model, and computes rather than holds them."""
    torch.manual_seed(6)
    expected = build()
    after = torch.get_rng_state()
    torch.manual_seed(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_core.model.deferred.HELD_UNMENTIONED", 0)
        model, values = construct_deferred(build)
    assert "held in memory" not in caplog.text + capfd.readouterr().err
    assert torch.equal(torch.get_rng_state(), after)
    assert all(parameter.is_meta for parameter in model.parameters())
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter), name
    for (name, buffer), (_, theirs) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, theirs), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
