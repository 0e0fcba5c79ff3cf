"""Which checkpoint is loaded: all ranks come to the same one, and prove it whole together."""

import logging
from pathlib import Path

from checkpoint_core.directory.commit import checkpoint_path
from checkpoint_core.directory.discovery import (
    checkpoint_directories,
    good_checkpoints,
    verify_checkpoint,
    warn_passing_over,
)
from checkpoint_core.directory.manifest import MANIFEST_NAME, Manifest, read_manifest
from checkpoint_core.directory.verification import damage, verify_together
from checkpoint_core.errors import CheckpointError
from checkpoint_core.ranks.agreement import RankAgreement

_logger = logging.getLogger(__name__)
_PHASE = "choosing a checkpoint"


def choose(ranks: RankAgreement, output_dir: Path, path: Path | None) -> tuple[Path, Manifest] | None:
    """Choose a checkpoint and verify it. Collective.

    Args:
        ranks: The ranks.
        output_dir: The directory of the checkpoints.
        path: The checkpoint; None for the newest that is good on every node.

    Returns:
        Directory and manifest, or None when ``path`` is None and there is no checkpoint.

    Raises:
        CheckpointError: On every rank: the named checkpoint is missing or damaged, or the nodes have no
            checkpoint in common.
    """
    return (
        _newest(ranks, output_dir.absolute()) if path is None else _named(ranks, output_dir, path.absolute())
    )


def _named(ranks: RankAgreement, output_dir: Path, path: Path) -> tuple[Path, Manifest]:
    def check() -> None:
        if not (path / MANIFEST_NAME).is_file() and checkpoint_directories(path):
            newest = checkpoint_directories(path)[0][1]
            raise CheckpointError(f"{path} holds checkpoints but is none; pass one of them, such as {newest}")
        verify_checkpoint(path, checksums=False)

    ranks.run_on_leaders(_PHASE, check)
    manifest = _read(ranks, path)
    verify_together(ranks, _PHASE, path, manifest)
    if path.parent.resolve() == output_dir.resolve() and ranks.is_leader:
        _warn_about_later(output_dir, manifest.step)
    return path, manifest


def _newest(ranks: RankAgreement, output_dir: Path) -> tuple[Path, Manifest] | None:
    found = ranks.run(_PHASE, lambda: _committed_steps(output_dir) if ranks.is_leader else [])
    for step in _common_steps(ranks, output_dir, found):
        path = checkpoint_path(output_dir, step)
        manifest = _read(ranks, path)
        error = damage(ranks, _PHASE, path, manifest)
        if error is None:
            return path, manifest
        if ranks.is_leader:
            warn_passing_over(path, error)
    return None


def _committed_steps(output_dir: Path) -> list[int]:
    return [manifest.step for _, manifest in good_checkpoints(output_dir, checksums=False)]


def _common_steps(ranks: RankAgreement, output_dir: Path, found: list[list[int]]) -> list[int]:
    """Steps that every site has, highest first."""
    by_site = {site.start: found[site.start] for site in ranks.sites()}
    common = set.intersection(*(set(steps) for steps in by_site.values()))
    if not common and any(by_site.values()):
        listing = "; ".join(f"node of rank {rank}: {steps or 'none'}" for rank, steps in by_site.items())
        raise CheckpointError(
            f"{_PHASE}: no checkpoint in {output_dir} is committed on every node ({listing}). Copy a "
            "checkpoint directory to the nodes that lack it, or move all away to begin afresh"
        )
    newest = max((steps[0] for steps in by_site.values() if steps), default=None)
    if newest is not None and newest not in common and ranks.is_leader:
        _logger.warning("checkpoint-%d is not committed on every node; going back to an earlier one", newest)
    return sorted(common, reverse=True)


def _read(ranks: RankAgreement, path: Path) -> Manifest:
    manifests: list[Manifest] = []
    ranks.run(_PHASE, lambda: manifests.append(read_manifest(path)))
    return manifests[0]


def _warn_about_later(output_dir: Path, step: int) -> None:
    later = [path.name for number, path in checkpoint_directories(output_dir) if number > step]
    if later:
        _logger.warning(
            "%s holds later checkpoints (%s), which an automatic resume would choose; move them away to go "
            "on from step %d",
            output_dir,
            ", ".join(later),
            step,
        )
