"""A Hugging Face model through a whole life: train, evaluate, save, load elsewhere, continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_core import CausalLMLoss, ModelLoss, TokenLoss, Trainer, TrainingArguments

VOCABULARY = 53
STEPS = 24
Row = dict[str, Tensor]
Curve = list[tuple[object, object]]


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def rows(count: int, seed: int) -> list[Row]:
    """Rows of 1 to 12 tokens that mostly follow a rule; some count nothing."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        length = int(torch.randint(1, 13, (), generator=generator))
        start = int(torch.randint(1, VOCABULARY, (), generator=generator))
        ids = torch.tensor([(start + 3 * k) % VOCABULARY for k in range(length)])
        labels = torch.full_like(ids, -100) if number % 7 == 3 else ids.clone()
        made.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return made


def pad(batch: list[Row]) -> Row:
    """Pad on the right to the longest row."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: pad_sequence([row[name] for row in batch], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


class StopAt:
    """Asks for the end of the run after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
        control.should_training_stop = state.global_step == self.step  # type: ignore[attr-defined]


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> MakeTrainer:
    """Builds a trainer of a tiny Llama; `batch_size * accumulation` is 8 rows unless said otherwise."""

    def build(
        directory: str = "run",
        *,
        tied: bool = False,
        loss: TokenLoss | None = None,
        stop_at: int | None = None,
        accumulation: int = 2,
        **settings: object,
    ) -> Trainer:
        given = {
            "output_dir": str(tmp_path / directory),
            "seed": 3,
            "use_cpu": True,
            "per_device_train_batch_size": 8 // accumulation,
            "gradient_accumulation_steps": accumulation,
            "max_steps": STEPS,
            "num_train_epochs": -1,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "logging_steps": 1,
            **settings,
        }
        return Trainer(
            TrainingArguments(**given),  # type: ignore[arg-type]
            model_init=lambda: llama(tied=tied),
            train_dataset=rows(60, seed=0),
            eval_dataset=rows(20, seed=1),
            data_collator=pad,  # type: ignore[arg-type]
            compute_loss_func=loss,
            callbacks=[] if stop_at is None else [StopAt(stop_at)],
        )

    return build


def curve(trainer: Trainer) -> Curve:
    """Loss and gradient norm of every step."""
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def assert_close(found: Curve, expected: Curve) -> None:
    assert len(found) == len(expected) == STEPS
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_life_of_a_model(make: MakeTrainer, tmp_path: Path, tied: bool) -> None:
    trainer = make(tied=tied)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    points = curve(trainer)
    assert len(points) == STEPS
    assert points[-1][0] < 0.7 * points[0][0]  # type: ignore[operator]
    scores = trainer.evaluate()
    assert scores["eval_loss"] < 0.8 * before
    assert scores["eval_tokens"] == sum(int((row["labels"][1:] != -100).sum()) for row in rows(20, seed=1))

    trainer.save_model(str(tmp_path / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    model = trainer.unwrapped_model().eval()
    assert loaded.config.tie_word_embeddings == tied
    batch = pad(rows(4, seed=2))
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
        loaded_loss = sum(
            CausalLMLoss()(loaded(**one), one["labels"]) for one in map(pad, ([r] for r in rows(20, seed=1)))
        )
    assert float(loaded_loss) / scores["eval_tokens"] == pytest.approx(scores["eval_loss"], rel=1e-5)


def test_loss_of_the_model_gives_the_curve_of_ours(make: MakeTrainer) -> None:
    """Ragged microbatches: transformers divides by the tokens of each unless it is told otherwise."""
    curves = []
    for directory, accumulation, loss in (
        ("ours", 1, CausalLMLoss()),
        ("theirs", 4, ModelLoss(count=CausalLMLoss().count)),
    ):
        trainer = make(directory, accumulation=accumulation, loss=loss, dataloader_shuffle=False)
        trainer.train()
        curves.append(curve(trainer))
    assert_close(*curves)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"construct_model_on": "default"}, marks=pytest.mark.full),
        pytest.param({"construct_model_on": "meta"}, marks=pytest.mark.full),
        {"construct_model_on": "meta", "gradient_checkpointing": True, "fused_loss": "auto"},
    ],
    ids=["plain", "meta", "meta, checkpointed, fused"],
)
def test_stop_and_go_on(make: MakeTrainer, tied: bool, settings: dict[str, object]) -> None:
    whole = make("whole", tied=tied, **settings)
    whole.train()
    first = make("parts", tied=tied, stop_at=STEPS // 2, **settings)
    first.train()
    second = make("parts", tied=tied, **settings)
    second.train()
    assert second.state.session_start_step == STEPS // 2
    assert curve(second) == curve(whole)
    ends = zip(second.unwrapped_model().parameters(), whole.unwrapped_model().parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in ends)


def test_memory_savers_keep_the_curve(make: MakeTrainer) -> None:
    plain = make("plain")
    plain.train()
    saver = make("saver", gradient_checkpointing=True, fused_loss="auto")
    saver.train()
    assert_close(curve(saver), curve(plain))
