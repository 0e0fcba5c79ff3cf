"""The callback that logs to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from dist_env import get_logger

from .tracker import Opening, Tracker

if TYPE_CHECKING:
    from wandb import Run

logger = get_logger(__name__)


class WandbCallback(Tracker):
    """Logs records to a Weights & Biases run; its step is the optimizer step.

    When it acts, and what it does on resume: see `Tracker`. The run of the checkpoint is resumed by its id. A
    run that is active already (`wandb.init` called before) is used, and left open. The arguments are the
    run's config. Offline runs go to `<log directory>/wandb` and are sent later with `wandb sync`.

    Needs `pip install 'trainer-core[wandb]'`.

    Args:
        project: Name of the project; W&B's default (`WANDB_PROJECT`) when not given.
        entity: User or team.
        run_name: Name of the run; W&B chooses one when not given.
        tags: Tags of a new run.
        mode: "online", "offline" or "disabled"; W&B's default (`WANDB_MODE`) when not given.
        run_id: Id of the run to go on with or to begin.

    Raises:
        ConfigurationError: `wandb` is not installed.
    """

    name = "wandb"
    library = "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        entity: str | None = None,
        run_name: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline", "disabled"] | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(run_id)
        self._project = project
        self._entity = entity
        self._run_name = run_name
        self._tags = tuple(tags)
        self._mode = mode
        self._run: Run | None = None
        self._opened_here = False

    def open_run(self, opening: Opening) -> str:
        """Begin or resume the run."""
        import wandb

        self._opened_here = wandb.run is None
        if wandb.run is not None:
            self._run = wandb.run
            self._run.config.update(opening.config, allow_val_change=True)  # type: ignore[no-untyped-call]
            return str(self._run.id)
        # The directory has to be there: W&B would go elsewhere without it.
        opening.directory.mkdir(parents=True, exist_ok=True)
        chosen = opening.run_id is not None and opening.run_id == self._chosen_id
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=self._run_name,
            tags=self._tags or None,
            mode=self._mode,
            dir=str(opening.directory),
            id=opening.run_id,
            resume=None if opening.run_id is None else ("allow" if chosen else "must"),
            config=opening.config,
            allow_val_change=True,
        )
        logger.info("W&B run %s in %s", self._run.id, self._run.url or self._run.dir)
        return str(self._run.id)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the scalars at the step."""
        if self._run is None:
            raise RuntimeError("open_run comes before write")
        self._run.log(dict(scalars), step=step)

    def close_run(self, *, aborted: bool) -> None:
        """Finish the run, if it was begun here."""
        if self._run is not None and self._opened_here:
            self._run.finish(exit_code=int(aborted))
        self._run = None
