"""The computed order looks like a true permutation to statistics that condemn weaker constructions.

All seeds are fixed, so a result is the same on every machine. A score is a distance from what a uniform
permutation gives on average, in standard deviations.
"""

import math
from typing import Any

import pytest
import torch

from dataloader_dispatch import ShuffledIndex

DISTANCES = (1, 2, 3, 4, 7, 8, 16, 64, 100, 256, 1024, 4096, 16_384, 65_536)


def first_of(*values: Any) -> list[Any]:
    """The first of some parameters for every run, and all for a full one.

    The order itself is pinned, number by number, in `test_shuffle.py`.
    """
    return [values[0], *(pytest.param(value, marks=pytest.mark.full) for value in values[1:])]


def order_of(n: int, seed: int, epoch: int = 0) -> torch.Tensor:
    return ShuffledIndex(n, seed, epoch).block(0, n)


def true_order(n: int, seed: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def uniform_score(cells: torch.Tensor, number: int) -> float:
    """Chi-squared statistic of how often each cell is hit, as a standard score."""
    counts = torch.bincount(cells, minlength=number).double()
    expected = counts.sum() / number
    freedom = number - 1
    return ((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)).item()


def table_score(rows: torch.Tensor, columns: torch.Tensor, size: int) -> float:
    """Chi-squared statistic of the independence of two variables with ``size`` classes, as above."""
    table = torch.bincount(rows * size + columns, minlength=size * size).double().view(size, size)
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    freedom = (size - 1) ** 2
    return ((((table - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)).item()


def pair_scores(first: torch.Tensor, second: torch.Tensor, n: int, name: str) -> dict[str, float]:
    """How far the pairs of two sequences of values are from independent uniform ones."""
    flips = ((first ^ second) & 1).double().mean().item()
    return {
        f"difference {name}": uniform_score((second - first) % n * 64 // n, 64),
        f"lattice {name}": table_score(first * 16 // n, second * 16 // n, 16),
        f"low bits {name}": table_score(first & 7, second & 7, 8),
        f"low bit flips {name}": (flips - 0.5) * 2 * math.sqrt(len(first)),
    }


def order_scores(order: torch.Tensor) -> dict[str, float]:
    """Pairs of values at several distances of their positions, and values against positions."""
    n = len(order)
    scores: dict[str, float] = {}
    for distance in DISTANCES:
        if distance <= n // 4:
            scores |= pair_scores(order[:-distance], order[distance:], n, f"at {distance}")
    positions = torch.arange(n)
    scores["value against position"] = table_score(positions * 16 // n, order * 16 // n, 16)
    scores["low bits of value and position"] = table_score(positions & 7, order & 7, 8)
    return scores


def worst(scores: dict[str, float]) -> tuple[str, float]:
    name = max(scores, key=lambda key: abs(scores[key]))
    return name, abs(scores[name])


@pytest.mark.parametrize("n", first_of(5000, 1024, 1025, 65_536, 65_537, 98_304, 300_000))
def test_values_are_spread_as_in_a_true_permutation(n: int) -> None:
    seeds = range(6)
    scores = {
        f"seed {seed}, {name}": score
        for seed in seeds
        for name, score in order_scores(order_of(n, seed, epoch=seed)).items()
    }
    true = [score for seed in seeds for score in order_scores(true_order(n, seed)).values()]
    name, score = worst(scores)
    assert score < 5.5, f"{name}: {score:.1f} standard deviations from uniform"
    ours, theirs = torch.tensor(list(scores.values())), torch.tensor(true)
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.2)
    assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=0.2)


def unmixed_walk(n: int) -> torch.Tensor:
    """A linear congruential walk with a multiplier of good repute, which shows all there is to see."""
    states = [1]
    for _ in range(n - 1):
        states.append((6364136223846793005 * states[-1] + 1442695040888963407) % n)
    return torch.tensor(states)


def once_mixed(n: int, multiplier: int) -> torch.Tensor:
    """Multiples, shifted into one another once."""
    values = torch.arange(n) * multiplier + 12_345 & n - 1
    values ^= values >> (n.bit_length() - 1) // 2
    return values


def once_squared(n: int) -> torch.Tensor:
    """What the order would be with one round of its mix instead of three."""
    shift = (n.bit_length() - 1) // 2 - 1
    values = unmixed_walk(n)
    values ^= values >> shift
    values = values * (2 * values + 40_013) & n - 1
    values ^= values >> shift
    return values


@pytest.mark.parametrize(
    ("order", "families"),
    [
        (torch.arange(65_536), ["difference", "lattice", "low bits", "low bit flips", "value against"]),
        (unmixed_walk(65_536), ["difference", "lattice", "low bits", "low bit flips", "low bits of value"]),
        (once_mixed(65_536, 44_485), ["difference", "lattice", "low bits", "low bit flips"]),
        (once_squared(65_536), ["difference", "low bits"]),
    ],
    ids=["counting", "bare walk", "one shift", "one round"],
)
def test_the_statistics_condemn_weaker_constructions(order: torch.Tensor, families: list[str]) -> None:
    assert torch.equal(order.sort().values, torch.arange(len(order))), "not even a bijection"
    scores = order_scores(order)
    for family in families:
        members = {name: score for name, score in scores.items() if name.startswith(family)}
        assert worst(members)[1] > 20, family


@pytest.mark.parametrize("n", first_of(4096, 2**18, 10**6))
@pytest.mark.parametrize("distance", [1, 2, 64, 1024])
def test_every_bit_flips_half_the_time(n: int, distance: int) -> None:
    order = order_of(n, seed=2)
    other = true_order(n, seed=2)
    for bit in range((n - 1).bit_length() - 1):
        share, expected = (
            (((values[distance:] ^ values[:-distance]) >> bit) & 1).double().mean().item()
            for values in (order, other)
        )
        assert share == pytest.approx(expected, abs=3.5 / math.sqrt(n)), f"bit {bit}"


@pytest.mark.parametrize("distance", first_of(1, 2, 3, 32_768, 131_072))
def test_no_lattice_shows_at_a_fine_resolution(distance: int) -> None:
    """Pairs as points in a square of 256 x 256 cells, 16 of them in each cell."""
    n = 2**20
    order = order_of(n, seed=4)
    assert abs(table_score(order[:-distance] >> 12, order[distance:] >> 12, 256)) < 5
    multiples = torch.arange(n) * 664_525 & n - 1
    assert table_score(multiples[:-distance] >> 12, multiples[distance:] >> 12, 256) > 1000


@pytest.mark.parametrize("n", first_of(2**47 + 1, 10**8, 10**10, 2**40, 2**48))
def test_long_orders_are_as_good_where_one_looks(n: int) -> None:
    """A stretch of consecutive positions, and positions at regular distances."""
    order = ShuffledIndex(n, seed=6)
    length = 2**16
    scores: dict[str, float] = {}
    for step in (1, 2, 1000, 1024, 2**20, 2**30):
        start = n // 3
        if start + step * length > n:
            continue
        values = torch.tensor(order[start : start + step * length : step])
        assert len(values.unique()) == length
        # 16 bits and a sign leave room for the products of the statistics.
        high, modulus = (values >> 16, n + 2**16 - 1 >> 16) if n > 2**40 else (values, n)
        scores[f"values, step {step}"] = uniform_score(high * 256 // modulus, 256)
        scores[f"low byte, step {step}"] = uniform_score(values & 255, 256)
        for distance in (1, 16, 256, 4096):
            name = f"step {step}, at {distance}"
            scores |= pair_scores(high[:-distance], high[distance:], modulus, name)
            low = values & 2**16 - 1
            scores |= pair_scores(low[:-distance], low[distance:], 2**16, f"{name}, low half")
    name, score = worst(scores)
    assert score < 5, f"{name}: {score:.1f} standard deviations from uniform"


@pytest.mark.parametrize("n", first_of(5, 2, 3, 8, 16, 64, 100))
def test_each_value_is_equally_likely_at_each_position(n: int) -> None:
    seeds = 2000
    orders = torch.tensor([ShuffledIndex(n, seed)[:] for seed in range(seeds)])
    positions = torch.arange(n).repeat(seeds)
    counts = torch.bincount(positions * n + orders.flatten(), minlength=n * n)
    expected = seeds / n
    freedom = (n - 1) ** 2
    statistic = ((counts - expected) ** 2 / expected).sum().item() * (n - 1) / n
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)
    pairs = orders[:, 0] * n + orders[:, 1]
    distinct = pairs[orders[:, 0] < orders[:, 1]], pairs[orders[:, 0] > orders[:, 1]]
    assert len(distinct[0]) == pytest.approx(len(distinct[1]), abs=5 * math.sqrt(seeds))


@pytest.mark.parametrize("n", first_of(4, 3, 5))
def test_all_orders_of_a_few_items_are_equally_likely(n: int) -> None:
    epochs = {3: 1200, 4: 2400, 5: 6000}[n]
    codes = [
        sum(value * n**place for place, value in enumerate(ShuffledIndex(n, seed=0, epoch=epoch)))
        for epoch in range(epochs)
    ]
    counts = torch.tensor(codes).unique(return_counts=True)[1]
    assert len(counts) == math.factorial(n)
    expected = epochs / len(counts)
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


def test_few_items_have_many_orders() -> None:
    for n in (12, 64):
        assert len({tuple(ShuffledIndex(n, seed)) for seed in range(2000)}) == 2000


@pytest.mark.parametrize("n", first_of(2**20 + 1, 10**6, 10**10))
def test_first_items_are_uniform_over_seeds(n: int) -> None:
    seeds = 20_000
    firsts, lasts = (torch.tensor([ShuffledIndex(n, seed)[at] for seed in range(seeds)]) for at in (0, -1))
    for values in (firsts, lasts):
        assert abs(uniform_score(values * 128 // n, 128)) < 4
        assert abs(uniform_score(values & 7, 8)) < 4
    assert abs(table_score(firsts * 16 // n, lasts * 16 // n, 16)) < 4
    assert abs(table_score(firsts[:-1] * 16 // n, firsts[1:] * 16 // n, 16)) < 4


@pytest.mark.parametrize("n", first_of(1000, 4096, 65_537))
def test_neighbouring_seeds_epochs_and_lengths_are_unrelated(n: int) -> None:
    scores: dict[str, float] = {}
    same = 0
    for seed in range(10):
        order = order_of(n, seed, 5)
        others = {
            "seed": order_of(n, seed + 1, 5),
            "epoch": order_of(n, seed, 6),
            "seed and epoch": order_of(n, seed + 1, 4),
            "length": order_of(n + 1, seed, 5)[:n] % n,
            "inverse": order.argsort(),
        }
        for name, other in others.items():
            scores |= pair_scores(order, other, n, f"{name} {seed}")
            scores |= pair_scores(order[:-1], other[1:], n, f"{name} {seed}, one on")
            same += int((order == other).sum()) if name != "inverse" else 0
    name, score = worst(scores)
    assert score < 5, f"{name}: {score:.1f} standard deviations from uniform"
    # Two unrelated orders agree at one position on average.
    assert same == pytest.approx(40, abs=5 * math.sqrt(40))
