"""No optimizer step brings a value from the device to the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_core import Trainer

FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "clipping": {"max_grad_norm": 1.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
    "skip": {"nonfinite_policy": "skip"},
    "raise": {"nonfinite_policy": "raise"},
    "in backward": {"fuse_optim_with_backward": True},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "garbage": {"gc_steps": 2, "gc_freeze": True},
}
QUIET = {"logging_steps": 1000, "num_train_epochs": -1, "learning_rate": 1e-3}


class CountReads(TorchDispatchMode):
    """Counts the times a tensor's value is brought to Python, which on a GPU waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def reads_in(trainer: Trainer) -> int:
    with CountReads() as counter:
        trainer.train()
    return counter.reads


@pytest.mark.parametrize("feature", FEATURES)
def test_steps_between_log_entries_read_nothing_from_the_device(
    make_trainer: Callable[..., Trainer], feature: str
) -> None:
    settings = QUIET | FEATURES[feature]
    # Of two lengths, so that what a run reads at its ends does not count.
    short, long = make_trainer(**settings, max_steps=4), make_trainer(**settings, max_steps=24)
    assert reads_in(short) == reads_in(long)


def test_the_default_callbacks_read_nothing_either(make_trainer: Callable[..., Trainer]) -> None:
    def make(steps: int) -> Trainer:
        trainer = make_trainer(**QUIET, max_steps=steps)
        for callback in Trainer.default_callbacks():
            trainer.add_callback(callback)
        return trainer

    assert reads_in(make(4)) == reads_in(make(24))


class Watched:
    """Makes torch complain about every wait for the device between the begin and the end of a step."""

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("feature", FEATURES if torch.cuda.is_available() else [])
def test_no_step_waits_for_a_gpu(make_trainer: Callable[..., Trainer], feature: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(**QUIET, **FEATURES[feature], device="cuda", max_steps=8, callbacks=[Watched()]).train()
    assert not [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
