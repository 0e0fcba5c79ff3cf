"""What a run sends: as the trainer counts it, and as the system sees it pass."""

from __future__ import annotations

from pathlib import Path

from trainer_core import Trainer, TrainerControl, TrainerState, TrainingArguments

_DEVICES = Path("/proc/net/dev")


def loopback_bytes() -> int | None:
    """Bytes that have passed the loopback device; None where the system does not tell.

    They are those of all processes that share the network: of the whole machine, unless the study runs in
    a network namespace of its own.
    """
    for line in _DEVICES.read_text().splitlines() if _DEVICES.exists() else []:
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    return None


class TrafficMeter:
    """A callback that adds up what training sends, and leaves out what evaluations send.

    The clock stands still from the end of a step that an evaluation follows to the begin of the next one.
    """

    def __init__(self, evaluate_every: int) -> None:
        self.counted = 0
        """Bytes that this rank handed to collectives."""
        self.loopback: int | None = None
        """Bytes on the loopback device, from all ranks; None where the system does not tell."""
        self.curve: list[tuple[int, float]] = []
        """Tokens trained on, held-out loss."""
        self._every = evaluate_every
        self._began: tuple[int, int | None] | None = None

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        trainer: Trainer,
        **_: object,
    ) -> None:
        """Continue measuring."""
        if self._began is None:
            self._began = _reading(trainer)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        trainer: Trainer,
        **_: object,
    ) -> None:
        """Stop measuring where an evaluation comes next."""
        if state.global_step % self._every or self._began is None:
            return
        counted, loopback = _reading(trainer)
        self.counted += counted - self._began[0]
        if loopback is not None and self._began[1] is not None:
            self.loopback = (self.loopback or 0) + loopback - self._began[1]
        self._began = None

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, float],
        **_: object,
    ) -> None:
        """Keep a point of the curve; the log entry before it has brought the tokens up to date."""
        self.curve.append((state.num_input_tokens_seen, metrics["eval_loss"]))


def _reading(trainer: Trainer) -> tuple[int, int | None]:
    traffic = trainer._prepare().built.traffic  # exact at every step; the log has sums of whole intervals
    if traffic is None:
        raise ValueError("this study needs a trainer that counts what it sends")
    return traffic.bytes, loopback_bytes()
