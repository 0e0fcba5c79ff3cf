"""A training loop that is small to read, exact in its numbers and resumable anywhere."""

from typing import TYPE_CHECKING

from dist_env import lazy_names

if TYPE_CHECKING:
    from .arguments import (
        BaseTrainingArguments,
        DataParallelArguments,
        MinimalTrainingArguments,
        TrainingArguments,
        run_path,
    )
    from .arguments.config import arguments_from_dict, field_docs
    from .arguments.files import load_config_file
    from .callbacks import (
        DivergenceDetector,
        EarlyStopping,
        ExternalControl,
        GradientStatistics,
        InfoCallback,
        MemorySnapshotCallback,
        MLflowCallback,
        ProfilerCallback,
        TensorBoardCallback,
        TextSamples,
        Tracker,
        WandbCallback,
        dump_on_oom,
    )
    from .checkpointing import PREVIOUS, checkpoints_in, move_aside
    from .data.loaders import (
        Batch,
        BatchLoader,
        EvalData,
        EvalMetric,
        IndexedDataset,
        PaddingCollator,
        TrainData,
        labels_of,
        to_device,
    )
    from .distributed.context import ContextParallel
    from .distributed.executor import (
        EagerExecutor,
        Executor,
        ForwardOutput,
        GradSync,
        clip_grad_norm_,
        own_part,
    )
    from .distributed.experts import ExpertParallel
    from .distributed.ranks import BatchPlacement, Ranks
    from .distributed.tensor import TensorParallel
    from .distributed.transforms import (
        BuiltModel,
        ModelTransform,
        ReplicateGradients,
        StepHooks,
        copy_weights_of_rank_0,
        saved_buffers,
    )
    from .dry_run import DryRun, no_dry_run
    from .errors import ConfigurationError, DataError
    from .generation import Sampling, generators_of_rank_0, logits_of_one_rank, share_generators
    from .hints import suggest
    from .inputs import TrainerOptions
    from .loss import (
        CausalLMLoss,
        ClassificationLoss,
        FusedLinearCrossEntropy,
        FusedLossFactory,
        MeanLoss,
        ModelLoss,
        OutputMeanLoss,
        RegressionLoss,
        TargetLoss,
        TokenLoss,
        count_next_tokens,
        ignored_like,
        is_ignored,
        loss_of,
        predict,
        with_router_loss,
    )
    from .memory_tier import LAUNCH_VARIABLE
    from .metrics.comm_bytes import Collective, CommBytes
    from .metrics.memory import RankMemory
    from .model import (
        InitialValues,
        ModelInit,
        ModelSource,
        checkpoint_activations,
        compile_model,
        construct_without_weights,
        convert_model,
        fill_parameters,
        find_blocks,
        fsdp_modules,
        is_fake,
        move_buffers,
        ordinary_tensors,
        prepare_model,
        use_sum_reduction,
    )
    from .optimization import Multiopt, build_optimizer
    from .periodic import EXIT_RESUMABLE
    from .planning import Plan, longest_sequence, margin_of, plan
    from .precision import (
        FP8_RECIPES,
        QAT_RECIPES,
        convert_qat,
        export_qat,
        export_qat_checkpoint,
        load_quantized,
        prepare_qat,
    )
    from .precision.autocast import autocast
    from .restarts import MARK_NAME, EarlierStart, find_earlier_start, may_start_again
    from .state import EVENTS, StopCause, TrainerControl, TrainerState, TrainOutput
    from .trainer import Trainer
    from .update import NonFiniteGradientError
    from .verification import Verification, VerificationCheck, check_verify_settings, verify

__all__ = [
    "LAUNCH_VARIABLE",
    "MARK_NAME",
    "EarlierStart",
    "EVENTS",
    "EXIT_RESUMABLE",
    "FP8_RECIPES",
    "PREVIOUS",
    "QAT_RECIPES",
    "BaseTrainingArguments",
    "Batch",
    "BatchLoader",
    "BatchPlacement",
    "BuiltModel",
    "CausalLMLoss",
    "ClassificationLoss",
    "Collective",
    "ConfigurationError",
    "ContextParallel",
    "DataError",
    "DataParallelArguments",
    "DivergenceDetector",
    "DryRun",
    "EagerExecutor",
    "EarlyStopping",
    "EvalData",
    "EvalMetric",
    "Executor",
    "ExpertParallel",
    "ExternalControl",
    "ForwardOutput",
    "FusedLinearCrossEntropy",
    "FusedLossFactory",
    "GradSync",
    "GradientStatistics",
    "IndexedDataset",
    "InfoCallback",
    "InitialValues",
    "MLflowCallback",
    "MeanLoss",
    "MemorySnapshotCallback",
    "MinimalTrainingArguments",
    "ModelInit",
    "ModelLoss",
    "ModelSource",
    "ModelTransform",
    "Multiopt",
    "NonFiniteGradientError",
    "OutputMeanLoss",
    "PaddingCollator",
    "Plan",
    "ProfilerCallback",
    "RankMemory",
    "Ranks",
    "RegressionLoss",
    "ReplicateGradients",
    "Sampling",
    "StepHooks",
    "StopCause",
    "TensorBoardCallback",
    "TensorParallel",
    "TextSamples",
    "TargetLoss",
    "TokenLoss",
    "Tracker",
    "CommBytes",
    "TrainData",
    "TrainOutput",
    "Trainer",
    "TrainerControl",
    "TrainerOptions",
    "TrainerState",
    "TrainingArguments",
    "Verification",
    "VerificationCheck",
    "WandbCallback",
    "use_sum_reduction",
    "arguments_from_dict",
    "autocast",
    "build_optimizer",
    "check_verify_settings",
    "checkpoint_activations",
    "checkpoints_in",
    "clip_grad_norm_",
    "compile_model",
    "construct_without_weights",
    "convert_model",
    "convert_qat",
    "copy_weights_of_rank_0",
    "count_next_tokens",
    "dump_on_oom",
    "export_qat",
    "export_qat_checkpoint",
    "field_docs",
    "fill_parameters",
    "find_blocks",
    "find_earlier_start",
    "fsdp_modules",
    "generators_of_rank_0",
    "is_fake",
    "ignored_like",
    "is_ignored",
    "labels_of",
    "load_config_file",
    "load_quantized",
    "logits_of_one_rank",
    "longest_sequence",
    "loss_of",
    "margin_of",
    "may_start_again",
    "move_aside",
    "move_buffers",
    "no_dry_run",
    "ordinary_tensors",
    "own_part",
    "plan",
    "predict",
    "prepare_model",
    "prepare_qat",
    "run_path",
    "saved_buffers",
    "share_generators",
    "suggest",
    "to_device",
    "verify",
    "with_router_loss",
]

_REPLACED = {
    "Parallelism": "ModelTransform, of which Trainer takes several: Trainer(args, parallel=[...])",
    "SingleDevice": "Trainer without parallel=[...]; for hooks of a run see StepHooks",
    "DataParallel": "ModelTransform and Ranks",
    "Scored": "ForwardOutput",
    "Traffic": "CommBytes",
    "add_up_gradients": "use_sum_reduction",
    "has_no_values": "is_fake",
    "clip_grad_norm": "clip_grad_norm_",
    "DATA_PARALLEL": "the views of trainer.ranks.meshes, such as meshes.data",
}
_HINTS = {name: f"Use {new} (see the changelog)." for name, new in _REPLACED.items()}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HINTS)
