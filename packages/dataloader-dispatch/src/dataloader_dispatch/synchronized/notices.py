"""What a group of ranks tells its user, once."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataloader_dispatch.rank_group import RankGroup
from dist_env import get_logger

_logger = get_logger("dataloader_dispatch")


@dataclass
class Notices:
    """Warnings of one loader, each kind given once and by one rank.

    Args:
        group: The ranks; the first one speaks. All of them are to come here, so that they agree on what was
            said.
    """

    group: RankGroup
    _said: set[str] = field(default_factory=set)

    def was_said(self, kind: str) -> bool:
        """Whether a warning of this kind was given."""
        return kind in self._said

    def say(self, kind: str, message: str) -> None:
        """Give a warning, unless one of its kind was given."""
        if kind not in self._said and self.group.index == 0:
            _logger.warning(message)
        self._said.add(kind)

    def say_here(self, message: str) -> None:
        """Give a warning that concerns this rank alone."""
        _logger.warning("%s: %s", self.group.name(self.group.index), message)
