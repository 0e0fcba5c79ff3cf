"""The computed order is a bijection, is the documented one, and costs the same at any size."""

import hashlib
import json
import pickle
import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch

from dataloader_dispatch import DataError, ShuffledIndex

LENGTHS_AROUND_A_DOMAIN = [1, 2, 63, 64, 65, 1000, 1024, 1025, 3 * 2**10, 65_536, 65_537]


def order_of(n: int, seed: int, epoch: int = 0) -> torch.Tensor:
    return ShuffledIndex(n, seed, epoch).block(0, n)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**70])
def test_is_a_bijection_for_every_small_length(seed: int) -> None:
    for n in range(150):
        assert sorted(ShuffledIndex(n, seed)) == list(range(n))


@pytest.mark.parametrize("n", [10_007, 65_536, 65_537, 98_304, 10**6, 2**20])
def test_is_a_bijection_for_large_lengths(n: int) -> None:
    assert torch.equal(order_of(n, seed=3).sort().values, torch.arange(n))


def documented_order(n: int, seed: int, epoch: int) -> list[int]:
    """The order as the docstring states it, but with the walk really walked, one step after the other."""
    bits = max(6, (n - 1).bit_length())
    size, shift, rounds = 2**bits, bits // 2 - 1, max(3, 17 - bits)
    stream = hashlib.shake_256(f"{n}/{seed}/{epoch}".encode()).digest(8 * (3 + rounds))
    words = [int.from_bytes(stream[at : at + 8], "little") for at in range(0, len(stream), 8)]
    state, c = words[0] % size, (words[1] | 1) % size
    a = (1 + (words[2] | 1) * 2 ** ((bits + 1) // 2)) % size
    values = []
    for _ in range(size):
        value = state ^ state >> shift
        for word in words[3:]:
            value = value * (2 * value + word - word % 8 + 5) % size
            value ^= value >> shift
        values.append(value)
        state = (a * state + c) % size
    assert state == words[0] % size, "the walk does not return to its start"
    order = []
    for value in values[:n]:
        while value >= n:
            value = values[value]
        order.append(value)
    return order


@pytest.mark.parametrize("n", LENGTHS_AROUND_A_DOMAIN)
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (-3, 1), (2**80, 12_345)])
def test_is_the_documented_order(n: int, seed: int, epoch: int) -> None:
    assert order_of(n, seed, epoch).tolist() == documented_order(n, seed, epoch)


@pytest.mark.parametrize("n", LENGTHS_AROUND_A_DOMAIN)
def test_random_access_iteration_slices_and_blocks_agree(n: int) -> None:
    order = ShuffledIndex(n, seed=11, epoch=4)
    listed = list(order)
    assert [order[position] for position in range(n)] == listed
    assert order[-1] == listed[-1]
    assert order[: n // 2 : 3] == listed[: n // 2 : 3]
    assert order[::-1] == listed[::-1]
    assert order[:: 10**30] == listed[:1]
    assert order[n:] == []
    assert order.block(n // 3, n).tolist() == listed[n // 3 :]
    assert order.block(n, n).shape == (0,)
    assert order.block(0, n).dtype == torch.int64
    assert len(order) == n
    assert (n - 1 in order, n in order) == (True, False)


@pytest.mark.parametrize("n", [2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 10**10, 2**47 + 1, 2**48])
def test_blocks_agree_with_random_access_at_large_lengths(n: int) -> None:
    """Where 32 bits end, and up to where 64-bit arithmetic has to wrap around."""
    order = ShuffledIndex(n, seed=5)
    start = n - 1000
    block = order.block(start, n).tolist()
    assert block == [order[position] for position in range(start, n)]
    assert all(0 <= value < n for value in block)
    assert len(set(block)) == 1000


def test_a_block_does_not_depend_on_where_it_starts() -> None:
    order = ShuffledIndex(10**10, seed=1)
    whole = order.block(123, 400_123)
    for start, stop in ((123, 124), (200, 70_000), (65_536, 65_536 + 2**16), (300_000, 400_123)):
        assert order.block(start, stop).equal(whole[start - 123 : stop - 123])


def test_is_a_function_of_seed_and_epoch() -> None:
    assert order_of(5000, 1, 2).equal(order_of(5000, 1, 2))
    for other in (order_of(5000, 1, 3), order_of(5000, 2, 2), order_of(5000, 2, 1)):
        # Two unrelated orders agree at one position on average.
        assert int((other == order_of(5000, 1, 2)).sum()) < 10


def test_the_order_does_not_change_between_releases() -> None:
    """Saved positions mean something only for the order they were saved with."""
    assert ShuffledIndex(10, seed=0)[:] == [0, 5, 6, 9, 2, 7, 1, 3, 4, 8]
    assert ShuffledIndex(10**9, seed=7, epoch=2)[:3] == [420872716, 762461017, 943701481]


def test_state_is_three_numbers() -> None:
    order = ShuffledIndex(2**48, seed=2**63 - 1, epoch=10_000)
    state = json.dumps({"n": len(order), "seed": order.seed, "epoch": order.epoch})
    assert len(state) <= 128
    assert ShuffledIndex(**json.loads(state))[2**40] == order[2**40]
    pickled = pickle.dumps(order)
    assert len(pickled) <= 128
    assert pickle.loads(pickled).block(7, 99).equal(order.block(7, 99))


def test_time_and_memory_do_not_depend_on_the_length() -> None:
    tracemalloc.start()
    order = ShuffledIndex(2**48, seed=1)
    begin = time.process_time()
    values = {order[position] for position in range(0, 2**48, 2**34)}
    iterator = iter(order)
    first = [next(iterator) for _ in range(10)]
    seconds = time.process_time() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(values) == 2**14
    assert first == order[:10]
    assert seconds < 30  # a table of 2**48 places takes years
    assert peak < 10_000_000  # the set of values above, not the order
    assert sys.getsizeof(order) < 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0), "n=-1"),
        ((2**48 + 1, 0), r"2\*\*48"),
        ((5, 0, -1), "epoch=-1"),
    ],
)
def test_out_of_range_arguments_are_named(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ShuffledIndex(*arguments)


def test_wrong_types_and_positions_are_refused() -> None:
    with pytest.raises(TypeError, match="seed must be an int"):
        ShuffledIndex(5, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="n must be an int"):
        ShuffledIndex(True, 1)
    order = ShuffledIndex(5, 1)
    for position in (5, -6):
        with pytest.raises(IndexError, match=str(position)):
            order[position]
    with pytest.raises(IndexError, match="0 to 6"):
        order.block(0, 6)


def test_integers_of_numpy_and_torch_are_positions() -> None:
    for length in (200, 2**40):
        order = ShuffledIndex(length, 1)
        for kind in (np.uint8, np.int32, np.int64, np.uint64, torch.tensor):
            item = order[kind(5)]  # type: ignore[operator]
            assert (type(item), item) == (int, order[5])
        assert np.int64(5) in order
        assert np.int64(length) not in order
        assert 0.5 not in order
