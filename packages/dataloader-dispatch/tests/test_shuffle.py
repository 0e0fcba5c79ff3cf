"""The computed order is a bijection, looks random, and costs the same at any size."""

import math
import sys
import time
import tracemalloc

import pytest
import torch

from dataloader_dispatch import DataError, ShuffledIndex

DISTANCES = (1, 2, 3, 4, 7, 16, 64, 100, 256, 1024, 4096)


def order_of(n: int, seed: int, epoch: int = 0) -> torch.Tensor:
    return ShuffledIndex(n, seed, epoch).block(0, n)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**70])
def test_is_a_bijection_for_every_small_length(seed: int) -> None:
    for n in range(150):
        assert sorted(ShuffledIndex(n, seed)) == list(range(n))


@pytest.mark.parametrize("n", [10_007, 65_536, 65_537])
def test_is_a_bijection_for_large_lengths(n: int) -> None:
    values = torch.tensor(list(ShuffledIndex(n, seed=3)))
    assert torch.equal(values.sort().values, torch.arange(n))


@pytest.mark.parametrize("n", [1, 2, 64, 1000, 65_537])
def test_random_access_iteration_slices_and_blocks_agree(n: int) -> None:
    order = ShuffledIndex(n, seed=11, epoch=4)
    listed = list(order)
    assert [order[position] for position in range(n)] == listed
    assert order[-1] == listed[-1]
    assert order[: n // 2 : 3] == listed[: n // 2 : 3]
    assert order.block(n // 3, n).tolist() == listed[n // 3 :]
    assert len(order) == n
    assert (n - 1 in order, n in order) == (True, False)


def test_blocks_agree_with_random_access_at_the_largest_lengths() -> None:
    for n in (2**48, 2**47 + 1, 10**10):
        order = ShuffledIndex(n, seed=5)
        start = n - 1000
        block = order.block(start, n).tolist()
        assert block == [order[position] for position in range(start, n)]
        assert all(0 <= value < n for value in block)
        assert len(set(block)) == 1000


def test_is_a_function_of_seed_and_epoch() -> None:
    assert order_of(5000, 1, 2).equal(order_of(5000, 1, 2))
    for other in (order_of(5000, 1, 3), order_of(5000, 2, 2), order_of(5000, 2, 1)):
        # Two unrelated orders agree at one position on average.
        assert int((other == order_of(5000, 1, 2)).sum()) < 10


def test_the_order_does_not_change_between_releases() -> None:
    """Saved positions mean something only for the order they were saved with."""
    assert ShuffledIndex(10, seed=0)[:] == [7, 0, 3, 5, 2, 8, 6, 1, 9, 4]
    assert ShuffledIndex(10**9, seed=7, epoch=2)[:3] == [218269439, 249367247, 392693374]


def pair_scores(order: torch.Tensor) -> dict[str, float]:
    """Chi-squared statistics of pairs at several distances, as standard scores, and low-bit flips."""
    n = len(order)
    scores: dict[str, float] = {}
    for distance in DISTANCES:
        if distance > n // 4:
            continue
        first, second = order[:-distance], order[distance:]
        difference = torch.bincount((second - first) % n * 64 // n, minlength=64)
        scores[f"difference at {distance}"] = chi_squared_score(difference)
        position = torch.bincount(first * 16 // n * 16 + second * 16 // n, minlength=256)
        scores[f"pairs at {distance}"] = chi_squared_score(position)
        flips = ((first ^ second) & 1).double().mean().item()
        scores[f"low bit at {distance}"] = (flips - 0.5) * 2 * math.sqrt(len(first))
    return scores


def chi_squared_score(counts: torch.Tensor) -> float:
    expected = counts.sum().double() / len(counts)
    freedom = len(counts) - 1
    return ((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)).item()


@pytest.mark.parametrize("n", [1024, 5000, 65_536, 300_000])
def test_pairs_are_spread_as_in_a_true_permutation(n: int) -> None:
    scores = {
        f"seed {seed}, {name}": score
        for seed in range(4)
        for name, score in pair_scores(order_of(n, seed, seed)).items()
    }
    generator = torch.Generator().manual_seed(1)
    true = [score for _ in range(4) for score in pair_scores(torch.randperm(n, generator=generator)).values()]
    worst = max(scores, key=lambda name: abs(scores[name]))
    assert abs(scores[worst]) < 5, f"{worst}: {scores[worst]:.1f} standard deviations from uniform"
    ours = torch.tensor(list(scores.values())).std().item()
    theirs = torch.tensor(true).std().item()
    assert ours < 1.3 * theirs


def test_the_statistics_condemn_a_walk_without_mix() -> None:
    n = 65_536
    bare = (torch.arange(n) * 6364136223846793005 + 1442695040888963407) & (n - 1)
    scores = pair_scores(bare)
    assert abs(scores["low bit at 1"]) > 100
    assert abs(scores["difference at 1"]) > 100


@pytest.mark.parametrize("n", [4096, 2**18])
def test_every_bit_flips_half_the_time(n: int) -> None:
    order = order_of(n, seed=2)
    for bit in range((n - 1).bit_length() - 1):
        flips = (((order[1:] ^ order[:-1]) >> bit) & 1).double().mean().item()
        assert flips == pytest.approx(0.5, abs=2.5 / math.sqrt(n)), f"bit {bit}"


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 100])
def test_each_value_is_equally_likely_at_each_position(n: int) -> None:
    seeds = 2000
    counts = torch.zeros(n, n)
    for seed in range(seeds):
        counts[torch.arange(n), torch.tensor(ShuffledIndex(n, seed)[:])] += 1
    expected = seeds / n
    freedom = (n - 1) ** 2
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def test_all_orders_of_four_items_occur() -> None:
    orders = {tuple(ShuffledIndex(4, seed=0, epoch=epoch)[:]) for epoch in range(1000)}
    assert len(orders) == 24


def test_time_and_memory_do_not_depend_on_the_length() -> None:
    tracemalloc.start()
    order = ShuffledIndex(2**48, seed=1)
    begin = time.perf_counter()
    values = {order[position] for position in range(0, 2**48, 2**34)}
    iterator = iter(order)
    first = [next(iterator) for _ in range(10)]
    seconds = time.perf_counter() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(values) == 2**14
    assert first == order[:10]
    assert seconds < 5
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
