"""What torch.compile has compiled, kept across restarts: a file for each rank, in a directory of the user.

The file holds what inductor leaves in its cache directory: graphs, as pickles, and kernels, as shared
libraries or GPU code. It is code that the run executes. So it is read only from a directory that a setting
names, never because it lies beside a checkpoint, and only if nobody else can have written it.

Owner and mode do not tell that of a directory that was unpacked or cloned: its files are the user's then. A
config file may come with it and name it. So each file is authenticated with a key of the user's, which lies
elsewhere, and what was written with another one is compiled anew.

`torch.compiler.save_cache_artifacts` is not used: its artifacts lack the C++ kernels of the CPU (torch 2.13),
so that a restart would compile those again, which is most of the time.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import json
import os
import platform
import secrets
import shutil
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Self

import torch

from dist_env import get_logger

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..arguments import TrainingArguments
    from ..distributed.ranks import Ranks

SETTING = "torch_compile_cache_dir"
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where inductor keeps its cache; torch reads it at each use."""
KEY_VARIABLE = "TRAINER_CORE_COMPILE_CACHE_KEY"
"""Names the file of the key, where the home directory does not last. No file of others sets a variable."""
MAX_BYTES = 1 << 30
"""A rank's file keeps at most this much; the oldest entries are left out, and compiled again if needed."""
_FORMAT = 2
_ID_BYTES, _MAC_BYTES = 8, 32
"""In front of the packed entries: which key it was, and what only that makes of the rest."""
_KEY_CHARACTERS = 64
_KEY_READS = 10
"""So often an empty key is read, which another rank may be writing."""
_LOCAL = "torch_compile"
_LOCKS = "locks"
"""Folder of inductor's lock files."""

logger = get_logger(__name__)


def check_cache_dir(args: TrainingArguments, ranks: Ranks) -> None:
    """Refuse a directory, or a file of one rank in it, that somebody else can have written; collective.

    Raises:
        ConfigurationError: On every rank, if it lies in a checkpoint, is not a directory, belongs to another
            user, cannot be looked at, or others may write to it. A `DataError` names the ranks, if it is so
            for some of them.
    """
    if args.torch_compile_cache_dir is None:
        return
    failure = None
    try:
        _check_own(args.torch_compile_cache_dir, ranks)
    except ConfigurationError as error:
        failure = error
    except OSError as error:  # here as well the other ranks wait for this one below
        failure = ConfigurationError(
            SETTING,
            args.torch_compile_cache_dir,
            f"cannot be looked at ({error})",
            "make it accessible to this user, or choose another directory",
        )
    ranks.fail_together(failure, f"use its {SETTING}")


def _resolved(given: str) -> Path:
    return Path(os.path.realpath(given))  # Path.resolve raises RuntimeError in a loop of links


def _check_own(given: str, ranks: Ranks) -> None:
    directory = _resolved(given)
    for folder in (directory, *directory.parents):
        if (folder / "manifest.json").is_file():
            rule = f"lies in the checkpoint {folder}, and checkpoints hold no code"
            raise ConfigurationError(
                SETTING, str(directory), rule, "choose a directory beside it, such as runs/a/compiled"
            )
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigurationError(SETTING, str(directory), "is not a directory", "choose another path")
    _refuse_others(directory, directory.stat())
    for path in _candidates(directory, ranks):
        with suppress(FileNotFoundError):
            _refuse_others(path, os.lstat(path))


def _refuse_others(path: Path, found: os.stat_result) -> None:
    fix = f"make it yours alone with chmod go-w {path}, or choose another {SETTING}"
    if found.st_uid != os.geteuid():
        rule = f"belongs to user {found.st_uid}, and user {os.geteuid()} would execute the code in it"
        fix = f"choose a {SETTING} that this user has made"
    elif not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        rule, fix = "is neither a file nor a directory", "remove it"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        rule = f"may be written by others (mode {mode:o}), and the run would execute the code in it"
    else:
        return
    raise ConfigurationError(SETTING, str(path), rule, fix)


def _candidates(directory: Path, ranks: Ranks) -> list[Path]:
    """Where this rank looks: its own file, else that of the same device on the first host, else of rank 0."""
    env = ranks.env
    return [directory / f"rank-{rank:05}.zip" for rank in dict.fromkeys((env.rank, env.local_rank, 0))]


class CompileCache(AbstractContextManager["CompileCache"]):
    """Starts a run with what an earlier one has compiled, and keeps what this one compiles.

    In its context inductor works in a folder of this process on the local disk, into which the rank's file
    was unpacked. A folder that ranks share would not do: g++ writes kernels in place, and one rank could pack
    a kernel that another has written half.

    Args:
        args: torch_compile and torch_compile_cache_dir; without them it does nothing.
        ranks: This rank, its device, and the others.
    """

    def __init__(self, args: TrainingArguments, ranks: Ranks) -> None:
        given = args.torch_compile_cache_dir if args.torch_compile else None
        self._args = args
        self._directory = None if given is None else _resolved(given)
        self._ranks = ranks
        self._is_prepared = False
        self._key = b""
        self._local: Path | None = None
        self._before: str | None = None
        self._kept: frozenset[str] = frozenset()
        self._has_compiled = False

    def __enter__(self) -> Self:
        if self._directory is None:
            return self
        self._before = os.environ.get(VARIABLE)
        if not self._is_prepared:
            self._is_prepared = True
            self._prepare(self._directory)
        if self._local is None:
            return self
        os.environ[VARIABLE] = str(self._local)
        # Private, as in RecompileCounter: torch has no public notice of a compilation. If it went, the test
        # of the second start would find that nothing was kept.
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._started)
        return self

    def _prepare(self, directory: Path) -> None:
        """Find the key, and unpack what was kept; what this machine does not allow is named in a warning."""
        with self._warning_of_failure("could not be made"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_cache_dir(self._args, self._ranks)
        key_path: Path | None = None
        with _WarningOfFailure(f"{SETTING}: its key has no place"):
            key_path = _key_path()
        if key_path is not None:
            with _WarningOfFailure(f"{SETTING}: the key {key_path} cannot be used"):
                self._key = _read_key(key_path)
        if self._key:
            with self._warning_of_failure("has no use, because no folder to compile in could be made"):
                self._local = _local_folder(self._before)
                self._load(self._local)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._directory is None or self._local is None:
            return
        from torch._dynamo.callback import callback_handler

        if self._started in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._started)
        if kind is None:
            self.save()
        if self._before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._before

    def _started(self, compilation: object) -> None:
        self._has_compiled = True

    def save(self) -> None:
        """Write what was compiled since the last call, if anything was; call it between steps.

        A file that cannot be written is named in a warning.
        """
        if not self._has_compiled or self._directory is None or self._local is None:
            return
        self._has_compiled = False
        path = _candidates(self._directory, self._ranks)[0]
        with self._warning_of_failure("could not be written"):
            found = dict(_entries(self._local))
            if found.keys() <= self._kept:
                return  # all of it came from the file
            _write(path, self._local, _bounded(found), _facts(self._ranks.device), self._key)
            self._kept = frozenset(found)

    def _load(self, local: Path) -> None:
        assert self._directory is not None
        for path in _candidates(self._directory, self._ranks):
            try:
                file = _open(path)
            except FileNotFoundError:
                continue
            except (OSError, ConfigurationError) as error:
                self._warn(path, f"could not be read ({error})")
                return
            with file:
                self._kept = frozenset(self._unpack(file, path, local))
            return

    def _unpack(self, file: BinaryIO, path: Path, local: Path) -> list[str]:
        """Check the whole file, then unpack it; the names of what is in it, or none if it is of no use."""
        try:
            which, told = file.read(_ID_BYTES), file.read(_MAC_BYTES)
            if len(told) == _MAC_BYTES and which != _key_id(self._key):
                rule = "so nothing tells that this user has compiled it, and it is not executed"
                self._warn(path, f"was written with another key than {_key_path()}, {rule}")
                return []
            if not hmac.compare_digest(told, _authenticate(file, self._key)):
                self._warn(path, "is damaged (its content is not what was written)")
                return []
            with zipfile.ZipFile(file) as packed:
                facts, wanted = json.loads(packed.comment), _facts(self._ranks.device)
                differs = [name for name in wanted if facts.get(name) != wanted[name]]
                if differs:
                    name = differs[0]
                    self._warn(path, f"was made with {name} {facts.get(name)}, and this is {wanted[name]}")
                    return []
                names = [info.filename for info in packed.infolist()]
                if (bad := packed.testzip()) is not None or not all(map(_is_inside, names)):
                    self._warn(path, f"is damaged at {bad or 'a name in it'}")
                    return []
                for info in packed.infolist():
                    target = local / info.filename
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    target.write_bytes(packed.read(info))
                    made = time.mktime((*info.date_time, 0, 0, -1))
                    os.utime(target, (made, made))
                return names
        except (
            OSError,
            ValueError,
            AttributeError,  # of facts that are not a dict
            zipfile.BadZipFile,
            EOFError,  # zipfile's, of an entry that reaches beyond the end
            NotImplementedError,  # zipfile's, of a damaged header that names another compression
        ) as error:
            self._warn(path, f"is damaged ({str(error) or type(error).__name__})")
            # A part of it would do: torch looks each entry up by what it was made from.
            return []

    def _warn(self, path: Path, what: str) -> None:
        logger.warning("%s: %s %s; what it held is compiled anew", SETTING, path, what)

    def _warning_of_failure(self, what: str) -> _WarningOfFailure:
        return _WarningOfFailure(f"{SETTING}: {self._directory} {what}")


class _WarningOfFailure(AbstractContextManager[None]):
    """Turns an error of the file system into a warning: a run does not end for want of its cache."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, OSError):
            return False
        logger.warning("%s (%s); a restart will compile again", self._text, error)
        return True


def _facts(device: torch.device) -> Mapping[str, object]:
    """What must be the same where compiled code is used again.

    Torch looks entries up by its own version, by the graph, the settings and the GPU. It does not look at the
    processor beyond the width of its vectors, yet g++ compiles with -march=native: a kernel from a processor
    with more instructions would end the run by a signal.
    """
    accelerator = "none"
    if device.type != "cpu":
        accelerator = str(torch.get_device_module(device).get_device_properties(device).name)
    return {
        "format": _FORMAT,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "processor": f"{platform.machine()} {_processor_features()}",
        "accelerator": accelerator,
    }


def _processor_features() -> str:
    """A digest of the instructions that the processor has; its name, where Linux does not tell them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return hashlib.sha256(" ".join(sorted(value.split())).encode()).hexdigest()[:16]
    return platform.processor()


def _local_folder(base: str | None) -> Path:
    """A new folder of this process, in torch's own if a variable names that; gone when the process ends."""
    parent = Path(base or tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    own = f"{_LOCAL}-{os.geteuid()}-{_process_space()}"
    for left in parent.glob(f"{own}-*-*"):
        # Of a process that was killed.
        process = left.name.removeprefix(f"{own}-").partition("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    local = Path(tempfile.mkdtemp(prefix=f"{own}-{os.getpid()}-", dir=parent))
    # Not at the end of the run: compiled functions may still load kernels from it.
    atexit.register(_remove_if_own, local, os.getpid())
    return local


def _process_space(kernel: Path = Path("/proc")) -> str:
    """Digits of this host, boot and process namespace: a shared folder has those of other processes, too."""
    where, space = platform.node(), kernel / "self/ns/pid"
    # Hosts may share a name, and outside of containers all have a namespace of the same number.
    with suppress(OSError):
        where += " " + (kernel / "sys/kernel/random/boot_id").read_text()
    if space.is_symlink():
        where += f" {space.readlink()}"
    return hashlib.sha256(where.encode()).hexdigest()[:8]


def _remove_if_own(local: Path, made_by: int) -> None:
    if os.getpid() == made_by:  # a forked worker ends with the same handlers
        shutil.rmtree(local, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _entries(local: Path) -> Iterator[tuple[str, os.stat_result]]:
    for path in sorted(local.rglob("*")):
        name = path.relative_to(local)
        # What begins with a dot, or ends so, inductor writes before it renames it.
        is_whole = not path.name.startswith(".") and path.suffix not in (".tmp", ".lock")
        if is_whole and name.parts[0] != _LOCKS and path.is_file() and not path.is_symlink():
            yield name.as_posix(), path.stat()


def _bounded(found: Mapping[str, os.stat_result]) -> list[str]:
    """The newest entries that fit into `MAX_BYTES`, by name."""
    names, size = [], 0
    for name in sorted(found, key=lambda name: found[name].st_mtime, reverse=True):
        size += found[name].st_size
        if size > MAX_BYTES:
            logger.warning(
                "%s: more than %d MiB were compiled; the oldest entries are left out",
                SETTING,
                MAX_BYTES >> 20,
            )
            break
        names.append(name)
    return sorted(names)


def _write(path: Path, local: Path, names: list[str], facts: Mapping[str, object], key: bytes) -> None:
    """Replace a file in one step; only its owner may read or write it."""
    # Of this process: two jobs may keep the same rank in one directory, of which the last one wins.
    own = f".{path.name}-{_process_space()}"
    for left in path.parent.glob(f"{own}-*.partial"):
        process = left.name.removeprefix(f"{own}-").partition("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            left.unlink(missing_ok=True)
    number, name = tempfile.mkstemp(prefix=f"{own}-{os.getpid()}-", suffix=".partial", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(number, "w+b") as file:
            file.write(bytes(_ID_BYTES + _MAC_BYTES))
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as packed:
                for name in names:
                    packed.write(local / name, name)
                packed.comment = json.dumps(facts).encode()
            file.seek(_ID_BYTES + _MAC_BYTES)
            code = _authenticate(file, key)
            file.seek(0)
            file.write(_key_id(key) + code)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # of a write that did not come to its end


def _authenticate(file: BinaryIO, key: bytes) -> bytes:
    """What only who has the key can make of the rest of a file."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    while part := file.read(1 << 20):
        code.update(part)
    return code.digest()


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"compile cache key" + key).digest()[:_ID_BYTES]


def _key_path() -> Path:
    """Where the key is.

    Raises:
        FileNotFoundError: If no variable names it, and the user has no home directory.
    """
    named = os.environ.get(KEY_VARIABLE)
    if named:
        return Path(named)
    state: str | Path | None = os.environ.get("XDG_STATE_HOME")
    if not state:
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError as error:  # as where a container gives the process a user that it does not know
            raise FileNotFoundError(
                f"this user has no home directory; name a file of the key in {KEY_VARIABLE}"
            ) from error
    return Path(state) / "trainer-core" / "compile-cache.key"


def _read_key(path: Path) -> bytes:
    """The key in a file, which is made with a new one if it is not there.

    Raises:
        OSError: If it cannot be made or read, or somebody else may read or write it.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):  # of several ranks the first one's
            _make_key(path)
    for _ in range(_KEY_READS):
        with path.open("rb") as file:
            found, key = os.fstat(file.fileno()), file.read(1 << 12).strip()
        if key:
            break
        time.sleep(0.05)  # Without links it is there for a moment before it has its content.
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"it belongs to user {found.st_uid}; name one of this user's in {KEY_VARIABLE}")
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(
            f"others have access to it (mode {stat.S_IMODE(found.st_mode):o}), and who has it can write code "
            f"that this run would execute; make it yours alone with chmod 600 {path}, and if others may have "
            "read it, remove it: a new one is made"
        )
    if len(key) < _KEY_CHARACTERS:
        raise OSError(
            f"it has {len(key)} characters, and a key has {_KEY_CHARACTERS} or more; remove it, and a new "
            "one is made"
        )
    return key


def _make_key(path: Path) -> None:
    """Make a file with a new key, which only its owner may read.

    Raises:
        FileExistsError: If it is there.
    """
    key = secrets.token_hex(_KEY_CHARACTERS // 2).encode()
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(key)
        os.link(name, path)  # whole at once
        return
    except FileExistsError:
        raise
    except OSError as error:
        logger.debug("%s: %s has no links to files (%s)", SETTING, path.parent, error)
    finally:
        Path(name).unlink()
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(key)
    except OSError:
        path.unlink()  # and not an empty one, which every later start would find
        raise


def _open(path: Path) -> BinaryIO:
    """Open a file of this user that nobody else may write: what was checked is what is read."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    try:
        _refuse_others(path, os.fstat(file.fileno()))
    except ConfigurationError:
        file.close()
        raise
    return file


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
