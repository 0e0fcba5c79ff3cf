"""The losses over a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from trainer_core import ClassificationLoss, ConfigurationError, TrainingArguments
from trainer_core.loss import (
    CausalLMLoss,
    FusedLinearCrossEntropy,
    ModelLoss,
    count_next_tokens,
    loss_of,
    predict,
)
from trainer_core.loss.head import output_head


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return GPT2LMHeadModel(config).eval()


MODELS = {"llama": lambda: llama(tied=False), "llama, tied": lambda: llama(tied=True), "gpt2": gpt2}


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 61, (3, 11), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, 6:] = labels[1] = labels[2, 0] = -100
    return ids, labels


def step(loss: object, model: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    ids, labels = batch()
    model.zero_grad()
    total = loss(predict(loss, model, {"input_ids": ids}, labels), labels)  # type: ignore[operator, arg-type]
    (total / count_next_tokens(labels)).backward()
    return total.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# One is compiled: what the compiler is given does not depend on where the head stands.
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in MODELS),
        *(pytest.param(name, True, marks=() if "tied" in name else pytest.mark.full) for name in MODELS),
    ],
)
def test_fused_loss(name: str, compiled: bool) -> None:
    model = MODELS[name]()
    expected = step(CausalLMLoss(), model)
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    fused = FusedLinearCrossEntropy(output_head(model), chunk_tokens=8)
    for _ in range(2):
        torch.testing.assert_close(step(fused, model), expected, rtol=1e-5, atol=1e-6)
    ids, _ = batch()
    assert model(ids).logits.shape == (3, 11, 61)


@pytest.mark.parametrize("name", MODELS)
def test_loss_of_the_model(name: str) -> None:
    model = MODELS[name]()
    torch.testing.assert_close(
        step(ModelLoss(count=count_next_tokens), model), step(CausalLMLoss(), model), rtol=1e-5, atol=1e-6
    )


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BERT = BertConfig(vocab_size=61, max_position_embeddings=16, **SMALL)
T5 = T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)


@pytest.mark.parametrize(
    "build",
    [
        lambda: BertForMaskedLM(BERT),
        lambda: BertForTokenClassification(BERT),
        lambda: BertForSequenceClassification(BERT),
        lambda: T5ForConditionalGeneration(T5),
    ],
    ids=["masked words", "classes of tokens", "classes", "translation"],
)
def test_a_model_that_does_not_predict_the_next_token_needs_another_loss(
    build: Callable[[], PreTrainedModel],
) -> None:
    """Their labels would be shifted by one, where shapes are the same."""
    model = build()
    with pytest.raises(ConfigurationError, match=rf"{type(model).__name__} does not.*ClassificationLoss"):
        loss_of(TrainingArguments(output_dir="unused"), model)


@pytest.mark.parametrize("build", [gpt2, lambda: llama(tied=False)])
def test_models_that_predict_the_next_token_do_not(build: Callable[[], PreTrainedModel]) -> None:
    assert isinstance(loss_of(TrainingArguments(output_dir="unused"), build()), CausalLMLoss)


def test_masked_words_are_classes() -> None:
    model = BertForMaskedLM(BERT).eval()
    ids, labels = batch()
    loss = ClassificationLoss()
    ours = loss(predict(loss, model, {"input_ids": ids}, labels), labels) / loss.count(labels)
    torch.testing.assert_close(ours, model(input_ids=ids, labels=labels).loss)
