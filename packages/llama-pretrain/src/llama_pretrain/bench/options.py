"""The settings of `bench`."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_core import ConfigurationError

LOG_EVERY = 5
"""Steps between two log entries of a contender; also the length of a window that is timed."""
LEAST_WARM_UP = LOG_EVERY + 1
"""The first log entry takes longer than the others, and belongs to the warm-up."""
_LEAST: dict[str, tuple[int, str]] = {
    "sequence_length": (2, "to predict a token from one"),
    "per_device_train_batch_size": (1, "to train on something"),
    "steps": (1, "to time something"),
    "warm_up_steps": (LEAST_WARM_UP, f"because the first log entry, after step {LOG_EVERY}, is not typical"),
    "rounds": (1, "to time something"),
}


@dataclass(frozen=True, kw_only=True)
class BenchArguments:
    """What `bench` is told."""

    model: str = "tiny"
    """A preset (tiny, 160m, 1b, 7b, 13b, 34b, 70b) or a directory with a config.json; weights are drawn."""
    sequence_length: int = 128
    """Tokens of one row."""
    per_device_train_batch_size: int = 8
    """Rows of one step."""
    steps: int = 20
    """Steps of a turn that are timed, in windows of 5."""
    warm_up_steps: int = 10
    """Steps of a turn before those; what is compiled is compiled in them."""
    rounds: int = 3
    """Turns of each contender; they take turns."""
    mixed_precision: str = "no"
    """bf16: matrix products in it under autocast; no: everything in float32."""
    torch_compile: bool = False
    """Compile the model with torch.compile."""
    contenders: tuple[str, ...] = ()
    """Of ours, torch, accelerate, hf and lightning; none: all that are installed."""
    use_cpu: bool = False
    """Run on the CPU although there is an accelerator."""
    json: str | None = None
    """File for all figures, with machine, versions and command."""

    def __post_init__(self) -> None:
        for name, (least, why) in _LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigurationError(name, value, f"must be at least {least}, {why}", "raise it")
        if self.steps % LOG_EVERY:
            rule = f"must be a multiple of {LOG_EVERY}, the length of a window"
            raise ConfigurationError("steps", self.steps, rule, "change it")
        if self.mixed_precision not in ("no", "bf16"):
            raise ConfigurationError(
                "mixed_precision", self.mixed_precision, "must be 'no' or 'bf16'", "choose one of these"
            )
