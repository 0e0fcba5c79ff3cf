"""The tier in memory: checkpoints of a running job, by the same save and the same load as any other."""

from dataclasses import replace
from pathlib import Path

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import Plan
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.errors import CheckpointError
from checkpoint_core.memory_room import MEMORY_COPIES, make_room
from checkpoint_core.retention import Retention
from checkpoint_core.saving import CheckpointSave
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


class _MemorySave(CheckpointSave):
    """A save that needs room for those that come after it."""

    def _begin(self, needed: int) -> str:
        make_room(self.final.parent, needed, self.run_id)
        return super()._begin(needed)
