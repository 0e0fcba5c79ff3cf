"""Losses: each a sum and a count, so that it can be averaged over any set of tokens exactly."""

from dataloader_dispatch import ignored_like, is_ignored

from .choice import LossSettings, check_loss, check_takes_targets, loss_of
from .fused import FusedLinearCrossEntropy, HiddenStates
from .head import FusedLossFactory, HiddenStatesLoss
from .model_loss import MeanLoss, ModelLoss, OutputMeanLoss
from .routers import (
    RoutedLoss,
    RoutedTargets,
    RouterLosses,
    RouterShape,
    RowParts,
    is_router,
    router_shape,
    row_balance,
    widest,
    with_router_loss,
)
from .supervised import ClassificationLoss, RegressionLoss
from .token_loss import (
    IGNORE_INDEX,
    CausalLMLoss,
    OnTargets,
    TargetLoss,
    TokenLoss,
    count_next_tokens,
    logits_of,
    loss_denominator,
    predict,
    takes_targets,
)

__all__ = [
    "IGNORE_INDEX",
    "CausalLMLoss",
    "ClassificationLoss",
    "FusedLinearCrossEntropy",
    "FusedLossFactory",
    "HiddenStates",
    "HiddenStatesLoss",
    "LossSettings",
    "MeanLoss",
    "ModelLoss",
    "OnTargets",
    "OutputMeanLoss",
    "RegressionLoss",
    "RoutedLoss",
    "RoutedTargets",
    "RouterLosses",
    "RouterShape",
    "TargetLoss",
    "TokenLoss",
    "check_loss",
    "check_takes_targets",
    "count_next_tokens",
    "ignored_like",
    "is_ignored",
    "is_router",
    "logits_of",
    "loss_denominator",
    "loss_of",
    "predict",
    "router_shape",
    "RowParts",
    "row_balance",
    "takes_targets",
    "widest",
    "with_router_loss",
]
