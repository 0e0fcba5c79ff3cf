"""One gradient on its way through powerSGD."""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import Memory


class LowRankGradient:
    """The gradient of one parameter in one step: `left`, then `right`, then `finish`.

    Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019, arXiv 1905.13727, algorithm 1, with the error feedback of algorithm 2. With this
    rank's gradient G, error E, the factor Q, and "mean" over the ranks:

        M = G + E;  P = mean(M Q);  P = orthonormal basis of P's columns;  R = M^T P
        averaged gradient = P mean(R)^T;  E = M - P R^T;  Q = mean(R) with columns of length 1

    The error takes the rank's own R, as algorithm 2 has it, so each rank keeps just what it did not send, and
    mean(E) is what the averaged gradient leaves out. (With mean(R) instead, mean(E) would be the same, but
    what only this rank's gradients have would pile up in E with nothing to take any of it away.)

    The length of Q's columns does not matter to the result. Length 1 keeps P at the size of the gradient;
    as it comes, P would have the size of its square, which 16 bits cannot hold.

    Args:
        gradient: View of the bucket, of any shape and strides.
        memory: Error and factor of the parameter; both are updated in place.
    """

    def __init__(self, gradient: Tensor, memory: Memory) -> None:
        self._gradient = gradient
        self._memory = memory
        self._largest: Tensor = torch.linalg.vector_norm(gradient, ord=torch.inf)
        # From here to `finish` the error holds M: no copy of the gradient's size is needed.
        memory.error.add_(gradient.reshape(memory.error.shape))

    def left(self) -> Tensor:
        """What is averaged first.

        Returns:
            M Q and one number more, [rows * rank + 1], in the gradient's dtype. The number is 0 where this
            rank's gradient is zero everywhere, nan where it has an element that is not finite, otherwise 1.
        """
        mark = (self._largest > 0).to(self._gradient.dtype)
        mark = mark.masked_fill(~self._largest.isfinite(), torch.nan)
        product = torch.mm(self._memory.error, self._memory.factor)
        return torch.cat([product.reshape(-1).to(self._gradient.dtype), mark.reshape(1)])

    def right(self, mean_left: Tensor) -> Tensor:
        """What is averaged next.

        Args:
            mean_left: The mean of `left` over the ranks.

        Returns:
            R, [columns * rank], in the gradient's dtype.
        """
        error, factor = self._memory.error, self._memory.factor
        product, mark = mean_left[:-1].to(error), mean_left[-1]
        basis: Tensor = torch.linalg.qr(product.view(error.shape[0], factor.shape[1])).Q
        # Nobody has a gradient: nothing is sent. DDP leaves a parameter that no rank has used as it was, and
        # what is owed must not be handed out to nobody.
        basis = basis.masked_fill(mark == 0, 0)
        # All ranks see the same mean, so all of them carry the nan on, into the result and into `finish`.
        self._basis = basis.masked_fill(~mean_left.isfinite().all(), torch.nan)
        right = (error.T @ self._basis).to(self._gradient.dtype)
        self._own = right.to(error)
        return right.reshape(-1)

    def finish(self, mean_right: Tensor) -> None:
        """Write the averaged gradient into the bucket, and remember what it leaves out.

        A gradient that is not finite anywhere comes out as nan, on every rank, for whoever guards the
        optimizer. The error is then forgotten, and the factor stays as it was, on every rank.

        Args:
            mean_right: The mean of `right` over the ranks.
        """
        error, factor = self._memory.error, self._memory.factor
        self._hold()
        mean = mean_right.to(error).view(factor.shape)
        self._gradient.copy_((self._basis @ mean.T).view(self._gradient.shape))
        finite = mean.isfinite().all()
        error.addmm_(self._basis, self._own.T, alpha=-1).masked_fill_(~finite, 0)
        length = torch.linalg.vector_norm(mean, dim=0)
        # A column of zeros says nothing about the next gradient, and could never become another.
        factor.copy_(torch.where(finite & (length > 0), mean / length, factor))

    def _hold(self) -> None:
        """Keep what `right` made from being used anew before the stream that reads it here is done.

        On an accelerator the callback that calls `finish` has a stream of its own.
        """
        if self._basis.device.type != "cpu":
            stream = torch.accelerator.current_stream(self._basis.device)
            self._basis.record_stream(stream)
            self._own.record_stream(stream)
