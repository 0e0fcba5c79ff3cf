"""Losses: each a sum and a count, so that it can be averaged over any set of tokens exactly."""

from dataloader_dispatch import ignored_like, is_ignored

from .choice import LossSettings, check_loss, loss_of
from .fused import FusedLinearCrossEntropy, HiddenStates
from .head import FusedLossFactory, HiddenStatesLoss
from .model_loss import MeanLoss, ModelLoss, OutputMeanLoss
from .supervised import ClassificationLoss, RegressionLoss
from .token_loss import (
    IGNORE_INDEX,
    CausalLMLoss,
    TokenLoss,
    count_next_tokens,
    logits_of,
    loss_denominator,
    predict,
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
    "OutputMeanLoss",
    "RegressionLoss",
    "TokenLoss",
    "check_loss",
    "count_next_tokens",
    "ignored_like",
    "is_ignored",
    "logits_of",
    "loss_denominator",
    "loss_of",
    "predict",
]
