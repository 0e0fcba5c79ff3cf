"""The shape of a Llama, with the field names of Hugging Face's configuration, and the named shapes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trainer_core import ConfigurationError, suggest

from .rope import RopeScaling, YarnScaling, take_rope_settings

if TYPE_CHECKING:
    from .moe_config import Experts

CONFIG_FILE = "config.json"

# Keys that do not change what the model computes. They are accepted and not kept.
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape and constants of a Llama, in Hugging Face's names.

    `num_key_value_heads` and `head_dim` may be left out: they become `num_attention_heads` and
    `hidden_size // num_attention_heads`. `rope_scaling` is None for plain rotary positions, or one of
    `LinearScaling`, `Llama3Scaling` and `YarnScaling`.

    Raises:
        ConfigurationError: If a value breaks a rule. The message names setting, value, rule and fix.
    """

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    """The class of transformers that reads the weights."""
    fixed: ClassVar[Mapping[str, object]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
    }
    """Settings that Hugging Face allows and this model does not compute: only these values are accepted."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if self.num_key_value_heads == 0:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for name in _COUNTS:
            _require(
                getattr(self, name) >= 1,
                name,
                getattr(self, name),
                "must be at least 1",
                "set it to 1 or more",
            )
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _check_shape(self)

    def experts(self, layer: int) -> Experts | None:
        """What stands in a layer in the place of one feed-forward; None: nothing does."""
        return None

    def to_dict(self) -> dict[str, object]:
        """Return the content of a `config.json` that transformers reads as `architecture`."""
        values: dict[str, object] = {"architectures": [self.architecture], "model_type": self.model_type}
        values |= {field.name: getattr(self, field.name) for field in fields(self)}
        # transformers 4 reads rope_theta and rope_scaling, transformers 5 reads rope_parameters.
        del values["rope_scaling"]
        if self.rope_scaling is not None:
            values["rope_scaling"] = self.rope_scaling.to_dict()
        values["rope_parameters"] = self._rope_parameters()
        values |= self.fixed
        return values

    def _rope_parameters(self) -> dict[str, object]:
        scaling = self.rope_scaling
        kind = {"rope_type": "default"} if scaling is None else scaling.to_dict()
        return {**kind, "rope_theta": self.rope_theta}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> LlamaConfig:
        """Read the content of a `config.json`.

        Args:
            values: Keys of Hugging Face's configuration, of transformers 4 or 5. Their `model_type` chooses
                the class: `llama`, or one of those with experts, `mixtral` and `glm4_moe`.

        Raises:
            ConfigurationError: If a key is unknown, or a value asks for something this model does not compute
                (other rotary scaling than `rope_scaling` can have, biases, dropout, another activation or
                architecture).
        """
        if cls is LlamaConfig and values.get("model_type") not in (None, cls.model_type):
            return _class_of(values["model_type"]).from_dict(values)
        remaining = {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}
        _refuse_unsupported(remaining, {"model_type": cls.model_type, **cls.fixed})
        names = {field.name: field for field in fields(cls)}
        positions = remaining.get("max_position_embeddings") or names["max_position_embeddings"].default
        theta, scaling = take_rope_settings(remaining, positions)
        unknown = sorted(set(remaining) - set(names))
        if unknown:
            raise ConfigurationError(
                unknown[0],
                remaining[unknown[0]],
                "is a key that this model cannot represent",
                "remove it if it does not change what the model computes",
            )
        # Hugging Face writes null where a default is meant.
        nullable = {"bos_token_id", "eos_token_id", "pad_token_id"}
        given = {key: value for key, value in remaining.items() if value is not None or key in nullable}
        if theta is not None:
            given["rope_theta"] = theta
        return cls(**given, rope_scaling=scaling)  # type: ignore[arg-type]  # the types are checked by the class

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write `config.json` into an existing directory and return its path."""
        path = Path(directory) / CONFIG_FILE
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> LlamaConfig:
        """Read `config.json` of a directory.

        Raises:
            ConfigurationError: If the file is missing, is not JSON, or describes another kind of model.
        """
        path = Path(directory) / CONFIG_FILE
        if not path.is_file():
            raise ConfigurationError(
                "model", str(directory), f"contains no {CONFIG_FILE}", "name the directory of a model"
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(
                "model", str(path), f"is not valid JSON ({error})", "write the file again"
            ) from error
        if not isinstance(values, dict):
            raise ConfigurationError("model", str(path), "must hold a JSON object", "write the file again")
        try:
            return cls.from_dict(values)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{path}: {error.setting}", error.value, error.rule, error.fix
            ) from error


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def _require(condition: bool, name: str, value: object, rule: str, fix: str) -> None:
    if not condition:
        raise ConfigurationError(name, value, rule, fix)


def _check_types(config: LlamaConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        expected = str(field.type)
        if expected == "bool":
            right = isinstance(value, bool)
        elif expected == "float":
            right = isinstance(value, int | float) and not isinstance(value, bool)
        elif value is None:
            right = "None" in expected
        elif field.name == "rope_scaling":
            right = isinstance(value, RopeScaling)
        else:
            right = isinstance(value, int) and not isinstance(value, bool)
        _require(right, field.name, value, f"must be {expected}", "give a value of that type")


def _check_shape(config: LlamaConfig) -> None:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    _require(
        heads % groups == 0,
        "num_key_value_heads",
        groups,
        f"must divide num_attention_heads={heads}",
        f"use a divisor of {heads}",
    )
    # head_dim is free, but transformers refuses a width that the heads do not divide.
    _require(
        config.hidden_size % heads == 0,
        "hidden_size",
        config.hidden_size,
        f"must be a multiple of num_attention_heads={heads}",
        f"use {(config.hidden_size // heads + 1) * heads}, or change the number of heads",
    )
    _require(
        config.head_dim >= 2 and config.head_dim % 2 == 0,
        "head_dim",
        config.head_dim,
        "must be even and at least 2, because the rotary embedding turns pairs",
        "set an even head_dim, such as 64",
    )
    for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
        _require(
            getattr(config, name) > 0,
            name,
            getattr(config, name),
            "must be above 0",
            "set it to a positive number",
        )
    _require(
        config.rope_theta > 1 or not isinstance(config.rope_scaling, YarnScaling),
        "rope_theta",
        config.rope_theta,
        "must be above 1 with rope_scaling 'yarn', which finds pairs of a head by their frequency",
        "set it to the base of the model, such as 10000.0",
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(config, name)
        _require(
            token is None or 0 <= token < config.vocab_size,
            name,
            token,
            f"must be an id below vocab_size={config.vocab_size}",
            "correct the id or raise vocab_size",
        )


def _class_of(model_type: object) -> type[LlamaConfig]:
    from .moe_config import CONFIGS

    kinds: list[type[LlamaConfig]] = [LlamaConfig, *CONFIGS]
    known = {each.model_type: each for each in kinds}
    if model_type not in known:
        raise ConfigurationError(
            "model_type",
            model_type,
            f"is not supported: only {', '.join(known)} are implemented",
            "use a model of one of these kinds",
        )
    return known[str(model_type)]


def _refuse_unsupported(values: dict[str, object], fixed: Mapping[str, object]) -> None:
    """Take the settings with one permitted value out of `values`, or refuse them."""
    for key, permitted in fixed.items():
        value = values.pop(key, permitted)
        if value is None or value == permitted:
            continue
        raise ConfigurationError(
            key,
            value,
            f"is not supported: only {permitted!r} is implemented",
            "use a model without this feature",
        )


# 7b to 70b are the shapes of Llama 2 (Touvron et al. 2023). Each preset has the number of parameters that its
# name says when the vocabulary is its own; `tiny` is for bytes and learns on a laptop.
_PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
        # Near 1 / sqrt(hidden_size); at 0.02 so narrow a model wastes its first hundreds of steps.
        initializer_range=0.09,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    ),
    "160m": LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=12,
    ),
    "1b": LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
    "7b": LlamaConfig(),
    "13b": LlamaConfig(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
    ),
    "34b": LlamaConfig(
        hidden_size=8192,
        intermediate_size=22016,
        num_hidden_layers=48,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "70b": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


def _presets() -> dict[str, LlamaConfig]:
    """All named shapes; those with experts are in a file that imports this one."""
    from .moe_config import PRESETS

    smallest, *rest = _PRESETS.items()
    return dict([smallest, *PRESETS.items(), *rest])


def preset_names() -> tuple[str, ...]:
    """Return the names that `preset` knows: the smallest model first, those with experts next."""
    return tuple(_presets())


def preset(name: str, **changes: int | None) -> LlamaConfig:
    """Return a named shape.

    Args:
        name: One of `preset_names()`.
        **changes: Settings to replace, such as the vocabulary and special tokens of a tokenizer.

    Raises:
        ConfigurationError: If there is no such preset, or a change breaks a rule.
    """
    presets = _presets()
    if name not in presets:
        raise ConfigurationError(
            "model",
            name,
            "is neither a preset nor a directory with a config.json",
            f"{suggest(name, presets, otherwise='')} The presets are {', '.join(presets)}.".strip(),
        )
    return replace(presets[name], **changes)  # type: ignore[arg-type]


def preset_or_load(name: str, sequence_length: int) -> LlamaConfig:
    """Return a named shape, or that of a directory, which has room for rows of some length.

    Raises:
        ConfigurationError: If there is no such model, or it has fewer positions than a row.
    """
    config = LlamaConfig.load(name) if (Path(name) / CONFIG_FILE).is_file() else preset(name)
    if sequence_length > config.max_position_embeddings:
        rule = f"is more than the max_position_embeddings of {name}, {config.max_position_embeddings}"
        raise ConfigurationError("sequence_length", sequence_length, rule, "lower it")
    return config
