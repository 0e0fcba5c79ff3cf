"""The loss of a run, from its arguments and what the user gave."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from dist_env import ParallelLayout

from ..errors import ConfigurationError
from .fused import FusedLinearCrossEntropy, check_terms
from .head import FusedLossFactory, bare, hidden_states_loss, output_head
from .token_loss import CausalLMLoss, TokenLoss, takes_targets


class LossSettings(Protocol):
    """The arguments that choose a loss."""

    @property
    def label_smoothing(self) -> float:
        """Share of the target mass spread evenly over the vocabulary, 0 to 1."""

    @property
    def z_loss(self) -> float:
        """Weight of the squared log-partition term."""

    @property
    def fused_loss(self) -> str:
        """no, auto, torch, chunked, liger or cut."""


def check_loss(args: LossSettings, given: object, fused_factory: object = None) -> None:
    """Refuse a loss that is not a sum and count, and arguments that have no effect beside it.

    Needs no model, so it can be called before there is one.

    Args:
        args: Label smoothing, z-loss and fused loss.
        given: The user's loss, or None.
        fused_factory: The user's factory of a loss on hidden states, or None.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if given is not None and fused_factory is not None:
        raise ConfigurationError(
            "fused_loss_factory",
            fused_factory,
            "cannot be given together with compute_loss_func",
            "give only one of them",
        )
    if given is None and fused_factory is None:
        if args.fused_loss != "no":
            check_terms(args.fused_loss, label_smoothing=args.label_smoothing, z_loss=args.z_loss)
        return
    if given is None:
        _refuse_settings(args, "fused_loss_factory")
        return
    if not callable(given) or not callable(getattr(given, "count", None)):
        raise ConfigurationError(
            "compute_loss_func",
            given,
            "must return a sum, and tell how many positions count",
            "give ClassificationLoss() or RegressionLoss(), or wrap a loss that returns a mean: "
            "MeanLoss(function, count), or OutputMeanLoss(function, count) for the model's whole output",
        )
    _refuse_settings(args, "compute_loss_func")


def check_takes_targets(loss: TokenLoss, layout: ParallelLayout) -> None:
    """Refuse a loss that needs whole rows of labels where rows are cut.

    Raises:
        ConfigurationError: Naming the loss and the layout.
    """
    if layout.context > 1 and not takes_targets(loss):
        raise ConfigurationError(
            "compute_loss_func",
            type(loss).__name__,
            f"takes labels as the data has them, but {layout} cuts each row into parts, between which "
            "targets would be lost",
            "give it make_targets(labels) and on_targets(predictions, targets), or train without cp",
        )


def _refuse_settings(args: LossSettings, beside: str) -> None:
    defaults: dict[str, object] = {"label_smoothing": 0.0, "z_loss": 0.0, "fused_loss": "no"}
    for name, default in defaults.items():
        value = getattr(args, name)
        if value != default:
            raise ConfigurationError(
                name,
                value,
                f"has no effect together with {beside}, which is computed as given",
                f"leave {name} out, or leave {beside} out",
            )


def loss_of(
    args: LossSettings,
    model: nn.Module,
    given: TokenLoss | None = None,
    fused_factory: FusedLossFactory | None = None,
) -> TokenLoss:
    """The loss to train with.

    Call it after the model's layers have been converted (FP8, QAT) and before it is compiled or wrapped.

    Args:
        args: Label smoothing, z-loss and fused loss.
        model: Names its output head, if the loss is to be fused.
        given: The user's loss, which goes first.
        fused_factory: Makes a loss on hidden states from the output head.

    Raises:
        ConfigurationError: If settings contradict each other, or the loss cannot be fused with this model.
    """
    check_loss(args, given, fused_factory)
    if given is not None:
        return given
    if fused_factory is not None:
        return hidden_states_loss(output_head(model), fused_factory)
    _refuse_other_tasks(bare(model))
    if args.fused_loss == "no":
        return CausalLMLoss(label_smoothing=args.label_smoothing, z_loss=args.z_loss)
    return FusedLinearCrossEntropy(
        output_head(model),
        backend=args.fused_loss,
        label_smoothing=args.label_smoothing,
        z_loss=args.z_loss,
    )


def _refuse_other_tasks(model: nn.Module) -> None:
    """Refuse the default loss for a model of Hugging Face whose own loss does not predict the next token.

    Those for masked words or for classes of tokens have logits and labels of the same shapes, and would be
    trained on labels that are shifted by one.
    """
    kind = getattr(model, "loss_type", None)  # set by transformers 4.46 and later, from the name of the class
    translates = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
    other = isinstance(kind, str) and kind not in ("ForCausalLM", "ForConditionalGeneration")
    if other or translates:
        raise ConfigurationError(
            "compute_loss_func",
            None,
            f"means the default loss, which predicts the next token, but {type(model).__name__} does not: "
            "its labels are not shifted",
            "give ClassificationLoss() if each label is the class of the logits at its place, as for masked "
            "words, RegressionLoss() for numbers, or ModelLoss(count=lambda labels: (labels != -100).sum()) "
            "for the loss of the model itself",
        )
