"""The tier in memory: checkpoints of a running job, by the same save and the same load as any other."""

from dataclasses import replace
from pathlib import Path

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import Plan
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.errors import CheckpointError
from checkpoint_core.loading import LoadedCheckpoint, load
from checkpoint_core.manifest import Manifest, read_manifest
from checkpoint_core.memory_directory import MEMORY_COPIES, check_memory
from checkpoint_core.retention import Retention, manifests_of_run
from checkpoint_core.saving import CheckpointSave
from checkpoint_core.selection import find_latest_checkpoint
from checkpoint_core.store_path import locate
from dist_env import DistributedEnvInterface


class MemoryTier:
    """Keeps the newest checkpoints of a run in the memory of each node. Constructing it is collective.

    Args:
        config: The settings, with ``memory_dir``.
        env: Rank and world size.
        ranks: The ranks as they agree on checkpoints on storage; those of one node agree here likewise.
        run_id: The id of the run.
    """

    def __init__(
        self, config: CheckpointConfig, env: DistributedEnvInterface, ranks: RankAgreement, run_id: str
    ) -> None:
        assert config.memory_dir is not None
        self.directory = locate(config.memory_dir).absolute()
        several = env.local_world_size < env.world_size
        # What nodes keep together on storage they do not keep so here: a lost node would take its part along.
        self._own = RankAgreement(env, config.timeout_seconds, each_node=True) if several else None
        self.ranks = ranks if self._own is None else self._own
        """Those that keep one copy together are the ranks of a node."""
        self._config = replace(
            config,
            output_dir=self.directory,
            memory_dir=None,
            remote_dir=None,
            save_total_limit=MEMORY_COPIES,
            save_on_each_node=several,
            one_writer_per_file=None,
            best_metric=None,
            greater_is_better=None,
            preserve_n_best=0,
            async_save=False,
        )
        self.retention = Retention(self._config, run_id)

    def close(self) -> None:
        """Close the connections."""
        if self._own is not None:
            self._own.close()

    def save(self, step: int, plan: Plan, local_world_size: int) -> Path:
        """Save a checkpoint, and remove those beyond the newest two. Collective.

        Args:
            step: The step.
            plan: Who writes what.
            local_world_size: Number of ranks on this host.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: On every rank, when any failed.
        """
        save = _MemorySave(
            config=self._config,
            ranks=self.ranks,
            plan=plan,
            step=step,
            path=None,
            run_id=self.retention.run_id,
            metrics=None,
            preprocessor=None,
            lease=None,
            local_world_size=local_world_size,
        )
        try:
            save.capture()
            save.commit()
        except CheckpointError as error:
            # What it calls by the setting of saves to storage.
            error.args = (str(error).replace("save_on_each_node=True", "memory_dir"),)
            raise
        phase = f"rotating in memory after {save.final.name}"
        self.ranks.run_on_leaders(phase, lambda: self.retention.apply(save.final, None))
        return save.final

    def load(self, plan: Plan, least_step: int) -> tuple[LoadedCheckpoint, Manifest] | None:
        """Restore the components from the newest good checkpoint here. Collective.

        Args:
            plan: Who reads what.
            least_step: The step below which another tier has a newer one.

        Returns:
            What was loaded; None when there is none of that step or a later one.

        Raises:
            CheckpointError: On every rank, when its state does not fit.
        """
        return load(self.ranks, plan, self.directory, None, in_memory_from=least_step)


def newest_step(output_dir: Path, remote_dir: Path | None, *, one_node: bool) -> int:
    """Step of the newest checkpoint on storage; -1 if there is none. The arguments are those of a search."""
    newest = find_latest_checkpoint(output_dir, remote_dir=remote_dir, one_node=one_node)
    return -1 if newest is None else read_manifest(newest).step


class _MemorySave(CheckpointSave):
    """A save that needs room for those that come after it."""

    def _begin(self, needed: int) -> str:
        directory = self.final.parent
        check_memory(directory, needed, len(manifests_of_run(directory, self.run_id)))
        return super()._begin(needed)
