"""Attention of divided sequences around a ring: keys and values travel, and no rank has them all at once.

Each rank attends to its own keys and values while those of the rank before it arrive, then to these, and so
on. Outputs are merged by the sums of exponentials of their scores (Liu, Zaharia and Abbeel 2023, "Ring
Attention with Blockwise Transformers for Near-Infinite Context"). The backward pass goes around once more,
computes attention to each part again, and lets the gradients of keys and values travel with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .activations import not_compiled
from .attention import Pieces, attend_to_some, computed_in, uses_flex

if TYPE_CHECKING:
    from .context import SequencePart

_SCORES = 2**22
"""So many scores of all heads are computed at a time."""


@not_compiled
def attend_around(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: SequencePart,
    document_ids: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Causal attention of this rank's positions to those of all ranks; collective.

    Args:
        query: [rows, heads, own positions, head size].
        key: [rows, key-value heads, own positions, head size].
        value: Likewise.
        part: How sequences are divided.
        document_ids: Integers [rows, all positions]; None: each row is one document.
        scale: Of the products; None: 1 / sqrt(head size).

    Returns:
        As `query`. Of the gradients that come to keys and values the sum over the ranks returns.
    """
    query, key, value = (each.to(computed_in(each)) for each in (query, key, value))
    ring = _Ring(part, document_ids, scale)
    return _around(query, key.contiguous(), value.contiguous(), ring)


@dataclass(frozen=True)
class _Step:
    """Which queries see some of the keys of another rank, and which of these keys."""

    queries: slice
    keys: slice
    query_pieces: Pieces
    key_pieces: Pieces


@dataclass(eq=False)
class _Ring:
    """The ranks that share out a sequence, and what this one attends to.

    Args:
        part: How sequences are divided.
        document_ids: The documents of whole rows.
        scale: Of the products.
    """

    part: SequencePart
    document_ids: Tensor | None
    scale: float | None

    def __post_init__(self) -> None:
        mesh = self.part.mesh
        self.size, self._rank, self._group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
        ranks = dist.get_process_group_ranks(self._group)
        self._next, self._previous = ranks[(self._rank + 1) % self.size], ranks[self._rank - 1]

    def send_on(self, *tensors: Tensor) -> tuple[list[Tensor], list[dist.Work]]:
        """Send tensors to the next rank; where those of the previous one arrive, and what to wait for."""
        arriving = [torch.empty_like(each) for each in tensors]
        sends = [dist.P2POp(dist.isend, each, self._next, self._group) for each in tensors]
        receives = [dist.P2POp(dist.irecv, each, self._previous, self._group) for each in arriving]
        return arriving, dist.batch_isend_irecv(sends + receives)

    def visits(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each rank with its keys and values, the own first; the next ones arrive in the meantime."""
        held = [key, value]
        for step in range(self.size):
            arriving, works = self.send_on(*held) if step < self.size - 1 else ([], [])
            yield (self._rank - step) % self.size, held[0], held[1]
            _wait(works)
            held = arriving

    def steps(self, source: int, query: Tensor, key: Tensor) -> Iterator[_Step]:
        """What this rank's queries attend to of the keys of another one: some queries at a time."""
        length = self.size * query.shape[2]
        own, others = self.part.pieces(length), self.part.pieces_of(source, length)
        # Positions ascend within the part of each rank: queries at its beginning see none of these keys, and
        # keys at the end of theirs are seen by none of the queries.
        begin, end = _count_before(own, others[0][0]), query.shape[2]
        size = max(1, _SCORES // (query.shape[0] * query.shape[1] * query.shape[2]))
        if uses_flex(query, key):
            size = end  # which makes no scores
        for first in range(begin, end, size):
            last = min(first + size, end)
            pieces = _between(own, first, last)
            seen = _count_before(others, pieces[-1][1])
            yield _Step(slice(first, last), slice(0, seen), pieces, _between(others, 0, seen))

    def attend(self, step: _Step, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the queries of a step, and the logarithms of their sums."""
        return attend_to_some(
            query, key, value, step.query_pieces, step.key_pieces, self.document_ids, self.scale
        )


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _count_before(pieces: Pieces, position: int) -> int:
    """How many positions of some pieces are before one."""
    return sum(min(max(position - start, 0), end - start) for start, end in pieces)


def _between(pieces: Pieces, first: int, last: int) -> list[tuple[int, int]]:
    """The pieces of those positions that come `first` to `last` among them."""
    found, before = [], 0
    for start, end in pieces:
        begin, stop = max(first - before, 0), min(last - before, end - start)
        if begin < stop:
            found.append((start + begin, start + stop))
        before += end - start
    return found


class _RingContext(FunctionCtx):
    ring: _Ring
    saved_tensors: tuple[Tensor, ...]


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RingContext, query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (*query.shape[:3], value.shape[3])
        out = torch.zeros(shape, dtype=wide, device=query.device)
        total = torch.full(shape[:3], -torch.inf, dtype=wide, device=query.device)
        for source, keys, values in ring.visits(key, value):
            for step in ring.steps(source, query, key):
                at = (..., step.queries, slice(None))
                own, count = ring.attend(step, query[at], keys[:, :, step.keys], values[:, :, step.keys])
                before = total[..., step.queries]
                both = torch.logaddexp(before, count)
                out[at] = out[at] * (before - both).exp()[..., None] + own * (count - both).exp()[..., None]
                total[..., step.queries] = both
        ctx.ring = ring
        narrow = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, narrow, total)
        return narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: _RingContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        ring, (query, key, value, out, total) = ctx.ring, ctx.saved_tensors
        wide = total.dtype
        gradient = gradient.to(wide)
        shared = (gradient * out).sum(-1)
        of_query = torch.zeros_like(query, dtype=wide)
        travelling, works = [torch.zeros_like(each, dtype=wide) for each in (key, value)], list[dist.Work]()
        for source, keys, values in ring.visits(key, value):
            mine = [torch.zeros_like(each, dtype=wide) for each in (keys, values)]
            for step in ring.steps(source, query, key):
                at = (..., step.queries, slice(None))
                with torch.enable_grad():
                    given = [
                        each.detach().requires_grad_()
                        for each in (query[at], keys[:, :, step.keys], values[:, :, step.keys])
                    ]
                    own, count = ring.attend(step, *given)
                # Of the sum of exp(count - total) own, where total is the logarithm of the sum of exp(count).
                weight = (count.detach() - total[..., step.queries]).exp()
                of_own = weight[..., None] * gradient[at]
                of_count = (of_own * own.detach()).sum(-1) - weight * shared[..., step.queries]
                found = torch.autograd.grad((own, count), given, (of_own.to(own.dtype), of_count))
                of_query[at] += found[0]
                mine[0][:, :, step.keys] += found[1]
                mine[1][:, :, step.keys] += found[2]
            _wait(works)
            # After the last rank gradients are sent once more, and are at home.
            travelling, works = ring.send_on(*(a + b for a, b in zip(travelling, mine, strict=True)))
        _wait(works)
        return of_query.to(query.dtype), travelling[0].to(key.dtype), travelling[1].to(value.dtype), None


_around: Callable[[Tensor, Tensor, Tensor, _Ring], Tensor] = _Around.apply
