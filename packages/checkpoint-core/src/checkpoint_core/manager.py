"""The checkpoint manager: saves and restores declared state for a group of ranks."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import StatefulProvider
from checkpoint_core.errors import CheckpointError
from checkpoint_core.export import export_model
from checkpoint_core.hf_layout import MODEL_STEM
from checkpoint_core.loading import CheckpointLoad, LoadedCheckpoint
from checkpoint_core.plan import make_plan
from checkpoint_core.rotation import rotate
from checkpoint_core.saving import CheckpointSave, Preprocessor
from checkpoint_core.weights import ModelState
from dist_env import DistributedEnvInterface


@dataclass
class CheckpointConfig:
    """Where and how checkpoints are kept.

    Raises:
        CheckpointError: A value out of range.
    """

    output_dir: str | Path
    """Holds the ``checkpoint-<step>`` directories; shared by all ranks."""
    save_total_limit: int | None = 2
    """How many checkpoints of this run to keep, at least 1; None keeps all."""
    max_shard_size: int = 5_000_000_000
    """Bytes of tensor data per file of weights; larger models are divided and get an index."""
    timeout_seconds: float = 1800.0
    """How long a rank waits for the slowest rank before it gives up."""

    def __post_init__(self) -> None:
        """Check the values."""
        limit = self.save_total_limit
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise CheckpointError(f"save_total_limit={limit!r} must be an integer of 1 or more, or None")
        if self.max_shard_size < 1:
            raise CheckpointError(f"max_shard_size={self.max_shard_size!r} must be 1 byte or more")
        if not self.timeout_seconds > 0:
            raise CheckpointError(f"timeout_seconds={self.timeout_seconds!r} must be positive")


class CheckpointManager:
    """Saves and restores the components that a provider declares.

    All methods are collective: every rank calls them, in the same order. So is the constructor.

    Args:
        config: Where and how.
        dist: Rank and world size. With more than one rank the process group must be open.
        stateful_provider: Declares the components.
        preprocessor: A tokenizer or processor with ``save_pretrained(directory)``, saved with the weights.

    Raises:
        CheckpointError: More than one rank, but no matching process group.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        dist: DistributedEnvInterface,
        stateful_provider: StatefulProvider,
        preprocessor: Preprocessor | None = None,
    ) -> None:
        self._config = config
        self._output_dir = Path(config.output_dir)
        self._provider = stateful_provider
        self._preprocessor = preprocessor
        self._ranks = RankAgreement(dist, config.timeout_seconds)
        self._run_id = uuid.uuid4().hex

    def __enter__(self) -> Self:
        """The manager itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the manager."""
        self.close()

    def close(self) -> None:
        """Give back the process group that the manager opened for itself."""
        self._ranks.close()

    def save_checkpoint(self, step: int, *, metrics: Mapping[str, float] | None = None) -> Path:
        """Save every component as ``<output_dir>/checkpoint-<step>``, then rotate. Collective.

        The checkpoint appears by one rename after all of it is on the disk. A checkpoint of the same step
        that this run wrote or resumed from is replaced.

        Args:
            step: The training step, 0 or more, equal on all ranks.
            metrics: Evaluation results to keep with it; those of rank 0 are stored.

        Returns:
            The committed checkpoint.

        Raises:
            CheckpointError: On every rank, when any failed. Nothing is left behind, and earlier checkpoints
                are as they were.
        """
        plan = make_plan("saving a checkpoint", self._ranks, self._provider, lambda: _describe_save(step))
        final = CheckpointSave(
            self._output_dir,
            self._ranks,
            plan,
            step=step,
            run_id=self._run_id,
            max_shard_size=self._config.max_shard_size,
            metrics=metrics,
            preprocessor=self._preprocessor,
        ).run()
        self._ranks.run_on_main(f"rotating after checkpoint-{step}", lambda: self._rotate(final))
        return final

    def load_checkpoint(self, path: str | Path | None = None) -> LoadedCheckpoint | None:
        """Verify a checkpoint and restore every component from it. Collective.

        Sizes and checksums of all files are compared first. A component whose file was deleted keeps its
        fresh state, with a warning, unless it is required.

        Args:
            path: The checkpoint. None takes the newest good one in ``output_dir``; damaged ones are passed
                over with a warning.

        Returns:
            What was loaded, or None when ``path`` is None and there is no checkpoint.

        Raises:
            CheckpointError: On every rank: the named checkpoint is missing or damaged, a required component
                is missing, or state does not fit its object. Components restored before the error keep the
                restored state.
        """
        wanted = None if path is None else Path(path)
        what = f"load of {wanted or 'the newest checkpoint'}"
        plan = make_plan("loading a checkpoint", self._ranks, self._provider, lambda: what)
        result = CheckpointLoad(self._ranks, plan).run(self._output_dir, wanted)
        if result is None:
            return None
        loaded, manifest = result
        if loaded.path.parent == self._output_dir.absolute():
            # Going on from it makes this the same run, so that rotation and replacement include it.
            self._run_id = manifest.run_id
        return loaded

    def save_model(self, output_dir: str | Path, *, overwrite_output_dir: bool = False) -> Path:
        """Write the weights, configuration and preprocessor as a Hugging Face directory. Collective.

        Args:
            output_dir: The directory; made if needed.
            overwrite_output_dir: Replace weights that are there.

        Returns:
            The directory.

        Raises:
            CheckpointError: On every rank: weights are there already, there is no component ``model``, or
                writing failed.
        """
        target = Path(output_dir)
        self._ranks.run_on_main(
            f"saving the model to {target}", lambda: self._export(target, overwrite_output_dir)
        )
        return target

    def _export(self, target: Path, overwrite: bool) -> None:
        components = {component.key: component for component in self._provider.get_state_components()}
        component = components.get(MODEL_STEM)
        if component is None or not isinstance(component.stateful, ModelState):
            raise CheckpointError(
                "save_model() needs a component with key 'model' whose stateful is a ModelState; declared "
                f"are {sorted(components)}"
            )
        export_model(
            component.stateful,
            target,
            overwrite=overwrite,
            max_shard_size=self._config.max_shard_size,
            preprocessor=self._preprocessor,
        )

    def _rotate(self, final: Path) -> None:
        limit, run_id = self._config.save_total_limit, self._run_id
        rotate(self._output_dir, limit=limit, run_id=run_id, newest=final)


def _describe_save(step: int) -> str:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"step={step!r} must be an integer of 0 or more")
    return f"save of step {step}"
