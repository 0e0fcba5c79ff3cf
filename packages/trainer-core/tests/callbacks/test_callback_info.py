from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from trainer_core import Trainer, TrainerControl, TrainerState, TrainingArguments
from trainer_core.callbacks import InfoCallback


class StopsAt:
    name = "somebody"

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        control.should_training_stop = state.global_step == self.step  # type: ignore[attr-defined]


def test_the_block_says_what_runs_and_the_line_why_it_ended(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    out = io.StringIO()
    settings = {
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_strategy": "steps",
        "mixed_precision": "bf16",
    }
    make_trainer(callbacks=[InfoCallback(out), StopsAt(2)], **settings).train()
    first = out.getvalue()
    # Embedding 23 x 16, mixing layer 16 x 16 + 16, head 16 x 23 + 23: float32.
    assert "TinyModel, 1,031 parameters, 1,031 trainable, 4.027 KiB" in first
    assert "8 examples = 4 per device x 2 accumulated x 1 data-parallel" in first
    assert "6 steps, 2 epochs of 3 steps" in first
    assert "weights float32; matrix products bf16" in first
    assert "logging_steps=1" in first
    assert "learning_rate=0.01" in first
    assert "mixed_precision=bf16" in first
    assert "max_steps=" not in first
    assert torch.__version__ in first
    assert "at step 0" in first
    assert "ended at step 2: stopped by somebody in on_step_end\n" in first
    assert "the run stops" not in caplog.text  # not said twice

    out.truncate(0)
    make_trainer(callbacks=[InfoCallback(out)], **settings).train()
    assert "resumed at step 2" in out.getvalue()
    assert "ended at step 6: all steps done\n" in out.getvalue()


def test_other_ranks_say_nothing(
    make_trainer: Callable[..., Trainer],
    arguments: Callable[..., TrainingArguments],
    state: Callable[..., TrainerState],
) -> None:
    out = io.StringIO()
    callback, trainer = InfoCallback(out), make_trainer()
    for_rank_1 = state(is_world_process_zero=False)
    callback.on_train_begin(
        arguments(), for_rank_1, TrainerControl(), model=torch.nn.Linear(1, 1), trainer=trainer
    )
    callback.on_train_end(arguments(), for_rank_1, TrainerControl(), trainer=trainer)
    assert not out.getvalue()


def test_a_reader_that_has_gone_does_not_end_the_run(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    assert make_trainer(max_steps=1, callbacks=[InfoCallback(Gone())]).train().global_step == 1
    assert "nobody reads stderr any more" in caplog.text


def test_importing_the_callbacks_imports_no_optional_library() -> None:
    code = (
        "import sys, trainer_core.callbacks\n"
        "heavy = {'tensorboard', 'wandb', 'mlflow', 'transformers', 'torchao', 'matplotlib'}\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in heavy\n"
        "    or name.startswith(('torch._dynamo', 'torch._inductor'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
