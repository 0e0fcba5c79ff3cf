"""Two tiers: checkpoints are saved to a fast local disk, and brought to an object store in the background.

A checkpoint is committed on the disk, and training continues. A thread then uploads its files, straight from
the disk and in pieces, and commits it in the store as a save to the store does: a marker first, the manifest
last by a conditional put. What is read is compared with the checksums of the manifest on the way, so a file
that changed meanwhile is never committed.

Nothing is queued. Whenever a checkpoint was saved, the thread compares both tiers, and brings what the store
lacks of what it should keep: the newest first, then the best, then others. So nothing waits for a slow
upload: a checkpoint that rotates away on the disk before its turn never gets to the store. What failed, or
was killed, is found again by the next comparison.
"""

import atexit
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import Plan
from checkpoint_core.config import CheckpointConfig, lower_is_better
from checkpoint_core.directory import check_other_runs, check_target, checkpoint_directories, checkpoint_path
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.lease import DirectoryLease
from checkpoint_core.manifest import Manifest, read_manifest
from checkpoint_core.peers import Peer, PeerError, Peers
from checkpoint_core.retention import BestCheckpoint, Retention, manifests_of_run, rank_by_metric
from checkpoint_core.store_directory import OtherRuns
from checkpoint_core.store_path import file_sizes, locate, store_place
from checkpoint_core.tier_upload import (
    GRACE_SECONDS,
    UPLOAD,
    DamagedSourceError,
    FileUpload,
    TierUpload,
    UploadStoppedError,
)
from dist_env import StaticDistributedEnvironment

_logger = logging.getLogger(__name__)
_GIVEN_UP = "the upload was given up, because the process ends."
_POLL_SECONDS = 0.05
_ASK_SECONDS = 0.5
_ANSWER_SECONDS = 120.0
"""For a request between nodes, but for uploads, which take as long as they take."""
_KEPT, _BUSY = "kept", "busy"


class RemoteTier:
    """Keeps a store supplied with the checkpoints of a directory.

    One rank uploads. A failure of the store or the network is logged, and the upload is tried again with the
    next checkpoint and at the end. What trying again does not mend, such as another run in the same place, is
    raised by :meth:`check` as well.

    Args:
        config: The settings, with ``remote_dir``.
        lease: The lease of the local directory, without which nothing is uploaded; None asks for none.

    Raises:
        CheckpointError: obstore is not installed.
    """

    def __init__(self, config: CheckpointConfig, lease: DirectoryLease | None) -> None:
        assert config.remote_dir is not None
        self.place = store_place(config.remote_dir, config.timeout_seconds)
        # Now rather than in the background, because it may not be installed.
        _ = self.place.store
        self._local = locate(config.output_dir)
        self._config = replace(
            config,
            output_dir=self.place,
            save_total_limit=config.remote_save_total_limit,
            remote_dir=None,
            save_on_each_node=False,
        )
        self._lease = lease
        self._limit_seconds = config.timeout_seconds
        self.retention = Retention(self._config, "")
        self._others = OtherRuns()
        self._asked = False
        # Guards what follows. Never held while the store is asked.
        self._lock = threading.Lock()
        self._uploading: Path | None = None
        self._upload_of: TierUpload | None = None
        self._rotated: tuple[int, bool] | None = None
        self._latest: tuple[int, bool] | None = None
        self._wanted = False
        self._running = False
        self._failure: BaseException | None = None
        self._refusal: BaseException | None = None
        self._stop_at: float | None = None
        self._pid = os.getpid()
        self._closed = False
        self._ended = False
        self._nodes: Peers | None = None
        self._without: list[str] = []
        """Nodes that had nothing of the checkpoint that they were last asked for."""
        self._passed_over: set[str] = set()
        self._elsewhere: Mapping[int, Manifest] = {}
        self._uploaded: set[str] = set()

    def connect(self, ranks: RankAgreement, phase: str) -> Peers:
        """Let the nodes that keep checkpoints together upload them together. Collective.

        Args:
            ranks: The ranks, of which rank 0 commits what all nodes upload.
            phase: What is being done, for messages.

        Returns:
            The nodes, to be closed after the tier.

        Raises:
            CheckpointError: On every rank: ``remote_dir`` is not one place for all nodes.
        """
        if self.place.bucket.startswith(("file://", "memory://")):
            self._check_shared(ranks, phase)
        tasks = {_KEPT: self._tell_kept, UPLOAD: self._upload_for_main, _BUSY: self._tell_busy}
        limit = min(self._limit_seconds, _ANSWER_SECONDS)
        self._nodes = Peers(ranks, phase, limit, tasks)
        return self._nodes

    def _check_shared(self, ranks: RankAgreement, phase: str) -> None:
        """Let each node look for what rank 0 has written. Collective."""
        probe = self.place / ranks.run_on_main(phase, lambda: f".probe-{uuid.uuid4().hex}")

        def look() -> None:
            if not probe.is_file():
                raise CheckpointError(
                    f"remote_dir={str(self.place)!r} is not one place for all nodes: this one does not see "
                    "there what rank 0 wrote. Give the address of a store that all nodes reach, such as "
                    "'s3://bucket/run'."
                )

        ranks.run_on_main(phase, lambda: probe.store.put(probe.key, b""))
        try:
            ranks.run_on_leaders(phase, look)
        finally:
            if ranks.rank == 0:
                probe.store.delete([probe.key])

    def _tell_kept(self, request: dict[str, Any], check_waited_for: Callable[[], None]) -> dict[str, object]:
        """Which files of a save this node has."""
        source = checkpoint_path(self._local, request["step"])
        try:
            manifest = read_manifest(source)
        except CheckpointError:
            return {"here": False, "files": []}
        if manifest.save_id != request["save"]:
            return {"here": False, "files": []}
        kept = file_sizes(source, list(manifest.files))
        return {"here": True, "files": [manifest.plain_name(name) for name in kept]}

    def _upload_for_main(
        self, request: dict[str, Any], check_waited_for: Callable[[], None]
    ) -> dict[str, object]:
        """Upload files of this node to the directory of a save that rank 0 commits."""
        source, names = checkpoint_path(self._local, request["step"]), request["files"]
        directory = self.place / request["directory"]
        manifest = _plain(read_manifest(source))
        saved_again = CheckpointError(f"{source} was saved again meanwhile.")
        if manifest.save_id != request["save"]:
            raise saved_again

        def check_stop() -> None:
            self._check_stop()
            check_waited_for()

        try:
            FileUpload(source, manifest.files, directory, check_stop).run(names)
        except BaseException as error:
            # Whoever asked may be gone, and with it the marker by which a later save would find them.
            directory.store.delete([(directory / name).key for name in names])
            if isinstance(error, CheckpointError) and read_manifest(source).save_id != request["save"]:
                raise saved_again from error
            if isinstance(error, DamagedSourceError):
                return {"damaged": str(error)}
            raise
        return {}

    def _tell_busy(self, request: dict[str, Any], check_waited_for: Callable[[], None]) -> dict[str, object]:
        """Whether this rank may still ask others to upload."""
        again = self._failure is not None and not self._ended
        return {"busy": not self._is_stopped() and (self._running or self._wanted or again)}

    def wait_for_main(self) -> None:
        """Wait until rank 0 asks nothing more of this node, for ``timeout_seconds`` at most."""
        if self._nodes is None or self._stop_at is not None:
            return
        until = time.monotonic() + self._limit_seconds
        try:
            while time.monotonic() < until and self._nodes.main.run(_BUSY, {})["busy"]:
                time.sleep(_ASK_SECONDS)
        except PeerError:
            return  # It has closed its manager, or is gone.

    def check_first_save(self, step: int) -> None:
        """Refuse a store in which another run saves, before the first save to the disk.

        Args:
            step: The step to be saved.

        Raises:
            CheckpointError: Naming the checkpoint of the other run.
        """
        if self._asked:
            return
        self._asked = True
        try:
            check_target(checkpoint_path(self.place, step), self.retention.run_id)
            check_other_runs(self.place, step, self.retention.run_id)
            self._others.check(
                [path for _, path in checkpoint_directories(self.place)], self.retention.run_id
            )
        except CheckpointError as error:
            raise _of_remote(error) from None
        except OSError as error:
            _logger.warning(
                "remote_dir cannot be asked now: %s. Checkpoints are saved to %s, and uploaded later",
                describe_error(error).removesuffix("."),
                self._local,
            )

    def take_part(self) -> None:
        """Upload again what rank 0 asks for: whoever gave an upload up continues after all."""
        if not self._closed:
            self._stop_at = None

    def request(self, step: int, *, saved: bool, manifest: Manifest | None = None) -> None:
        """Bring a checkpoint to the store, and what else it lacks, in the background.

        Args:
            step: The step of the newest checkpoint.
            saved: Whether this process has saved it, so that older ones in the store rotate.
            manifest: What it holds, where nodes keep it together and this one may have nothing of it.
        """
        with self._lock:
            self._latest = step, saved
            self._wanted = True
            self._elsewhere = {} if manifest is None else {step: manifest}
            self.take_part()
            self._start()

    @contextmanager
    def rotating(self) -> Iterator[list[Path]]:
        """While the local directory is rotated: what must stay because it is being uploaded."""
        with self._lock:
            yield [] if self._uploading is None else [self._uploading]

    def check(self) -> None:
        """Raise what trying again does not mend. Does not block.

        Raises:
            CheckpointError: The refusal, once for each attempt.
        """
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def wait(self, limit_seconds: float) -> None:
        """Wait until the store has what it should keep; what has failed is tried once more.

        Args:
            limit_seconds: How long at most.

        Raises:
            CheckpointError: It does not have it; says why, and where the checkpoint is.
        """
        deadline, again = time.monotonic() + limit_seconds, True
        while time.monotonic() < deadline:
            with self._lock:
                if not self._running and (self._failure is None or not again):
                    break
                if not self._running:
                    self._wanted, again = True, False
                    self._start()
            time.sleep(_POLL_SECONDS)
        failure = self._failure
        if self._running or self._wanted:
            failure = TimeoutError(f"the upload did not end within {limit_seconds:g} s")
            upload = self._upload_of
            if upload is not None and (node := upload.waits_for) is not None:
                failure = TimeoutError(f"{failure}, because {node} has not ended its part")
            if self._is_stopped():
                failure = UploadStoppedError(_GIVEN_UP)
        if failure is not None:
            raise CheckpointError(self._told(failure)) from failure

    def close(self) -> None:
        """Wait for the uploads, for ``timeout_seconds`` at most, and end them.

        Raises:
            CheckpointError: The store does not have what it should keep; or as :meth:`check`.
            KeyboardInterrupt: Ctrl-C was pressed; the upload is given up, and nothing is left of it.
        """
        if self._closed or os.getpid() != self._pid:
            return  # A forked child has no part in it.
        self._closed = True
        if self._running:
            _logger.info(
                "waiting for the upload to %s, for %g s at most; Ctrl-C gives it up. The checkpoint is in %s",
                self.place,
                self._limit_seconds,
                self._local,
            )
        try:
            self.wait(self._limit_seconds)
        finally:
            self._stop_at = 0.0
            self._ended = True
            until = time.monotonic() + GRACE_SECONDS
            while self._running and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        self.check()

    def give_up(self) -> None:
        """End an upload under way, and begin no other: the process was told to end. Does not block."""
        self._stop_at = 0.0

    def _at_exit(self) -> None:
        """Wait for an upload that nobody waits for, as the interpreter ends."""
        if self._closed or os.getpid() != self._pid:
            return
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._limit_seconds
        until = max(self._stop_at, time.monotonic()) + GRACE_SECONDS
        while self._running and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def best(self, local: Collection[BestCheckpoint]) -> list[BestCheckpoint]:
        """The checkpoints of both tiers that hold the metric, best first; where both hold one, the local one.

        Args:
            local: The local ones.

        Returns:
            The ranking. While the store cannot be asked, that of the local ones, with a warning.
        """
        found = {each.step: each for each in local}
        try:
            found = {each.step: each for each in self.retention.best(None)} | found
        except OSError as error:
            _logger.warning("only checkpoints in %s are ranked: %s", self._local, describe_error(error))
        metric = self._config.best_metric
        if metric is None:
            return []
        return rank_by_metric(found.values(), lower_is_better(metric, self._config.greater_is_better))

    def _start(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            # The interpreter waits for it in `_at_exit`, and not for a request that hangs after `give_up`.
            atexit.register(self._at_exit)
            threading.Thread(target=self._work, name=f"uploading to {self.place}", daemon=True).start()
        except BaseException:
            self._running = False
            raise

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted or self._is_stopped():
                    self._running = False
                    return
                self._wanted = False
            try:
                self._bring_all()
            except BaseException as error:  # noqa: BLE001 - logged, and raised by check() or wait()
                self._failure = error
                if isinstance(error, CheckpointError):
                    error = self._failure = _of_remote(error)
                if not isinstance(error, (OSError, UploadStoppedError)):
                    self._refusal = error
                _logger.error("%s", self._told(error))
            else:
                self._failure = None

    def _told(self, error: BaseException) -> str:
        assert self._latest is not None
        newest = checkpoint_path(self._local, self._latest[0])
        return (
            f"{newest} is committed, but {self.place} does not have all that it should keep: "
            f"{describe_error(error).removesuffix('.')}. The upload is tried again with the next checkpoint, "
            "when the manager is closed, and when this run is resumed."
        )

    def _is_stopped(self) -> bool:
        return self._stop_at is not None and time.monotonic() > self._stop_at

    def _check_stop(self) -> None:
        if self._is_stopped():
            raise UploadStoppedError(_GIVEN_UP)

    def _bring_all(self) -> None:
        while True:
            assert self._latest is not None
            latest = step, saved = self._latest
            manifest = self._next(step)
            if manifest is not None:
                self._bring(manifest)
            # Also where a pass that was under way has brought it before it was asked for.
            if saved and (manifest is not None or self._rotated is not latest):
                self.retention.apply(checkpoint_path(self.place, step), None)
                self._rotated = latest
            if manifest is None:
                return

    def _next(self, newest: int) -> Manifest | None:
        """The checkpoint on the disk that the store lacks most; None when it has all that it should keep."""
        local = {**self._elsewhere, **manifests_of_run(self._local, self.retention.run_id)}
        remote = manifests_of_run(self.place, self.retention.run_id)
        missing = {
            step: manifest
            for step, manifest in local.items()
            if manifest.save_id not in self._passed_over | self._uploaded
            and not (step in remote and _plain(remote[step]).files == _plain(manifest).files)
        }
        for step in self._order(newest, local | remote):
            if step in missing and self._is_complete(missing[step], must_be=step == newest):
                return missing[step]
        return None

    def _order(self, newest: int, known: Mapping[int, Manifest]) -> list[int]:
        """Steps that the store should keep, the most wanted first: what its rotation would leave."""
        limit, config = self._config.save_total_limit, self._config
        others = sorted((step for step in known if step != newest), key=lambda step: (step > newest, -step))
        best: list[int] = []
        if config.best_metric is not None and config.preserve_n_best:
            ranked = rank_by_metric(
                BestCheckpoint.of(self._local, known, config.best_metric),
                lower_is_better(config.best_metric, config.greater_is_better),
            )
            best = [each.step for each in ranked[: config.preserve_n_best]]
        return [newest, *best, *(others if limit is None else others[: limit - 1])]

    def _is_complete(self, manifest: Manifest, *, must_be: bool) -> bool:
        """Whether all files of a checkpoint are there, on this node or others.

        Args:
            manifest: What it holds.
            must_be: Whether it is an error when a node has nothing of it. Of older ones a node may
                not have published its part yet, or have rotated it away.
        """
        source = checkpoint_path(self._local, manifest.step)
        here = {manifest.plain_name(name) for name in file_sizes(source, list(manifest.files))}
        given = {name for _, names in self._given(manifest, here) for name in names}
        deleted = sorted({manifest.plain_name(name) for name in manifest.files} - here - given)
        if deleted and self._without:
            if must_be:
                others = ", ".join(self._without)
                raise PeerError(f"{source}: no node has {deleted[0]}, and {others} nothing of it")
            return False
        if deleted:
            self._passed_over.add(manifest.save_id)
            _logger.warning("%s is not uploaded: %s was deleted from it", source, deleted[0])
        return not deleted

    def _given(self, manifest: Manifest, here: Collection[str]) -> list[tuple[Peer, list[str]]]:
        """What other nodes have of a checkpoint, by plain name, each file once and none that is here.

        Raises:
            PeerError: A node does not answer.
        """
        found: list[tuple[Peer, list[str]]] = []
        known = set(here)
        self._without = []
        request = {"step": manifest.step, "save": manifest.save_id}
        for peer in [] if self._nodes is None else self._nodes.others():
            answer = peer.run(_KEPT, request)
            if not answer["here"]:
                self._without.append(peer.name)
            names = sorted(set(answer["files"]) - known)
            known.update(names)
            if names:
                found.append((peer, names))
        return found

    def _bring(self, manifest: Manifest) -> None:
        source = checkpoint_path(self._local, manifest.step)
        with self._lock:
            self._uploading = source
        was_here = manifest.step not in self._elsewhere or not _is_replaced(source, manifest)
        try:
            self._upload(source, manifest)
        except (OSError, CheckpointError) as error:
            if was_here and _is_replaced(source, manifest):
                return  # By a later save of the step, or somebody deleted it: the next comparison tells.
            if isinstance(error, DamagedSourceError):
                self._passed_over.add(manifest.save_id)
            raise
        finally:
            self._uploading = None
        self._uploaded.add(manifest.save_id)

    def _upload(self, source: Path, manifest: Manifest) -> None:
        _logger.info("uploading %s to %s", source, self.place)
        here = {manifest.plain_name(name) for name in file_sizes(source, list(manifest.files))}
        self._upload_of = TierUpload(
            config=self._config,
            ranks=RankAgreement(StaticDistributedEnvironment(), self._limit_seconds),
            plan=Plan({}, {}),
            step=manifest.step,
            path=None,
            run_id=self.retention.run_id,
            metrics=None,
            preprocessor=None,
            lease=self._lease,
            others=self._others,
            source=source,
            manifest=_plain(manifest),
            given=self._given(manifest, here),
            check_stop=self._check_stop,
        )
        self._upload_of.commit()


def _of_remote(error: CheckpointError) -> CheckpointError:
    """The error of a check that calls the place of checkpoints output_dir, which here is remote_dir."""
    if type(error) is not CheckpointError:
        return error
    text = str(error).replace("output_dir as a directory, without file://", "an address in another store")
    return CheckpointError(text.replace("output_dir", "remote_dir"))


def _plain(manifest: Manifest) -> Manifest:
    """The manifest with the plain names of its files, which are the same in every tier."""
    return manifest.renamed(manifest.plain_name)


def _is_replaced(source: Path, manifest: Manifest) -> bool:
    """Whether a checkpoint is not the one any more whose upload began."""
    try:
        return read_manifest(source).save_id != manifest.save_id
    except (OSError, CheckpointError):
        return not source.exists()
