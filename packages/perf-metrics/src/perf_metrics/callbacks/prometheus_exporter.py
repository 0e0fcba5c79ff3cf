"""The callback that lets Prometheus scrape a training job, beside the counters of its GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..logs.log_file import is_evaluation, is_training
from ..monitoring.series import (
    LOGGED_AT,
    STEP,
    TOKENS,
    Figures,
    device_seconds,
    figures_of_evaluation,
    figures_of_interval,
    number,
)
from ..ofu.counter_files import LABEL
from . import EventHandlers, ProgressState

if TYPE_CHECKING:
    from .goodput_logger import GoodputLogger
    from .prometheus_endpoint import MetricsEndpoint

_logger = logging.getLogger("perf_metrics")


class PrometheusExporter(EventHandlers):
    """Serves the figures of the last log record to Prometheus, from the process with world rank 0.

    So the application's MFU is in the same database as the counters of dcgm-exporter, and the two can be
    joined by the labels. Put it after the callbacks that add figures, such as `DefaultMetrics`.

    | series | from |
    |---|---|
    | `training_step` | `state.global_step` |
    | `training_loss`, `training_grad_norm`, `training_learning_rate` | entries of these names |
    | `training_tokens_per_second` | `tok_per_sec` |
    | `training_tokens_total`, a counter from 0 at the start of the training | `input_tokens` |
    | `training_mfu_ratio`, `training_hfu_ratio`, `training_ofu_ratio` | `mfu`, `hfu`, `ofu` |
    | `training_peak_memory_bytes`, of the rank with the most | `peak_mem_allocated` |
    | `training_evaluation_loss` | `eval_loss` |
    | `training_last_record_timestamp_seconds`, Unix time | when the last interval was logged |
    | `training_device_seconds_total`, a counter by `kind` | `goodput`, at the time of the scrape |

    What a record does not have, or has as None or a list, is not served until a record has it again: an old
    value would look like a new one. Not a number stays that. The final metrics of a run are not served, as
    the endpoint ends with the training.

    Args:
        port: Port to listen on; 0 for any free one, which `port` of this object tells.
        host: Address to listen on. For a Prometheus on another machine it has to be "0.0.0.0", or this
            machine's address in the cluster's network. There is neither encryption nor a password.
        labels: Constant labels of all series, such as `{"hpc_job": os.environ["SLURM_JOB_ID"]}`.
        goodput: A callback of the same training, to serve what its device time is spent on. It has to be
            among the callbacks itself.

    Raises:
        ModuleNotFoundError: The extra `prometheus` is not installed.
        TypeError: The value of a label is not text, or `goodput` is not a GoodputLogger.
        ValueError: `port` is out of range, or a label is none to Prometheus.
    """

    def __init__(
        self,
        port: int = 9401,
        host: str = "127.0.0.1",
        labels: Mapping[str, str] | None = None,
        *,
        goodput: GoodputLogger | None = None,
    ) -> None:
        # Here, so that a missing library is found before the training begins.
        from . import prometheus_endpoint  # noqa: F401

        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(
                f"port={port!r} must be a whole number from 0 to 65535, where 0 takes any free port."
            )
        self._port, self._host, self._labels = port, host, dict(labels or {})
        _check_labels(self._labels)
        if goodput is not None and not callable(getattr(goodput, "device_seconds", None)):
            raise TypeError(f"goodput={goodput!r} must be a GoodputLogger.")
        if goodput is not None and "kind" in self._labels:
            raise ValueError(
                f"labels={self._labels!r} must not have kind, by which device time is told apart. Give that "
                "label another name, or leave goodput out."
            )
        self._goodput = goodput
        self._told = False
        self._endpoint: MetricsEndpoint | None = None
        self._tokens = 0.0
        self._interval: Figures = {}
        self._evaluation: Figures = {}

    @property
    def port(self) -> int | None:
        """The port that it listens on; None where it does not: on other ranks, and outside a training."""
        return None if self._endpoint is None else self._endpoint.port

    def on_train_begin(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """Begin to listen.

        Raises:
            OSError: The port is taken, or the address is not one of this machine.
        """
        self._close()
        if not state.is_world_process_zero:
            return
        from .prometheus_endpoint import MetricsEndpoint

        self._tokens, self._interval, self._evaluation = 0.0, {}, {}
        self._endpoint = MetricsEndpoint(self._host, self._port, self._labels, live=self._device_seconds)
        self._endpoint.tell(self._figures(state))

    def on_log(
        self, args: object, state: ProgressState, control: object, *, logs: Mapping[str, object], **_: object
    ) -> None:
        """Serve the figures of a record."""
        if self._endpoint is None:
            return
        if self._goodput is not None and not self._goodput.device_seconds() and not self._told:
            self._told = True
            _logger.warning(
                "device time is not served, as goodput=%r of PrometheusExporter is not among the callbacks "
                "of this training. Give it to the trainer, too.",
                self._goodput,
            )
        if is_training(logs):
            self._tokens += number(logs.get("input_tokens")) or 0.0
            self._interval = {**figures_of_interval(logs), LOGGED_AT: time.time()}
        elif is_evaluation(logs):
            self._evaluation = figures_of_evaluation(logs)
        self._endpoint.tell(self._figures(state))

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Stop listening."""
        self._close()

    def on_exception(self, args: object, state: object, control: object, **_: object) -> None:
        """Stop listening: the last figures would look like those of a training that lives."""
        self._close()

    def _figures(self, state: ProgressState) -> Figures:
        return {STEP: state.global_step, TOKENS: self._tokens, **self._interval, **self._evaluation}

    def _device_seconds(self) -> Figures:
        seconds = {} if self._goodput is None else self._goodput.device_seconds()
        return {device_seconds(kind): value for kind, value in seconds.items()}

    def _close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()


def _check_labels(labels: Mapping[str, str]) -> None:
    for name, value in labels.items():
        if not isinstance(name, str) or not LABEL.fullmatch(name) or name.startswith("__"):
            raise ValueError(
                f"labels={labels!r} has {name!r}, which is not the name of a label. Use letters, digits and "
                "_, and begin neither with a digit nor with __, such as hpc_job."
            )
        if not isinstance(value, str):
            raise TypeError(f"labels={labels!r} must have text as {name}. Give str(...) of it.")
        if not value:
            raise ValueError(
                f"labels={labels!r} must not have an empty {name}, which is not a label at all. Leave it out."
            )
