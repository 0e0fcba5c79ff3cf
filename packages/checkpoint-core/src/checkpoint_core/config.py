"""The settings of a checkpoint manager."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkpoint_core.errors import CheckpointError
from checkpoint_core.store_path import StorePath, locate

_LOWER_WINS = ("loss", "perplexity")
_LONGEST_TIMEOUT = 30 * 86400.0


@dataclass
class CheckpointConfig:
    """Where and how checkpoints are kept.

    Raises:
        CheckpointError: A value out of range.
    """

    output_dir: str | Path
    """Holds the ``checkpoint-<step>`` directories; shared by all ranks. Also an address in an object store,
    as text: ``s3://bucket/run``, ``gs://``, ``az://``, ``file:///directory`` or ``memory://name/run``."""
    save_total_limit: int | None = 2
    """How many checkpoints of this run to keep, at least 1; None keeps all. The ``preserve_n_best`` best and
    the one that was resumed from are kept besides."""
    best_metric: str | None = None
    """The metric that ranks checkpoints, such as ``eval_loss``; None ranks none."""
    greater_is_better: bool | None = None
    """Whether the greater ``best_metric`` wins. None goes by the name: with ``loss`` or ``perplexity`` in it
    the lower value wins, any other name is an error."""
    preserve_n_best: int = 0
    """How many of the best checkpoints are exempt from ``save_total_limit``."""
    max_shard_size: int = 5_000_000_000
    """Bytes of tensor data per file of weights; larger models are divided and get an index."""
    timeout_seconds: float = 1800.0
    """How long a rank waits for the slowest rank before it gives up."""
    save_on_each_node: bool = False
    """Every node writes to an ``output_dir`` of its own, for storage that the nodes do not share. Each keeps
    a whole copy, so state that is divided between nodes cannot be saved so; but with ``remote_dir`` the nodes
    keep one copy together, each the files that its ranks write."""
    remote_dir: str | None = None
    """A second tier: an address in an object store, such as ``s3://bucket/run``, to which checkpoints are
    uploaded in the background once they are committed in ``output_dir``. A resume takes the newest good
    checkpoint of both. That directory is one that all ranks share, or with ``save_on_each_node`` one on the
    disk of each node: then a resume takes from there what was saved by nodes that are all back."""
    remote_save_total_limit: int | None = 2
    """``save_total_limit`` of ``remote_dir``, with the ``preserve_n_best`` best of there besides."""
    memory_dir: str | Path | None = None
    """A tier in memory: the directory of a `MemoryDirectory` on each node, where ``save_to_memory`` keeps the
    two newest checkpoints for ranks that a launcher starts again. A resume takes the newest good checkpoint
    of all tiers. State that is divided between nodes cannot be saved there."""
    one_writer_per_file: bool | None = None
    """Whether each file is written by one rank, to which others send their parts of it. False lets ranks
    write to ranges of one file, of which NFS loses some when they are on several hosts. None decides at each
    save: ranks of several hosts share a file only on a parallel file system, such as Lustre or GPFS. In an
    object store each file always has one writer."""
    async_save: bool = False
    """``save_checkpoint`` returns once the state is copied; writing continues in the background. Close the
    manager before the process group is destroyed, or the last save is lost."""
    on_replica_mismatch: Literal["error", "warn"] = "error"
    """What happens when copies of a component with ``validate_replication`` differ between ranks."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("save_total_limit", "remote_save_total_limit"):
            limit = getattr(self, name)
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise CheckpointError(f"{name}={limit!r} must be an integer of 1 or more, or None.")
        if not isinstance(self.max_shard_size, int) or self.max_shard_size < 1:
            raise CheckpointError(
                f"max_shard_size={self.max_shard_size!r} must be an integer of 1 byte or more."
            )
        _check_best_settings(self.best_metric, self.greater_is_better, self.preserve_n_best)
        if self.one_writer_per_file is not None and not isinstance(self.one_writer_per_file, bool):
            raise CheckpointError(
                f"one_writer_per_file={self.one_writer_per_file!r} must be True, False or None."
            )
        if self.one_writer_per_file and self.save_on_each_node:
            raise CheckpointError(
                "one_writer_per_file=True does not go with save_on_each_node=True, where only ranks of one "
                "node write to a directory. Leave one of them out."
            )
        if self.remote_dir is not None:
            _check_tiers(self.output_dir, self.remote_dir)
        if self.memory_dir is not None and isinstance(locate(self.memory_dir), StorePath):
            raise CheckpointError(
                f"memory_dir={str(self.memory_dir)!r} is in an object store, but must be a directory in "
                "memory. Give the path of a MemoryDirectory."
            )
        if self.on_replica_mismatch not in ("error", "warn"):
            raise CheckpointError(
                f"on_replica_mismatch={self.on_replica_mismatch!r} must be 'error' or 'warn'."
            )
        timeout = self.timeout_seconds
        if not isinstance(timeout, (int, float)) or not 0 < timeout <= _LONGEST_TIMEOUT:
            raise CheckpointError(
                f"timeout_seconds={timeout!r} must be a number above 0 and at most {_LONGEST_TIMEOUT:g}."
            )


def lower_is_better(metric: str, greater_is_better: bool | None) -> bool:
    """Which direction of a metric wins.

    Args:
        metric: Its name.
        greater_is_better: The direction; None goes by the name, in which ``loss`` or ``perplexity`` means
            that the lower value wins.

    Returns:
        True when the lower value wins.

    Raises:
        CheckpointError: ``greater_is_better`` is None and the name tells nothing.
    """
    if greater_is_better is not None:
        return not greater_is_better
    if any(word in metric.lower() for word in _LOWER_WINS):
        return True
    raise CheckpointError(
        f"greater_is_better=None leaves open which value of best_metric={metric!r} wins, because only a "
        f"name with {' or '.join(_LOWER_WINS)} tells that (the lower). Set greater_is_better to True or "
        "False."
    )


def _check_tiers(output_dir: str | Path, remote_dir: str | Path) -> None:
    """Check that the two tiers are two, and that the first one is a directory."""
    local, remote = locate(output_dir), locate(remote_dir)
    if not isinstance(remote, StorePath):
        raise CheckpointError(
            f"remote_dir={str(remote_dir)!r} is a directory, but the second tier is in an object store. Give "
            "an address, such as 's3://bucket/run'."
        )
    if isinstance(local, StorePath):
        raise CheckpointError(
            f"output_dir={str(local)!r} is in an object store, but with remote_dir it must be a directory. "
            "Give one on a fast disk, or leave remote_dir out to save to the store directly."
        )
    if remote.bucket == "file://":
        here, there = local.resolve(), Path(f"/{remote.key}").resolve()
        if here == there or here in there.parents or there in here.parents:
            raise CheckpointError(
                f"remote_dir={str(remote_dir)!r} and output_dir={str(output_dir)!r} are the same directory, "
                "or one holds the other. Give each tier a place of its own."
            )


def _check_best_settings(
    best_metric: str | None, greater_is_better: bool | None, preserve_n_best: int
) -> None:
    """Check the settings of best tracking, each by itself and together."""
    if best_metric is not None and (not isinstance(best_metric, str) or not best_metric):
        raise CheckpointError(f"best_metric={best_metric!r} must be the name of a metric, or None.")
    if greater_is_better is not None and not isinstance(greater_is_better, bool):
        raise CheckpointError(f"greater_is_better={greater_is_better!r} must be True, False or None.")
    if not isinstance(preserve_n_best, int) or isinstance(preserve_n_best, bool) or preserve_n_best < 0:
        raise CheckpointError(f"preserve_n_best={preserve_n_best!r} must be an integer of 0 or more.")
    if best_metric is not None:
        lower_is_better(best_metric, greater_is_better)
    elif preserve_n_best:
        raise CheckpointError(
            f"preserve_n_best={preserve_n_best} needs a metric to rank by, but best_metric is None. Set "
            "best_metric to a name that the metrics of save_checkpoint() hold, such as 'eval_loss'."
        )
    elif greater_is_better is not None:
        raise CheckpointError(
            f"greater_is_better={greater_is_better} has no meaning while best_metric is None. Set "
            "best_metric, or leave greater_is_better out."
        )
