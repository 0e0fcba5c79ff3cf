"""The checkpoints of a run as the scenario knows them: which are whole, and which it has damaged."""

from __future__ import annotations

import random
from pathlib import Path

DAMAGES = ("a bit flipped", "a file cut short", "manifest emptied")
"""What is done to a checkpoint. Taking files away is not among them: without the file of a component it
begins afresh, and a directory without a manifest is somebody else's."""


class Checkpoints:
    """Those in the output directory of a run.

    Args:
        output: The directory.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self._damaged: dict[int, int] = {}

    def steps(self) -> list[int]:
        """Steps of all that have appeared, in order."""
        return sorted(int(path.name.rpartition("-")[2]) for path in self.output.glob("checkpoint-*"))

    def damaged(self) -> list[int]:
        """Steps of those that were damaged and have not been written again since."""
        return [step for step in self.steps() if self._damaged.get(step) == self._identity(step)]

    def good(self) -> list[int]:
        """Steps of the others; the run has to continue from the last one."""
        damaged = self.damaged()
        return [step for step in self.steps() if step not in damaged]

    def being_written(self) -> list[str]:
        """Names of temporary directories of saves."""
        return [path.name for path in self.output.glob(".tmp-checkpoint-*")]

    def leftovers(self) -> list[str]:
        """Names of all hidden temporary directories and files; what tells who has begun the run stays."""
        return sorted({path.name for path in self.output.glob(".*")} - {".started-by.json"})

    def damage_newest(self, how: str, generator: random.Random) -> str:
        """Damage the newest one that is good, which leaves another one.

        Args:
            how: One of `DAMAGES`.
            generator: Chooses file and place.

        Returns:
            What was done to which one.
        """
        step = self.good()[-1]
        directory = self.output / f"checkpoint-{step}"
        path = directory / "manifest.json"
        if how == "manifest emptied":
            path.write_bytes(b"")
        else:
            path = generator.choice(sorted(path for path in directory.iterdir() if path.stat().st_size))
            content = bytearray(path.read_bytes())
            place = generator.randrange(len(content))
            if how == "a bit flipped":
                content[place] ^= 1 << generator.randrange(8)
            else:
                del content[place:]
            path.write_bytes(content)
        self._damaged[step] = self._identity(step)
        return f"{how}: {directory.name}/{path.name}"

    def _identity(self, step: int) -> int:
        """What tells a directory from another one that takes its place later."""
        return (self.output / f"checkpoint-{step}").stat().st_ino
