"""The trainer for several ranks that each hold the whole model."""

from __future__ import annotations

from typing import ClassVar

from trainer_core import ConfigurationError, ModelTransform, Trainer, TrainingArguments

from .arguments import DDPTrainingArguments
from .replicate import Replicate


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

    def preset(self) -> list[ModelTransform]:
        """Replicates the model over the dimension `replicate`: all ranks, unless `mesh` says otherwise.

        Raises:
            ConfigurationError: If the arguments are not for this trainer.
        """
        args = self.args
        if not isinstance(args, DDPTrainingArguments):
            raise ConfigurationError(
                "args", type(args).__name__, "is not for DDPTrainer", "make a DDPTrainingArguments"
            )
        modes = {"post_local_sgd": args.post_local_sgd, "diloco": args.diloco}
        return [Replicate(args.ddp, compression=args.compression, **modes)]  # type: ignore[arg-type]
