"""Models of Hugging Face make no key-value cache while they train; generation has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from trainer_core import Trainer, TrainingArguments


def llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def rows() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 37, (8, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def test_packed_documents_do_not_attend_to_one_another_in_evaluation(tmp_path: Path) -> None:
    """With a cache, which transformers makes unless told otherwise, it takes them for one document."""
    documents = [row["input_ids"] for row in rows()[:3]]
    packed = torch.cat(documents)
    labels = packed.clone()
    labels[::12] = -100  # the first of a document is not predicted in a row of its own either
    positions = torch.arange(12).repeat(3)
    scored = []
    for data in (
        [{"input_ids": packed, "labels": labels, "position_ids": positions}],
        [{"input_ids": each, "labels": each.clone()} for each in documents],
    ):
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=1)
        scored.append(Trainer(args, model=llama(2), eval_dataset=data).evaluate())
    assert scored[0]["eval_tokens"] == scored[1]["eval_tokens"] == 33
    assert scored[0]["eval_loss"] == pytest.approx(scored[1]["eval_loss"], rel=1e-6)


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def trainer_of(tmp_path: Path) -> MakeTrainer:
    def make(model: LlamaForCausalLM, callbacks: list[object] | None = None, **settings: object) -> Trainer:
        given = {
            "output_dir": str(tmp_path),
            "max_steps": 3,
            "num_train_epochs": -1,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
        } | settings
        return Trainer(
            TrainingArguments(**given),  # type: ignore[arg-type]
            model=model,
            train_dataset=rows(),
            callbacks=callbacks or [],
        )

    return make


class Caches:
    """Notes the cache of every output of a model, by whether it was training."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.seen: list[tuple[bool, object]] = []
        model.register_forward_hook(self._note)

    def _note(self, model: LlamaForCausalLM, args: object, outputs: object) -> None:
        self.seen.append((model.training, getattr(outputs, "past_key_values", None)))


def test_blocks_beyond_the_compilers_limit_are_compiled_once(trainer_of: MakeTrainer) -> None:
    torch._dynamo.reset()
    trainer = trainer_of(
        llama(12),
        torch_compile=True,
        torch_compile_backend="aot_eager",
        torch_compile_scope="blocks",
    )
    trainer.train()
    torch._dynamo.reset()
    recompiles = [entry["recompiles"] for entry in trainer.state.log_history if "recompiles" in entry]
    assert recompiles == [0, 0, 0]


@pytest.mark.parametrize("mode", ["no", "full"])
def test_training_makes_no_cache_and_generation_keeps_its_own(trainer_of: MakeTrainer, mode: str) -> None:
    model = llama(2)
    trainer = trainer_of(model, activation_checkpointing=mode)
    caches = Caches(model)
    trainer.train()
    assert [training for training, _ in caches.seen] == [True] * 3
    assert {cache for _, cache in caches.seen} == {None}
    assert model.config.use_cache
    caches.seen.clear()
    model.eval()
    ids = rows()[0]["input_ids"][None]
    cached = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert all(isinstance(cache, DynamicCache) for _, cache in caches.seen)
    uncached = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(cached, uncached)


def test_generation_inside_a_training_step_keeps_its_cache(trainer_of: MakeTrainer) -> None:
    class Sample:
        def on_step_end(
            self, args: object, state: object, control: object, *, model: LlamaForCausalLM, **_: object
        ) -> None:
            model.generate(rows()[0]["input_ids"][None], max_new_tokens=2, do_sample=False, pad_token_id=0)

    model = llama(2)
    caches = Caches(model)
    trainer_of(model, [Sample()], max_steps=1).train()
    assert [type(cache) for _, cache in caches.seen] == [type(None), DynamicCache, DynamicCache]
