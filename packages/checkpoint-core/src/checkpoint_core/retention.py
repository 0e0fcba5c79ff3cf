"""Which checkpoints of a run stay: the newest, the best, and the one it was resumed from."""

import logging
from collections.abc import Mapping
from pathlib import Path

from checkpoint_core.config import CheckpointConfig
from checkpoint_core.directory.best import BestCheckpoint, best_checkpoints
from checkpoint_core.directory.rotation import rotate

_logger = logging.getLogger(__name__)


class Retention:
    """Ranks the checkpoints of one run and deletes those beyond the limit.

    Used by one rank of each directory. Nothing is kept in memory: the ranking is read from the manifests, so
    that a restart loses none of it.

    Args:
        config: Limit and metric.
        run_id: The id of the run.
    """

    def __init__(self, config: CheckpointConfig, run_id: str) -> None:
        self.run_id = run_id
        self.resumed_from: Path | None = None
        self._config = config
        self._warned = False

    def best(self, count: int) -> list[BestCheckpoint]:
        """The best checkpoints, best first.

        Args:
            count: How many at most.

        Returns:
            The checkpoints; none without ``best_metric``.
        """
        config = self._config
        if config.best_metric is None or count == 0:
            return []
        return best_checkpoints(
            Path(config.output_dir),
            run_id=self.run_id,
            metric=config.best_metric,
            greater_is_better=config.greater_is_better,
            count=count,
        )

    def apply(self, newest: Path, metrics: Mapping[str, float] | None) -> None:
        """Delete what the limit no longer covers.

        Args:
            newest: The checkpoint just written.
            metrics: Its metrics.
        """
        self._warn_if_unranked(newest, metrics)
        try:
            protected = [best.path for best in self.best(self._config.preserve_n_best)]
        except OSError as error:
            # Without the ranking the best could be deleted; the new checkpoint is safe, so training goes on.
            _logger.warning("nothing is rotated after %s, the best cannot be told (%s)", newest.name, error)
            return
        if self.resumed_from is not None:
            protected.append(self.resumed_from)
        limit, directory = self._config.save_total_limit, Path(self._config.output_dir)
        rotate(directory, limit=limit, run_id=self.run_id, newest=newest, protected=protected)

    def _warn_if_unranked(self, newest: Path, metrics: Mapping[str, float] | None) -> None:
        wanted = self._config.best_metric
        if wanted is None or metrics is None or wanted in metrics or self._warned:
            return
        self._warned = True
        _logger.warning(
            "best_metric=%r is not among the metrics of %s, which are: %s; it is not ranked. Set best_metric "
            "to one of them",
            wanted,
            newest.name,
            ", ".join(sorted(metrics)) or "none",
        )
