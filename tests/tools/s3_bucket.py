"""A folder in a bucket of a test server, for tests of what reads from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dist_env import ObjectStore


@dataclass
class Bucket:
    """A new folder on the server. What lies there is uploaded by the test, not by what is tested.

    Attributes:
        address: That of the folder.
        environment: What a process needs to reach it, with a cache of its own.
        cache: Directory of that cache.
    """

    address: str
    environment: dict[str, str]
    cache: Path
    _store: ObjectStore = field(repr=False)

    @property
    def key(self) -> str:
        return self.address.removeprefix("s3://tests/")

    def put(self, name: str, data: bytes) -> str:
        """Upload an object; its address."""
        self._store.put(f"{self.key}/{name}", data)
        return f"{self.address}/{name}"

    def upload(self, folder: Path, name: str = "") -> str:
        """Upload the files below a directory; the address of the folder."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder).as_posix()}".lstrip("/"), path.read_bytes())
        return f"{self.address}/{name}".rstrip("/")

    def get(self, name: str) -> bytes:
        """The content of an object."""
        return self._store.get(f"{self.key}/{name}")

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._store.delete([f"{self.key}/{name}"])

    def names(self) -> list[str]:
        """All objects in the folder."""
        return sorted(info.key.removeprefix(f"{self.key}/") for info in self._store.objects(self.key))

    def blocks(self) -> list[Path]:
        """The blocks in the cache."""
        return sorted(self.cache.glob("*/*/*-[0-9]*"))

    def clear_cache(self) -> None:
        """Remove all blocks."""
        for path in self.blocks():
            path.unlink(missing_ok=True)

    def cached_bytes(self) -> int:
        """Bytes of all files in the cache."""
        files = (path for path in self.cache.rglob("*") if not path.name.startswith("."))
        return sum(path.stat().st_size for path in files if path.is_file())
