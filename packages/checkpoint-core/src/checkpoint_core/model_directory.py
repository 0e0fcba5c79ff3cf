"""Weights alone: a Hugging Face directory, written and read."""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import Plan, SharingPattern
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.directory import check_space, clean_leftovers, create_staging, discard
from checkpoint_core.encoding import EncodedState
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.files import checksum_file, read_json, sync_file
from checkpoint_core.lease import DirectoryLease
from checkpoint_core.loading import StoredState, check_unclaimed, plan_restore
from checkpoint_core.manifest import MANIFEST_NAME, WEIGHTS_FORMAT, Manifest, read_manifest, wrong_content
from checkpoint_core.model_state import ModelState
from checkpoint_core.saving import (
    ComponentFiles,
    Preprocessor,
    capture_all,
    divide_into_files,
    save_preprocessor,
)
from checkpoint_core.shared_files import needs_one_writer
from checkpoint_core.store_path import locate
from checkpoint_core.tensor_files import MODEL_STEM

_WEIGHTS = re.compile(
    r"model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors"
    r"|pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?"
)


@dataclass(kw_only=True)
class ModelExport:
    """The weights, configuration and preprocessor of one model, written as a Hugging Face directory.

    Everything is written aside first; then each file takes its place by one rename, the index last. Every
    rank writes its own bytes straight from its memory, so no rank ever holds a tensor that it does not have.
    """

    config: CheckpointConfig
    ranks: RankAgreement
    plan: Plan
    """Declares the component ``model``."""
    output_dir: Path
    """The directory; made if needed. Other files in it stay."""
    overwrite: bool
    """Replace weights that are there."""
    preprocessor: Preprocessor | None
    lease: DirectoryLease | None
    """One that this process may hold; of this directory it serves for the export, too."""
    local_world_size: int = 1
    """Number of ranks on this host."""

    def run(self) -> None:
        """Export. Collective.

        Raises:
            CheckpointError: On every rank: weights are there already, the directory is a checkpoint, another
                process writes to it, there is no component ``model``, or writing failed.
        """
        ranks, phase, lease = self.ranks, f"saving the model to {self.output_dir}", self.lease
        self._staging: Path | None = None
        # Two exports into one directory would leave the files of both.
        own = lease is not None and lease.held and lease.directory.resolve() == self.output_dir.resolve()
        self._lease = None if own else DirectoryLease(self.output_dir)
        try:
            ranks.run_on_leaders(phase, self._claim)
            captured: dict[str, EncodedState] = {}
            ranks.run(phase, lambda: captured.update(capture_all(ranks, self._model_plan())))
            setting = self.config.one_writer_per_file
            one_writer = bool(self._model_plan().sharded) and needs_one_writer(
                ranks, phase, self.output_dir, setting, self.local_world_size
            )
            files = divide_into_files(
                ranks,
                phase,
                self._model_plan(),
                captured,
                self.config,
                one_writer=one_writer,
                owners=ranks.nodes()[0] if ranks.is_spread else None,
            )
            staging = self.output_dir / ranks.run_on_leaders(phase, lambda: self._begin([*files.values()]))

            def write() -> None:
                for each in files.values():
                    each.write(staging, ranks.threads, ranks.rank)

            ranks.run(phase, write)
            for key in self._model_plan().sharded:
                files[key].exchange(ranks, phase, staging)
            ranks.run_on_leaders(phase, lambda: self._place(staging))
        finally:
            if self._staging is not None:
                discard(self._staging)
            if self._lease is not None:
                self._lease.release()

    def _claim(self) -> None:
        target, setting = self.output_dir, "overwrite_output_dir=True"
        if not self._writes:
            return
        check_export_target(target, overwrite=self.overwrite, setting=setting)
        if self._lease is not None:
            self._lease.acquire()
            # Again, for what another export has left meanwhile.
            check_export_target(target, overwrite=self.overwrite, setting=setting)

    @property
    def _writes(self) -> bool:
        """Whether the leader of this node writes: the first one, where nodes keep one copy together."""
        return self.ranks.site.start == self.ranks.leader

    def _model_plan(self) -> Plan:
        """The plan of the model alone, which the leader of every node writes under its usual name."""
        pattern = self.plan.patterns.get(MODEL_STEM)
        if pattern is SharingPattern.GLOBAL and self.ranks.rank != 0:
            return Plan({MODEL_STEM: pattern}, {})
        assignment = self.plan.assignments.get(MODEL_STEM)
        if pattern is None or assignment is None or not isinstance(assignment.component.stateful, ModelState):
            raise CheckpointError(
                "save_model() needs a component with key 'model' whose stateful is a ModelState, but "
                f"declared are {sorted(self.plan.assignments)}."
            )
        mine = replace(assignment, writer=self.ranks.site.start, stem=MODEL_STEM)
        return Plan({MODEL_STEM: pattern}, {MODEL_STEM: mine})

    def _place(self, staging: Path) -> None:
        if self._writes:
            place_files(staging, self.output_dir)

    def _begin(self, files: Sequence[ComponentFiles]) -> str:
        if not self._writes:
            return ""
        clean_leftovers(self.output_dir)
        check_space(self.output_dir, sum(each.size() for each in files))
        self._staging = create_staging(self.output_dir, 0)
        if self.preprocessor is not None:
            save_preprocessor(self.preprocessor, self._staging)
        for each in files:
            each.create(self._staging)
        return self._staging.name


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


_FREQUENCIES = ".rotary_emb.inv_freq"
"""End of names of what early versions of transformers kept of rotary positions, as in the files of Llama 2.
It follows from the configuration, and transformers does not read it either."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_files(directory: Path, stem: str = MODEL_STEM) -> list[Path]:
    """The weight files of a Hugging Face directory, by its index or as the one file.

    Args:
        directory: The directory.
        stem: Beginning of the file names.

    Returns:
        The shards.

    Raises:
        CheckpointError: No safetensors weights are there, or the index is malformed.
    """
    single = directory / f"{stem}.safetensors"
    index = directory / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        pickles = [name for name in found if Path(name).suffix in _PICKLE_SUFFIXES]
        remedy = "Name a directory that has one of them."
        if pickles:
            remedy = f"It has {pickles[0]}, a pickle that is never read. Convert it to safetensors."
        raise CheckpointError(f"{directory} holds neither {single.name} nor {index.name}. {remedy}")
    document = read_json(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map.")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if Path(name).name != name or name in ("", "..") or "\x00" in name:
            raise CheckpointError(f"{index} points outside its directory: {name!r}. Restore the index.")
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name!r}, which is not a safetensors file. Other formats are never read. "
                "Convert it."
            )
        if not (directory / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is not there. Restore that file.")
    return [directory / name for name in names]


def load_model_weights(
    model: nn.Module,
    directory: str | Path,
    *,
    verify_checksums: bool = True,
    elsewhere: Container[str] = (),
) -> None:
    """Load the weights of a Hugging Face directory, or of a checkpoint, into a model.

    Of parameters that are DTensors each rank reads only the bytes of its own part; there is no communication.

    Args:
        model: The model; its parameters keep their dtype and device.
        directory: A directory with ``model.safetensors`` or an index and its shards. Rotary frequencies
            (``rotary_emb.inv_freq``), which old ones have, may be left over.
        verify_checksums: In a checkpoint, first read the weight files whole and compare their checksums.
            Every rank does so for itself; for a large sharded model verify once and pass False. Other
            directories have no checksums.
        elsewhere: For a part of a model: names of weights that other ranks hold, which may be left over.

    Raises:
        CheckpointError: The weights are missing, damaged, or do not fit the model; or the dtype of a
            parameter cannot hold its values, not even rounded.
    """
    try:
        model_state = ModelState(model)
        place = locate(directory)
        manifest = read_manifest(place) if (place / MANIFEST_NAME).is_file() else None
        # A save to a store has a directory of its own, also in a copy of it on the disk.
        moved = manifest is not None and any(name != manifest.plain_name(name) for name in manifest.files)
        paths = weight_files(place / manifest.save_directory if manifest is not None and moved else place)
        if verify_checksums and manifest is not None:
            _verify(place, manifest, paths)
        stored = StoredState(paths, WEIGHTS_FORMAT)
        try:
            plan = plan_restore(model_state, stored)
            left = [name for name in plan.unclaimed if name not in elsewhere]
            if manifest is None:
                left = [name for name in left if not name.endswith(_FREQUENCIES)]
            check_unclaimed(model_state, left)
            stored.fill(plan.fills, threads=1)
            plan.finish()
        finally:
            stored.close()
    except OSError as error:
        raise CheckpointError(f"loading weights from {directory}: {describe_error(error)}") from error


def _verify(checkpoint: Path, manifest: Manifest, paths: Sequence[Path]) -> None:
    for path in paths:
        if checksum_file(path) != manifest.files.get(path.relative_to(checkpoint).as_posix()):
            raise wrong_content(path)
