"""Trains a tiny model in one way, and tells its processor time at the end of the first step.

    python _start_worker.py WAY DIRECTORY [resume]

Each way imports what it needs itself, as a script of its own would. With `resume` it continues from the
checkpoint that a call without it has left after step 2.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

STEPS = 2
BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS = 8, 128, 320, 128, 2


class Block(nn.Module):
    """Attention and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, positions, width]."""
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.silu(self.up(self.norm_after(x))))


class Model(nn.Module):
    """A decoder of half a million parameters, in plain torch, so that no way imports another's model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary]."""
        logits: Tensor = self.head(self.layers(self.embed(input_ids)))
        return logits


class Rows(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, VOCABULARY, (64, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def told() -> None:
    """Tell the parent, once, that the first step has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {"cpu": time.process_time(), "children": children.ru_utime + children.ru_stime}
    print("FIRST " + json.dumps(figures), flush=True)


class FirstStep:
    """Tells of the first step: a callback."""

    waits = True

    def on_step_end(self, *_: object, **__: object) -> None:
        """Tell of it."""
        if self.waits:
            told()
        self.waits = False


def plain(folder: Path, resume: bool) -> None:
    """The loop that everybody writes."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    if resume:
        state = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step, batch in enumerate(DataLoader(Rows(), BATCH), start=1):
        mean_loss(model(batch["input_ids"]), batch["labels"]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            told()
        if step == STEPS:
            break
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")


def ours(folder: Path, resume: bool, **settings: Any) -> None:
    """`trainer_core.Trainer` with its default callbacks."""
    from trainer_core import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=STEPS * (1 + resume),
        per_device_train_batch_size=BATCH,
        max_grad_norm=1.0,
        use_cpu=True,
        **settings,
    )
    callbacks = [*Trainer.default_callbacks(), FirstStep()]
    Trainer(args, model_init=Model, train_dataset=Rows(), callbacks=callbacks).train()


def ours_compiled(folder: Path, resume: bool) -> None:
    """The same, compiled, with what torch keeps by itself."""
    ours(folder, resume, torch_compile=True, save_strategy="no")


def ours_cached(folder: Path, resume: bool) -> None:
    """The same, compiled, with a cache directory."""
    ours(
        folder, resume, torch_compile=True, save_strategy="no", torch_compile_cache_dir=str(folder / "cache")
    )


def accelerate(folder: Path, resume: bool) -> None:
    """Accelerate: model, optimizer and loader prepared."""
    from accelerate import Accelerator

    runtime = Accelerator(cpu=True)
    model = Model()
    model, optimizer, loader = runtime.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(Rows(), BATCH)
    )
    if resume:
        runtime.load_state(str(folder / "state"))
    for step, batch in enumerate(loader, start=1):
        runtime.backward(mean_loss(model(batch["input_ids"]), batch["labels"]))
        runtime.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            told()
        if step == STEPS:
            break
    runtime.save_state(str(folder / "state"))


def hf_trainer(folder: Path, resume: bool) -> None:
    """Hugging Face Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class First(FirstStep, TrainerCallback):
        """The same, for a trainer that calls all methods of a callback."""

    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=STEPS * (1 + resume),
        per_device_train_batch_size=BATCH,
        max_grad_norm=1.0,
        save_steps=STEPS,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )

    def loss(outputs: Tensor, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
        return mean_loss(outputs, labels)

    trainer = Trainer(Model(), args, train_dataset=Rows(), compute_loss_func=loss, callbacks=[First()])
    trainer.train(resume_from_checkpoint=resume)


def lightning(folder: Path, resume: bool) -> None:
    """Lightning Trainer, with a checkpoint at its end."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

    class Module(LightningModule):
        """The model with its loss and optimizer."""

        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            """Loss of a batch."""
            return mean_loss(self.model(batch["input_ids"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            """AdamW."""
            return torch.optim.AdamW(self.parameters())

    class First(Callback):
        """Tells of the first step."""

        waits = True

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            """Tell of it."""
            if self.waits:
                told()
            self.waits = False

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS * (1 + resume),
        gradient_clip_val=1.0,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[First()],
    )
    # The file is of this benchmark itself: Lightning's holds more than tensors.
    saved = {"ckpt_path": str(folder / "state.ckpt"), "weights_only": False} if resume else {}
    trainer.fit(Module(), DataLoader(Rows(), BATCH), **saved)
    trainer.save_checkpoint(folder / "state.ckpt")


WAYS = {
    "plain": plain,
    "ours": ours,
    "ours_compiled": ours_compiled,
    "ours_cached": ours_cached,
    "accelerate": accelerate,
    "hf_trainer": hf_trainer,
    "lightning": lightning,
}

if __name__ == "__main__":
    WAYS[sys.argv[1]](Path(sys.argv[2]), "resume" in sys.argv[3:])
