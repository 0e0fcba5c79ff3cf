"""One save to an object store: every rank uploads files of its own, and the manifest commits them.

See ``store_directory.py`` for what lies where, and ``tensor_owners.py`` for who writes what of sharded state.
"""

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue

from checkpoint_core.background import StagingBuffer
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.directory import (
    REPLACED,
    STAGING,
    check_new,
    check_other_runs,
    check_owner,
    check_target,
    checkpoint_directories,
    clean_leftovers,
    temporary_path,
)
from checkpoint_core.encoding import EncodedState
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.files import (
    InterruptSafeEvent,
    PartialDigest,
    in_threads,
    json_bytes,
    parse_json,
)
from checkpoint_core.lease import DirectoryLease
from checkpoint_core.manifest import MANIFEST_NAME, SAVE_DIGITS, Manifest, metrics_document, parse_manifest
from checkpoint_core.saving import (
    METRICS_NAME,
    CheckpointSave,
    ComponentFiles,
    divide_into_files,
    save_preprocessor,
)
from checkpoint_core.shared_files import RankReport, Shares, check_one_writer, gather_reports, written_twice
from checkpoint_core.store_directory import OtherRuns, claim, delete_directory, put_marker
from checkpoint_core.store_path import STORE_THREADS, StorePath, locate, store_place
from checkpoint_core.tensor_files import file_content
from checkpoint_core.tensor_owners import send_to_owners

_logger = logging.getLogger(__name__)
_QUEUED_WINDOWS = 2
_POLL_SECONDS = 0.2


@dataclass(kw_only=True)
class StoreSave(CheckpointSave):
    """The save of one step to a store."""

    others: OtherRuns
    """Knows the checkpoints that were there when this run began to save."""

    def __post_init__(self) -> None:
        """Name the checkpoint."""
        super().__post_init__()
        self._marker: StorePath | None = None
        self._committing = False
        self._replaced: tuple[Mapping[str, str], str | None] | None = None

    def capture(self, staging: StagingBuffer | None = None) -> None:
        """Take the state of all components, and compare replicas. Collective.

        Args:
            staging: Where to copy what this rank will write; None writes from the live state.

        Raises:
            CheckpointError: On every rank, when any failed, or with ``save_on_each_node``.
        """
        self.ranks.run(self._phase, lambda: check_supported(self.final, self.config, None))
        super().capture(staging)

    @property
    def _place(self) -> StorePath:
        return store_place(self.final)

    @property
    def _directory(self) -> StorePath:
        """Where the files of this save go."""
        return self._place / self._save_id[:SAVE_DIGITS]

    def _divide(self, captured: Mapping[str, EncodedState]) -> dict[str, ComponentFiles]:
        return divide_into_files(self.ranks, self._phase, self.plan, captured, self.config, one_writer=True)

    def _write_all(self, needed: int) -> None:
        ranks, phase = self.ranks, self._phase
        ranks.run_on_leaders(phase, self._claim)
        reports = gather_reports(ranks, phase, self._upload_own)
        # In the order that all ranks know: each may declare its components in another one.
        for key in self.plan.sharded:
            files = self._files[key]
            if files.whole is not None and files.whole.need_exchange:
                for report, shares in zip(reports, self._upload_sharded(key, files), strict=True):
                    report["files"] |= shares
        ranks.run_on_leaders(phase, lambda: self._commit(reports))

    def _discard(self) -> None:
        """Remove what was uploaded; a lost rank may still upload, so then the marker stays."""
        if self._marker is None or self._committing:
            return  # It is not known whether a commit without an answer has happened; the marker stays, too.
        try:
            delete_directory(self._directory)
            if not self._others_write:
                self._marker.store.delete([self._marker.key])
        except OSError as error:
            self._warn_left(self._marker, error)

    @property
    def _others_write(self) -> bool:
        """Whether others may still upload to the place of this save after it has failed."""
        return self.ranks.broken

    def _warn_left(self, marker: StorePath, error: OSError) -> None:
        _logger.warning(
            "cannot remove what %s marks (%s); a later save does",
            marker,
            describe_error(error).removesuffix("."),
        )

    def _claim(self) -> None:
        """Refuse what cannot be committed, then make this save known."""
        place, output_dir = self._place, locate(self.config.output_dir)
        parent = place.parent
        self._check_lease()
        if self.path is not None:
            check_new(place, output_dir, self.step)
        else:
            check_target(place, self.run_id)
            check_other_runs(parent, self.step, self.run_id)
            self._check_others()
            self._replaced = self._look_at_replaced()
        clean_leftovers(parent)
        self._marker = temporary_path(parent, STAGING, self.step, self._directory.name)
        claim(self._marker, self._directory)
        if self.preprocessor is not None:
            self._made |= self._upload_preprocessor()
        if self.metrics is not None:
            content = json_bytes({**metrics_document(self.metrics), "global_step": self.step})
            self._put_new(self._made, METRICS_NAME, content)

    def _check_others(self) -> None:
        found = [path for _, path in checkpoint_directories(self._place.parent)]
        self.others.check(found, self.run_id)

    def _look_at_replaced(self) -> tuple[Mapping[str, str], str | None] | None:
        """Version of the manifest that is to be replaced, and the directory of its save; None without one."""
        manifest, store = self._place / MANIFEST_NAME, self._place.store
        try:
            version = store.head(manifest.key).version
            content = store.get(manifest.key)
        except FileNotFoundError:
            return None
        try:
            found: Manifest | None = parse_manifest(manifest, parse_json(content))
        except ValueError:
            found = None  # Damaged: replaced, while its files stay where they are.
        if found is not None:
            # Another run may have committed it since the place was looked at first.
            check_owner(self._place, found.run_id, self.run_id)
        if not store.can_replace():
            raise CheckpointError(
                f"{self._place} exists already, and file:// cannot replace it safely. Save another step, or "
                "give output_dir as a directory, without file://."
            )
        return version, None if found is None else found.save_directory

    def _upload_preprocessor(self) -> Shares:
        assert self.preprocessor is not None
        with tempfile.TemporaryDirectory(prefix="checkpoint-core-") as folder:
            shares = save_preprocessor(self.preprocessor, Path(folder))
            for name in shares:
                self._put(name, (Path(folder) / name).read_bytes())
        return shares

    def _put(self, name: str, content: bytes) -> None:
        place = self._directory / name
        place.store.put_stream(place.key, iter([content]), len(content))

    def _put_new(self, shares: Shares, name: str, content: bytes) -> None:
        """Upload a small file that no other part of the checkpoint has written."""
        self._check_free(name)
        digest = PartialDigest()
        digest.update(0, content)
        self._put(name, content)
        shares[name] = (len(content), digest.share(len(content)))

    def _check_free(self, name: str) -> None:
        if name in self._made:
            raise written_twice(name)

    def _upload_own(self) -> RankReport:
        report = RankReport(components={}, files=dict(self._made))
        jobs: list[Callable[[Shares], None]] = []
        for key, files in self._files.items():
            if self._makes(key):
                report["components"][key] = (files.names, files.format, dict(files.tied))
                for name, text in {**files.documents, **files.companions}.items():
                    jobs.append(partial(self._put_new, name=name, content=text))
            if files.whole is not None and files.whole.need_exchange:
                continue
            for name in self._own_layouts(key, files):
                jobs.append(partial(self._upload, name=name, files=files))

        def run(some: Sequence[Callable[[Shares], None]]) -> Shares:
            shares: Shares = {}
            for job in some:
                job(shares)
            return shares

        for shares in in_threads(min(STORE_THREADS, 2 * self.ranks.threads), jobs, run):
            report["files"] |= shares
        return report

    def _own_layouts(self, key: str, files: ComponentFiles) -> list[str]:
        """Names of the tensor files that this rank writes."""
        if files.whole is None:
            return list(files.layouts) if self._makes(key) else []
        owners = zip(files.layouts, files.whole.owners, strict=False)
        return [name for name, owner in owners if owner == self.ranks.rank]

    def _upload(self, shares: Shares, name: str, files: ComponentFiles) -> None:
        self._check_free(name)
        layout = files.layouts[name]
        upload = _Upload(self._directory / name, layout.size)
        upload.run(file_content(layout, files.parts))
        shares[name] = (layout.size, upload.share)

    def _upload_sharded(self, key: str, files: ComponentFiles) -> list[Shares]:
        """Upload files of which other ranks hold parts. Collective; what each rank has uploaded."""
        assert files.whole is not None
        current: list[_FedUpload] = []
        shares: Shares = {}

        def finish() -> None:
            if current:
                upload = current.pop()
                shares[upload.name] = (upload.size, upload.finish())

        def feed(name: str, data: bytes) -> None:
            if not current or current[0].name != name:
                finish()
                self._check_free(name)
                current.append(_FedUpload(self._directory / name, files.layouts[name].size))
            current[0].feed(data)

        def end() -> Shares:
            finish()
            return shares

        try:
            send_to_owners(self.ranks, self._phase, files.layouts, files.whole, files.parts, feed)
            found = self.ranks.run(f"{self._phase}, component {key!r}", end)
        finally:
            for upload in current:
                upload.give_up()
        # What has travelled as JSON, which has no tuples.
        return [{name: (size, share) for name, (size, share) in each.items()} for each in found]

    def _commit(self, reports: Sequence[RankReport]) -> None:
        check_one_writer(reports)
        manifest = self._manifest(reports).moved(self._directory.name)
        self._check_complete(manifest)
        if self.path is None:
            self._check_others()
        self._check_lease()
        place, store = self._place, self._place.store
        old_marker: StorePath | None = None
        version, old = self._replaced or (None, None)
        if old is not None:
            old_marker = temporary_path(place.parent, REPLACED, self.step, old)
            put_marker(old_marker, place / old)
        self._committing = True
        committed = store.put_if((place / MANIFEST_NAME).key, manifest.to_bytes(), version)
        self._committing = False
        if not committed:
            if old_marker is not None:
                store.delete([old_marker.key])
            raise CheckpointError(
                f"{place} was committed by another run or process while this one uploaded it, and stays as "
                "it is. Stop one of them, or give each an output_dir of its own."
            )
        marker, self._marker = self._marker, None
        assert marker is not None
        # From here on the checkpoint is committed: what fails now is only left for the next save.
        try:
            if old is not None:
                delete_directory(place / old)
            store.delete([each.key for each in (marker, old_marker) if each is not None])
        except OSError as error:
            self._warn_left(marker, error)

    def _check_complete(self, manifest: Manifest) -> None:
        """Look at what is there: another process may have taken this one for dead, and cleaned up."""
        found = {info.key: info.size for info in self._place.store.objects(self._directory.key)}
        for name, record in manifest.files.items():
            place = self._place / name
            if found.get(place.key) != record.size:
                raise CheckpointError(
                    f"{place} should have {record.size} bytes, but the store has "
                    f"{found.get(place.key, 'none')} of it. Nothing is committed; another process "
                    "may have removed it."
                )


def check_supported(place: Path, config: CheckpointConfig, lease: DirectoryLease | None) -> None:
    """Refuse settings that do not work where checkpoints are to be saved.

    Args:
        place: A directory, or a place in a store.
        config: The settings.
        lease: A lease that the manager was given for it.

    Raises:
        CheckpointError: Naming the setting.
    """
    if not isinstance(place, StorePath):
        return
    if config.save_on_each_node:
        raise CheckpointError(
            f"save_on_each_node=True does not go with {place}, which all nodes share. Leave it out."
        )
    if lease is not None:
        raise CheckpointError(
            f"lease: that of {lease.directory} is of a directory, and {place} is in a store, where the "
            "conditional put of the manifest keeps runs apart. Leave lease out."
        )


class _Upload:
    """One object that is uploaded, and the checksum of what went into it."""

    def __init__(self, place: StorePath, size: int) -> None:
        self.name = place.name
        self.size = size
        self.share = 0
        self._place = place

    def run(self, pieces: Iterator[bytes]) -> None:
        """Upload the pieces."""
        digest = PartialDigest()

        def digested() -> Iterator[bytes]:
            position = 0
            for piece in pieces:
                digest.update(position, piece)
                position += len(piece)
                yield piece

        self._place.store.put_stream(self._place.key, digested(), self.size)
        self.share = digest.share(self.size)


class _FedUpload(_Upload):
    """An upload in a thread of its own, whose pieces come from outside."""

    def __init__(self, place: StorePath, size: int) -> None:
        super().__init__(place, size)
        self._queue: Queue[bytes | None] = Queue(_QUEUED_WINDOWS)
        self._given_up = False
        self._failure: BaseException | None = None
        self._ended = InterruptSafeEvent()
        self._is_over = False
        # A thread rather than concurrent.futures, which refuses work once the interpreter is ending.
        threading.Thread(target=self._work, name=f"uploading {self.name}").start()

    def feed(self, data: bytes | None) -> None:
        """Hand over the next piece.

        Raises:
            BaseException: The upload has failed.
        """
        while not self._is_over:
            try:
                self._queue.put(data, timeout=_POLL_SECONDS)
            except Full:
                continue
            return
        if self._failure is not None:
            raise self._failure

    def finish(self) -> int:
        """Wait until the object is there; returns its share in the checksum.

        Raises:
            BaseException: The upload has failed.
        """
        self.feed(None)
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return self.share

    def give_up(self) -> None:
        """End the upload; nothing is left of it."""
        self._given_up = True
        self._ended.wait()

    def _work(self) -> None:
        try:
            self.run(self._pieces())
        except BaseException as error:  # noqa: BLE001 - raised by feed() or finish()
            self._failure = error
        finally:
            self._is_over = True
            self._ended.set()

    def _pieces(self) -> Iterator[bytes]:
        while True:
            if self._given_up:
                raise CheckpointError(f"the upload of {self._place} was given up.")
            try:
                piece = self._queue.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if piece is None:
                return
            yield piece
