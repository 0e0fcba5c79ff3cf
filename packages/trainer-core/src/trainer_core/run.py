"""Everything that a prepared run is made of, in one place for the loop and its actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core import CheckpointManager
from perf_metrics import ThroughputMeter, exclude_compilation

from .arguments import TrainingArguments
from .callbacks import dump_on_oom
from .distributed.placement import BatchPlacement
from .distributed.ranks import Ranks
from .distributed.transforms import BuiltModel
from .evaluation import EvalMetric, EvaluationSets
from .events import CallbackHandler
from .flops_account import FlopsAccount
from .interval import Interval
from .loaders import epoch_of, epoch_progress_of
from .loss import TokenLoss
from .memory import GarbagePolicy
from .model import RecompileCounter, run_settings
from .output_lease import OutputLease
from .run_state import RunProgress
from .schedule_state import ScheduleState
from .speed import RunSpeed
from .state import TrainerState
from .update import Update


@dataclass(kw_only=True)
class Run:
    """The parts of a run; loader, optimizer and update exist when there is training data."""

    args: TrainingArguments
    state: TrainerState
    events: CallbackHandler
    ranks: Ranks
    built: BuiltModel
    placement: BatchPlacement
    loss: TokenLoss
    meter: ThroughputMeter
    speed: RunSpeed
    interval: Interval
    flops: FlopsAccount
    progress: RunProgress
    manager: CheckpointManager
    lease: OutputLease
    loader: object | None
    evaluation: EvaluationSets | None
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    schedule: ScheduleState | None
    """The same, as a part of checkpoints."""
    update: Update | None
    garbage: GarbagePolicy
    recompiles: RecompileCounter
    eval_metrics: Mapping[str, EvalMetric]
    announced_epoch: int | None = None
    """The epoch that the training data was last told of, if it stands there."""
    loaded: Path | None = None
    """The checkpoint that was loaded last in this process."""
    went_back: bool = False
    """Whether that one was named, so that there may be newer ones."""
    has_trained: bool = False
    """Whether a loop has run in this process."""
    evaluated: tuple[int, dict[str, float]] | None = None
    """Step and result of the last evaluation of the run's own data in this process."""
    ranked_step: int = -1
    """Step of the last checkpoint that was saved with the result of an evaluation in this process."""
    saved_step: int = -1
    """Step of the newest checkpoint of this run."""

    @property
    def steps_in_epoch(self) -> int:
        """Optimizer steps since the current epoch began."""
        return self.state.global_step - self.state.epoch_start_step

    def update_epoch(self) -> None:
        """Bring `state.epoch` up to date, with its fraction where epoch length or loader tell it."""
        state, epoch = self.state, epoch_of(self.loader)
        state.epoch = float(state.raw_epoch)
        if state.epoch_train_steps:
            state.epoch += self.steps_in_epoch / state.epoch_train_steps
        elif epoch is not None and epoch >= state.raw_epoch:
            # A loader whose epoch was left early learns of the next one only when that begins.
            state.epoch = epoch + epoch_progress_of(self.loader)


@contextmanager
def training_switches(run: Run) -> Iterator[None]:
    """What is switched on in the process, or for autograd, while a run trains; all is put back afterwards."""
    args, device = run.args, run.ranks.device
    with ExitStack() as stack:
        stack.enter_context(run_settings(args, device))
        stack.enter_context(run.recompiles)
        if args.torch_compile:
            stack.enter_context(exclude_compilation(run.meter))
        stack.enter_context(run.garbage)
        stack.enter_context(dump_on_oom(args.log_path / "memory"))
        yield
