"""The tier in memory: checkpoints of a running job, by the same save and the same load as any other."""

import logging
from dataclasses import replace
from pathlib import Path

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import Plan
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.errors import CheckpointError
from checkpoint_core.memory_room import MEMORY_COPIES, MemoryRoomError, make_room
from checkpoint_core.retention import Retention, manifests_of_run
from checkpoint_core.saving import CheckpointSave
from checkpoint_core.store_path import locate
from dist_env import DistributedEnvInterface

_logger = logging.getLogger(__name__)


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
        self._has_saved = False
        self._skips = False
        """Whether the last save was left out. Equal on all ranks, as is the one above."""

    def close(self) -> None:
        """Close the connections."""
        if self._own is not None:
            self._own.close()

    def save(self, step: int, plan: Plan, local_world_size: int) -> Path | None:
        """Save a checkpoint, and remove those beyond the newest two. Collective.

        The first save of a run that does not fit is refused, so that whoever started it can make room. A
        later one is left out, on every node alike: what has filled the memory meanwhile need not end the run.

        Args:
            step: The step.
            plan: Who writes what.
            local_world_size: Number of ranks on this host.

        Returns:
            The checkpoint; None if a node lacks room for it, which a warning says.

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
            if not self.ranks.broken and self._may_skip(save):
                self._warn_of_skipping(error)
                return None
            # What it calls by the setting of saves to storage.
            error.args = (str(error).replace("save_on_each_node=True", "memory_dir"),)
            raise
        phase = f"rotating in memory after {save.final.name}"
        self.ranks.run_on_leaders(phase, lambda: self.retention.apply(save.final, None))
        self._has_saved, self._skips = True, False
        return save.final

    def _may_skip(self, save: "_MemorySave") -> bool:
        """Whether a save failed for lack of room alone, in a run that has saved before. Collective."""

        def look() -> list[bool]:
            if not self.ranks.is_leader:
                return [False, False, False]
            earlier = manifests_of_run(self.directory, self.retention.run_id)
            return [save.lacks_room, save.has_failed, bool(earlier)]

        # What those report who had room counts as well: a node that took another's place has no earlier one.
        reports = self.ranks.run("looking for room in memory", look)
        lacks, failed, saved = (any(column) for column in zip(*reports, strict=True))
        return lacks and not failed and (self._has_saved or saved)

    def _warn_of_skipping(self, error: CheckpointError) -> None:
        if self.ranks.rank == 0 and not self._skips:  # not at each step
            _logger.warning(
                "%s Saves to memory are left out until there is room; a restart continues from an earlier "
                "checkpoint.",
                error,
            )
        self._skips = True


class _MemorySave(CheckpointSave):
    """A save that needs room for those that come after it."""

    lacks_room = False
    """Whether this node has refused it for that."""
    has_failed = False
    """Whether it did not begin here for another reason."""

    def _begin(self, needed: int) -> str:
        try:
            make_room(self.final.parent, needed, self.run_id)
            return super()._begin(needed)
        except MemoryRoomError:
            self.lacks_room = True
            raise
        except Exception:
            self.has_failed = True
            raise
