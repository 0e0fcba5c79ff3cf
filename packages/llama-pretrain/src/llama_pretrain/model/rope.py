"""Rotary positions, and how those of a trained model are scaled for longer rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace

import torch
from torch import Tensor, nn

from trainer_core import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class RopeScaling(ABC):
    """How the frequencies of a rotary embedding differ from the plain ones. Use one of its subclasses.

    Fields have the names of `rope_parameters` in Hugging Face's configuration.

    Raises:
        ConfigurationError: If a value breaks a rule. The message names setting, value, rule and fix.
    """

    rope_type: str = field(init=False, default="")
    factor: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "bool":
                self._require(isinstance(value, bool), each.name, "must be bool", "use true or false")
            elif each.type == "int":
                whole = isinstance(value, int) and not isinstance(value, bool)
                self._require(whole and value >= 1, each.name, "must be an int of at least 1", "correct it")
            elif each.name != "rope_type" and not (value is None and "None" in str(each.type)):
                number = isinstance(value, int | float) and not isinstance(value, bool)
                finite = number and math.isfinite(value)
                self._require(finite, each.name, f"must be {each.type}", "give a finite number")
                object.__setattr__(self, each.name, float(value))
        self._require(self.factor >= 1, "factor", "must be at least 1", "use new length / original length")

    @abstractmethod
    def frequencies(self, per_radian: Tensor, theta: float) -> Tensor:
        """Return the scaled frequencies of all pairs of a head.

        Args:
            per_radian: Positions in which each pair turns by one radian without scaling, the inverse of its
                frequency, float32 `[head_dim / 2]`.
            theta: Base of these.
        """

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    @property
    def stretches(self) -> bool:
        """Whether another `factor` alone gives the same scaling for other rows."""
        return True

    def to_dict(self) -> dict[str, object]:
        """Return what stands in `rope_parameters` beside the base; settings without a value are left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def _require(self, condition: bool, name: str, rule: str, fix: str) -> None:
        if not condition:
            raise ConfigurationError(f"rope_scaling.{name}", getattr(self, name), rule, fix)


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595, section 2.3).

    Position `m` is turned as `m / factor` was, which is the same as to divide every frequency by `factor`.
    """

    rope_type: str = field(init=False, default="linear")

    def frequencies(self, per_radian: Tensor, theta: float) -> Tensor:
        """As in `RopeScaling`."""
        return 1.0 / per_radian / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """The scaling of Llama 3.1 (Meta 2024, the models' `rope_scaling`; there 8, 1, 4 and 8192).

    A pair that turns at least `high_freq_factor` times within `original_max_position_embeddings` keeps its
    frequency. One that turns at most `low_freq_factor` times has it divided by `factor`. Between the two the
    share of the kept frequency grows linearly with the number of turns.
    """

    rope_type: str = field(init=False, default="llama3")
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.low_freq_factor > 0, "low_freq_factor", "must be above 0", "use 1.0")
        above = self.high_freq_factor > self.low_freq_factor
        rule = f"must be above low_freq_factor={self.low_freq_factor}"
        self._require(above, "high_freq_factor", rule, "raise it, for example to 4 times as much")

    def frequencies(self, per_radian: Tensor, theta: float) -> Tensor:
        """As in `RopeScaling`."""
        plain = 1.0 / per_radian
        turns = self.original_max_position_embeddings / (2 * math.pi / plain)
        width = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / width).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4).

    Pairs that turn at least `beta_fast` times within `original_max_position_embeddings` keep their
    frequency, those that turn at most `beta_slow` times have it divided by `factor`. The paper lets the share
    grow with the number of turns; its code and transformers let it grow with the index of the pair,
    and so does this, because published weights were trained so.

    Cosines and sines are multiplied by `0.1 ln(factor) + 1`, so scores by its square.

    Args:
        beta_fast: Called beta in the paper.
        beta_slow: Called alpha in the paper.
        attention_factor: Used in the place of `0.1 ln(factor) + 1`.
        mscale: With `mscale_all_dim`, the factor is `(0.1 mscale ln(factor) + 1)` divided by
            `(0.1 mscale_all_dim ln(factor) + 1)`. One of them alone, or 0, has no effect.
        mscale_all_dim: See `mscale`.
        truncate: Whether the pairs where the share begins and ends to change are rounded to whole ones.
    """

    rope_type: str = field(init=False, default="yarn")
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.beta_slow > 0, "beta_slow", "must be above 0", "use 1.0")
        rule = f"must be at least beta_slow={self.beta_slow}"
        self._require(self.beta_fast >= self.beta_slow, "beta_fast", rule, "use 32.0")
        factor = self.attention_factor
        self._require(factor is None or factor > 0, "attention_factor", "must be above 0", "leave it out")
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            self._require(value is None or value >= 0, name, "must be 0 or more", "leave it out")

    def frequencies(self, per_radian: Tensor, theta: float) -> Tensor:
        """As in `RopeScaling`."""
        dim = 2 * len(per_radian)

        def pair_that_turns(times: float) -> float:
            # Solved for the index: original * theta ** (-2 index / dim) / 2 pi = times.
            wavelengths = self.original_max_position_embeddings / (2 * math.pi * times)
            return dim * math.log(wavelengths) / (2 * math.log(theta))

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The upper bound is not the last pair, dim / 2 - 1: so it is in the code of the paper.
        first, last = max(first, 0), min(last, dim - 1)
        if first == last:
            last += 0.001  # a step in the place of a ramp, without dividing by 0
        index = torch.arange(len(per_radian), dtype=torch.float32, device=per_radian.device)
        kept = 1 - ((index - first) / (last - first)).clamp(0, 1)
        # Rounded as transformers does: at position 100,000 the last bit of a frequency is 0.01 radians.
        return (1 - kept) * (1.0 / (self.factor * per_radian)) + kept * (1.0 / per_radian)

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._amplitude(self.mscale) / self._amplitude(self.mscale_all_dim)
        return self._amplitude(1.0)

    @property
    def stretches(self) -> bool:
        """Whether another `factor` alone gives the same scaling for other rows."""
        return self.attention_factor is None

    def _amplitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0


_KINDS: Mapping[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


def scaling_for(kind: str, *, positions: int, wanted: int, before: RopeScaling | None = None) -> RopeScaling:
    """Return the scaling by which a model of some positions is made to have more.

    Args:
        kind: `linear`, `llama3` or `yarn`.
        positions: Those that the model has.
        wanted: Those that it is to have.
        before: Scaling that it has already, of the same kind: it is stretched further.
    """
    if before is not None:
        return replace(before, factor=before.factor * wanted / positions)
    factor = wanted / positions
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "llama3":
        # The two as published for Llama 3.1.
        return Llama3Scaling(
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=positions,
        )
    return YarnScaling(factor=factor, original_max_position_embeddings=positions)


def take_rope_settings(values: dict[str, object], positions: object) -> tuple[object, RopeScaling | None]:
    """Take the settings of rotary positions out of the content of a `config.json`.

    Those are `rope_parameters` of transformers 5 and `rope_scaling` of transformers 4. A file may have both
    if they agree. Of two that differ, transformers uses `rope_scaling`, and may lose the base of the other.

    Args:
        values: The content. Both keys are removed; `rope_theta` stays.
        positions: Its `max_position_embeddings`, which stands for what transformers lets be left out.

    Returns:
        The base of the frequencies, None where neither has one; and the scaling, None where there is none.

    Raises:
        ConfigurationError: If one of them cannot be represented, or they contradict each other.
    """
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = values.pop(key, None)
        if given is not None and given != {}:
            found[key] = (given, *_read(key, given, positions))
    if len(found) == 2:
        (new, *in_new), (old, *in_old) = found.values()
        # A table without a base has that of the file.
        in_new[0], in_old[0] = (
            values.get("rope_theta") if each[0] is None else each[0] for each in (in_new, in_old)
        )
        if in_new != in_old:
            raise ConfigurationError(
                "rope_scaling", old, f"contradicts rope_parameters={new!r}", "leave one of them out"
            )
    theta = next((theta for _, theta, _ in found.values() if theta is not None), None)
    return theta, next((scaling for _, _, scaling in found.values()), None)


def _read(key: str, given: object, positions: object) -> tuple[object, RopeScaling | None]:
    if not isinstance(given, Mapping):
        raise ConfigurationError(key, given, "must be a table", "write rope_type and rope_theta into it")
    # transformers writes null where a default is meant.
    inside = {name: value for name, value in given.items() if value is not None}
    old_name = inside.pop("type", "default")
    kind, theta = inside.pop("rope_type", old_name), inside.pop("rope_theta", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None and kind != "default":
        raise ConfigurationError(
            f"{key}.rope_type",
            kind,
            f"is not supported: of rotary scaling only {', '.join(_KINDS)} are implemented",
            "use a model that is scaled in one of these ways, or not at all",
        )
    settings = {} if cls is None else {each.name: each for each in fields(cls) if each.init}
    unknown = sorted(set(inside) - set(settings))
    if unknown:
        raise ConfigurationError(
            f"{key}.{unknown[0]}",
            inside[unknown[0]],
            f"is a key that this model cannot represent in rotary scaling of rope_type {kind!r}",
            "remove it if it does not change what the model computes",
        )
    if cls is None:
        return theta, None
    if "original_max_position_embeddings" in settings:
        inside.setdefault("original_max_position_embeddings", positions)
        original = inside["original_max_position_embeddings"]
        if kind == "yarn" and given.get("factor", 0) is None and _are_counts(positions, original):
            inside["factor"] = positions / original  # as transformers takes it
    missing = [
        name for name, each in settings.items() if each.default is MISSING and inside.get(name) is None
    ]
    if missing:
        raise ConfigurationError(
            key,
            dict(given),
            f"has no {missing[0]}, which rotary scaling of rope_type {kind!r} needs",
            f"add {missing[0]}",
        )
    return theta, cls(**inside)


def _are_counts(*values: object) -> bool:
    return all(isinstance(value, int) and value >= 1 for value in values)


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables for every position, in float32.

    Pair `i` of a head turns by `position * theta ** (-2 i / head_dim)` (Su et al., RoFormer, section 3.2.2),
    with the halves of the head as partners (Hugging Face's `rotate_half` convention). Complex numbers would
    break compiled graphs, so cosine and sine are kept apart.

    The tables are not parameters and are not saved. They are computed again whenever the module changes
    device or dtype, so they stay float32 in a bfloat16 model and are right after a start on the meta device.

    Args:
        head_dim: Width of one head.
        max_positions: Number of positions in the tables.
        theta: Base of the frequencies.
        scaling: What changes the frequencies, and the size of cosines and sines.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, head_dim: int, max_positions: int, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.theta = theta
        self.scaling = scaling
        cos, sin = self._tables(torch.get_default_device())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the factors of `apply_rotary` `[length, head_dim]` for `length` positions from `start`."""
        return _of_both_halves(self.cos[start : start + length], self.sin[start : start + length])

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of `apply_rotary` `[batch, 1, positions, head_dim]` for given positions."""
        return _of_both_halves(self.cos[position_ids].unsqueeze(1), self.sin[position_ids].unsqueeze(1))

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        per_radian = self.theta**exponents
        frequencies = 1.0 / per_radian
        if self.scaling is not None:
            frequencies = self.scaling.frequencies(per_radian, self.theta)
        positions = torch.arange(self.max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies)
        if self.scaling is None or self.scaling.amplitude == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.scaling.amplitude, angles.sin() * self.scaling.amplitude

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        nn.Module._apply(self, fn, recurse)
        self.cos, self.sin = self._tables(self.cos.device)
        return self


def _of_both_halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads by their positions.

    Args:
        x: Queries or keys `[batch, heads, positions, head_dim]`.
        cos: Cosines for both halves of a head, `[positions, head_dim]` or `[batch, 1, positions, head_dim]`,
            float32, as `RotaryEmbedding` returns them.
        sin: Sines likewise, negative for the first half.

    Returns:
        The turned heads in the shape and dtype of `x`.
    """
    wide = x.float()
    partner = wide.roll(wide.shape[-1] // 2, dims=-1)
    return (wide * cos + partner * sin).to(x.dtype)
