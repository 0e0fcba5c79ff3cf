"""The trainer for several ranks that each hold the whole model."""

from __future__ import annotations

from typing import ClassVar

from dist_env import DistributedEnvInterface
from trainer_core import Parallelism, Trainer, TrainingArguments

from .arguments import DDPTrainingArguments
from .parallelism import DDPParallelism


class DDPTrainer(Trainer):
    """Trains a model that every rank holds, on data that the ranks share.

    The curve is that of one process with the same global batch: per_device_train_batch_size times
    gradient_accumulation_steps times ranks. With one rank it is `trainer_core.Trainer`. Making it compares
    the arguments of all ranks, so all ranks make it together. It takes what `Trainer` takes; the arguments
    are `DDPTrainingArguments`, or a dict of them.

    Raises:
        ConfigurationError: For arguments that cannot be used, or that differ between ranks, before any work.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = DDPTrainingArguments

    def make_parallelism(self, env: DistributedEnvInterface) -> Parallelism:
        """Data parallelism over all ranks."""
        return DDPParallelism(env)
