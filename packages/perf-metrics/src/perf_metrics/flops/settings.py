"""Reading a model's configuration, be it an object or the contents of a config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class UnknownShapeError(ValueError):
    """The model holds something that the formula does not cover; the message names it."""


class Settings:
    """A configuration in the Hugging Face style.

    Args:
        config: An object with attributes, or a mapping. A configuration of a language model within another
            one (`text_config`) is taken for it.
    """

    def __init__(self, config: object) -> None:
        inner = _read(config, "text_config")
        self._config = config if inner is None else inner
        self._defaults: Mapping[str, object] = {}

    def or_else(self, defaults: Mapping[str, object]) -> Settings:
        """The same, with figures for what is not there."""
        filled = Settings(self._config)
        filled._defaults = defaults
        return filled

    def get(self, *names: str) -> object:
        """The first of these settings that is there and not None; otherwise None."""
        for name in names:
            value = self._value(name)
            if value is not None:
                return value
        return None

    def _value(self, name: str) -> object:
        """A setting, or its default where it is not there; one that is null stays so."""
        is_there = not isinstance(self._config, Mapping) or name in self._config
        return _read(self._config, name) if is_there else self._defaults.get(name)

    def count(self, *names: str) -> int:
        """The first of these settings that is there, a positive integer.

        Raises:
            UnknownShapeError: None of them is there, or it is something else.
        """
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnknownShapeError(f"config.{names[0]}={value!r} is not a positive integer")
        return value

    def count_or(self, default: int, *names: str) -> int:
        """The same, with a value for when none of them is there."""
        return default if self.get(*names) is None else self.count(*names)

    def texts(self, name: str) -> list[str] | None:
        """A list of texts; None if it is not there or empty."""
        value = self.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            return None
        return [str(item) for item in value]

    def numbers(self, name: str) -> list[int]:
        """A list of integers; empty if it is not there."""
        value = self.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            return []
        return [item for item in value if isinstance(item, int)]

    @property
    def family(self) -> str:
        """The `model_type`, or an empty text."""
        value = self.get("model_type")
        return value if isinstance(value, str) else ""

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.count("hidden_size", "n_embd", "d_model")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.count("num_hidden_layers", "n_layer", "num_layers")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.count("num_attention_heads", "n_head")

    @property
    def head_size(self) -> int:
        """Width of a head."""
        if self.get("head_dim") is not None:
            return self.count("head_dim")
        if self.hidden % self.heads:
            raise UnknownShapeError(
                f"config.hidden_size={self.hidden} is not a multiple of num_attention_heads={self.heads}, "
                "and there is no head_dim"
            )
        return self.hidden // self.heads

    @property
    def experts(self) -> tuple[int, int] | None:
        """Routed experts of a layer, and how many of them each token is sent to; None without experts."""
        total = self.get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        if not isinstance(total, int) or total < 2:
            return None
        used = self.count("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_k", "top_k")
        if used > total:
            raise UnknownShapeError(f"each token is sent to {used} of {total} experts")
        return total, used


def _read(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except Exception as error:  # a property may raise what it likes
        raise UnknownShapeError(f"config.{name} cannot be read: {error}") from error
