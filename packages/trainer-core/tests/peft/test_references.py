"""The losses of the recipes are those of transformers, trl, peft and loops of plain torch, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

STEPS, ROWS = 30, 8
CLOSE = 1e-4
Page = dict[str, Any]


def padded(rows: list[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
    """The batches of the recipes, padded by hand."""
    for first in range(0, STEPS * ROWS, ROWS):
        batch = rows[first : first + ROWS]
        longest = max(len(row["input_ids"]) for row in batch)
        ids, mask = torch.zeros(2, ROWS, longest, dtype=torch.int64)
        for number, row in enumerate(batch):
            ids[number, : len(row["input_ids"])] = torch.as_tensor(row["input_ids"])
            mask[number, : len(row["input_ids"])] = 1
        yield {"input_ids": ids, "attention_mask": mask}


def plain_loop(
    model: nn.Module, batches: list[dict[str, Tensor]], loss_of: Callable[..., Tensor], rate: float = 2e-3
) -> list[float]:
    """What a script without any trainer does: AdamW, with a rate that falls in a line."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    losses = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / STEPS)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=CLOSE)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_classification_and_regression(page: Page, task: str) -> None:
    texts = page["texts"]
    labels = torch.tensor([ids[0] % 3 if task == "classes" else len(ids) / 12 for ids in texts])
    batches = [
        {**batch, "labels": part}
        for batch, part in zip(padded([{"input_ids": ids} for ids in texts]), labels.split(ROWS), strict=True)
    ]
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(page["config"](num_labels=3 if task == "classes" else 1))
    assert_same(page["curves"][task], plain_loop(model, batches, own_loss))


def test_masked_language_modelling(page: Page) -> None:
    rows = [page["Masked"]()[index] for index in range(STEPS * ROWS)]
    batches = []
    for first, batch in zip(range(0, len(rows), ROWS), padded(rows), strict=True):
        labels = torch.full_like(batch["input_ids"], -100)
        for number, row in enumerate(rows[first : first + ROWS]):
            labels[number, : len(row["labels"])] = row["labels"]
        batches.append({**batch, "labels": labels})
    torch.manual_seed(1)
    assert_same(page["curves"]["masked"], plain_loop(page["bert"](), batches, own_loss))


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, counts = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["counts"]
    found = logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return -(found * counts[:, 1:]).sum() / counts[:, 1:].sum()


def answer_batches(rows: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    masks = padded([{"input_ids": row["completion_mask"]} for row in rows])
    return [{**batch, "counts": mask["input_ids"]} for batch, mask in zip(padded(rows), masks, strict=True)]


def test_lora(page: Page) -> None:
    torch.manual_seed(1)
    losses = plain_loop(page["adapted"](), answer_batches(page["answers"]), answer_loss, rate=1e-2)
    assert_same(page["curves"]["lora"], losses)


def tokenizer() -> PreTrainedTokenizerFast:
    """Trl asks for one, and the rows are tokens already."""
    words = {f"<{token}>": token for token in range(64)}
    made = Tokenizer(models.WordLevel(words, unk_token="<63>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<0>", eos_token="<62>")


class Noted:
    """Notes the losses of one of trl's trainers before they are rounded for its log."""

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        loss = super().compute_loss(*given, **more)  # type: ignore[misc]
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


class NotedSFT(Noted, SFTTrainer):
    pass


class NotedDPO(Noted, DPOTrainer):
    def _prepare_dataset(self, dataset: Dataset, *given: Any, **more: Any) -> Dataset:
        return dataset


def trl_settings(directory: Path) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "train_sampling_strategy": "sequential",
        "seed": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def test_supervised_fine_tuning(page: Page, tmp_path: Path) -> None:
    torch.manual_seed(1)
    trainer = NotedSFT(
        model=LlamaForCausalLM(page["config"]()),
        args=SFTConfig(completion_only_loss=True, **trl_settings(tmp_path)),
        train_dataset=Dataset.from_list(page["answers"]),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert_same(page["curves"]["answers"], trainer.losses)


def test_preference_tuning(page: Page, tmp_path: Path) -> None:
    rows = []
    for pair in page["preferences"]:
        sides = {}
        for side in ("chosen", "rejected"):
            ids, mask = pair[side]["input_ids"], pair[side]["completion_mask"]
            sides |= {"prompt_ids": ids[: mask.index(1)], f"{side}_ids": ids[mask.index(1) :]}
        rows.append(sides)
    base = page["base"]
    trainer = NotedDPO(
        model=LlamaForCausalLM.from_pretrained(base),
        ref_model=LlamaForCausalLM.from_pretrained(base),
        args=DPOConfig(beta=0.1, disable_dropout=False, **trl_settings(tmp_path)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert_same(page["curves"]["preferences"], trainer.losses)
