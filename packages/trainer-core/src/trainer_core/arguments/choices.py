"""Names that settings choose among: schedules with their options, trackers, FP8 and QAT recipes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigurationError
from ..hints import suggest
from . import rules

_COSINE_FLOOR = ("num_cycles", "min_lr", "min_lr_rate")

SCHEDULES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "reduce_lr_on_plateau": (
        "metric",
        "mode",
        "factor",
        "patience",
        "threshold",
        "threshold_mode",
        "cooldown",
        "min_lr",
        "eps",
    ),
    "cosine_with_min_lr": _COSINE_FLOOR,
    "cosine_warmup_with_min_lr": (*_COSINE_FLOOR, "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""Names of the learning-rate schedules, with the options of each: those of transformers, and `metric`."""

DEFAULT_MIN_LR_RATE = 0.1
"""Floor of the two cosines with a floor, as a share of the learning rate, when no option gives it."""

WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau")
"""Schedules on which `warmup_steps` has no effect."""

WITHOUT_TOTAL = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau")
"""Schedules that need not know where the run ends; warmup_stable_decay neither, with num_stable_steps."""

RAMPS = ("linear", "cosine", "1-sqrt")
"""Shapes of the warm-up and of the decay of warmup_stable_decay."""


OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "eps", "adjust_lr_fn"),
    "schedule_free_adamw": ("r", "weight_lr_power"),
}
"""Names of the built-in optimizers, with the options of each that no argument of its own gives."""

SCHEDULE_FREE = ("", "constant", "constant_with_warmup")
"""What `lr_scheduler_type` may be with schedule_free_adamw, which has the warm-up itself."""


@dataclass(frozen=True)
class _Range:
    """Numbers from `low` to `high`; the ends belong to it unless it is open there."""

    low: float
    high: float = 1e9
    whole: bool = False
    open: bool = False

    def check(self, setting: str, value: object) -> None:
        if self.whole:
            rules.at_least(setting, value, int(self.low))
            return
        rules.within(setting, value, self.low, self.high)
        if self.open and value in (self.low, self.high):
            raise ConfigurationError(
                setting,
                value,
                f"must be between {self.low:g} and {self.high:g}, both excluded",
                f"choose a value between them, such as {self.low + 0.5:g}",
            )


_SHARE = _Range(0.0, 1.0)
_RULES: dict[str, _Range | tuple[str | bool, ...]] = {
    "lr": _Range(0.0, 1e3),
    "weight_decay": _Range(0.0, 1e3),
    "momentum": _SHARE,
    "nesterov": (True, False),
    "ns_steps": _Range(1, whole=True),
    "adjust_lr_fn": ("original", "match_rms_adamw"),
    "r": _Range(0.0),
    "weight_lr_power": _Range(0.0),
    "num_cycles": _Range(0.0, open=True),
    "lr_end": _Range(0.0),
    "power": _Range(0.0, open=True),
    "timescale": _Range(1, whole=True),
    "mode": ("min", "max"),
    "factor": _Range(0.0, 1.0, open=True),
    "patience": _Range(0, whole=True),
    "threshold": _Range(0.0),
    "threshold_mode": ("rel", "abs"),
    "cooldown": _Range(0, whole=True),
    "eps": _Range(0.0),
    "min_lr": _Range(0.0),
    "min_lr_rate": _SHARE,
    "warmup_lr_rate": _SHARE,
    "num_decay_steps": _Range(0, whole=True),
    "num_stable_steps": _Range(0, whole=True),
    "warmup_type": RAMPS,
    "decay_type": RAMPS,
    "min_lr_ratio": _SHARE,
}


def check_schedule(name: str, options: Mapping[str, object]) -> None:
    """Check the name of a schedule and its options, as far as they can be checked without the run.

    Args:
        name: `lr_scheduler_type`.
        options: `lr_scheduler_kwargs`.

    Raises:
        ConfigurationError: For an unknown name or option, with the nearest known one; for a value out of
            range; for options that a schedule cannot do without, or that exclude each other.
    """
    if name not in SCHEDULES:
        raise ConfigurationError("lr_scheduler_type", name, "is not a known schedule", _near(name, SCHEDULES))
    _check_options("lr_scheduler_kwargs", name, options, SCHEDULES[name])
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        _check_floor(name, options)
    if name == "warmup_stable_decay" and "num_decay_steps" not in options:
        raise ConfigurationError(
            "lr_scheduler_kwargs",
            dict(options),
            "lacks num_decay_steps, the length of the decay in optimizer steps, which "
            "'warmup_stable_decay' needs",
            "add num_decay_steps, such as lr_scheduler_kwargs={'num_decay_steps': 1000}",
        )


def check_optimizer(name: str, options: Mapping[str, object]) -> None:
    """Check the name of a built-in optimizer and its options.

    Args:
        name: `optim`.
        options: `optim_kwargs`.

    Raises:
        ConfigurationError: For an unknown name or option, with the nearest known one; for a value out of
            range.
    """
    if name not in OPTIMIZERS:
        raise ConfigurationError("optim", name, "is not a built-in optimizer", _near(name, OPTIMIZERS))
    _check_options("optim_kwargs", name, options, OPTIMIZERS[name])


def needs_total(name: str, options: Mapping[str, object]) -> bool:
    """Whether a schedule must know at which optimizer step the run ends."""
    if name == "warmup_stable_decay":
        return "num_stable_steps" not in options
    return name not in WITHOUT_TOTAL


def _check_options(setting: str, name: str, options: Mapping[str, object], known: tuple[str, ...]) -> None:
    for option, value in options.items():
        if option not in known:
            rule = f"is not an option of {name!r}, whose options are: {', '.join(known) or 'none'}"
            # A recipe or file may have set it for the choice that is replaced.
            fix = (
                _near(option, known)
                if known
                else f"leave it out, or empty {setting} (on a command line: none)"
            )
            raise ConfigurationError(f"{setting}.{option}", value, rule, fix)
        _check_value(f"{setting}.{option}", name, option, value)


def _check_value(setting: str, name: str, option: str, value: object) -> None:
    if option == "metric":
        if not isinstance(value, str) or not value:
            raise ConfigurationError(
                setting, value, "must be the name of a metric", "write 'eval_loss', for example"
            )
        return
    rule = _RULES[option]
    if name == "cosine_with_restarts":
        rule = _Range(1, whole=True)
    if isinstance(rule, tuple):
        rules.one_of(setting, value, rule)
    else:
        rule.check(setting, value)


def _check_floor(name: str, options: Mapping[str, object]) -> None:
    if "min_lr" in options and "min_lr_rate" in options:
        raise ConfigurationError(
            "lr_scheduler_kwargs",
            dict(options),
            f"has both min_lr and min_lr_rate (a share of the learning rate), and the floor of {name!r} is "
            "one of them",
            "leave one of them out",
        )


def _near(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    slips = difflib.get_close_matches(name, list(known), n=1, cutoff=0.9)
    # Others add to the same first word: adamw_torch_fused, linear_with_warmup.
    beginnings = sorted((each for each in known if name.startswith(f"{each}_")), key=len, reverse=True)
    matches = slips or beginnings or difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"choose one of {', '.join(known)}"


TRACKERS = ("mlflow", "tensorboard", "wandb")
"""What `report_to` names; each is the name of a `Tracker`, of its library and of the extra that brings it."""


def trackers_of(report_to: str | Sequence[str]) -> tuple[str, ...]:
    """The trackers that `report_to` names, each once; none where it is "none" or empty.

    Raises:
        ConfigurationError: For an unknown name, with the nearest known one, and for "none" beside another.
    """
    given = report_to.split(",") if isinstance(report_to, str) else report_to
    names = tuple(dict.fromkeys(name.strip() for name in given if name.strip()))
    for name in names:
        if name not in (*TRACKERS, "none"):
            raise ConfigurationError(
                "report_to",
                name,
                f"must be of {', '.join(TRACKERS)}, or none",
                suggest(name, TRACKERS, otherwise="a tracker of your own is a callback: pass it to Trainer"),
            )
    if "none" in names and len(names) > 1:
        raise ConfigurationError("report_to", report_to, "names trackers, and none", "leave none out")
    return () if "none" in names else names


FP8_RECIPES: dict[str, str] = {
    "tensorwise": "one scale for each tensor; the fastest",
    "rowwise": "one scale for each row, e4m3 everywhere, scales are powers of two; more exact",
    "rowwise_with_gw_hp": "like rowwise, but the weights' gradients are not rounded to FP8; the most exact",
}
"""FP8 recipes of torchao: name and what it does."""


@dataclass(frozen=True)
class QATRecipe:
    """What quantization-aware training prepares for.

    Attributes:
        description: One line for people.
        weight_bits: Size of a quantized weight.
        group_size: Weights along the input that share a scale; None: each output row has one scale.
        quantizes_activations: Whether each token's activations are rounded to int8, by their own range.
    """

    description: str
    weight_bits: int
    group_size: int | None
    quantizes_activations: bool


QAT_RECIPES: dict[str, QATRecipe] = {
    "int8-dynamic-act-int4-weight": QATRecipe(
        "int4 weights in groups of 32, activations int8 for each token as they come", 4, 32, True
    ),
    "int8-dynamic-act-int8-weight": QATRecipe(
        "int8 weights with one scale a row, activations int8 for each token as they come", 8, None, True
    ),
    "int4-weight-only": QATRecipe("int4 weights in groups of 32, activations untouched", 4, 32, False),
    "int8-weight-only": QATRecipe("int8 weights with one scale a row, activations untouched", 8, None, False),
}
"""QAT recipes: those that torchao 0.18 both prepares and converts on any device, CPU included."""
