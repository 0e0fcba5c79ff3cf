"""What trains in a trial: trainer-core, and the loops and trainers that it is compared with.

Each is written as the manual of its library shows, and is loaded before memory is measured: a library that is
imported then does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from dist_env import StaticDistributedEnvironment
from trainer_core import ConfigurationError, Trainer, TrainingArguments, suggest

from ..commands.arguments import LOG_EVERY, MOST_STEPS, BenchArguments
from ..console import PROG
from ..model.config import LlamaConfig
from ..model.llama import Llama

LEARNING_RATE = 3e-4
TO_LOSS_LEARNING_RATE = 2e-3
CLIP_NORM = 1.0
Example = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one trial: AdamW with a constant rate and no decay, gradients clipped, one pass in order.

    Attributes:
        config: Shape of the model.
        examples: One per row, `input_ids` and `labels` the same; on the CPU.
        args: Batch size, precision and compilation.
        device: Where it is trained.
        directory: Where a baseline may write.
    """

    config: LlamaConfig
    examples: list[Example]
    args: BenchArguments
    device: torch.device
    directory: Path

    @classmethod
    def of(cls, config: LlamaConfig, args: BenchArguments, device: torch.device, directory: Path) -> Work:
        """The work that the settings ask for."""
        rows = total_steps(args) * args.per_device_train_batch_size
        tokens = _tokens((rows, args.sequence_length), config.vocab_size)
        examples = [{"input_ids": row, "labels": row} for row in tokens]
        return cls(config=config, examples=examples, args=args, device=device, directory=directory)

    @property
    def steps(self) -> int:
        """Optimizer steps, those of the warm-up included."""
        return total_steps(self.args)

    @property
    def batch_size(self) -> int:
        """Rows of one step."""
        return self.args.per_device_train_batch_size

    @property
    def learning_rate(self) -> float:
        """The rate of all steps; to reach a loss, that of the default run."""
        return LEARNING_RATE if self.args.to_loss is None else TO_LOSS_LEARNING_RATE

    def model(self) -> Llama:
        """A new model on the device, with the same weights each time."""
        torch.manual_seed(0)
        with self.device:
            return Llama(self.config)

    def compiled(self, model: nn.Module) -> nn.Module:
        """The model, compiled if the settings say so."""
        return cast(nn.Module, torch.compile(model)) if self.args.torch_compile else model

    def loader(self) -> DataLoader[Example]:
        """A new torch loader of the examples, in order."""
        return DataLoader(cast("Dataset[Example]", self.examples), batch_size=self.batch_size)

    @torch.no_grad()
    def loss(self, model: Llama) -> float:
        """The mean loss of the first batch, in float32."""
        rows = torch.stack([each["input_ids"] for each in self.examples[: self.batch_size]]).to(self.device)
        # By its class: Accelerate leaves a `forward` of its own, under autocast, in the object.
        return mean_loss(Llama.forward(model, rows), rows).item()


def total_steps(args: BenchArguments) -> int:
    """Optimizer steps of a trial; with `to_loss`, the most there may be."""
    return args.warm_up_steps + args.steps if args.to_loss is None else MOST_STEPS


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next token, averaged over the tokens of the batch."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _tokens(shape: tuple[int, int], vocabulary: int) -> Tensor:
    """Random ids of which low ones are frequent, so that there is something to learn within few steps."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (uniform**3 * vocabulary).long()


Train = Callable[[Work, nn.Module], object]
"""Trains a model on some work, which its second argument is left with."""
REFERENCE = "torch"
"""The baseline that the others are compared with."""
INSTALL = f"pip install '{PROG}[bench]'"


def trainer_core() -> Train:
    """Train as `llama-pretrain train` does, with the rows of this work, and without checkpoints."""

    def train(work: Work, model: nn.Module) -> None:
        args = TrainingArguments(
            output_dir=str(work.directory),
            max_steps=work.steps,
            per_device_train_batch_size=work.batch_size,
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP_NORM,
            mixed_precision=work.args.mixed_precision,
            torch_compile=work.args.torch_compile,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            resume_from_checkpoint=False,
            dataloader_shuffle=False,
        )
        environment = StaticDistributedEnvironment(device=work.device)
        Trainer(args, model=model, train_dataset=work.examples, distributed_env=environment).train()

    return train


def torch_loop() -> Train:
    """Train with the loop that everybody writes: loader, clipping, AdamW, and a line every few steps."""

    def train(work: Work, model: nn.Module) -> None:
        optimizer = AdamW(model.parameters(), lr=work.learning_rate, weight_decay=0.0, fused=True)
        compiled, total = work.compiled(model), torch.zeros((), device=work.device)
        in_bf16 = work.args.mixed_precision == "bf16"
        compiled.train()
        for step, batch in enumerate(work.loader(), start=1):
            rows = batch["input_ids"].to(work.device, non_blocking=True)
            with torch.autocast(work.device.type, torch.bfloat16, enabled=in_bf16):
                loss = mean_loss(compiled(rows), rows)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            if step % LOG_EVERY == 0:
                print(step, total.item() / LOG_EVERY, norm.item())
                total.zero_()

    return train


def accelerate() -> Train:
    """Train with Accelerate: model, optimizer and loader prepared."""
    from accelerate import Accelerator

    def train(work: Work, model: nn.Module) -> None:
        accelerator = Accelerator(
            cpu=work.device.type == "cpu",
            mixed_precision=work.args.mixed_precision,
            dynamo_backend="inductor" if work.args.torch_compile else None,
        )
        plain = AdamW(model.parameters(), lr=work.learning_rate, weight_decay=0.0, fused=True)
        prepared, optimizer, loader = accelerator.prepare(model, plain, work.loader())
        total = torch.zeros((), device=work.device)
        prepared.train()
        for step, batch in enumerate(loader, start=1):
            loss = mean_loss(prepared(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(prepared.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            if step % LOG_EVERY == 0:
                accelerator.print(step, total.item() / LOG_EVERY, norm.item())
                total.zero_()

    return train


def transformers_trainer() -> Train:
    """Train with the Trainer of transformers, its default optimizer (AdamW, fused), and lines for its bar."""
    from transformers import Trainer as TransformersTrainer
    from transformers import TrainingArguments as TransformersArguments

    def train(work: Work, model: nn.Module) -> None:
        args = TransformersArguments(
            output_dir=str(work.directory),
            max_steps=work.steps,
            per_device_train_batch_size=work.batch_size,
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP_NORM,
            bf16=work.args.mixed_precision == "bf16",
            torch_compile=work.args.torch_compile,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
            use_cpu=work.device.type == "cpu",
        )
        inner = _WithoutConfig(model)
        TransformersTrainer(inner, args, train_dataset=work.examples, compute_loss_func=_loss).train()

    return train


class _WithoutConfig(nn.Module):
    """The model without its `config`, which is frozen and which transformers would write into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of token ids."""
        logits: Tensor = self.model(input_ids)
        return logits


def _loss(outputs: Tensor, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
    return mean_loss(outputs, labels)


def lightning_trainer() -> Train:
    """Train with the Trainer of Lightning: the model in a module, the loss logged, lines for its bar."""
    from lightning import LightningModule
    from lightning import Trainer as LightningTrainer
    from lightning.pytorch.loggers import Logger

    def train(work: Work, model: nn.Module) -> None:
        in_bf16 = work.args.mixed_precision == "bf16"

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = work.compiled(model)

            def training_step(self, batch: Example, batch_index: int) -> Tensor:
                loss = mean_loss(self.model(batch["input_ids"]), batch["labels"])
                self.log("loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                # Not fused in mixed precision, where Lightning would not clip then.
                return AdamW(
                    self.model.parameters(), lr=work.learning_rate, weight_decay=0.0, fused=not in_bf16
                )

        class Lines(Logger):
            name = "lines"
            version = 0

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                print(step, metrics)

            def log_hyperparams(self, *_: object, **__: object) -> None:
                """The module has none."""

        trainer = LightningTrainer(
            accelerator="cpu" if work.device.type == "cpu" else "auto",
            devices=1,
            precision="bf16-mixed" if in_bf16 else "32-true",
            max_steps=work.steps,
            gradient_clip_val=CLIP_NORM,
            logger=Lines(),
            log_every_n_steps=LOG_EVERY,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=str(work.directory),
        )
        trainer.fit(Module(), work.loader())

    return train


@dataclass(frozen=True)
class Baseline:
    """A way to train.

    Attributes:
        name: Its name on the command line.
        label: Its name in the table.
        load: Imports its library, and returns the function that trains.
        distributions: What it needs, by their names in a package registry.
        in_bf16: What is unlike the others in mixed precision.
    """

    name: str
    label: str
    load: Callable[[], Train]
    distributions: tuple[str, ...]
    in_bf16: str = ""

    def missing(self) -> list[str]:
        """Distributions that it needs and that are not installed."""
        return [name for name in self.distributions if not _is_installed(name)]


BASELINES = {
    baseline.name: baseline
    for baseline in (
        Baseline("ours", "trainer-core", trainer_core, ("trainer-core",)),
        Baseline(REFERENCE, "plain torch loop", torch_loop, ("torch",)),
        Baseline("accelerate", "Accelerate", accelerate, ("accelerate",)),
        Baseline("hf", "Hugging Face Trainer", transformers_trainer, ("transformers", "accelerate")),
        Baseline(
            "lightning",
            "Lightning",
            lightning_trainer,
            ("lightning",),
            in_bf16="its AdamW is not fused, because Lightning does not clip gradients of a fused one then",
        ),
    )
}


def chosen(names: Sequence[str]) -> tuple[list[Baseline], list[Baseline]]:
    """Return those to run, and those that would run if they were installed.

    Args:
        names: Names of baselines; empty for all.

    Raises:
        ConfigurationError: If a name is unknown, given twice, or named and not installed.
    """
    for name in names:
        if name not in BASELINES:
            known = ", ".join(BASELINES)
            raise ConfigurationError("contenders", name, f"must be one of {known}", suggest(name, BASELINES))
        if missing := BASELINES[name].missing():
            rule = f"needs {', '.join(missing)}, which is not installed"
            raise ConfigurationError("contenders", name, rule, f"install it with `{INSTALL}`")
    if len(set(names)) < len(names):
        raise ConfigurationError("contenders", ",".join(names), "names one twice", "name each once")
    wanted = [BASELINES[name] for name in names or BASELINES]
    return [each for each in wanted if not each.missing()], [each for each in wanted if each.missing()]


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
