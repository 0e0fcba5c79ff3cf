"""A shuffled order that is computed instead of stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import overload

import torch

from dataloader_dispatch.errors import DataError

MAX_LENGTH = 2**48
_ROUNDS = 6  # with four, pairs at power-of-two distances are visibly uneven; with six they are not
_MIN_BITS = 6  # fewer bits leave too few different orders for a handful of items
_BLOCK = 16384  # indices that iteration computes at once: 128 KiB of int64, which stays in cache


class ShuffledIndex(Sequence[int]):
    """A pseudo-random order of ``range(n)``, a pure function of (n, seed, epoch).

    The order is a bijection on ``range(2**k)``, the smallest power of two that holds ``n`` (at least 64).
    Six rounds, each of them invertible, send a position to a value:

    1. one step of a linear congruential walk, ``x -> (a * x + c) mod 2**k`` with ``a % 8 == 5`` and odd
       ``c``. This meets the conditions of Hull and Dobell (SIAM Review 4(3), 1962), so the walk visits
       every value of the domain once before it returns;
    2. ``x -> x ^ (x >> ceil(k / 2))``, which brings the good high bits of the walk into its poor low bits.

    Where the result is not below ``n``, it goes through the rounds again until it is ("cycle-walking").
    This follows a cycle of the permutation from a start below ``n``, so it ends, and what remains is a
    bijection on ``range(n)``. For n > 32 the domain is less than twice as large as ``n``, so fewer than two
    passes are needed on average. Nothing is stored but the constants of the rounds: time and memory
    of one look-up depend on neither ``n`` nor the position.

    This is for shuffling data; it is not a cipher.

    Args:
        n: Number of items, 0 to 2**48.
        seed: Any integer.
        epoch: Epoch number, at least 0; each epoch has an order of its own.

    Raises:
        DataError: ``n`` or ``epoch`` is out of range.
        TypeError: An argument is not an integer.

    Example:
        >>> sorted(ShuffledIndex(5, seed=1)) == [0, 1, 2, 3, 4]
        True
    """

    __slots__ = ("_constants", "_mask", "_n", "_shift", "epoch", "seed")

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        for name, value in (("n", n), ("seed", seed), ("epoch", epoch)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"ShuffledIndex: {name} must be an int, not {value!r}")
        if not 0 <= n <= MAX_LENGTH:
            raise DataError(f"ShuffledIndex: n={n} is out of range; it must lie in 0..2**48")
        if epoch < 0:
            raise DataError(f"ShuffledIndex: epoch={epoch} is out of range; epochs count from 0")
        bits = max(_MIN_BITS, (n - 1).bit_length())
        self._n = n
        self.seed = seed
        self.epoch = epoch
        self._mask = (1 << bits) - 1
        self._shift = (bits + 1) // 2
        self._constants = _round_constants(f"{n}/{seed}/{epoch}", self._mask)

    def __len__(self) -> int:
        return self._n

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and 0 <= value < self._n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """The item at a position, or the list of items at a slice of positions.

        Raises:
            IndexError: The position is outside ``range(-n, n)``.
        """
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(self._n))]
        position = index + self._n if index < 0 else index
        if not 0 <= position < self._n:
            raise IndexError(f"position {index} is outside an order of {self._n} items")
        return self._at(position)

    def __iter__(self) -> Iterator[int]:
        """All items in order, computed in blocks."""
        for start in range(0, self._n, _BLOCK):
            yield from self.block(start, min(start + _BLOCK, self._n)).tolist()

    def block(self, start: int, stop: int) -> torch.Tensor:
        """The items at positions ``start`` to ``stop - 1``, computed together.

        Args:
            start: First position.
            stop: Position after the last one, at most ``n``.

        Returns:
            int64 tensor of shape [stop - start].

        Raises:
            IndexError: The positions are not inside the order.
        """
        if not 0 <= start <= stop <= self._n:
            raise IndexError(f"positions {start} to {stop} are not inside an order of {self._n} items")
        values = self._permute_block(torch.arange(start, stop, dtype=torch.int64))
        outside = (values >= self._n).nonzero().flatten()
        while outside.numel():
            moved = self._permute_block(values[outside])
            values[outside] = moved
            outside = outside[moved >= self._n]
        return values

    def __repr__(self) -> str:
        return f"ShuffledIndex(n={self._n}, seed={self.seed}, epoch={self.epoch})"

    def _at(self, position: int) -> int:
        mask, shift, n = self._mask, self._shift, self._n
        value = position
        while True:
            for a, c in self._constants:
                value = (a * value + c) & mask
                value ^= value >> shift
            if value < n:
                return value

    def _permute_block(self, values: torch.Tensor) -> torch.Tensor:
        """One pass over the domain, in place. The int64 product wraps mod 2**64; the mask keeps mod 2**k."""
        shifted = torch.empty_like(values)
        for a, c in self._constants:
            torch.add(torch.tensor(c), values, alpha=a, out=values)
            values.bitwise_and_(self._mask)
            torch.bitwise_right_shift(values, self._shift, out=shifted)
            values.bitwise_xor_(shifted)
        return values


def _round_constants(key: str, mask: int) -> tuple[tuple[int, int], ...]:
    """Multiplier (5 mod 8) and odd increment of each round, from a hash so that near keys are unrelated."""
    digest = hashlib.shake_256(key.encode()).digest(16 * _ROUNDS)
    words = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]
    return tuple(((a & ~7 | 5) & mask, (c | 1) & mask) for a, c in zip(words[::2], words[1::2], strict=True))
