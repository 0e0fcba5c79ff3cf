"""Muon: which parameters it takes, and whole matrices for it where ranks hold parts of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Muon

from ..arguments import MinimalTrainingArguments
from ..distributed.executor import own_part
from ..errors import ConfigurationError

# Private in torch 2.11 to 2.13: the iteration and the factor of the rate of `Muon.step`, which has no
# place between gradient and iteration. `ShardedMuon` is refused under a torch without them.
try:
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
except ImportError as error:
    _missing: ImportError | None = error
else:
    _missing = None

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Group = dict[str, Any]


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


def build_muon(args: MinimalTrainingArguments, groups: list[Group]) -> Muon:
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
    matrices = (matrix for group in groups for _, matrix in group["params"])
    kind = ShardedMuon if any(own_part(matrix) is not matrix for matrix in matrices) else Muon
    return kind(groups, **options)


class ShardedMuon(Muon):
    """torch's Muon for matrices of which ranks hold parts: each is made whole to be orthogonalized.

    `torch.optim.Muon` steps DTensors, too, but multiplies their parts in bfloat16 and adds up the products,
    which rounds otherwise than one process does. Here a whole matrix is computed as one process would, in
    bfloat16 from the first, as the iteration begins with that: where ranks divide rows, each computes another
    matrix, else all compute the same. State stays divided as the parameters are. Gradients have to be placed
    as their parameters are.

    Args:
        params: As of `torch.optim.Muon`.
        options: As of `torch.optim.Muon`.

    Raises:
        ConfigurationError: If this torch has no longer the parts of Muon that are used here.
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
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                if (sharers := _sharers_of_rows(matrix)) is None:
                    update = _whole(self._update(matrix, group), matrix)
                    self._apply(matrix, _part(_orthogonal(update, group), matrix), group)
                    continue
                some = together.setdefault(sharers, [])
                some.append(matrix)
                if len(some) == dist.get_world_size(sharers):
                    self._step_together(some, group, sharers)
                    some.clear()
            for sharers, some in together.items():
                if some:
                    self._step_together(some, group, sharers)
        return loss

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
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer, gradient = own_part(state["momentum_buffer"]), own_part(cast(Tensor, matrix.grad))
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.to(torch.bfloat16, copy=True)

    def _apply(self, matrix: Tensor, step: Tensor, group: Group) -> None:
        held, rate = own_part(matrix), float(group["lr"])
        held.mul_(1 - rate * group["weight_decay"])
        held.add_(step, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], matrix.shape))


def _orthogonal(update: Tensor, group: Group) -> Tensor:
    result: Tensor = _zeropower_via_newtonschulz(
        update, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )
    return result


def _sharers_of_rows(matrix: Tensor) -> ProcessGroup | None:
    """The ranks that hold rows of a matrix, if nothing else of it is divided."""
    if own_part(matrix) is matrix:
        return None
    placed = cast("DTensor", matrix)
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


def _whole(part: Tensor, like: Tensor) -> Tensor:
    """The matrix of which this rank has a part, placed as another one is."""
    if own_part(like) is like:
        return part
    from torch.distributed.tensor import DTensor

    placed = cast("DTensor", like)
    mesh, placements = placed.device_mesh, placed.placements
    parts = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=placed.shape, stride=placed.stride()
    )
    return parts.full_tensor()


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a matrix that all ranks have, placed as another one is."""
    if own_part(like) is like:
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    placed = cast("DTensor", like)
    everywhere = [Replicate()] * placed.device_mesh.ndim
    copies = DTensor.from_local(whole, placed.device_mesh, everywhere, run_check=False)
    return copies.redistribute(placements=placed.placements).to_local()
