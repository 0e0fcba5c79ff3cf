"""Lightning's checkpoints in this package's format: whole or not there, verified, never unpickled."""

import importlib
import importlib.util
import logging
import shutil
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from checkpoint_core.components import SharingPattern, StateComponent
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.directory import remove_checkpoint
from checkpoint_core.errors import CheckpointError
from checkpoint_core.manager import CheckpointManager
from checkpoint_core.manifest import MANIFEST_NAME, read_manifest
from dist_env import StaticDistributedEnvironment

Framework = Literal["lightning.pytorch", "pytorch_lightning"]

_logger = logging.getLogger(__name__)
_BASES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Where each framework has its `CheckpointIO`."""
_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"


class LightningCheckpointIO:
    """A `CheckpointIO` for Lightning's trainer: ``Trainer(plugins=[LightningCheckpointIO()])``.

    All that Lightning puts into a checkpoint is saved and restored: weights, optimizers, schedulers, loops,
    callbacks, and the positions of loaders with ``state_dict``. Each checkpoint is a directory under the name
    that Lightning chose, such as ``epoch=0-step=100.ckpt``: ``model.safetensors`` with the weights under the
    module's own names, which `load_model_weights` and Hugging Face tools read; the rest as JSON and
    safetensors; and a manifest with checksums. It appears by one rename, and nothing is ever unpickled.

    Lightning's ``ModelCheckpoint`` decides when to save and what to keep, and
    ``trainer.fit(module, ckpt_path="last")`` resumes. A checkpoint that is written again, as ``last.ckpt``
    is, is first put aside as ``last-replaced.ckpt``, which Lightning takes for "last" if the process dies in
    between.

    As in Lightning's own files there are no random numbers. Rank 0 writes; strategies that save shards (FSDP,
    model parallel) do not use a `CheckpointIO`. A `CheckpointManager` in a callback does both.
    ``Module.load_from_checkpoint`` reads only Lightning's own files: make the module and call
    ``load_model_weights(module, path)``.

    Lightning is imported when an instance is made.

    Args:
        max_shard_size: Bytes of weights in a file; larger models are divided and get an index.
        framework: Whose trainer it is for. None: the one that is imported already.

    Raises:
        ValueError: ``framework`` is not one of the two, or both are imported and ``framework`` is None.
        ModuleNotFoundError: Lightning is not installed.
    """

    def __new__(cls, *_: object, framework: Framework | None = None, **__: object) -> Self:
        """Make an instance that is a `CheckpointIO` of the framework as well."""
        base = _base(framework or _framework_in_use())
        if not issubclass(cls, base):
            body = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": _reduce}
            cls = type(cls.__name__, (cls, base), body)
        return super().__new__(cls)

    def __init__(self, *, max_shard_size: int = 5_000_000_000, framework: Framework | None = None) -> None:
        self._max_shard_size = max_shard_size
        CheckpointConfig(output_dir=".", max_shard_size=max_shard_size)  # checks it

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        """Save what Lightning collected; called on rank 0 alone.

        Args:
            checkpoint: The state.
            path: The checkpoint, a directory.
            storage_options: None.

        Raises:
            CheckpointError: The state holds something that cannot be stored, whose place is named; or
                ``path`` is there and is not a checkpoint of this package.
            TypeError: ``storage_options`` is not None.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} has no meaning for LightningCheckpointIO. Leave it out."
            )
        path = _local(path)
        step = int(checkpoint.get("global_step", 0))
        replaces = (path / MANIFEST_NAME).is_file()
        fresh = path.with_name(f".{path.name}.new") if replaces else path
        if replaces and fresh.exists():
            shutil.rmtree(fresh)  # a save that was killed
        state = {name: value for name, value in checkpoint.items() if name not in (_WEIGHTS, _OPTIMIZERS)}
        weights = checkpoint.get(_WEIGHTS, {})
        parts = {"model": _Held(dict(weights)), "lightning": _Held(state)}
        if _OPTIMIZERS in checkpoint:
            parts["optimizers"] = _Held({_OPTIMIZERS: checkpoint[_OPTIMIZERS]})
        if metadata := getattr(weights, "_metadata", None):
            parts["module_versions"] = _Held(dict(metadata))
        with self._manager(path.parent, parts) as manager:
            manager.save_checkpoint(step, path=fresh)
        aside = _aside(path)
        _remove(aside)
        if replaces:
            path.rename(aside)
            fresh.rename(path)
            _remove(aside)

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify a checkpoint and return its state, with tensors on the CPU; any rank may call this alone.

        Args:
            path: The checkpoint.
            map_location: None; Lightning moves the values to where they belong.
            weights_only: Not needed: nothing is unpickled in any case.

        Raises:
            CheckpointError: It is missing, damaged or not a checkpoint of this package.
            TypeError: ``map_location`` is not None.
        """
        if map_location is not None:
            raise TypeError(
                f"map_location={map_location!r} has no meaning for LightningCheckpointIO, which returns "
                "tensors on the CPU. Leave it out."
            )
        path = _local(path)
        aside = _aside(path)
        if not path.exists() and aside.exists():
            _logger.warning("loading %s: the save that was replacing %s was interrupted", aside, path.name)
            path = aside
        if path.is_file():
            raise CheckpointError(
                f"path={str(path)!r} is a file, a pickle of Lightning's own format, which is never read. "
                "Resume without LightningCheckpointIO, or start a new run."
            )
        found = sorted(record.key for record in read_manifest(path).components)
        if not {"model", "lightning"} <= {*found}:
            raise CheckpointError(
                f"path={str(path)!r} was not saved by LightningCheckpointIO: it has {', '.join(found)}. Load "
                "it with the CheckpointManager of the loop that saved it, or only its weights with "
                "load_model_weights(module, path)."
            )
        parts = {key: _Held({}) for key in found}
        with self._manager(path.parent, parts) as manager:
            manager.load_checkpoint(path)
        weights = OrderedDict(parts["model"].state)
        if "module_versions" in parts:
            # As Module.state_dict() does.
            weights._metadata = OrderedDict(parts["module_versions"].state)  # type: ignore[attr-defined]
        optimizers = parts["optimizers"].state if "optimizers" in parts else {}
        return {**parts["lightning"].state, _WEIGHTS: weights, **optimizers}

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, so that no moment shows it half deleted; one that is missing is gone already.

        Raises:
            CheckpointError: It is not a checkpoint of this package.
        """
        path = _local(path)
        if path.is_symlink():  # ModelCheckpoint(save_last="link")
            path.unlink()
        else:
            _remove(path)

    def _manager(self, directory: Path, parts: Mapping[str, "_Held"]) -> CheckpointManager:
        shared = SharingPattern.GLOBAL
        return CheckpointManager(
            CheckpointConfig(output_dir=directory, max_shard_size=self._max_shard_size),
            # Lightning calls one rank for a save, and each by itself for a load.
            dist=StaticDistributedEnvironment(),
            stateful_provider=[
                StateComponent(key=key, stateful=held, sharing_pattern=shared, required=True)
                for key, held in parts.items()
            ],
        )


class _Held:
    """State that Lightning has taken out of its objects, or will put back."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        raise CheckpointError(
            f"path={str(path)!r} is not on a file system of this machine. Use a path such as 'runs/a'."
        )
    return Path(path).absolute()


def _aside(path: Path) -> Path:
    """Where a checkpoint stays while another takes its place; "last" in front is what Lightning looks for."""
    return path.with_name(f"{path.stem}-replaced{path.suffix}")


def _remove(path: Path) -> None:
    if path.exists():
        remove_checkpoint(path, read_manifest(path).step)


def _base(framework: Framework) -> type:
    if framework not in _BASES:
        raise ValueError(f"framework={framework!r} must be one of {', '.join(_BASES)}, or None.")
    base: type = importlib.import_module(f"{_BASES[framework]}.plugins").CheckpointIO
    return base


def _framework_in_use() -> Framework:
    """The framework that is imported, or else the first one that is installed."""
    names: tuple[Framework, ...] = ("lightning.pytorch", "pytorch_lightning")
    imported = [name for name in names if name in sys.modules]
    if len(imported) > 1:
        raise ValueError(
            "framework=None cannot tell which Lightning is meant, because both lightning.pytorch and "
            "pytorch_lightning are imported. Name the one whose Trainer this is for."
        )
    for name in imported or names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ModuleNotFoundError(
        "LightningCheckpointIO needs Lightning, which is not installed. Install it with "
        "`pip install lightning`."
    )


def _reduce(self: LightningCheckpointIO) -> tuple[object, ...]:
    # The class that __new__ made cannot be imported by name, so it is made again.
    return _remake, (_name_of_framework(type(self)),), self.__dict__


def _name_of_framework(cls: type) -> str:
    modules = {base.__module__.partition(".")[0] for base in cls.__mro__}
    return "pytorch_lightning" if "lightning_fabric" in modules else "lightning.pytorch"


def _remake(framework: Framework) -> LightningCheckpointIO:
    return LightningCheckpointIO.__new__(LightningCheckpointIO, framework=framework)
