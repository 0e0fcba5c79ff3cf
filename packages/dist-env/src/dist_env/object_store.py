"""Object stores: opened by address, with retries, a time limit, and errors that say what to do.

The library underneath is ``obstore`` (the extra ``remote``), which is imported when a store is opened. Its
errors hold addresses, headers and answers of the server, which may hold credentials: nothing of that text
leaves this module but the status, the error code and the region that the store names.

obstore has threads that do the work. A process that is forked after they began has none of them and would
wait for ever, so it is refused there.
"""

from __future__ import annotations

import errno
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

STORE_SCHEMES = ("s3", "gs", "az", "file", "memory")
"""Schemes of the addresses that are understood."""
PART_BYTES = 8 * 1024 * 1024
"""Of a larger object, what one request uploads; S3 takes at most 10,000 such parts of an object."""
_MOST_PARTS = 9000
_PARTS_AT_ONCE = 4
_LONGEST_RETRY_SECONDS = 180.0
"""obstore signs a request once, so its documentation advises to stay below 5 minutes."""
_LONGEST_REQUEST_SECONDS = 120.0
_COALESCE_BYTES = 64 * 1024
_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of this machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the service account of this machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, or the identity of this machine",
}
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>")
_STATUS = re.compile(r"(?:status code: |status: |HTTP status \w+ error \()(\d{3})")
_NO_CODE = re.compile(r"\(HTTP [34]\d\d\)$|another region$")
_BROKE_OFF = re.compile(r"kind: Interrupted|request or response body error")
"""An answer that ended early. obstore asks again for the content of objects, and not for anything else."""
_PAUSES_SECONDS = (0.2, 0.8, 3.0)
_RETRIES = re.compile(r"after (\d+) retries")
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired", "AccessDeniedExpired"}
_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
}
_REGIONS = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "EntityTooLarge", "InsufficientStorage"}
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_T = TypeVar("_T")
_threads_in: int | None = None
"""The process in which the threads of obstore were begun."""


class StoreError(OSError):
    """An object store did not do what was asked: it cannot be reached, refuses the credentials, or is full.

    What it holds is as good as before. The message names the address and the remedy, and holds nothing else
    of what the store or its library said.

    Attributes:
        may_pass: Whether the same request may succeed later: the store could not be reached, did not answer
            in time, failed, or asked for fewer requests.
    """

    may_pass = False


class _BrokeOffError(StoreError):
    """The answer ended early."""


class StoreSettingsError(ValueError):
    """An address or setting of an object store is not usable, or what reading it needs is not installed."""


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
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
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
        self._opened = self._open(timeout_seconds)
        self._commits: bool | None = None
        self._lock = threading.Lock()

    @property
    def _store(self) -> Any:
        _refuse_forked(self.root)
        return self._opened

    def url(self, key: str) -> str:
        """The address of an object."""
        return f"{self.root}/{key}"

    def _open(self, timeout_seconds: float) -> Any:
        stores = self._obstore.store
        if self._scheme == "memory":
            return stores.MemoryStore()
        if self._scheme == "file":
            return stores.LocalStore(prefix="/", automatic_cleanup=True)
        retry = min(_LONGEST_RETRY_SECONDS, timeout_seconds / 2)
        request = min(_LONGEST_REQUEST_SECONDS, timeout_seconds / 2)
        options: dict[str, Any] = {
            "retry_config": {"retry_timeout": timedelta(seconds=retry), "max_retries": 10},
            "client_options": {
                "timeout": timedelta(seconds=request),
                "connect_timeout": timedelta(seconds=min(5.0, request)),
            },
        }
        if self._scheme == "s3":
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
            if endpoint:
                options["endpoint"] = endpoint
            # A store of one's own network, which the address in the environment names so.
            if endpoint.startswith("http://"):
                options["client_options"]["allow_http"] = True
            # The store compares each part with it, and refuses one that changed on the way.
            if "AWS_CHECKSUM_ALGORITHM" not in os.environ:
                options["checksum_algorithm"] = "SHA256"
            if (profile := os.environ.get("AWS_PROFILE")) and "AWS_ACCESS_KEY_ID" not in os.environ:
                options["credential_provider"] = _profile_provider(self.root, profile)
        try:
            return stores.from_url(self.root, **options)
        except self._failures as error:
            raise self._error("cannot be opened with the settings in the environment", "", error) from None

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
                self._obstore.put(
                    self._store,
                    key,
                    guarded(),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            except self._failures as error:
                if failures:
                    raise failures[0] from None
                broke_off = _BROKE_OFF.search(str(error)) is not None
                if broke_off and given == 0 and pause is not None:
                    time.sleep(pause)  # The answer to its beginning was lost.
                    continue
                if broke_off and given == size and self._has(key, size):
                    return  # That to its end.
                raise self._error("cannot be written", key, error) from None
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
        return _repeated(lambda: self._put_if(key, data, version))

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
            raise self._error("cannot be written", key, error) from None
        except self._failures as error:
            raise self._error("cannot be written", key, error) from None
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
        return _repeated(lambda: self._ask(doing, key, action, *args, **options))

    def _ask(self, doing: str, key: str, action: Callable[..., _T], *args: Any, **options: Any) -> _T:
        try:
            return action(self._store, *args, **options)
        except FileNotFoundError as error:
            if _CODE.search(str(error)) and "NoSuchBucket" in str(error):
                raise self._error(doing, key, error) from None
            raise FileNotFoundError(errno.ENOENT, "this object does not exist", self.url(key)) from None
        except self._failures as error:
            raise self._error(doing, key, error) from None

    def _error(self, doing: str, key: str, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        text = str(error)
        code = match[1] if (match := _CODE.search(text)) else ""
        status = int(match[1]) if (match := _STATUS.search(text)) else 0
        region = match[1] if (match := _REGION.search(text)) else ""
        reason = self._reason(type(error).__name__, text, status, code, region)
        retries = f" after {match[1]} retries" if (match := _RETRIES.search(text)) else ""
        told = ", ".join(part for part in (f"HTTP {status}" if status else "", code) if part)
        broke_off = not told and _BROKE_OFF.search(text)
        kind = _BrokeOffError if broke_off else StoreError
        found = kind(f"{self.url(key)} {doing}{retries}: {reason}{f' ({told})' if told else ''}")
        found.may_pass = bool(broke_off) or _may_pass(text, status, code)
        return found

    def _reason(self, kind: str, text: str, status: int, code: str, region: str) -> str:
        where = _ENVIRONMENT.get(self._scheme, "the environment")
        if "169.254." in text or "/computeMetadata/" in text:
            # Where machines of a cloud are given theirs: asked for when the environment has none.
            return f"there are not any credentials. Set {where}"
        if code in _CLOCK or "too skewed" in text:
            return "the clock of this machine differs from that of the store. Set it, by NTP for one"
        if code in _REGIONS or "incorrectly configured region" in text or region or "region" in code.lower():
            named = f"={region}" if region else " to the region of the bucket"
            return f"the bucket is in another region. Set AWS_REGION{named}"
        if code == "NoSuchBucket" or (status == 404 and code != "NoSuchKey"):
            return "the bucket does not exist. Create it, or correct its name"
        if code in _CREDENTIALS or kind == "UnauthenticatedError" or status == 401:
            return f"the store does not accept the credentials. Set {where}"
        if kind == "PermissionDeniedError" or status == 403:
            return (
                "the credentials do not permit it. Give them the right to list, read, write and delete "
                f"there, or set others ({where})"
            )
        if code in _FULL or status == 507:
            return "the store is full, or a quota of it is used up. Free space there, or raise it"
        if status in (429, 503) or code in ("SlowDown", "ThrottlingException"):
            return "the store asks for fewer requests. Try again later, or raise the limits of the bucket"
        if status >= 500:
            return "the store failed: it may be full or out of order. Look at it, or free space there"
        if "timed out" in text.lower() or "kind: Timeout" in text or "operation timed out" in text:
            return "no answer in time. Look at the network, or raise timeout_seconds"
        if _BROKE_OFF.search(text):
            return "the answer broke off on its way. Look at the network, and try again"
        if "kind: Connect" in text or "error sending request" in text or "dns error" in text:
            return "the store cannot be reached. Look at the network and the endpoint in the environment"
        if "redential" in text or "metadata" in text.lower():
            return f"there are not any usable credentials. Set {where}"
        if isinstance(status, int) and status:
            return "the store refuses the request"
        return f"{kind} of obstore, whose text is left out because it may hold credentials"


def _repeated(action: Callable[[], _T]) -> _T:
    """Do what may be done twice, again if the answer broke off."""
    for pause in _PAUSES_SECONDS:
        try:
            return action()
        except _BrokeOffError:
            time.sleep(pause)
    return action()


def _may_pass(text: str, status: int, code: str) -> bool:
    if code in _FULL or status == 507:
        return False
    if status == 429 or status >= 500 or code in ("SlowDown", "ThrottlingException"):
        return True
    marks = ("timed out", "kind: Timeout", "kind: Connect", "error sending request", "dns error")
    return not status and any(mark in text for mark in marks)


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

    return Boto3CredentialProvider()


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
