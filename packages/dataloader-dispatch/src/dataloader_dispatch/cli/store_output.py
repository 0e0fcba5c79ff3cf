"""The place in an object store that ``tokenize`` writes to: the same files and promises as on a disk.

A part is made in a local directory and uploaded when it is whole, then its record. ``manifest.json`` comes
last, by a conditional put. Until then the place cannot be opened as data. What a part holds follows from the
plan, so two runs of the same plan write the same bytes; ``.unfinished/plan.json``, put on the condition that
there is none, keeps out a run with another plan.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from dataloader_dispatch.cli.output import PLAN, FinishedPart, Output, Plan, Standing
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.token_binary import (
    MANIFEST,
    PART,
    UNFINISHED,
    Part,
    TokenManifest,
    TokenType,
    parse_manifest,
)
from dataloader_dispatch.store.addresses import Address
from dist_env import ObjectStore, StoreSettingsError, open_object_store

_TIMEOUT_SECONDS = 600.0
_READ_BYTES = 1 << 20
_READ_AT_ONCE = 16


class StoreOutput(Output):
    """The address OUT.

    Args:
        place: Where it is or will be.
        share: What is made of it by this process, if it is not all: tasks on one machine make their parts
            in different local directories.
    """

    can_be_forked = False

    def __init__(self, place: Address, share: str = "") -> None:
        self.place = place
        user = os.getuid() if hasattr(os, "getuid") else 0
        name = f"{place} {share}" if share else str(place)
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        super().__init__(Path(tempfile.gettempdir()) / f"dataloader-dispatch-{user}-tokenize-{digest}")

    def __str__(self) -> str:
        return str(self.place)

    @property
    def _store(self) -> ObjectStore:
        try:
            return open_object_store(self.place.root, _TIMEOUT_SECONDS)
        except StoreSettingsError as error:
            raise DataError(str(error)) from None

    def _key(self, name: str) -> str:
        return f"{self.place.key}/{name}"

    def _names(self) -> dict[str, int]:
        """Objects of the place, with their sizes."""
        prefix = f"{self.place.key}/"
        return {one.key.removeprefix(prefix): one.size for one in self._store.objects(self.place.key)}

    def refuse_others(self) -> None:
        if not self.place.key:
            raise DataError(
                f"OUT {self.place} is a whole bucket. Name a place in it, such as {self.place}/tokens."
            )
        names = self._names()
        others = sorted(name for name in names if not _is_own(name))
        manifest = self._get(MANIFEST) if MANIFEST in names else None
        if manifest is not None:
            self._parsed(manifest)  # refuses one of something else
        if others:
            raise DataError(
                f"OUT {self.place} holds something else, {others[0]!r} for one. Name a place that is new, or "
                "was written by this command (--overwrite replaces nothing else)."
            )

    @contextmanager
    def locked(self, shared: bool = False) -> Iterator[None]:
        if shared:
            with self.local_directory():
                yield
            return
        self._make_local_directory()
        with super().locked():
            yield

    def _make_local_directory(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        if hasattr(os, "getuid") and self.path.stat().st_uid != os.getuid():
            raise DataError(f"{self.path} belongs to another user. Set TMPDIR to a directory of your own.")

    @contextmanager
    def for_one_part(self, name: str) -> Iterator[Output]:
        output = StoreOutput(self.place, name)
        with output.local_directory():
            output.clear_local_directory()
            yield output

    @contextmanager
    def local_directory(self) -> Iterator[None]:
        """The local directory of a share, for a while; it waits for another process with the same share."""
        while True:
            self._make_local_directory()
            handle = os.open(self.path, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if self._is_local_directory(handle):
                break
            os.close(handle)  # it was removed by the process that had it
        try:
            yield
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(handle)

    def _is_local_directory(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self.path.stat())
        except FileNotFoundError:
            return False

    def begin(self, plan: Plan, shared: bool = False) -> None:
        self.clear_local_directory()
        self._check_conditions()
        if not self._store.put_if(self._key(f"{UNFINISHED}/{PLAN}"), plan.to_json().encode(), None):
            self._refuse_other_plan(plan)

    def clear_local_directory(self) -> None:
        """Remove what a killed process left there."""
        for path in self.path.iterdir():  # of a run that was killed
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.scratch.mkdir()

    def _check_conditions(self) -> None:
        """Refuse a store that takes conditions and ignores them: two runs could write one place."""
        claim = self._key(f"{UNFINISHED}/claim-{uuid.uuid4().hex}")
        if not self._store.put_claim(claim, b"{}"):
            raise DataError(
                f"{self.place.root} ignores the condition of a put (If-None-Match), so two runs could write "
                "one place. Name a directory as OUT, and copy it."
            )
        self._store.delete([claim])

    def _plan(self) -> Plan | None:
        try:
            content = json.loads(self._get(f"{UNFINISHED}/{PLAN}"))
            return Plan.from_values(content["settings"], content["sources"])
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.place}/{UNFINISHED}/{PLAN} is damaged ({error}). Begin anew with --overwrite."
            ) from error

    def record(self, finished: FinishedPart) -> None:
        for ending in (".bin", ".idx"):
            path = self.path / f"{finished.part.name}{ending}"
            with path.open("rb") as stream:
                pieces = iter(lambda: stream.read(_READ_BYTES), b"")
                self._store.put_stream(self._key(path.name), pieces, path.stat().st_size)
        record = json.dumps(asdict(finished)).encode()
        self._store.put(self._key(f"{UNFINISHED}/{finished.part.name}.json"), record)
        for ending in (".bin", ".idx"):
            (self.path / f"{finished.part.name}{ending}").unlink()

    def recorded(self) -> set[str]:
        begin = f"{UNFINISHED}/part-"
        names = (name for name in self._names() if name.startswith(begin) and name.endswith(".json"))
        return {name.removeprefix(f"{UNFINISHED}/").removesuffix(".json") for name in names}

    def finished_parts(self, names: Sequence[str], dtype: TokenType) -> dict[str, FinishedPart]:
        stored = self._names()

        def read(name: str) -> FinishedPart | None:
            try:
                content = json.loads(self._get(f"{UNFINISHED}/{name}.json"))
                finished = FinishedPart(**{**content, "part": Part(**content["part"])})
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                return None
            sizes = finished.part.sizes(dtype)
            return finished if sizes == {file: stored.get(file) for file in sizes} else None

        chosen = [name for name in names if f"{UNFINISHED}/{name}.json" in stored]
        with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
            found = zip(chosen, threads.map(read, chosen), strict=True)
            return {name: finished for name, finished in found if finished is not None}

    def finish(self, manifest: TokenManifest) -> None:
        raw = manifest.to_json().encode()
        if self._plan() is None and not self._is_finished_as(raw):
            raise DataError(
                f"another tokenize command has begun {self.place} anew in the meantime. Run this one again, "
                "alone."
            )
        if not self._store.put_if(self._key(MANIFEST), raw, None):
            raise DataError(
                f"another tokenize command has finished {self.place} in the meantime, otherwise. Name "
                "another OUT, or run this one again with --overwrite."
            )
        self.remove_scratch()

    def _is_finished_as(self, raw: bytes) -> bool:
        """Whether another task has put the same manifest."""
        try:
            return self._get(MANIFEST) == raw
        except FileNotFoundError:
            return False

    def remove_scratch(self) -> None:
        self._store.delete([self._key(name) for name in self._names() if name.startswith(f"{UNFINISHED}/")])
        shutil.rmtree(self.path, ignore_errors=True)  # what stays does no harm

    def manifest(self) -> TokenManifest:
        return self._parsed(self._get(MANIFEST))

    def _parsed(self, raw: bytes) -> TokenManifest:
        return parse_manifest(raw, f"{self.place}/{MANIFEST}")

    def _get(self, name: str) -> bytes:
        return self._store.get(self._key(name))

    def _look(self) -> Standing:
        names = self._names()
        if MANIFEST in names:
            return Standing.FINISHED
        begun = any(PART.fullmatch(name) for name in names) or f"{UNFINISHED}/{PLAN}" in names
        return Standing.UNFINISHED if begun else Standing.NEW

    def _clear(self) -> None:
        names = sorted(self._names(), key=lambda name: name != MANIFEST)
        # The manifest first: what remains after a kill must not look finished.
        self._store.delete([self._key(name) for name in names[:1]])
        self._store.delete([self._key(name) for name in names[1:] if _is_own(name)])


def _is_own(name: str) -> bool:
    return name == MANIFEST or bool(PART.fullmatch(name)) or name.startswith(f"{UNFINISHED}/")
