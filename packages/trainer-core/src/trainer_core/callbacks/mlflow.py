"""The callback that logs to MLflow."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from dist_env import get_logger

from .tracker import Opening, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = get_logger(__name__)

T = TypeVar("T")

PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000
PARAM_LENGTH = 6000
"""Limits of MLflow's log_batch: https://mlflow.org/docs/latest/rest-api.html#log-batch"""


class MLflowCallback(Tracker):
    """Logs records to an MLflow run; its step is the optimizer step.

    When it acts, and what it does on resume: see `Tracker`. The run of the checkpoint goes on under its id.
    The arguments are stored once as the run's params. An active run of `mlflow.start_run` is neither used nor
    changed. At the end the run's status is FINISHED, or FAILED when training was aborted.

    Needs `pip install 'trainer-core[mlflow]'`; mlflow-skinny is enough.

    Args:
        experiment: Name of the experiment, made if it is not there.
        run_name: Name of the run; MLflow chooses one when not given.
        tracking_uri: Where runs are kept: a server, `sqlite:///file` or `file:directory`; MLflow's default
            (`MLFLOW_TRACKING_URI`) when not given.
        run_id: Id of a run that exists, to go on with.

    Raises:
        ConfigurationError: `mlflow` is not installed.
    """

    name = "mlflow"
    library = "mlflow"

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(run_id)
        self._experiment = experiment
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
            raise RuntimeError("open_run comes before write")
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
