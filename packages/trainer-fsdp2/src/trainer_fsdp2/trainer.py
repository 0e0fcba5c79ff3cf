"""The trainer for several ranks that share one model."""

from __future__ import annotations

from typing import ClassVar

from dist_env import DistributedEnvInterface
from trainer_core import Parallelism, Trainer, TrainingArguments

from .arguments import FSDP2TrainingArguments
from .parallelism import FSDP2Parallelism


class FSDP2Trainer(Trainer):
    """Trains a model of which every rank holds a part, on data that the ranks share.

    The curve is that of one process with the same global batch: per_device_train_batch_size times
    gradient_accumulation_steps times ranks. With one rank it is `trainer_core.Trainer`. Making it compares
    the arguments of all ranks, so all ranks make it together. It takes what `Trainer` takes; the arguments
    are `FSDP2TrainingArguments`, or a dict of them. Give `model_init` rather than `model`: then no rank ever
    holds the whole model.

    Raises:
        ConfigurationError: For arguments that cannot be used, or that differ between ranks, before any work.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = FSDP2TrainingArguments

    def make_parallelism(self, env: DistributedEnvInterface) -> Parallelism:
        """Sharded data parallelism over all ranks."""
        return FSDP2Parallelism(env)
