"""Ways to save and load a model and its optimizer, each as its documentation says.

Every contender saves into the directory it is given and loads from there. Libraries are imported when a
contender is made, so that those that are left out need not be installed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from _checkpoint_model import Decoder, as_bytes, state_tensors

if TYPE_CHECKING:
    import checkpoint_core as core

AdamW = torch.optim.AdamW


class Contender(Protocol):
    """A way to save and load."""

    def save(self, step: int) -> None:
        """Save the model and the optimizer."""

    def load(self) -> None:
        """Load what was saved as step 1 into the model and the optimizer."""


class AsyncContender(Protocol):
    """A way to save while the training continues."""

    def save(self, step: int) -> None:
        """Return when the model and the optimizer may change again."""

    def wait(self) -> None:
        """Return when the last save is complete."""

    def close(self) -> None:
        """Give back what is kept between saves."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the memory of all tensors into one file, one after another, and nothing else."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for tensor in tensors.values():
            rest = as_bytes(tensor)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


class _Raw:
    """The least that saving and loading can be: one write, one read. Also a check on the baseline."""

    def __init__(self, model: Decoder, optimizer: AdamW, directory: Path) -> None:
        self._model, self._optimizer, self._path = model, optimizer, directory / "raw"

    def save(self, step: int) -> None:
        write_tensors(self._path, state_tensors(self._model, self._optimizer))

    def load(self) -> None:
        for parameter in self._model.parameters():
            self._optimizer.state[parameter] = {
                "step": torch.empty(()),
                "exp_avg": torch.empty_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
            }
        with self._path.open("rb", buffering=0) as file:
            for name, tensor in state_tensors(self._model, self._optimizer).items():
                if file.readinto(as_bytes(tensor)) != tensor.nbytes:
                    raise OSError(f"{self._path} ends inside {name}")


class _Ours:
    """checkpoint-core: checksums, manifest, sync and rename at every save; everything verified at a load."""

    def __init__(
        self, model: Decoder, optimizer: AdamW, directory: Path, config: core.CheckpointConfig
    ) -> None:
        import checkpoint_core as core
        from dist_env import StaticDistributedEnvironment

        parts: list[tuple[str, core.Stateful]] = [
            ("model", core.ModelState(model)),
            ("optimizer", core.OptimizerState(optimizer, model)),
        ]
        components = [
            core.StateComponent(
                key=key,
                stateful=stateful,
                sharing_pattern=core.SharingPattern.REPLICATED,
                required=key == "model",
            )
            for key, stateful in parts
        ]
        self._manager = core.CheckpointManager(
            config,
            dist=StaticDistributedEnvironment(),
            stateful_provider=core.StaticStatefulProvider(components),
        )
        self._first = directory / "checkpoint-1"

    def save(self, step: int) -> None:
        self._manager.save_checkpoint(step)

    def wait(self) -> None:
        self._manager.wait()

    def close(self) -> None:
        self._manager.close()

    def load(self) -> None:
        self._manager.load_checkpoint(self._first)


def _ours(model: Decoder, optimizer: AdamW, directory: Path) -> Contender:
    from checkpoint_core import CheckpointConfig

    return _Ours(model, optimizer, directory, CheckpointConfig(output_dir=directory, save_total_limit=1))


def _ours_async(model: Decoder, optimizer: AdamW, directory: Path) -> AsyncContender:
    from checkpoint_core import CheckpointConfig

    config = CheckpointConfig(output_dir=directory, save_total_limit=1, async_save=True)
    return _Ours(model, optimizer, directory, config)


class _TorchSave:
    """``torch.save`` of both state dictionaries in one file."""

    def __init__(self, model: Decoder, optimizer: AdamW, directory: Path) -> None:
        self._model, self._optimizer, self._path = model, optimizer, directory / "checkpoint.pt"

    def save(self, step: int) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": step}
        torch.save(state, self._path)

    def load(self) -> None:
        state = torch.load(self._path, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


class _TorchSaveWithoutCrc(_TorchSave):
    """The same without the checksums of the zip format."""

    def __init__(self, model: Decoder, optimizer: AdamW, directory: Path) -> None:
        super().__init__(model, optimizer, directory)
        torch.serialization.set_crc32_options(False)


class _Safetensors:
    """safetensors for the weights, ``torch.save`` for the optimizer."""

    def __init__(self, model: Decoder, optimizer: AdamW, directory: Path) -> None:
        import safetensors.torch

        self._save_file, self._load_file = safetensors.torch.save_file, safetensors.torch.load_file
        self._model, self._optimizer, self._directory = model, optimizer, directory

    def save(self, step: int) -> None:
        self._save_file(self._model.state_dict(), self._directory / "model.safetensors")
        torch.save(self._optimizer.state_dict(), self._directory / "optimizer.pt")

    def load(self) -> None:
        self._model.load_state_dict(self._load_file(self._directory / "model.safetensors"))
        self._optimizer.load_state_dict(torch.load(self._directory / "optimizer.pt", weights_only=True))


class _Distributed:
    """torch.distributed.checkpoint in one process, which syncs its files itself."""

    def __init__(self, model: Decoder, optimizer: AdamW, directory: Path) -> None:
        from torch.distributed.checkpoint import state_dict, state_dict_loader, state_dict_saver

        # One process without a group is what is wanted, and what no_dist says.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        self._states, self._loader, self._saver = state_dict, state_dict_loader, state_dict_saver
        self._model, self._optimizer, self._directory = model, optimizer, directory

    def _state(self) -> dict[str, object]:
        model, optimizer = self._states.get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        self._saver.save(self._state(), checkpoint_id=self._directory / f"{step}", no_dist=True)

    def load(self) -> None:
        model, optimizer = self._states.get_state_dict(self._model, self._optimizer)
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        self._loader.load(state, checkpoint_id=self._directory / "1", no_dist=True)
        self._states.set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


class _DistributedAsync(_Distributed):
    """Its ``async_save`` in a thread, with one stager for all saves."""

    _pending: Future[object]

    def __init__(self, model: Decoder, optimizer: AdamW, directory: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(model, optimizer, directory)
        # Kept between saves, so that later ones find the memory of the first.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(self, step: int) -> None:
        pending = self._saver.async_save(
            self._state(),
            checkpoint_id=self._directory / f"{step}",
            async_stager=self._stager,
            no_dist=True,
        )
        if not isinstance(pending, Future):
            raise TypeError(f"async_save returned a {type(pending).__name__}, not a future")
        self._pending = pending

    def wait(self) -> None:
        self._pending.result()

    def close(self) -> None:
        self._stager.close()


class _Accelerate:
    """``Accelerator.save_state`` and ``load_state``."""

    def __init__(self, model: Decoder, optimizer: AdamW, directory: Path) -> None:
        from accelerate import Accelerator  # type: ignore[import-untyped]

        self._accelerator = Accelerator(cpu=True)
        self._accelerator.prepare(model, optimizer)
        self._directory = directory

    def save(self, step: int) -> None:
        self._accelerator.save_state(str(self._directory / f"{step}"))

    def load(self) -> None:
        self._accelerator.load_state(str(self._directory / "1"))


class _HuggingFaceTrainer:
    """The methods by which a real ``transformers.Trainer`` saves, and resumes in ``train``."""

    def __init__(self, model: Decoder, optimizer: AdamW, directory: Path) -> None:
        import transformers

        arguments = transformers.TrainingArguments(
            output_dir=str(directory), use_cpu=True, report_to=[], disable_tqdm=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        self._trainer = transformers.Trainer(model=model, args=arguments, optimizers=(optimizer, schedule))
        self._model, self._directory = model, directory

    def save(self, step: int) -> None:
        self._trainer.state.global_step = step
        self._trainer._save_checkpoint(self._model, trial=None)

    def load(self) -> None:
        checkpoint = str(self._directory / "checkpoint-1")
        self._trainer._load_from_checkpoint(checkpoint)
        self._trainer._load_optimizer_and_scheduler(checkpoint)
        self._trainer._load_rng_state(checkpoint)


SYNC: dict[str, Callable[[Decoder, AdamW, Path], Contender]] = {
    "raw": _Raw,
    "ours": _ours,
    "torch-save-no-crc": _TorchSaveWithoutCrc,
    "torch-save": _TorchSave,
    "safetensors": _Safetensors,
    "dcp": _Distributed,
    "accelerate": _Accelerate,
    "hf-trainer": _HuggingFaceTrainer,
}

ASYNC: dict[str, Callable[[Decoder, AdamW, Path], AsyncContender]] = {
    "ours-async": _ours_async,
    "dcp-async": _DistributedAsync,
}
