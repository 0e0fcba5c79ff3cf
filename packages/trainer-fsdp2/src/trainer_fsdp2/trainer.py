"""The trainer for several ranks that share one model."""

from __future__ import annotations

from typing import ClassVar

from trainer_core import ConfigurationError, ModelTransform, Trainer, TrainingArguments

from .arguments import FSDP2TrainingArguments
from .full_sharding import FullyShard


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

    def preset(self) -> list[ModelTransform]:
        """Shards the model over the dimension `shard`: all ranks, unless `mesh` says otherwise.

        Raises:
            ConfigurationError: If the arguments are not for this trainer.
        """
        if not isinstance(self.args, FSDP2TrainingArguments):
            raise ConfigurationError(
                "args",
                type(self.args).__name__,
                "is not the arguments class of FSDP2Trainer",
                "pass an FSDP2TrainingArguments",
            )
        return [FullyShard(self.args.fsdp2)]
