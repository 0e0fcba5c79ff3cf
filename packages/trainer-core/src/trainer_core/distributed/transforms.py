"""Ways to use several devices: transforms of the model, which combine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from checkpoint_core import StateComponent, load_model_weights
from dist_env import ParallelLayout

from ..arguments import TrainingArguments
from ..errors import ConfigurationError, DataError
from ..generation import generators_of_rank_0, logits_of_one_rank
from ..metrics.comm_bytes import CommBytes
from ..model.meta_model import is_fake
from .executor import EagerExecutor, Executor, Fire, ForwardOutput, GradSync, clip_grad_norm_, own_part
from .ranks import Ranks

if TYPE_CHECKING:
    from model_parallel import SequencePart

    from ..data.loaders import Batch
    from ..loss import TokenLoss
    from ..optimization.averaging import AveragedWeights

ORDER = ("expert", "tensor", "context", "pipeline", "shard", "replicate")
"""The order in which transforms are applied, by their axes, whatever the order in which they are given.

What divides layers comes before stages, for it has to see the whole model; nothing has storage yet.
"""


class ModelTransform(Protocol):
    """A way to use a dimension of the layout; inherit from it to write one for `Trainer(parallel=[...])`.

    Layers are converted (FP8, QAT, activation checkpointing) before the first transform is applied. After
    the last one parameters get their values, modules are compiled in place, and the optimizer is made.
    """

    axis: ClassVar[str]
    """The dimension of `dist_env.ParallelLayout` that it uses."""
    keeps_parameters: bool = False
    """Whether it takes a model whose parameters have values, on the device, and changes none of them. If not,
    they are on the meta device when it is applied, and get their values for what this rank then holds."""

    def is_active(self, layout: ParallelLayout) -> bool:
        """Whether it has anything to do in a layout: by default where its dimension has several ranks."""
        return int(getattr(layout, self.axis)) > 1

    def check(self, args: TrainingArguments, ranks: Ranks) -> None:
        """Refuse settings that it cannot honour, before any work; on all ranks alike, without communication.

        Raises:
            ConfigurationError: Naming the setting.
        """
        return

    def check_dry_run(self, args: TrainingArguments) -> None:
        """Refuse settings with which a step reads values of tensors, which a dry run does not have.

        Raises:
            ConfigurationError: Naming the setting.
        """
        return

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """What one should know about a plan of memory with it, as phrases for the table."""
        return ()

    def before_conversion(self, built: BuiltModel) -> None:
        """Say how layers are to be converted, such as `built.gathers_fp8`."""
        return

    def apply(self, built: BuiltModel) -> None:
        """Change the model in place, and add what it needs in training to `built`; collective.

        Names of parameters stay those of the user's model.
        """
        ...


class StepHooks(Protocol):
    """What a transform adds to a run; inherit from it, and override what is needed. Calls are collective."""

    def attach(self, optimizer: Optimizer | None) -> None:
        """Model and optimizer are complete; there is no optimizer in a run that does not train."""
        return

    def begin(self, step: int) -> None:
        """Training begins, or is resumed, with so many optimizer steps done."""
        return

    def after_step(self, step: int) -> None:
        """Optimizer step number `step` was made."""
        return

    def end(self) -> None:
        """Training has ended, or pauses; `begin` continues it."""
        return

    def synced_weights(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """A context in which the model is the one that would be saved or scored.

        Args:
            optimizer: Whether the state of the optimizer is wanted too.
        """
        return nullcontext()

    def generating(self) -> AbstractContextManager[None]:
        """A context in which all ranks let the model write the same text, calling it alike."""
        return nullcontext()

    def log_entries(self) -> Mapping[str, object]:
        """Further entries for the log, about the time since the last call."""
        return {}

    def state_components(self) -> Sequence[StateComponent]:
        """What it saves beside the components of every run; restored after them."""
        return ()


@dataclass
class BuiltModel:
    """The model of a run as this rank holds it, and what transforms have added for training."""

    args: TrainingArguments
    ranks: Ranks
    model: nn.Module
    """The user's module; parameters of other stages are missing in it."""
    meta_model: nn.Module
    """The model with all its parameters, to count them; they may have no storage."""
    executor: Executor = field(init=False)
    parts: list[nn.Module] = field(init=False)
    """What is called: the model, or the stages of this rank."""
    grad_sync: GradSync = field(default_factory=GradSync)
    hooks: list[StepHooks] = field(default_factory=list)
    average: AveragedWeights | None = None
    """What keeps an average of the weights, if anything does; one of the hooks."""
    is_partial: bool = False
    """Whether ranks hold different parts of the weights."""
    has_loss: bool = True
    """Whether this rank computes the loss: it holds the end of the model."""
    gathers_fp8: bool = False
    """Whether weights of FP8 layers are sharded and gathered in float8."""
    weights_device: torch.device | None = None
    """Where parameters rest, if that is not where this rank computes."""
    matmul_dtype: str | None = None
    """What matrix products run in, as peak tables name it, where that is another dtype than `args` says."""
    compiled_blocks: str | None = None
    """Path of the blocks to compile one by one, where the model cannot be called as a whole."""
    balances_routers: bool = False
    """Whether the loss has the balance of routers, whatever the model computes of it."""
    counted_elsewhere: list[nn.Parameter] = field(default_factory=list)
    """Parameters whose gradient counts in the norm on another stage."""
    frozen: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    """Parameters by name that were frozen when all was built."""
    experts: list[nn.Module] = field(default_factory=list)
    """Modules with experts that are divided; the ranks of `Meshes.expert_fsdp` hold the same ones."""
    sequence: SequencePart | None = None
    """What this rank computes of each sequence, where sequences are divided."""
    layers_divide_sequences: bool = False
    """Whether the ranks of `tensor` have parts of sequences between the layers."""
    traffic: CommBytes | None = None
    """What this rank has sent for training; None where nobody counts."""
    stages: tuple[int, ...] = (0,)
    """Stages of the pipeline that this rank holds."""
    layers: tuple[tuple[int, int], ...] = ()
    """First and last layer of each of these stages; empty where they are not made of layers."""
    keeps_sends: bool = False
    """Whether what is sent to other stages may have to be kept until the step ends."""

    def __post_init__(self) -> None:
        # A transform may choose another way to sum gradients later.
        self.executor = EagerExecutor(self.model, self.args, self.ranks.device, lambda: self.grad_sync)
        self.parts = [self.model]

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput | None:
        """Run the model on one batch and score it, without gradients; ranks of one replica do so together.

        Returns:
            As `Executor.forward`, with the loss of whole rows. Predictions are those of this rank's part.
        """
        scored = self.executor.forward(self._placed(batch), loss)
        return None if scored is None else scored._replace(loss=self._over_parts(scored.loss))

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Fire
    ) -> Tensor:
        """Run all microbatches of an optimizer step forward and backward, as `Executor.forward_backward`."""
        given = [self._placed(batch) for batch in batches]
        return self._over_parts(
            self.executor.forward_backward(given, loss, denominator=denominator, fire=fire)
        )

    def _placed(self, batch: Batch) -> Batch:
        """What the model is called with: this rank's part of the sequences.

        Raises:
            DataError: If sequences of this batch cannot be divided.
        """
        if self.sequence is not None:
            try:
                batch = self.sequence.cut(batch, self.ranks.device)
            except ValueError as error:
                raise DataError(f"the layout {self.ranks.layout} divides sequences: {error}") from error
        options: dict[str, object] = {}
        if "position_ids" in batch:
            # With a cache transformers takes packed documents for one: each would attend to those before it.
            options["use_cache"] = False
        if self.balances_routers:
            # The model need not compute its own balance loss, and in a pipeline no rank has all routers.
            options["output_router_logits"] = False
        wanted = {name: value for name, value in options.items() if name in self._taken and name not in batch}
        return {**batch, **wanted} if wanted else batch

    @cached_property
    def _taken(self) -> set[str]:
        """Names of what the model takes."""
        base = getattr(self.model, "get_base_model", None)  # of an adapter of PEFT
        model = base() if callable(base) else self.model
        # What divides the model may have put a class in front, whose forward takes anything.
        forwards = (vars(cls)["forward"] for cls in type(model).__mro__ if "forward" in vars(cls))
        return {name for each in forwards for name in inspect.signature(each).parameters}

    def whole_predictions(self, predictions: object, length: int) -> object:
        """Predictions [rows, length, ...] of whole rows, from those that `forward` returns; collective.

        Raises:
            ConfigurationError: If sequences are divided, and predictions are not a tensor.
        """
        if self.sequence is None:
            return predictions
        if not isinstance(predictions, Tensor):
            raise ConfigurationError(
                "eval_metrics",
                type(predictions).__name__,
                f"cannot be put together from the parts that ranks of {self.ranks.layout} have",
                "use metrics of logits, or leave out cp",
            )
        return self.sequence.gather(predictions, 1)[:, :length]

    def _over_parts(self, total: Tensor) -> Tensor:
        """The sum of a loss over the ranks that share out each sequence: nothing waits for the device."""
        if self.sequence is None or self.ranks.meshes is None:
            return total
        total = total.clone()
        dist.all_reduce(total, group=self.ranks.meshes.context.get_group())
        return total

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer works on, under the model's own names."""
        return self.model.named_parameters()

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def zero_grad(self) -> None:
        """Drop every gradient, also those of parameters that no optimizer steps."""
        for parameter in self.parameters:
            parameter.grad = None

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Measure the gradient's 2-norm over all ranks, and scale the gradient to `max_norm` if it is longer.

        Returns:
            The norm before clipping: scalar on the device.
        """
        elsewhere = {id(parameter) for parameter in self.counted_elsewhere}
        counted = self.parameters
        if elsewhere:
            counted = [parameter for parameter in counted if id(parameter) not in elsewhere]
        norm = clip_grad_norm_(
            counted, max_norm, stages=self.ranks.pipeline_group, counted_elsewhere=self.counted_elsewhere
        )
        return norm.to(self.ranks.device)

    def load_weights(self, directory: str | Path) -> None:
        """Fill what this rank holds of the model from a directory in the Hugging Face layout.

        Raises:
            checkpoint_core.CheckpointError: If the weights are missing, damaged, or do not fit.
        """
        elsewhere = set() if self.meta_model is self.model else set(self.meta_model.state_dict())
        load_model_weights(self.model, directory, elsewhere=elsewhere)
        self.weights_replaced()

    def weights_replaced(self) -> None:
        """The weights are others than those of the step before."""
        if self.average is not None:
            self.average.forget()

    def attach(self, optimizer: Optimizer | None) -> None:
        """Model and optimizer are complete."""
        self.frozen = [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]
        for hook in self.hooks:
            hook.attach(optimizer)

    def check_frozen(self) -> None:
        """Refuse parameters that were thawed, as by a callback, after all was built without them.

        Raises:
            ConfigurationError: If one requires a gradient now.
        """
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise ConfigurationError(
                    "model",
                    name,
                    "was frozen when the optimizer was made, and requires a gradient now, which nothing "
                    "would sum over ranks, clip or clear",
                    "make it trainable from the start, and freeze it by requires_grad_(False) in "
                    "on_step_begin until its turn comes",
                )

    def begin(self, step: int) -> None:
        """Training begins, or is resumed, with so many optimizer steps done."""
        self.model.train()
        for hook in self.hooks:
            hook.begin(step)

    def after_step(self, step: int) -> None:
        """An optimizer step was made."""
        for hook in self.hooks:
            hook.after_step(step)

    def end(self) -> None:
        """Training has ended, or pauses."""
        for hook in self.hooks:
            hook.end()

    @contextmanager
    def synced_weights(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which the model is the one that would be saved or scored; collective.

        Every rank has the saved buffers of the first one meanwhile, such as running means.
        """
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.synced_weights(optimizer=optimizer))
            # After the hooks: what a hook sets aside as a rank's own are its own buffers.
            stack.enter_context(buffers_of_rank_0(self.model, self.ranks.loss_group))
            yield

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context in which all ranks let the model write the same text; collective at each of its calls."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.generating())
            if self.balances_routers and "output_router_logits" in self._taken:
                # For the same reason; whoever lets the model write does not say so in each call.
                stack.callback(setattr, self.model.config, "output_router_logits", True)
                self.model.config.output_router_logits = False  # type: ignore[union-attr]
            meshes = self.ranks.meshes
            for view in ("tensor", "context"):
                if meshes is not None and getattr(self.ranks.layout, view) > 1:
                    # They compute each token together, so that they have to draw the same one.
                    stack.enter_context(generators_of_rank_0(self.ranks.env))
                    stack.enter_context(logits_of_one_rank(self.model, getattr(meshes, view).get_group()))
            yield

    def log_entries(self) -> dict[str, object]:
        """Further entries for the log, about the time since the last call; collective."""
        return {name: value for hook in self.hooks for name, value in hook.log_entries().items()}

    def state_components(self) -> list[StateComponent]:
        """What transforms save beside the components of every run."""
        return [component for hook in self.hooks for component in hook.state_components()]


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the state of a model; others, such as caches, are each rank's own affair."""
    buffers = {id(buffer) for buffer in model.buffers()}
    saved = model.state_dict(keep_vars=True)
    return {name: value for name, value in saved.items() if id(value) in buffers}


@torch.no_grad()
def copy_weights_of_rank_0(model: nn.Module, group: ProcessGroup | None) -> None:
    """Overwrite parameters and saved buffers of all ranks by those of the first; collective.

    Args:
        model: The same on all ranks, but for values.
        group: The ranks; None for one.
    """
    if group is None:
        return
    for tensor in (*model.parameters(), *saved_buffers(model).values()):
        dist.broadcast(tensor, group_src=0, group=group)


@contextmanager
def buffers_of_rank_0(model: nn.Module, group: ProcessGroup | None) -> Iterator[None]:
    """Give every rank the saved buffers of the first, such as running means; collective at entry.

    Each rank sees other batches, so these drift apart within a step. Afterwards each has its own again.
    """
    buffers = [] if group is None else list(saved_buffers(model).values())
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        dist.broadcast(buffer, group_src=0, group=group)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, own, strict=True):
                buffer.copy_(before)


class ReplicateGradients(ModelTransform):
    """Replicas of the model, or of each stage of it, whose gradients are summed at the end of a step.

    The sums of a stage travel while other stages still compute. `trainer_ddp.Replicate` overlaps them with
    the backward pass of a whole model, too.
    """

    axis: ClassVar[str] = "replicate"
    keeps_parameters = True

    def is_active(self, layout: ParallelLayout) -> bool:
        """Where replicas are not summed by what shards the weights within each of them."""
        return layout.replicate > 1 and not layout.shards_weights

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """That nothing is divided, and what gradients under way are."""
        return ("gradients under way are the buckets in which replicas sum them",)

    def apply(self, built: BuiltModel) -> None:
        """Have the gradients of each part summed over its replicas."""
        meshes = built.ranks.meshes
        if meshes is None or built.ranks.layout.replicate == 1:
            return
        group = meshes.replicate.get_group()
        if not any(parameter.is_meta for parameter in built.model.parameters()):
            copy_weights_of_rank_0(built.model, group)
        built.grad_sync = ReplicaGradSync(group)


_BUCKET = 25 * 2**20
"""Bytes that travel as one message, as in torch's DDP."""


class ReplicaGradSync(GradSync):
    """Sums the gradients of a part over its replicas once the last microbatch has passed.

    Args:
        group: The ranks with the same part.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._under_way: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []
        self._unused: dict[int, nn.Parameter] = {}
        """What this rank has not used in the step, by the id of what it sums instead of a gradient."""

    @torch.no_grad()
    def after_backward(self, part: nn.Module, *, last: bool) -> None:
        """Begin to sum the gradients of the part; collective among the replicas."""
        if not last:
            return
        gradients = []
        for parameter in part.parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                if gradient is None:
                    # Another replica may have used it.
                    gradient = parameter.grad = torch.zeros_like(parameter)
                    self._unused[id(own_part(gradient))] = parameter
                gradients.append(own_part(gradient))
        for bucket in _buckets(gradients):
            uses = bucket[0].new_ones(len(bucket))
            for place, gradient in enumerate(bucket):
                if id(gradient) in self._unused:
                    uses[place].zero_()
            flat = torch.cat([*(gradient.reshape(-1) for gradient in bucket), uses])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._under_way.append((work, flat, bucket))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums and put them into the gradients; what no replica has used has none.

        The optimizer would decay a weight whose gradient is zeros, and move its moments.
        """
        for work, flat, bucket in self._under_way:
            if work is not None:
                work.wait()
            *pieces, uses = torch.split(flat, [*(gradient.numel() for gradient in bucket), len(bucket)])
            for place, (gradient, piece) in enumerate(zip(bucket, pieces, strict=True)):
                gradient.copy_(piece.view_as(gradient))
                parameter = self._unused.get(id(gradient))
                # Only a rank that has not used it reads how many have, which waits for the device.
                if parameter is not None and not is_fake() and not uses[place].item():
                    parameter.grad = None
        self._under_way.clear()
        self._unused.clear()


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    buckets: list[list[Tensor]] = []
    for gradient in gradients:
        bucket = open_buckets.get(gradient.dtype)
        if bucket is None or sum(each.nbytes for each in bucket) + gradient.nbytes > _BUCKET:
            bucket = open_buckets[gradient.dtype] = []
            buckets.append(bucket)
        bucket.append(gradient)
    return buckets


TransformFactory = Callable[[TrainingArguments], ModelTransform]


def refuse_converted_layers(args: TrainingArguments, layout: ParallelLayout, way: str, short: str) -> None:
    """Refuse settings that replace layers by others, for a way that cannot divide these.

    Args:
        args: The settings.
        layout: The layout.
        way: What divides layers, such as "tensor parallelism".
        short: Its dimension in a mesh.

    Raises:
        ConfigurationError: Naming the setting.
    """
    for name in ("fp8_recipe", "qat_recipe"):
        if (value := getattr(args, name)) is not None:
            raise ConfigurationError(
                name,
                value,
                f"replaces layers by others that {way} (the layout {layout}) cannot divide",
                f"leave {name} out, or {short} out of mesh",
            )


def in_order(transforms: Sequence[ModelTransform]) -> list[ModelTransform]:
    """The transforms in the order in which they are applied.

    Raises:
        ConfigurationError: If one names no dimension of a layout, or two name the same.
    """
    for number, transform in enumerate(transforms):
        if isinstance(transform, type):
            raise ConfigurationError(
                "parallel",
                transform.__name__,
                "is a class, but a run needs an instance of it",
                f"write parallel=[{transform.__name__}()]",
            )
        axis = getattr(transform, "axis", None)
        if axis not in ORDER:
            raise ConfigurationError(
                "parallel",
                type(transform).__name__,
                f"has the axis {axis!r}, which is not a dimension of a layout",
                f"give it one of {', '.join(ORDER)}",
            )
        for other in transforms[:number]:
            if other.axis == axis:
                raise ConfigurationError(
                    "parallel",
                    type(transform).__name__,
                    f"uses the dimension {axis}, which {type(other).__name__} uses too",
                    "give only one of them",
                )
    return sorted(transforms, key=lambda transform: ORDER.index(transform.axis))
