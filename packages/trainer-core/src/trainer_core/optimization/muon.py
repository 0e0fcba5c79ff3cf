"""Muon: which parameters it takes, whole matrices for it where ranks hold parts, and small ones together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed import ProcessGroup

from ..arguments import MinimalTrainingArguments
from ..distributed.executor import as_dtensor, own_part
from ..errors import ConfigurationError

# Private in torch 2.11 to 2.13: the iteration and the factor of the rate of `Muon.step`, which has no
# place between gradient and iteration. This `Muon` is refused under a torch without them.
try:
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
except ImportError as error:
    _missing: ImportError | None = error
else:
    _missing = None

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Group = dict[str, Any]
_MOST_STACKED = 2**21
"""Numbers in a stack of matrices, which is held beside them for a step. Larger ones fill the cores alone."""
_MOST_THREADS = 2
"""Threads with which products of a stack have the bits of single ones; with three some have not."""
_MOST_ITERATIONS = 99
"""torch's iteration refuses more, by name."""
_LEAST_STACKED = 8
"""Rows and columns of a matrix in a stack: torch adds products of smaller ones in another order there."""


def matrices_for_adamw(model: nn.Module) -> dict[str, str]:
    """The matrices that Muon leaves to AdamW: those of embeddings and of the output layer.

    An embedding is a module of torch's, or one whose class has a name that ends in "Embedding". The output
    layer is what `model.get_output_embeddings()` returns. What is tied to one of them counts as that.

    Args:
        model: The whole model; its parameters need no storage.

    Returns:
        The reason by parameter name, under each name of a tied one.

    Raises:
        ConfigurationError: If the model does not say which its output layer is.
    """
    getter = getattr(model, "get_output_embeddings", None)
    if not callable(getter):
        raise ConfigurationError(
            "optim",
            "muon",
            f"needs AdamW for the layer that makes the logits, which {type(model).__name__} does not name",
            "give it a method get_output_embeddings() that returns this layer, or None if there is none",
        )
    head = getter()
    reasons: dict[int, str] = {}
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or kind.endswith("Embedding"):
            reasons |= {id(parameter): f"of {kind}" for parameter in module.parameters(recurse=False)}
    if isinstance(head, nn.Module):
        reasons |= {id(parameter): "of the output layer" for parameter in head.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: reasons[id(parameter)] for name, parameter in named if id(parameter) in reasons}


def build_muon(args: MinimalTrainingArguments, groups: list[Group]) -> optim.Muon:
    """Muon over group dicts of named matrices, which may be empty; other options come from `args`.

    Learning rate and weight decay are AdamW's unless `optim_kwargs` has others, so the factor of the learning
    rate is `match_rms_adamw` unless it is given.
    """
    options: dict[str, Any] = {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
        **args.optim_kwargs,
    }
    members = [member for group in groups for member in group["params"]]
    if strange := [name for name, matrix in members if matrix.is_complex()]:
        raise ConfigurationError(
            "optim",
            "muon",
            f"does not support complex parameters, of which {strange[0]} is one",
            "train with optim='adamw', or give it another optimizer by `optimizer_groups`",
        )
    divided = any(own_part(matrix) is not matrix for _, matrix in members)
    # Elsewhere torch's own does the same steps, more slowly on small matrices. Of bfloat16 without nesterov
    # it normalizes its momentum in place; what whole matrices did before, they still do.
    stacked = _missing is None and all(matrix.dtype == torch.float32 for _, matrix in members)
    kind = Muon if divided or stacked else optim.Muon
    return kind(groups, **options)


class Muon(optim.Muon):
    """The steps of torch's Muon, to the bit, where ranks hold parts of a matrix, and faster for small ones.

    `torch.optim.Muon` steps DTensors, too, but multiplies their parts in bfloat16 and adds up the products,
    which rounds otherwise than one process does. Here each matrix is made whole to be orthogonalized, and is
    computed as one process would, in bfloat16 from the first, as the iteration begins with that: where ranks
    divide rows, each computes another matrix, else all compute the same. State stays divided as the
    parameters are. Gradients have to be placed as their parameters are.

    On a CPU, whole matrices of one shape are orthogonalized as a stack, as long as that is small, where
    products of a stack were seen to have the bits of single ones: contiguous ones in float32, on one thread
    or two. With more threads a single product may be divided among them otherwise; on other devices nobody
    has looked. There each goes by itself.

    Args:
        params: As of `torch.optim.Muon`.
        options: As of `torch.optim.Muon`.

    Raises:
        ConfigurationError: If this torch lacks the parts of Muon that are used here, or for a complex
            parameter.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        if _missing is not None:
            raise ConfigurationError(
                "optim",
                "muon",
                f"needs parts of torch's Muon that torch {torch.__version__} does not have ({_missing}), "
                "where ranks hold parts of a matrix",
                "train with whole copies (dp), or with optim='adamw'",
            )
        super().__init__(params, **options)
        for matrix in (each for group in self.param_groups for each in group["params"]):
            if matrix.is_complex():
                raise ConfigurationError(
                    "optim",
                    "muon",
                    f"does not support complex parameters, and one of the shape {list(matrix.shape)} is "
                    f"{str(matrix.dtype).removeprefix('torch.')}",
                    "train with optim='adamw', or give it another optimizer by `optimizer_groups`",
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every matrix that has a gradient; collective among the ranks that hold parts of it.

        Args:
            closure: Computes the loss again, with gradients.

        Returns:
            What the closure returned, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[ProcessGroup, list[Tensor]] = {}
            alike: dict[tuple[torch.Size, bool], list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                placed = as_dtensor(matrix)
                if placed is None:
                    alike.setdefault((matrix.shape, _may_be_stacked(matrix, group)), []).append(matrix)
                    continue
                if (sharers := _sharers_of_rows(placed)) is None:
                    update = _whole(self._update(matrix, group), placed)
                    self._apply(matrix, _part(_orthogonal(update, group), placed), group)
                    continue
                some = together.setdefault(sharers, [])
                some.append(matrix)
                if len(some) == dist.get_world_size(sharers):
                    self._step_together(some, group, sharers)
                    some.clear()
            for sharers, some in together.items():
                if some:
                    self._step_together(some, group, sharers)
            for (shape, stackable), some in alike.items():
                most = max(1, _MOST_STACKED // max(1, shape.numel())) if stackable else 1
                for first in range(0, len(some), most):
                    self._step_stack(some[first : first + most], group)
        return loss

    def _step_stack(self, matrices: Sequence[Tensor], group: Group) -> None:
        """Step whole matrices of one shape."""
        if len(matrices) == 1:
            self._apply(matrices[0], _orthogonal(self._update(matrices[0], group), group), group)
            return
        updates = torch.stack([self._update(matrix, group) for matrix in matrices])
        for matrix, step in zip(matrices, _orthogonal_stack(updates, group), strict=True):
            self._apply(matrix, step, group)

    def _step_together(self, matrices: Sequence[Tensor], group: Group, sharers: ProcessGroup) -> None:
        """Step up to as many matrices as there are ranks: rows go to the one that computes, and come back."""
        parts = [self._update(matrix, group) for matrix in matrices]
        size, rank = dist.get_world_size(sharers), dist.get_rank(sharers)
        here = [part.numel() for part in parts] + [0] * (size - len(parts))
        own = matrices[rank].shape if rank < len(matrices) else torch.Size([0, 0])
        there = [length * own[1] for length in _rows(own[0], size)]
        flat = torch.cat([part.flatten() for part in parts])
        whole = flat.new_empty(own.numel())
        dist.all_to_all_single(whole, flat, there, here, group=sharers)
        if own.numel():
            whole = _orthogonal(whole.view(own), group).flatten()
        dist.all_to_all_single(flat, whole, here, there, group=sharers)
        for matrix, part, piece in zip(matrices, parts, torch.split(flat, here), strict=False):
            self._apply(matrix, piece.view_as(part), group)

    def _update(self, matrix: Tensor, group: Group) -> Tensor:
        """This rank's part of what is orthogonalized."""
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            whole = own_part(matrix) is matrix
            state["momentum_buffer"] = torch.zeros_like(_gradient(matrix) if whole else matrix)
        buffer, gradient = own_part(state["momentum_buffer"]), own_part(_gradient(matrix))
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.to(torch.bfloat16, copy=True)

    def _apply(self, matrix: Tensor, step: Tensor, group: Group) -> None:
        held, rate = own_part(matrix), float(group["lr"])
        held.mul_(1 - rate * group["weight_decay"])
        held.add_(step, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], matrix.shape))


def _gradient(matrix: Tensor) -> Tensor:
    """The gradient of a matrix that is stepped."""
    if matrix.grad is None:
        raise RuntimeError(
            f"The matrix of the shape {list(matrix.shape)} has no gradient, and Muon steps by it. Call "
            "backward() before step(), or leave the matrix out of the optimizer."
        )
    return matrix.grad


def _may_be_stacked(matrix: Tensor, group: Group) -> bool:
    """Whether a stack of such whole matrices has the bits of each by itself."""
    gradient = _gradient(matrix)
    return (
        matrix.device.type == "cpu"
        and matrix.dtype == gradient.dtype == torch.float32
        and matrix.is_contiguous()
        and gradient.is_contiguous()
        and min(matrix.shape) >= _LEAST_STACKED
        and group["ns_steps"] <= _MOST_ITERATIONS
        and torch.get_num_threads() <= _MOST_THREADS
    )


def _orthogonal(update: Tensor, group: Group) -> Tensor:
    result: Tensor = _zeropower_via_newtonschulz(
        update, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )
    return result


def _orthogonal_stack(updates: Tensor, group: Group) -> Tensor:
    """What `_orthogonal` makes of each update of [matrices, rows, columns], which is overwritten."""
    scale, of_gram, of_square = group["ns_coefficients"]
    tall = updates.size(1) > updates.size(2)
    result = updates.mT if tall else updates
    # One by one: a sum over the stack may be rounded to another bfloat16.
    norms = torch.stack([each.norm() for each in result])
    result.div_(norms.clamp(min=group["eps"])[:, None, None])
    for _ in range(group["ns_steps"]):
        gram = result @ result.mT
        gram = torch.baddbmm(gram, gram, gram, beta=of_gram, alpha=of_square)
        result = torch.baddbmm(result, gram, result, beta=scale)
    return result.mT if tall else result


def _sharers_of_rows(placed: DTensor) -> ProcessGroup | None:
    """The ranks that hold rows of a matrix that is divided, if nothing else of it is."""
    mesh = placed.device_mesh
    divided = [
        dim for dim, each in enumerate(placed.placements) if not each.is_replicate() and mesh.size(dim) > 1
    ]
    if len(divided) != 1 or not placed.placements[divided[0]].is_shard(0):
        return None
    return mesh.get_group(divided[0])


def _rows(length: int, ranks: int) -> list[int]:
    """Rows of each rank: as `torch.chunk` divides them, by which DTensors are sharded."""
    most = max(1, -(-length // ranks))
    return [max(0, min(most, length - rank * most)) for rank in range(ranks)]


def _whole(part: Tensor, placed: DTensor) -> Tensor:
    """The matrix of which this rank has a part, placed as another one is."""
    from torch.distributed.tensor import DTensor

    mesh, placements = placed.device_mesh, placed.placements
    parts = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=placed.shape, stride=placed.stride()
    )
    return parts.full_tensor()


def _part(whole: Tensor, placed: DTensor) -> Tensor:
    """This rank's part of a matrix that all ranks have, placed as another one is."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * placed.device_mesh.ndim
    copies = DTensor.from_local(whole, placed.device_mesh, everywhere, run_check=False)
    return copies.redistribute(placements=placed.placements).to_local()
