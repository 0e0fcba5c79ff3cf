"""The callbacks that log to MLflow, TensorBoard and Weights & Biases, each imported when it is used."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from dist_env import get_logger

from ..arguments.choices import trackers_of
from ..errors import ConfigurationError
from .tracker import Opening, Tracker, require_library

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run

logger = get_logger(__name__)

T = TypeVar("T")

PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000
PARAM_LENGTH = 6000
"""Limits of MLflow's log_batch: https://mlflow.org/docs/latest/rest-api.html#log-batch"""


class MLflowCallback(Tracker):
    """Logs records to an MLflow run; its step is the optimizer step.

    When it acts, and what it does on resume: see `Tracker`. The run of the checkpoint continues under its id.
    The arguments are stored once as the run's params. An active run of `mlflow.start_run` is neither used nor
    changed. At the end the run's status is FINISHED, or FAILED when training was aborted.

    Needs `pip install 'trainer-core[mlflow]'`; mlflow-skinny is enough.

    Args:
        experiment: Name of the experiment, made if it is not there; that of `MLFLOW_EXPERIMENT_NAME`, or else
            "Default", when not given.
        run_name: Name of the run; MLflow chooses one when not given.
        tracking_uri: Where runs are kept: a server, `sqlite:///file` or `file:directory`; MLflow's default
            (`MLFLOW_TRACKING_URI`) when not given.
        run_id: Id of a run that exists, to continue with.

    Raises:
        ConfigurationError: `mlflow` is not installed.
    """

    name = "mlflow"
    library = "mlflow"

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(run_id)
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._client: MlflowClient | None = None

    def open_run(self, opening: Opening) -> str:
        """Begin a run, or set the known one running again."""
        from mlflow import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._tracking_uri)
        if opening.run_id is not None:
            client.update_run(opening.run_id, status="RUNNING")
            return opening.run_id
        run = client.create_run(self._experiment_id(client), run_name=self._run_name)
        run_id = str(run.info.run_id)
        self._store_config(client, run_id, opening.config)
        logger.info("MLflow run %s", run_id)
        return run_id

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the scalars at the step."""
        from mlflow.entities import Metric

        if self._client is None or self.run_id is None:
            raise RuntimeError("open_run comes before write.")
        now = time.time_ns() // 1_000_000
        metrics = [Metric(_allowed(name), value, now, step) for name, value in scalars.items()]
        for part in _parts(metrics, METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=part)

    def close_run(self, *, aborted: bool) -> None:
        """Tell MLflow how the run ended."""
        if self._client is not None and self.run_id is not None:
            self._client.set_terminated(self.run_id, "FAILED" if aborted else "FINISHED")
        self._client = None

    def _experiment_id(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self._experiment)
        return str(found.experiment_id if found is not None else client.create_experiment(self._experiment))

    @staticmethod
    def _store_config(client: MlflowClient, run_id: str, config: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        texts = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in config.items()
        }
        params = [Param(name, text[:PARAM_LENGTH]) for name, text in texts.items()]
        for part in _parts(params, PARAMS_PER_CALL):
            client.log_batch(run_id, params=part)


def _allowed(name: str) -> str:
    """MLflow's names are letters, digits, underscores, dashes, periods, spaces, colons and slashes."""
    return "".join(sign if sign.isalnum() or sign in "_-. :/" else "_" for sign in name)


def _parts(items: Sequence[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part


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
            raise RuntimeError("open_run comes before write.")
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
        run_id: Id of the run to continue with or to begin.

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
            self._run.config.update(opening.config, allow_val_change=True)
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
            raise RuntimeError("open_run comes before write.")
        self._run.log(dict(scalars), step=step)

    def close_run(self, *, aborted: bool) -> None:
        """Finish the run, if it was begun here."""
        if self._run is not None and self._opened_here:
            self._run.finish(exit_code=int(aborted))
        self._run = None


_BY_NAME: Mapping[str, type[MLflowCallback | TensorBoardCallback | WandbCallback]] = {
    each.name: each for each in (MLflowCallback, TensorBoardCallback, WandbCallback)
}


def trackers_by_name(report_to: str | Sequence[str]) -> list[Tracker]:
    """The trackers that the setting `report_to` names, each with its defaults.

    Raises:
        ConfigurationError: The library of one is not installed.
    """
    names = trackers_of(report_to)
    for name in names:
        require_library("report_to", name, _BY_NAME[name].library)
    return [_BY_NAME[name]() for name in names]


def refuse_second_tracker(callback: object, report_to: str | Sequence[str]) -> None:
    """Refuse a callback, or class of one, that `report_to` brings already: each record would be logged twice.

    Raises:
        ConfigurationError: Naming both.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    for name in trackers_of(report_to):
        if issubclass(kind, _BY_NAME[name]):
            raise ConfigurationError(
                "report_to",
                name,
                f"adds a {_BY_NAME[name].__name__}, and {kind.__name__} is among the callbacks already",
                "leave one of the two out",
            )
