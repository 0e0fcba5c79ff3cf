"""The forward and backward passes of a step, when gradients are summed over ranks, and their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..arguments import TrainingArguments
from ..data.loaders import Batch, labels_of, to_device
from ..errors import ConfigurationError
from ..loss import TokenLoss, predict
from ..precision.autocast import autocast

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Fire = Callable[[str], object]
"""Fires an event of the trainer by its name."""


class ForwardOutput(NamedTuple):
    """A batch after the forward pass."""

    loss: Tensor
    """Sum of the token losses: float32 scalar on the device."""
    predictions: object
    """What the loss was computed from, usually logits [batch, sequence, vocabulary]."""


class Executor(Protocol):
    """Runs the model that this rank holds."""

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput | None:
        """Run the model on one batch and score it, without gradients; ranks of one replica do so together.

        Args:
            batch: Its `labels` are what the loss is called with: labels, or targets made of them.
            loss: Sum-and-count loss.

        Returns:
            The scores; None on a rank that does not hold the end of the model.
        """
        ...

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Fire
    ) -> Tensor:
        """Run all microbatches of an optimizer step forward and backward.

        Args:
            batches: The microbatches of this rank; `labels` as for `forward`.
            loss: Sum-and-count loss.
            denominator: What the sum of the losses is divided by before the backward pass: the tokens that
                count in the whole step over all ranks, at least 1, over the scale of the gradients.
            fire: Told `on_forward_backward_begin` and `on_forward_backward_end` around what runs as one.

        Returns:
            Sum of the token losses of this rank's data, detached: scalar on the device.
        """
        ...


class GradSync:
    """When gradients are summed over the ranks that share or replicate a part of the model; here never.

    An executor tells it of every backward pass of every part: the model, or a stage of it.
    """

    mean_over: int = 1
    """Of how many ranks the mean is taken where the sum is wanted: losses are multiplied by it."""

    def module(self, part: nn.Module) -> nn.Module:
        """What to call for a part in training: the part, or a wrapper of it."""
        return part

    def before_backward(self, part: nn.Module, *, last: bool) -> None:
        """A part is about to compute a microbatch; before its forward pass where that comes right before.

        Args:
            part: The part.
            last: Whether it is the last microbatch of the optimizer step.
        """

    def after_backward(self, part: nn.Module, *, last: bool) -> None:
        """A part has computed the gradients of a microbatch."""

    def finish(self) -> None:
        """The gradients of all parts have to be complete."""


class EagerExecutor:
    """One microbatch after another, each forward and then backward.

    Args:
        model: The model that this rank holds.
        args: Precision settings.
        device: Where it computes.
        sync: Tells when gradients are summed over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        device: torch.device,
        sync: Callable[[], GradSync] = GradSync,
    ) -> None:
        self.model = model
        self._sync = sync
        self._autocast = autocast(args, device.type)
        self._device = device

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput:
        """Run the model on one batch and score it."""
        return self._run(self.model, batch, loss)

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Fire
    ) -> Tensor:
        """Run all microbatches of an optimizer step forward and backward."""
        sync = self._sync()
        module = sync.module(self.model)
        share = denominator if sync.mean_over == 1 else denominator / sync.mean_over
        sums = []
        for number, batch in enumerate(batches, start=1):
            fire("on_forward_backward_begin")
            last = number == len(batches)
            sync.before_backward(self.model, last=last)
            total = self._run(module, batch, loss).loss
            (total / share).backward()
            sync.after_backward(self.model, last=last)
            if last:
                sync.finish()  # before handlers, who see and may change the gradient of the step
            sums.append(total.detach())
            fire("on_forward_backward_end")
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _run(self, module: nn.Module, batch: Batch, loss: TokenLoss) -> ForwardOutput:
        inputs = to_device(batch, self._device)
        labels = labels_of(inputs)
        del inputs["labels"]
        with self._autocast:
            predictions = predict(loss, module, inputs, labels)
        return ForwardOutput(loss(predictions, labels), predictions)


_PLAIN = (Tensor, nn.Parameter)
_HALVES = (torch.float16, torch.bfloat16)
_WITH_FLOAT64 = ("cpu", "cuda")
"""Devices known to have float64; sums of squares are in float32 elsewhere."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float | None,
    *,
    stages: ProcessGroup | None = None,
    counted_elsewhere: Iterable[Tensor] = (),
    foreach: bool | None = None,
) -> Tensor:
    """Measure the 2-norm of the gradient of the whole model, and scale the gradient down to `max_norm`.

    What is added up over ranks follows from each parameter's own placements: the squares of a DTensor over
    exactly the mesh dimensions that shard it, those of a plain tensor over none. Meshes and placements may
    differ between parameters. There is one all-reduce for each distinct process group of more than one rank,
    and one over `stages`. Gradients of 16 bits are summed in float32.

    Nothing waits for the device: the scaling factor is a tensor, 1 if there is nothing to clip. The exception
    are gradients on the host whose process groups serve an accelerator only.

    Collective: every rank of a group that shards parameters gives these parameters in the same order, with or
    without gradients. A gradient with Partial placements must be there on all ranks.

    Args:
        parameters: Plain tensors and DTensors. Their gradients are scaled in place; a gradient whose
            placements are not the parameter's, such as Partial, is replaced by one redistributed to them.
        max_norm: The longest norm allowed; None or 0: measure only.
        stages: The ranks of a pipeline, which hold different layers: squares are added over them last.
        counted_elsewhere: Parameters of this rank, in `parameters` or not, that are scaled as well, and that
            another stage counts, such as tied copies.
        foreach: Whether to go through the gradients in one call of torch; one by one if False. None: one
            call, which is the faster one on every device, for few gradients and for many.

    Returns:
        The norm before clipping, the same on every rank: scalar on the device of the parameters; float32, or
        float64 if there are gradients of it.

    Raises:
        ConfigurationError: If a parameter itself is Partial, if only one of parameter and gradient is a
            DTensor, or if they are on different meshes.
    """
    counted, copies = list(parameters), list(counted_elsewhere)
    if copies:
        elsewhere = {id(copy) for copy in copies}
        counted = [parameter for parameter in counted if id(parameter) not in elsewhere]
    groups: dict[str, ProcessGroup] = {}
    unsharded: list[Tensor] = []
    parts: dict[frozenset[str], list[Tensor]] = {frozenset(): unsharded}
    for parameter in counted:
        gradient = parameter.grad
        if gradient is not None and type(gradient) in _PLAIN and type(parameter) in _PLAIN:
            unsharded.append(gradient)  # with as little work as it takes: there may be thousands
            continue
        sharding = _sharding_groups(parameter)
        groups |= sharding
        parts.setdefault(frozenset(sharding), []).extend(_own_gradient(parameter))
    gradients = [part for held in parts.values() for part in held]
    if groups or stages is not None:
        norm = _norm_over_ranks(counted, parts, groups, stages, foreach)
    elif gradients:
        norm = local_norm(gradients, foreach)
    else:
        norm = torch.zeros((), device=_device_of(counted))
    gradients += [part for copy in copies for part in _own_gradient(copy)]
    scale_down(gradients, max_norm, norm, foreach)
    return norm


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, without a trace in autograd; any other tensor itself."""
    sharded = as_dtensor(tensor)
    # `to_local` would be a step of autograd, for each tensor in each step.
    return tensor if sharded is None else sharded._local_tensor


def local_norm(tensors: list[Tensor], foreach: bool | None = None) -> Tensor:
    """The 2-norm of tensors that this rank holds; scalar on the device of the first.

    Args:
        tensors: At least one; of any devices and dtypes. Those of 16 bits are summed in float32.
        foreach: As in `clip_grad_norm_`.
    """
    norms: list[Tensor] = []
    for (_, dtype, plain), alike in _alike(tensors).items():
        summed_in = torch.float32 if dtype in _HALVES else None
        if plain and foreach is not False:
            norms += torch._foreach_norm(alike, 2, dtype=summed_in)
        else:
            norms += [torch.linalg.vector_norm(tensor, dtype=summed_in) for tensor in alike]
    device = tensors[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
    return total


def scale_down(
    gradients: list[Tensor], max_norm: float | None, norm: Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients of a norm in place, so that it is no longer than `max_norm`; None or 0: leave them."""
    if not max_norm or not gradients:
        return
    # As in torch: a little below, so that rounding does not leave the norm above the limit.
    factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    for (device, dtype, plain), alike in _alike(gradients).items():
        if plain and foreach is not False:
            torch._foreach_mul_(alike, factor.to(device, dtype))
        else:
            for gradient in alike:
                gradient.mul_(factor.to(device, dtype))


def _norm_over_ranks(
    parameters: list[Tensor],
    parts: dict[frozenset[str], list[Tensor]],
    groups: dict[str, ProcessGroup],
    stages: ProcessGroup | None,
    foreach: bool | None,
) -> Tensor:
    """Add up the squares of parts over the groups that share them out, and then over stages."""
    device = _device_of(parameters) or torch.device("cpu")
    precise = torch.float64 if device.type in _WITH_FLOAT64 else torch.float32
    zero = torch.zeros((), dtype=precise, device=device)
    squares = {
        sharding: local_norm(held, foreach).to(device, precise).square() if held else zero
        for sharding, held in parts.items()
    }
    # Groups come in the order of parameters and of their mesh dimensions, which is the same on all ranks. An
    # order by global ranks would be the same, too, but mix dimensions: on a mesh of 2 x 2 ranks, rank 0 would
    # go first to (0, 1), then to (0, 2), but rank 2 first to (0, 2), before it has the square of rank 3.
    for name, group in groups.items():
        concerned = [sharding for sharding in squares if name in sharding]
        total = _all_reduce(torch.stack([squares[sharding] for sharding in concerned]), group)
        squares |= zip(concerned, total.unbind(), strict=True)
    square = torch.stack([zero, *squares.values()]).sum()
    if stages is not None:
        square = _all_reduce(square, stages)
    # Of all parameters, for ranks with and without gradients return the same dtype.
    wide = any(parameter.dtype is torch.float64 for parameter in parameters)
    return square.sqrt().to(torch.float64 if wide else torch.float32)


def _all_reduce(value: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over a group of a value, which is lost; on its device, which the group need not serve."""
    # Such as "cpu:gloo,cuda:nccl". Parameters that are kept on the host may be sharded over nccl alone.
    served = [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]
    device = value.device if value.device.type in served else _accelerator(value.device)
    total = value.to(device)
    dist.all_reduce(total, group=group)
    return total.to(value.device)


def _accelerator(otherwise: torch.device) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return otherwise
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _sharding_groups(parameter: Tensor) -> dict[str, ProcessGroup]:
    """By name, the groups of more than one rank over which a parameter is sharded, outermost first."""
    sharded = as_dtensor(parameter)
    if sharded is None:
        return {}
    mesh, placements = sharded.device_mesh, sharded.placements
    if any(placement.is_partial() for placement in placements):
        raise _unsupported(parameter, f"is itself Partial ({placements})", "redistribute it")
    # Not by `is_shard`, which is False for a _StridedShard in torch 2.13.
    dimensions = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    groups = [mesh.get_group(dim) for dim in dimensions if mesh.size(dim) > 1]
    return {group.group_name: group for group in groups}


def _own_gradient(parameter: Tensor) -> list[Tensor]:
    """This rank's part of the gradient, if any, after giving the gradient the parameter's placements."""
    gradient = parameter.grad
    if gradient is None:
        return []
    part = own_part(_same_layout(parameter, gradient))
    return [part] if part.numel() else []


def _same_layout(parameter: Tensor, gradient: Tensor) -> Tensor:
    sharded, found = as_dtensor(parameter), as_dtensor(gradient)
    if sharded is None and found is None:
        return gradient
    if sharded is None or found is None:
        of_which = "parameter" if found is None else "gradient"
        raise _unsupported(parameter, f"differs from its gradient: only the {of_which} is a DTensor")
    if sharded.device_mesh != found.device_mesh:
        raise _unsupported(parameter, f"is on {sharded.device_mesh}, and its gradient on {found.device_mesh}")
    if sharded.placements == found.placements:
        return gradient
    parameter.grad = found.redistribute(placements=sharded.placements)
    return parameter.grad


def _unsupported(
    parameter: Tensor, found: str, fix: str = "give it a gradient on its mesh"
) -> ConfigurationError:
    return ConfigurationError(
        "parallel",
        f"a parameter of shape {list(parameter.shape)}",
        f"{found}, but the norm of its gradient follows from the parameter's placements",
        fix,
    )


def _alike(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype, bool], list[Tensor]]:
    """Tensors by device, dtype and whether they are plain; a subclass may lack torch._foreach_*."""
    alike: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype, type(tensor) in _PLAIN), []).append(tensor)
    return alike


def _device_of(parameters: list[Tensor]) -> torch.device | None:
    return own_part(parameters[0]).device if parameters else None


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """The tensor, if it is a DTensor. To import the class is slow, and plain tensors need not do it."""
    if type(tensor) in _PLAIN:
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None
