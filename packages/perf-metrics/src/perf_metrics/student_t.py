"""Quantiles of Student's t, which neither the standard library nor a library that is needed anyway has."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_NORMAL_FROM_DF = 1e6


@lru_cache(maxsize=1024)
def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t, to ten digits; the degrees of freedom need not be whole.

    By bisection of P(|T| > t) = I_x(df / 2, 1 / 2), x = df / (df + t^2) (Abramowitz and Stegun, 26.7.1 and
    26.5.27).

    Raises:
        ValueError: `probability` is not between 0 and 1, or `df` is not positive.
    """
    if not 0 < probability < 1:
        raise ValueError(f"probability={probability!r} must be between 0 and 1.")
    if not df > 0:
        raise ValueError(f"df={df!r} must be positive.")
    if probability < 0.5:
        return -t_quantile(1 - probability, df)
    if probability == 0.5:
        return 0.0
    if df >= _NORMAL_FROM_DF:
        return NormalDist().inv_cdf(probability)
    beyond = 2 * (1 - probability)
    low, high = 0.0, 1.0
    while _incomplete_beta(df / (df + high * high), df / 2, 0.5) > beyond:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if not low < middle < high:  # neighbouring floats
            break
        if _incomplete_beta(df / (df + middle * middle), df / 2, 0.5) > beyond:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return min(1.0, max(0.0, x))
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # The fraction converges fast on this side only; the other follows from the symmetry 8.17.4.
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _beta_fraction(1 - x, b, a) / b
    return front * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Evaluate the fraction by Lentz's method (DLMF 3.10(iii))."""
    tiny = 1e-300
    c, d = 1.0, 1 / max(tiny, 1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            change = c * d
            value *= change
        if abs(change - 1) < 1e-15:
            break
    return value
