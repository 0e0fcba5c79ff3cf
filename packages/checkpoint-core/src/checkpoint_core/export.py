"""Weights alone, as a Hugging Face directory: where it may be written, and how files take their place."""

import re
from pathlib import Path
from typing import Literal

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.component_files import (
    CapturedState,
    ComponentFiles,
    capture,
    join_states,
    own_state,
    plan_files,
)
from checkpoint_core.components import Plan, SharingPattern
from checkpoint_core.directory.commit import check_space, clean_leftovers, create_staging, discard
from checkpoint_core.directory.lease import DirectoryLease
from checkpoint_core.directory.manifest import MANIFEST_NAME
from checkpoint_core.errors import CheckpointError
from checkpoint_core.saving import Preprocessor, save_preprocessor
from checkpoint_core.state.weights import ModelState
from checkpoint_core.storage.files import sync_file
from checkpoint_core.storage.tensor_files import MODEL_STEM

_WEIGHTS = re.compile(
    r"model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors"
    r"|pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?"
)


class ModelExport:
    """The weights, configuration and preprocessor of one model, written as a Hugging Face directory.

    Everything is written aside first; then each file takes its place by one rename, the index last. Every
    rank writes its own bytes straight from its memory, so no rank ever holds a tensor that it does not have.

    Args:
        ranks: The ranks that export together.
        plan: Declares the component ``model``.
        output_dir: The directory; made if needed. Other files in it stay.
        overwrite: Replace weights that are there.
        max_shard_size: Bytes of tensor data per file.
        preprocessor: The tokenizer or processor.
        on_replica_mismatch: Whether different values of one tensor are an error or a warning.
        lease: One that this process may hold; of this directory it serves for the export, too.
    """

    def __init__(
        self,
        ranks: RankAgreement,
        plan: Plan,
        output_dir: Path,
        *,
        overwrite: bool,
        max_shard_size: int,
        preprocessor: Preprocessor | None,
        on_replica_mismatch: Literal["error", "warn"],
        lease: DirectoryLease | None = None,
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._output_dir = output_dir
        self._overwrite = overwrite
        self._max_shard_size = max_shard_size
        self._preprocessor = preprocessor
        self._on_replica_mismatch = on_replica_mismatch
        # Two exports into one directory would leave the files of both.
        own = lease is not None and lease.held and lease.directory.resolve() == output_dir.resolve()
        self._lease = None if own else DirectoryLease(output_dir)
        self._phase = f"saving the model to {output_dir}"
        self._files: ComponentFiles | None = None
        self._staging: Path | None = None

    def run(self) -> None:
        """Export. Collective.

        Raises:
            CheckpointError: On every rank: weights are there already, the directory is a checkpoint, another
                process writes to it, there is no component ``model``, or writing failed.
        """
        try:
            self._ranks.run_on_leaders(self._phase, self._claim)
            captured: dict[str, CapturedState] = {}
            self._ranks.run(self._phase, lambda: self._capture(captured))
            self._plan_files(captured)
            staging = self._output_dir / self._ranks.run_on_leaders(self._phase, self._begin)
            self._ranks.run(self._phase, lambda: self._write(staging))
            self._ranks.run_on_leaders(self._phase, lambda: place_files(staging, self._output_dir))
        finally:
            if self._staging is not None:
                discard(self._staging)
            if self._lease is not None:
                self._lease.release()

    def _claim(self) -> None:
        self._check_target()
        if self._lease is not None:
            self._lease.acquire()
            self._check_target()  # again, for what another export has left meanwhile

    def _check_target(self) -> None:
        check_export_target(self._output_dir, overwrite=self._overwrite, setting="overwrite_output_dir=True")

    def _capture(self, captured: dict[str, CapturedState]) -> None:
        if self._ranks.rank != 0 and self._plan.patterns.get(MODEL_STEM) is SharingPattern.GLOBAL:
            return
        assignment = self._plan.assignments.get(MODEL_STEM)
        if assignment is None or not isinstance(assignment.component.stateful, ModelState):
            raise CheckpointError(
                "save_model() needs a component with key 'model' whose stateful is a ModelState, but "
                f"declared are {sorted(self._plan.assignments)}."
            )
        # Every replica is asked, because taking the state may itself need all ranks.
        captured[MODEL_STEM] = capture(assignment.component.stateful, MODEL_STEM, sharded=self._sharded)

    @property
    def _sharded(self) -> bool:
        return self._plan.patterns[MODEL_STEM] is SharingPattern.SHARDED

    def _plan_files(self, captured: dict[str, CapturedState]) -> None:
        if self._sharded:
            whole = join_states(self._ranks, self._phase, captured, self._on_replica_mismatch)[MODEL_STEM]
            self._files = plan_files(whole, MODEL_STEM, self._max_shard_size)
        elif self._ranks.is_leader and captured:
            self._files = plan_files(own_state(captured[MODEL_STEM]), MODEL_STEM, self._max_shard_size)

    def _begin(self) -> str:
        clean_leftovers(self._output_dir)
        if self._files is not None:
            check_space(self._output_dir, self._files.size)
        self._staging = create_staging(self._output_dir, 0)
        if self._preprocessor is not None:
            save_preprocessor(self._preprocessor, self._staging)
        if self._files is not None:
            self._files.create(self._staging)
        return self._staging.name

    def _write(self, staging: Path) -> None:
        if self._files is not None:
            self._files.write(staging, self._ranks.threads)


def check_export_target(out: Path, *, overwrite: bool, setting: str) -> None:
    """Refuse to write into a checkpoint, or over weights unless told to.

    Args:
        out: The directory to write.
        overwrite: Weights that are there may be replaced.
        setting: How the user says so, for messages.

    Raises:
        CheckpointError: It is a checkpoint or inside one, no directory, or has weights.
    """
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file. Choose a directory.")
    absolute = out.absolute()
    for directory in (absolute, *absolute.parents):
        if (directory / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{directory} is a checkpoint, which must not change. Choose another directory."
            )
    existing = _existing_weights(out)
    if existing and not overwrite:
        raise CheckpointError(
            f"{out / existing[0]} exists. Pass {setting} to replace the weights, or choose another directory."
        )


def place_files(staging: Path, out: Path) -> None:
    """Move complete files to their place, the index last, and remove weights they replace.

    Args:
        staging: Holds the files.
        out: The directory.
    """
    stale = set(_existing_weights(out))
    written = sorted((path.relative_to(staging) for path in staging.rglob("*") if path.is_file()), key=_order)
    for name in written:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(out / name)
    for old in stale - {str(name) for name in written}:
        (out / old).unlink()
    sync_file(out)


def _existing_weights(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if _WEIGHTS.fullmatch(path.name))


def _order(name: Path) -> tuple[bool, str]:
    return name.name.endswith(".index.json"), str(name)
