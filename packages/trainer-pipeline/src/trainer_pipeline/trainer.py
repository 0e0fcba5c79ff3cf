"""The trainer for ranks that have different layers of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

from torch import Tensor

from trainer_core import (
    ConfigurationError,
    ModelTransform,
    Sampling,
    Trainer,
    TrainerOptions,
    TrainingArguments,
)

from .arguments import PipelineTrainingArguments
from .generation import write_on
from .schedules import ScheduleFactory
from .splitting import ModelSplitter
from .transform import PipelineStages


class PipelineTrainer(Trainer):
    """Trains a model of which every rank has some layers: `trainer_core.Trainer` with `PipelineStages`.

    All ranks are one pipeline unless `args.mesh` says otherwise, such as "pp=2,dp=2". The curve is that of
    one process with the same global batch: per_device_train_batch_size times gradient_accumulation_steps
    times the pipelines. Making it compares the arguments of all ranks, so all ranks make it together.

    Args:
        args: The arguments, or a dict of them.
        model_splitter: Cuts the model into stages; `BlockSplitter`, as the arguments say, otherwise.
        pipe_schedule_factory: A schedule class of `torch.distributed.pipelining`, a subclass or a partial of
            one, instead of the name in the arguments.
        **options: What `Trainer` takes; `model_init` rather than `model`, since no rank ever holds the whole
            model.

    Raises:
        ConfigurationError: For arguments that cannot be used, or that differ between ranks, before any work.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = PipelineTrainingArguments

    def __init__(
        self,
        args: TrainingArguments | Mapping[str, object],
        *,
        model_splitter: ModelSplitter | None = None,
        pipe_schedule_factory: ScheduleFactory | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._splitter = model_splitter
        self._schedule = pipe_schedule_factory
        super().__init__(args, **options)

    def preset(self) -> list[ModelTransform]:
        """Stages as the arguments say.

        Raises:
            ConfigurationError: If the arguments are not for this trainer, or the schedule is not one.
        """
        if not isinstance(self.args, PipelineTrainingArguments):
            raise ConfigurationError(
                "args",
                type(self.args).__name__,
                "is not the arguments class of PipelineTrainer",
                "pass a PipelineTrainingArguments",
            )
        return [PipelineStages(self.args.pipeline, splitter=self._splitter, schedule=self._schedule)]

    def pipeline_generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        do_sample: bool = True,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        use_cache: bool = True,
    ) -> Tensor:
        """Continue texts, one token at a time, through the stages of all ranks; collective.

        Each rank keeps keys and values of its own layers, for models that take a cache: those with
        `past_key_values`, as Hugging Face's, and those with a method `make_cache(rows, positions)` whose
        result they take as `cache`. Others compute the whole text again for each token.

        Args:
            input_ids: int64 [rows, positions], the same on all ranks.
            max_new_tokens: Most tokens to add.
            eos_token_id: Ends a row; it is kept.
            pad_token_id: What fills a row up behind its end; eos_token_id otherwise.
            do_sample: Draw tokens; False: the most probable one.
            temperature: Divides the logits.
            top_k: Draw from so many most probable tokens; 0: from all.
            top_p: Draw from the fewest most probable tokens whose probabilities sum to this; 1: from all.
            repetition_penalty: Makes tokens of the text less probable; 1: leaves them.
            use_cache: Keep keys and values.

        Returns:
            int64 [rows, positions + new], the same on all ranks.

        Raises:
            ConfigurationError: If a value is out of range.
        """
        sampling = Sampling(
            temperature=temperature if do_sample else 0.0,
            top_k=top_k or None,
            top_p=None if top_p == 1 else top_p,
            repetition_penalty=repetition_penalty,
        )
        with self.ranks.lost_rank_errors("generating"), self.generating():
            return write_on(
                self.unwrapped_model(),
                input_ids.to(self.ranks.device),
                sampling,
                max_new_tokens=max_new_tokens,
                eos_token_id=eos_token_id,
                pad_token_id=pad_token_id,
                use_cache=use_cache,
            )
