"""What experiment trackers share: one run that continues after a resume, with steps that never go back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from dist_env import get_logger

from ..errors import ConfigurationError
from .files import read_json_object, write_text

if TYPE_CHECKING:
    from ..arguments import TrainingArguments
    from ..state import TrainerControl, TrainerState


def require_library(setting: str, value: str, library: str) -> None:
    """Check that an optional library is installed, without importing it; its extra has the same name.

    Args:
        setting: What asks for it: "callbacks" or "report_to".
        value: The callback or name that was given there.
        library: Name of the library, and of the extra.

    Raises:
        ConfigurationError: It is not installed.
    """
    if find_spec(library) is None:
        raise ConfigurationError(
            setting,
            value,
            f"needs the library {library}, which is not installed",
            f"install it with `pip install 'trainer-core[{library}]'`, or leave it out of {setting}",
        )


def scalars_of(record: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a log record under grouped names.

    | record | names |
    |---|---|
    | training | `train/<key>` |
    | evaluation | `eval/<key without eval_>`; its `epoch` is left out, the training record has it |
    | final metrics (with `train_runtime`) | `final/<key>` |
    | a key with a slash | stays as it is |

    The items of a list become `<name>/rank0`, `<name>/rank1` and so on, those of a dict `<name>/<key>`. None
    and whatever is not a number is left out. A tensor of one element is brought to the host.
    """
    return {
        name: number
        for key, value in record.items()
        if (grouped := _grouped(key, record)) is not None
        for name, number in _flat(grouped, value)
    }


def config_of(args: object) -> dict[str, object]:
    """The run's arguments as JSON values; what JSON does not have becomes text."""
    if not is_dataclass(args):
        return {}
    return {field.name: _json_value(getattr(args, field.name)) for field in fields(args)}


def _grouped(key: str, record: Mapping[str, object]) -> str | None:
    if "/" in key:
        return key
    if "train_runtime" in record:
        return f"final/{key}"
    if key.startswith("eval_"):
        return f"eval/{key.removeprefix('eval_')}"
    is_evaluation = "loss" not in record and any(name.startswith("eval_") for name in record)
    return None if key == "epoch" and is_evaluation else f"train/{key}"


def _flat(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool):
        return
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        yield name, float(value)
    elif isinstance(value, list | tuple):
        for rank, item in enumerate(value):
            yield from _flat(f"{name}/rank{rank}", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            # A table, such as the load of each expert of each layer, would be hundreds of curves.
            if not isinstance(item, list | tuple):
                yield from _flat(f"{name}/{key}", item)


def _json_value(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return str(value)


logger = get_logger(__name__)

RESUMED_AT = "session/resumed_at_step"
"""Name of the marker in the first point after a resume; its value is the step of the checkpoint."""


class Opening(NamedTuple):
    """What a tracker needs to open its run."""

    run_id: str | None
    """The run to continue with; None begins one."""
    directory: Path
    """The run's log directory."""
    config: dict[str, object]
    """The arguments, as JSON values."""
    step: int
    """Optimizer step at which the run continues."""


class Tracker(ABC):
    """Base of the trackers: rank 0 writes each log record as grouped scalars over the optimizer step.

    Acts at on_train_begin (opens the run, or continues with the one of the checkpoint), on_log and
    on_train_end (closes it). Names of the scalars: `train/...`, `eval/...`, `final/...`. A record that is
    logged outside `train`, such as an evaluation afterwards, opens the run and closes it again.

    The run's id is saved with each checkpoint. If the interrupted part had logged beyond the checkpoint, a
    tracker that can take points back does so; for one that cannot, the steps that are there already are not
    logged a second time, and a warning names them. Either way steps only grow, and the first new point
    carries `session/resumed_at_step`.

    Args:
        run_id: Continue with this run of the tracker, not with the one of the checkpoint.

    Raises:
        ConfigurationError: The tracker's library is not installed.
    """

    name: ClassVar[str]
    """Name under which its state is saved."""
    library: ClassVar[str]
    """The optional library, which is also the name of the extra."""
    takes_points_back: ClassVar[bool] = False
    """Whether opening a run at a step removes its points beyond that step."""

    def __init__(self, run_id: str | None = None) -> None:
        require_library("callbacks", type(self).__name__, self.library)
        self._chosen_id = run_id
        self._run_id = run_id
        self._last_step = -1
        self._logged_through = -1
        self._resumed_at: int | None = None
        self._ledger: Path | None = None

    @property
    def run_id(self) -> str | None:
        """Id of the tracker's run, on rank 0 once training has begun."""
        return self._run_id

    @abstractmethod
    def open_run(self, opening: Opening) -> str:
        """Begin a run and store its config, or continue with one.

        Returns:
            The run's id.
        """

    @abstractmethod
    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Store scalars at an optimizer step."""

    @abstractmethod
    def close_run(self, *, aborted: bool) -> None:
        """Bring everything to its place and close the run."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Open the run."""
        if self._ledger is not None:
            self._close(aborted=True)  # an error ended the training before this one, past on_train_end
        if state.is_world_process_zero:
            self._open(args, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: Mapping[str, object],
        **_: object,
    ) -> None:
        """Store one record."""
        if not state.is_world_process_zero:
            return
        if self._ledger is not None:
            self._store(logs, state.global_step)
            return
        self._open(args, state)
        self._store(logs, state.global_step)
        self._close(aborted=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Close the run."""
        if self._ledger is not None:
            self._close(aborted=control.should_abort_without_save)

    def state_dict(self) -> dict[str, object]:
        """The run's id and the last step logged; those of rank 0 count."""
        return {"run_id": self._run_id, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue with the run of a checkpoint, unless another one was chosen."""
        run_id, last_step = state["run_id"], state["last_step"]
        if isinstance(run_id, str) and isinstance(last_step, int) and self._chosen_id in (None, run_id):
            self._run_id, self._last_step = run_id, last_step

    def _open(self, args: TrainingArguments, state: TrainerState) -> None:
        step = state.global_step
        known, directory = self._run_id, args.log_path
        ledger = directory / f"{self.name}.run.json"
        self._resumed_at = step if known is not None and step > 0 else None
        self._logged_through = self._already_logged(ledger, step)
        self._run_id = self.open_run(Opening(known, directory, config_of(args), step))
        self._ledger = ledger

    def _already_logged(self, ledger: Path, step: int) -> int:
        """Last step that must not be logged again; -1 when there is none beyond the current one."""
        noted = read_json_object(ledger)
        last = noted.get("last_step") if noted.get("run_id") == self._run_id else None
        through = max(self._last_step, last if isinstance(last, int) else -1)
        if self.takes_points_back or self._run_id is None or through <= step:
            return -1
        logger.warning(
            "%s: run %s holds points up to step %d and cannot take them back; training continues from step "
            "%d, and is not logged there again until step %d is passed. Give run_id for a run of its own",
            type(self).__name__,
            self._run_id,
            through,
            step,
            through,
        )
        return through

    def _store(self, record: Mapping[str, object], step: int) -> None:
        scalars = scalars_of(record)
        if step <= self._logged_through or not scalars:
            return
        if self._resumed_at is not None:
            scalars[RESUMED_AT] = float(self._resumed_at)
            self._resumed_at = None
        self.write(scalars, step)
        self._last_step = step
        if self._ledger is not None:
            # A checkpoint does not know what was logged after it, so that is noted beside the logs.
            write_text(self._ledger, json.dumps({"run_id": self._run_id, "last_step": step}) + "\n")

    def _close(self, *, aborted: bool) -> None:
        self._ledger = None
        self.close_run(aborted=aborted)
