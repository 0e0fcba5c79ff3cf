"""The callback that writes TensorBoard event files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .tracker import Opening, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardCallback(Tracker):
    """Writes log records as TensorBoard scalars into `<log directory>/tensorboard/<run id>`.

    When it acts, and what it does on resume: see `Tracker`. Points beyond the checkpoint are purged:
    TensorBoard does not show them any more. The arguments are stored once as the text `config`.

    Needs `pip install 'trainer-core[tensorboard]'`. Look at the curves with
    `tensorboard --logdir <log directory>/tensorboard`.

    Args:
        run_id: Name of the run's folder; the time at which training began when not given.

    Raises:
        ConfigurationError: `tensorboard` is not installed.
    """

    name = "tensorboard"
    library = "tensorboard"
    takes_points_back = True

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__(run_id)
        self._writer: SummaryWriter | None = None

    def open_run(self, opening: Opening) -> str:
        """Open the event file; points beyond the current step are purged."""
        from torch.utils.tensorboard import SummaryWriter

        parent = opening.directory / "tensorboard"
        run_id = opening.run_id or _free_name(parent)
        is_new = not (parent / run_id).exists()
        # Event files hold steps as they come; the purge tells readers to forget what is at it or beyond.
        purge = None if is_new else opening.step + 1
        self._writer = SummaryWriter(str(parent / run_id), purge_step=purge)
        if is_new:
            text = "```json\n" + json.dumps(opening.config, indent=2) + "\n```"
            self._writer.add_text("config", text, global_step=opening.step)
        return run_id

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Add the points, and flush, so that a killed run keeps them."""
        if self._writer is None:
            raise RuntimeError("open_run comes before write")
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close_run(self, *, aborted: bool) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _free_name(parent: Path) -> str:
    base = name = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while (parent / name).exists():
        number += 1
        name = f"{base}-{number}"
    return name
