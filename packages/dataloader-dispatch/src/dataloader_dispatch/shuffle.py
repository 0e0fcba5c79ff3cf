"""A shuffled order that is computed instead of stored."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, overload

import numpy as np
import torch

from dataloader_dispatch.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    _Unsigned = NDArray[np.uint32 | np.uint64]

MAX_LENGTH = 2**48
_MIN_BITS = 6  # fewer bits leave too few different orders for a handful of items
_MIN_ROUNDS = 3  # with two, the low bits of a value depend visibly on those of its position
_BLOCK = 2**16  # values whose cycles are followed together: the more, the less the last few of them cost
_CHUNK = 2**15  # values that go through the steps of a pass together: these stay in the innermost caches
_FEW = 16  # so few values are faster one by one
_LIST = 2**15  # most values that iteration computes ahead
_FIRST_LIST = 16  # iteration starts with this many, so that its first value comes at once


class ShuffledIndex(Sequence[int]):
    """A pseudo-random order of ``range(n)``, a pure function of (n, seed, epoch).

    The order is a bijection on ``range(2**k)``, the smallest power of two that holds ``n`` (at least 64).
    It sends a position to a value in two steps, both modulo ``2**k``:

    1. A linear congruential walk, ``x -> a * x + c`` from a first state ``x0``: position ``i`` gets the state
       after ``i`` steps. ``c`` is odd, and ``a - 1`` is an odd multiple of ``2**ceil(k / 2)``. That meets the
       conditions of Hull and Dobell (SIAM Review 4(3), 1962), so the walk visits every value once before it
       returns. Because ``(a - 1)**2`` is 0, the binomial series of ``a**i`` ends after two terms, and no step
       has to be taken: the state is ``x0 + i * (d - d * h + d * h * i)`` with ``d = (a - 1) * x0 + c`` and
       ``h = (a - 1) / 2``.
    2. An output mix, because the low bits of such a walk are poor: ``x ^= x >> (k // 2 - 1)``, then rounds of
       ``x *= 2 * x + m`` and ``x ^= x >> (k // 2 - 1)``, each with its own ``m``, where ``m % 8 == 5``. There
       are 3 rounds, or ``17 - k`` if that is more. The quadratic can be inverted (Rivest, "Permutation
       Polynomials Modulo 2^w", Finite Fields and Their Applications 7, 2001; with ``m == 1`` it is the one of
       the cipher RC6). It makes the difference between two values depend on the values, and the shift brings
       the good high bits into the low ones.

    A result that is not below ``n`` goes through both steps again until it is ("cycle-walking", Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). This follows a cycle of the permutation
    from a start below ``n``, so it ends, and what remains is a bijection on ``range(n)``. For n > 32 the
    domain is less than twice as large as ``n``, so fewer than two passes are needed on average.

    ``x0``, ``c``, ``a`` and every ``m`` come from SHAKE-256 of the text ``n/seed/epoch``, so near seeds and
    near epochs have unrelated orders. All is done in integers, so the order is the same on every platform.
    Nothing but these constants is stored: the time and memory of a look-up do not grow with ``n`` or the
    position. All that has to be saved is ``n``, ``seed`` and ``epoch``.

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

    __slots__ = ("_constants", "_n", "epoch", "seed")

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        for name, value in (("n", n), ("seed", seed), ("epoch", epoch)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"ShuffledIndex: {name} must be an int, not {value!r}")
        if not 0 <= n <= MAX_LENGTH:
            raise DataError(f"ShuffledIndex: n={n} is out of range; it must lie in 0..2**48")
        if epoch < 0:
            raise DataError(f"ShuffledIndex: epoch={epoch} is out of range; epochs count from 0")
        self._n = n
        self.seed = seed
        self.epoch = epoch
        self._constants = _constants_of(n, f"{n}/{seed}/{epoch}")

    def __len__(self) -> int:
        return self._n

    def __contains__(self, value: object) -> bool:
        return isinstance(value, SupportsIndex) and 0 <= operator.index(value) < self._n

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        """The item at a position, or the list of items at a slice of positions.

        Raises:
            IndexError: The position is outside ``range(-n, n)``.
        """
        if isinstance(index, slice):
            items: list[int] = self._items(range(*index.indices(self._n))).tolist()
            return items
        number = operator.index(index)  # numpy's integers would overflow on the way
        position = number + self._n if number < 0 else number
        if not 0 <= position < self._n:
            raise IndexError(f"position {number} is outside an order of {self._n} items")
        return self._follow(position)

    def __iter__(self) -> Iterator[int]:
        """All items in order, computed in blocks, small ones first."""
        return chain.from_iterable(self._lists())

    def block(self, start: int, stop: int) -> torch.Tensor:
        """The items at positions ``start`` to ``stop - 1``, computed together.

        This is the fastest way to many items, best with 50,000 or more of them in one call.

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
        return torch.from_numpy(self._items(range(start, stop)))

    def __reduce__(self) -> tuple[type[ShuffledIndex], tuple[int, int, int]]:
        """A pickle holds no more than the arguments."""
        return ShuffledIndex, (self._n, self.seed, self.epoch)

    def __repr__(self) -> str:
        return f"ShuffledIndex(n={self._n}, seed={self.seed}, epoch={self.epoch})"

    def _lists(self) -> Iterator[list[int]]:
        start, size = 0, _FIRST_LIST
        while start < self._n:
            stop = min(start + size, self._n)
            yield self._items(range(start, stop)).tolist()
            start, size = stop, min(2 * size, _LIST)

    def _follow(self, value: int) -> int:
        """One pass, and more until the value is below ``n``."""
        bits, x0, linear, square, rounds = self._constants
        mask, shift, n = (1 << bits) - 1, bits // 2 - 1, self._n
        while True:
            value = x0 + value * (linear + square * value) & mask
            value ^= value >> shift
            for m in rounds:
                value = value * (2 * value + m) & mask
                value ^= value >> shift
            if value < n:
                return value

    def _items(self, positions: range) -> NDArray[np.int64]:
        """The items at some positions, as `_follow` would give them one by one."""
        # 32-bit operations take half the time. Both types wrap around, and the mask keeps what is the same.
        small = self._n < 2**32
        one_pass = _VectorPass(self._constants, np.uint32 if small else np.uint64, len(positions))
        items = np.empty(len(positions), np.int64)
        # The step of a range of one position may be any integer.
        step = positions.step if len(positions) > 1 else 1
        steps = np.arange(min(len(positions), _BLOCK), dtype=np.int64) * step
        for at in range(0, len(positions), _BLOCK):
            block = items[at : at + _BLOCK]
            np.add(steps[: len(block)], positions[at], out=block)
            values = block.astype(np.uint32) if small else block.view(np.uint64)
            self._follow_all(values, one_pass)
            if small:
                block[:] = values
        return items

    def _follow_all(self, values: _Unsigned, one_pass: _VectorPass) -> None:
        """`_follow` for every value of an array, in place."""
        one_pass(values)
        places = np.flatnonzero(values >= self._n)
        while len(places) > _FEW:
            walked = values.take(places)
            one_pass(walked)
            values[places] = walked
            places = places.take(np.flatnonzero(walked >= self._n))
        for place in places.tolist():
            values[place] = self._follow(int(values[place]))


class _Constants(NamedTuple):
    """The domain is ``range(2**bits)``; all the other numbers are in it."""

    bits: int
    x0: int
    linear: int
    square: int
    rounds: tuple[int, ...]


def _constants_of(n: int, key: str) -> _Constants:
    bits = max(_MIN_BITS, (n - 1).bit_length())
    mask = (1 << bits) - 1
    rounds = max(_MIN_ROUNDS, 17 - bits)  # the fewer the bits, the less a round mixes them
    digest = hashlib.shake_256(key.encode()).digest(8 * (3 + rounds))
    x0, c, a, *words = (int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))
    a_minus_1 = (a | 1) << (bits + 1) // 2 & mask
    step = a_minus_1 * x0 + (c | 1)
    square = step * (a_minus_1 >> 1)
    multipliers = tuple((word & ~7 | 5) & mask for word in words)
    return _Constants(bits, x0 & mask, step - square & mask, square & mask, multipliers)


class _VectorPass:
    """One pass over an array of unsigned integers of one kind, in place."""

    def __init__(self, constants: _Constants, kind: type[np.uint32 | np.uint64], longest: int) -> None:
        bits, *walk, rounds = constants
        # Arrays without dimensions: numpy takes them faster than numbers.
        self._shift, self._mask, self._x0, self._linear, self._square, *self._rounds = (
            np.array(word, kind) for word in (bits // 2 - 1, (1 << bits) - 1, *walk, *rounds)
        )
        self._scratch = np.empty(min(longest, _CHUNK), kind)

    def __call__(self, values: _Unsigned) -> None:
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            self._apply(chunk, self._scratch[: len(chunk)])

    def _apply(self, x: _Unsigned, scratch: _Unsigned) -> None:
        np.multiply(x, self._square, out=scratch)
        np.add(scratch, self._linear, out=scratch)
        np.multiply(x, scratch, out=x)
        np.add(x, self._x0, out=x)
        self._fold(x, scratch)
        for m in self._rounds:
            np.add(x, x, out=scratch)
            np.add(scratch, m, out=scratch)
            np.multiply(x, scratch, out=x)
            self._fold(x, scratch)

    def _fold(self, x: _Unsigned, scratch: _Unsigned) -> None:
        np.bitwise_and(x, self._mask, out=x)
        np.right_shift(x, self._shift, out=scratch)
        np.bitwise_xor(x, scratch, out=x)
