"""Object stores: opened by address, with retries, a time limit, and errors that say what to do.

The library underneath is ``obstore`` (the extra ``remote``), which is imported when a store is opened.

obstore has threads that do the work. A process that is forked after they began has none of them and would
wait for ever, so it is refused there.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import unquote

from dist_env.store_errors import (
    BrokeOffError,
    StoreError,
    StoreSettingsError,
    broke_off,
    lacks_bucket,
    store_error,
)

STORE_SCHEMES = ("s3", "gs", "az", "file", "memory")
"""Schemes of the addresses that are understood."""
PART_BYTES = 8 * 1024 * 1024
"""Of a larger object, what one request uploads; S3 takes at most 10,000 such parts of an object."""
_MOST_PARTS = 9000
_PARTS_AT_ONCE = 4
_LONGEST_RETRY_SECONDS = 180.0
"""obstore signs a request once, so its documentation advises to stay below 5 minutes."""
_LONGEST_REQUEST_SECONDS = 120.0
_LONGEST_PATIENCE_SECONDS = 60.0
_COALESCE_BYTES = 64 * 1024
_NO_CODE = re.compile(r"\(HTTP [34]\d\d\)$|another region$")
_AZURE_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_PAUSES_SECONDS = (0.2, 0.8, 3.0)
_BACKOFF_SECONDS = {"init_backoff": 0.2, "max_backoff": 8.0}
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 8.0
_ENDPOINT = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_T = TypeVar("_T")
_logger = logging.getLogger("dist_env.object_store")
_threads_in: int | None = None
"""The process in which the threads of obstore were begun."""


def split_address(text: str) -> tuple[str, str] | None:
    """The store of an address, and the path in it.

    Args:
        text: Such as ``s3://bucket/run``, or a path of a file system.

    Returns:
        The scheme with the bucket (``s3://bucket``, ``file://``, ``memory://name``), and the path without
        slashes around it, empty for a whole bucket; None for what is not an address.

    Raises:
        StoreSettingsError: The scheme is unknown, there is more than a bucket and a path (credentials,
            options), the bucket is missing, or a part of the path is ``.`` or ``..``.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    if text != text.strip() or not text.isprintable():
        raise StoreSettingsError(
            f"an address {match[1].lower()}://... has white space around it, or a character that cannot be "
            "shown in it. Remove it."
        )
    scheme, rest = match[1].lower(), match[2]
    if scheme not in STORE_SCHEMES:
        raise StoreSettingsError(
            f"addresses that begin with {scheme}:// are not supported. Use one of "
            f"{', '.join(f'{known}://' for known in STORE_SCHEMES)}, or a directory."
        )
    if "@" in rest.partition("/")[0] or "?" in rest:
        # Without the text, which goes to logs.
        raise StoreSettingsError(
            f"an address {scheme}://... holds more than a bucket and a path. Leave out credentials and "
            "options: they come from the environment."
        )
    bucket, _, path = rest.partition("/")
    parts = [part for part in path.split("/") if part]
    if scheme == "file":
        if bucket:
            raise StoreSettingsError(
                f"file://{bucket}/... names a host. Write file:///directory with three slashes."
            )
        parts = [unquote(part) for part in parts]
    if any(part in (".", "..") for part in parts):
        raise StoreSettingsError(f"{scheme}://{rest} has a part '.' or '..'. Name the place directly.")
    if scheme != "file" and not bucket:
        raise StoreSettingsError(f"{scheme}://{rest} does not name a bucket. Write {scheme}://bucket/run.")
    return f"{scheme}://{bucket}", "/".join(parts)


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing tells of an object."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """When it was written, by the clock of the store, in seconds since 1970."""
    version: Mapping[str, str]
    """What tells this content from a later one, for :meth:`ObjectStore.put_if`."""


class ObjectStore:
    """One bucket, container or file system.

    Args:
        root: Its address without a path, such as ``s3://bucket``.
        timeout_seconds: How long others wait for this process: a request that does not succeed is given up
            well before.

    Raises:
        StoreSettingsError: obstore is not installed, or the settings in the environment are not usable.
    """

    def __init__(self, root: str, timeout_seconds: float) -> None:
        self.root = root
        self._scheme = root.partition(":")[0]
        self._obstore = _import_obstore(root)
        self._failures = (
            self._obstore.exceptions.BaseError,
            *(OSError, ValueError, RuntimeError, NotImplementedError, TypeError),
        )
        self._longest_retry = min(_LONGEST_RETRY_SECONDS, timeout_seconds / 2)
        self._patience = min(_LONGEST_PATIENCE_SECONDS, timeout_seconds / 10)
        self._opened = self._open(timeout_seconds, {"max_retries": 10})
        # Parts of an upload cannot be asked for again, so here the library is the one that is patient.
        backoff = {name: timedelta(seconds=value) for name, value in _BACKOFF_SECONDS.items()}
        self._for_uploads = self._open(
            timeout_seconds, {"max_retries": 60, "backoff": {**backoff, "base": 2}}
        )
        self._warned = False
        self._commits: bool | None = None
        self._lock = threading.Lock()

    @property
    def _store(self) -> Any:
        _refuse_forked(self.root)
        return self._opened

    def url(self, key: str) -> str:
        """The address of an object."""
        return f"{self.root}/{key}"

    def _open(self, timeout_seconds: float, retries: Mapping[str, Any]) -> Any:
        stores = self._obstore.store
        if self._scheme == "memory":
            return self._opened if hasattr(self, "_opened") else stores.MemoryStore()
        if self._scheme == "file":
            return stores.LocalStore(prefix="/", automatic_cleanup=True)
        request = min(_LONGEST_REQUEST_SECONDS, timeout_seconds / 2)
        options: dict[str, Any] = {
            "retry_config": {"retry_timeout": timedelta(seconds=self._longest_retry), **retries},
            "client_options": {
                "timeout": timedelta(seconds=request),
                "connect_timeout": timedelta(seconds=min(5.0, request)),
            },
        }
        if self._scheme == "s3":
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
            if endpoint and not _ENDPOINT.fullmatch(endpoint):
                # Without the value, which may hold credentials.
                raise StoreSettingsError(
                    "AWS_ENDPOINT_URL is not the address of a server. Write http://host:port or "
                    "https://host, without credentials."
                )
            if endpoint:
                options["endpoint"] = endpoint
            # A store of one's own network, which the address in the environment names so.
            if _is_plain(endpoint):
                options["client_options"]["allow_http"] = True
            # The store compares each part with it, and refuses one that changed on the way.
            if "AWS_CHECKSUM_ALGORITHM" not in os.environ:
                options["checksum_algorithm"] = "SHA256"
            if (profile := os.environ.get("AWS_PROFILE")) and "AWS_ACCESS_KEY_ID" not in os.environ:
                options["credential_provider"] = _profile_provider(self.root, profile)
        if self._scheme == "az" and any(_is_plain(os.environ.get(name)) for name in _AZURE_ENDPOINTS):
            options["client_options"]["allow_http"] = True
        try:
            return stores.from_url(self.root, **options)
        except self._failures as error:
            raise store_error(
                self.url(""), "cannot be opened with the settings in the environment", error
            ) from None

    def put(self, key: str, data: bytes) -> None:
        """Write a small object."""
        self._call("cannot be written", key, self._obstore.put, key, data, use_multipart=False)

    def put_stream(self, key: str, pieces: Iterator[bytes], size: int) -> None:
        """Write an object of any size, in parts that are uploaded in parallel. It appears once it is whole.

        Args:
            key: The object.
            pieces: Its content. What it raises is raised here, and nothing is left of the upload.
            size: Bytes of all pieces.
        """
        if size <= PART_BYTES:
            self.put(key, b"".join(pieces))
            return
        part = max(PART_BYTES, -(-size // _MOST_PARTS))
        failures: list[BaseException] = []
        given = 0

        def guarded() -> Iterator[bytes]:
            nonlocal given
            try:
                for piece in pieces:
                    given += len(piece)
                    yield piece
            except GeneratorExit:
                raise  # The upload has failed, and its own error says why.
            except BaseException as error:
                failures.append(error)
                raise

        for pause in (*_PAUSES_SECONDS, None):
            try:
                _refuse_forked(self.root)
                self._obstore.put(
                    self._for_uploads,
                    key,
                    guarded(),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            except self._failures as error:
                if failures:
                    raise failures[0] from None
                ended = broke_off(error)
                if ended and given == 0 and pause is not None:
                    time.sleep(pause)  # The answer to its beginning was lost.
                    continue
                if ended and given == size and self._has(key, size):
                    return  # That to its end.
                raise store_error(self.url(key), "cannot be written", error) from None
            return

    def _has(self, key: str, size: int) -> bool:
        try:
            return self.head(key).size == size
        except OSError:
            return False

    def put_if(self, key: str, data: bytes, version: Mapping[str, str] | None) -> bool:
        """Write a small object only if nobody else has: the commit.

        Args:
            key: The object.
            data: Its content.
            version: The version that it must still have; None where it must not exist.

        Returns:
            Whether it was written; False if the condition does not hold.
        """
        return self._patiently(lambda: self._put_if(key, data, version))

    def _put_if(self, key: str, data: bytes, version: Mapping[str, str] | None) -> bool:
        try:
            mode = "create" if version is None else dict(version)
            self._obstore.put(self._store, key, data, mode=mode)
        except (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError):
            # A request that was sent again, for its answer was lost, meets what it wrote itself.
            return self._holds(key, data)
        except FileNotFoundError as error:
            if version is not None:
                return False
            raise store_error(self.url(key), "cannot be written", error) from None
        except self._failures as error:
            raise store_error(self.url(key), "cannot be written", error) from None
        return True

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except FileNotFoundError:
            return False

    def get(self, key: str) -> bytes:
        """A small object.

        Raises:
            FileNotFoundError: It does not exist.
        """
        return bytes(self._call("cannot be read", key, lambda *a: self._obstore.get(*a).bytes(), key))

    def get_ranges(self, key: str, starts: Sequence[int], lengths: Sequence[int]) -> list[Any]:
        """Ranges of an object; those that lie close together are fetched by one request.

        Raises:
            FileNotFoundError: It does not exist.
        """
        found: list[Any] = self._call(
            "cannot be read",
            key,
            self._obstore.get_ranges,
            key,
            starts=starts,
            lengths=lengths,
            coalesce=_COALESCE_BYTES,
        )
        return found

    def get_range(self, key: str, start: int, stop: int, version: Mapping[str, str]) -> Any | None:
        """A range of an object, only if that still has the content of a version.

        Args:
            key: The object.
            start: Its first byte.
            stop: The byte behind its last one; more than ``start``.
            version: As a listing told it.

        Returns:
            The bytes, as a buffer; None if the object was replaced.

        Raises:
            FileNotFoundError: It does not exist.
        """
        options: dict[str, Any] = {"range": (start, stop)}
        tag = version.get("e_tag", "")
        if tag:
            # A listing of Azure leaves out the quotation marks that a condition needs.
            options["if_match"] = tag if tag.endswith('"') else f'"{tag}"'

        def read(store: Any) -> Any | None:
            try:
                found = self._obstore.get(store, key, options=options)
            except self._obstore.exceptions.PreconditionError:
                return None
            # Some stores take a condition and ignore it.
            if tag and str(found.meta.get("e_tag") or tag).strip('"') != tag.strip('"'):
                return None
            return found.bytes()

        return self._call("cannot be read", key, read)

    def head(self, key: str) -> ObjectInfo:
        """What is known of an object.

        Raises:
            FileNotFoundError: It does not exist.
        """
        try:
            return _info(self._call("cannot be read", key, self._obstore.head, key))
        except StoreError as error:
            if _NO_CODE.search(str(error)):
                # The answer to this request has no body, and so no code; that to a listing has one.
                self.children(key.rpartition("/")[0])
            raise

    def objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix, at any depth."""

        def collect(store: Any, where: str) -> list[Any]:
            return [each for chunk in self._obstore.list(store, where) for each in chunk]

        found = self._call("cannot be listed", prefix, collect, f"{prefix}/")
        return [_info(each) for each in found if not _is_folder(each, prefix)]

    def children(self, prefix: str) -> tuple[list[str], list[ObjectInfo]]:
        """Names of what looks like directories right below a prefix, and the objects there."""
        found = self._call(
            "cannot be listed", prefix, self._obstore.list_with_delimiter, f"{prefix}/" if prefix else None
        )
        objects = [_info(each) for each in found["objects"] if not _is_folder(each, prefix)]
        return [str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]], objects

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are gone already are left out."""
        if not keys:
            return
        try:
            self._call("cannot be deleted", keys[0], self._obstore.delete, list(keys))
        except FileNotFoundError:
            # A file system stops at the first one that is missing.
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def put_claim(self, key: str, data: bytes) -> bool:
        """Write a new object. The first one of a process also shows whether the store can commit.

        Args:
            key: A name that nobody else has.
            data: Its content.

        Returns:
            Whether it was written: not if the store takes both of two conditional puts, of which one must
            fail. Nothing is left of the object then.
        """
        with self._lock:
            if self._commits is None:
                self._commits = self._try_conditions(key, data)
            elif self._commits:
                self.put(key, data)
        return self._commits

    def _try_conditions(self, key: str, data: bytes) -> bool:
        if self.put_if(key, data, None) and not self.put_if(key, b"", None) and self.get(key) == data:
            return True
        self.delete([key])
        return False

    def can_replace(self) -> bool:
        """Whether an object can be replaced on the condition that nobody else has changed it."""
        return self._scheme != "file"

    def _call(self, doing: str, key: str, action: Callable[..., _T], *args: Any, **options: Any) -> _T:
        return self._patiently(lambda: self._ask(doing, key, action, *args, **options))

    def _patiently(self, action: Callable[[], _T]) -> _T:
        """Do what may be done twice, again while its failure may pass, for a tenth of the time limit.

        The library gives a server up that refuses connections within seconds: less than a restart takes.
        """
        until, pause = time.monotonic() + self._patience, _FIRST_PAUSE_SECONDS
        while True:
            try:
                return action()
            except StoreError as error:
                if not error.may_pass or time.monotonic() + pause > until:
                    raise
                if not self._warned and not isinstance(error, BrokeOffError):
                    self._warned = True
                    _logger.warning("%s; it is tried again, for %.0f s at most", error, self._patience)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _ask(self, doing: str, key: str, action: Callable[..., _T], *args: Any, **options: Any) -> _T:
        try:
            return action(self._store, *args, **options)
        except FileNotFoundError as error:
            if lacks_bucket(error):
                raise store_error(self.url(key), doing, error) from None
            raise FileNotFoundError(errno.ENOENT, "this object does not exist", self.url(key)) from None
        except self._failures as error:
            raise store_error(self.url(key), doing, error) from None


def _is_plain(endpoint: str | None) -> bool:
    """Whether an address in the environment asks for a connection without TLS."""
    return (endpoint or "").startswith("http://")


def _info(entry: Mapping[str, Any]) -> ObjectInfo:
    version = {name: str(entry[name]) for name in ("e_tag", "version") if entry.get(name)}
    return ObjectInfo(str(entry["path"]), int(entry["size"]), entry["last_modified"].timestamp(), version)


def _is_folder(entry: Mapping[str, Any], prefix: str) -> bool:
    """Whether a listed object is what some stores keep of a folder: empty, without a digest of nothing."""
    return entry["size"] == 0 and (entry["path"] == prefix or entry.get("e_tag") in ('""', "", None))


def _refuse_forked(root: str) -> None:
    global _threads_in
    if _threads_in not in (None, os.getpid()):
        raise StoreError(
            f"{root} cannot be used in this process, which was forked from one that has used a store: the "
            "threads of obstore are not here. Start it by multiprocessing.get_context('spawn')"
        )
    _threads_in = os.getpid()


def _import_obstore(root: str) -> Any:
    if find_spec("obstore") is None:
        raise StoreSettingsError(
            f"{root} is an object store, which needs obstore. Install the extra 'remote' of the package that "
            "you use, such as checkpoint-core[remote]."
        )
    import obstore
    import obstore.exceptions
    import obstore.store

    return obstore


def _profile_provider(root: str, profile: str) -> Any:
    if find_spec("boto3") is None:
        raise StoreSettingsError(
            f"{root}: AWS_PROFILE={profile} is read by boto3, which is not installed. Install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except Exception as error:  # noqa: BLE001  (boto3 has many of its own)
        # Without their texts, which may name keys.
        raise StoreSettingsError(
            f"{root}: boto3 cannot use AWS_PROFILE={profile} ({type(error).__name__}). Look at its name and "
            "at the files of its settings, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from None


@lru_cache(maxsize=64)
def open_object_store(root: str, timeout_seconds: float) -> ObjectStore:
    """The store of an address, opened once for each process.

    Args:
        root: The address without a path, such as ``s3://bucket``.
        timeout_seconds: As for :class:`ObjectStore`.

    Returns:
        The store.
    """
    if root.startswith("memory:"):
        return _memory_store(root)
    return ObjectStore(root, timeout_seconds)


@lru_cache(maxsize=64)
def _memory_store(root: str) -> ObjectStore:
    """One for each name, whatever the time limit."""
    return ObjectStore(root, 0.0)
