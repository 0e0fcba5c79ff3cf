"""The directory that ``tokenize`` writes, finished or not."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from dataloader_dispatch.cli.plan import Plan, read_plan
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.token_manifest import (
    MANIFEST,
    PART,
    UNFINISHED,
    Part,
    TokenManifest,
    TokenType,
    is_token_directory,
    read_manifest,
)
from dataloader_dispatch.sources.token_writer import sync_directory, write_durably

_PLAN = "plan.json"


class Standing(Enum):
    """How far a directory is."""

    NEW = auto()
    UNFINISHED = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class FinishedPart:
    """What is known of a part that is on the disk.

    Attributes:
        part: Its entry in the manifest.
        text_bytes: Bytes of the text of its documents, in UTF-8.
        empty: Documents without tokens, those left out included.
        separators: Separators that stand in documents, as their text spells them.
        skipped: Documents left out as they could not be read.
        undecodable: Documents that were not UTF-8.
    """

    part: Part
    text_bytes: int
    empty: int
    separators: int
    skipped: int
    undecodable: int


class Output:
    """The directory OUT.

    Args:
        path: Where it is or will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scratch = path / UNFINISHED

    def refuse_others(self) -> None:
        """Refuse a place that this command must not write.

        Raises:
            DataError: It is no directory, or holds something else than tokens.
        """
        if not self.path.exists() or is_token_directory(self.path):
            return
        if not self.path.is_dir():
            raise DataError(f"OUT {self.path} is not a directory; name one, as the last of the paths")
        others = sorted(path.name for path in self.path.iterdir() if path.name != UNFINISHED)
        if others:
            raise DataError(
                f"OUT {self.path} holds something else, {others[0]!r} for one; name a directory that is new, "
                "empty, or was written by this command (--overwrite replaces nothing else)"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory if needed, and keep other runs out of it for a while.

        Raises:
            DataError: Another run is writing it.
            OSError: It cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"another tokenize command is writing {self.path}; wait for its end, or name another OUT"
                ) from error
            yield
        finally:
            os.close(handle)

    def standing(self, plan: Plan, overwrite: bool) -> Standing:
        """See how far the directory is, and clear it if it is to be begun anew.

        Raises:
            DataError: It holds something else, or tokens made with other settings or of other input.
        """
        self.refuse_others()
        if not is_token_directory(self.path):
            return Standing.NEW
        finished = (self.path / MANIFEST).exists()
        if overwrite and (finished or self._differences(plan)):
            self._clear()
            return Standing.NEW
        if differences := self._differences(plan):
            raise DataError(
                f"OUT {self.path} was begun otherwise: {'; '.join(differences)}; repeat the command as it "
                "was, name another OUT, or begin anew with --overwrite"
            )
        return Standing.FINISHED if finished else Standing.UNFINISHED

    def begin(self, plan: Plan) -> None:
        """Write down what is to be done, and remove what a killed run left half-written.

        Raises:
            OSError: The directory cannot be written.
        """
        self.scratch.mkdir(exist_ok=True)
        for path in self.scratch.iterdir():
            if path.name.startswith("part-") and path.suffix != ".json":
                path.unlink(missing_ok=True)
        write_durably(self.scratch / _PLAN, plan.to_json())

    def record(self, finished: FinishedPart) -> None:
        """Write down that a part is finished; after that it is not made again.

        Raises:
            OSError: The directory cannot be written.
        """
        write_durably(self.scratch / f"{finished.part.name}.json", json.dumps(asdict(finished)))

    def finished_part(self, name: str, dtype: TokenType) -> FinishedPart | None:
        """What is known of a part, None if it is not finished."""
        try:
            content: dict[str, Any] = json.loads((self.scratch / f"{name}.json").read_text(encoding="utf-8"))
            finished = FinishedPart(**{**content, "part": Part(**content["part"])})
            sizes = {file: (self.path / file).stat().st_size for file in finished.part.sizes(dtype)}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return finished if sizes == finished.part.sizes(dtype) else None

    def finish(self, manifest: TokenManifest) -> None:
        """Make the directory one that can be read.

        Raises:
            OSError: It cannot be written.
        """
        write_durably(self.path / MANIFEST, manifest.to_json(), scratch=self.scratch)
        self.remove_scratch()

    def remove_scratch(self) -> None:
        """Remove the records of a run that is finished."""
        shutil.rmtree(self.scratch, ignore_errors=True)  # what stays does no harm
        sync_directory(self.path)

    def _differences(self, plan: Plan) -> list[str]:
        """How the directory was begun otherwise than planned now."""
        try:
            if (self.path / MANIFEST).exists():
                about = read_manifest(self.path).about
                return Plan.from_values(about["settings"], about["sources"]).differences(plan)
            before = read_plan(self.scratch / _PLAN)
        except KeyError as error:
            return [f"{MANIFEST} has no entry {error}"]
        except DataError as error:
            return [str(error)]
        return before.differences(plan) if before else ["it holds parts, but not how they were made"]

    def _clear(self) -> None:
        # The manifest first: what remains after a kill must not look finished.
        (self.path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        for path in self.path.iterdir():
            if PART.fullmatch(path.name):
                path.unlink()
        sync_directory(self.path)
