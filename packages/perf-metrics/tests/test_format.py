from collections.abc import Callable

import pytest

from perf_metrics import ColumnSpec, format_value

MEMORY = [2.0e9, 2.2e9]


def spread(values: list[float]) -> float:
    return max(values) - min(values)


@pytest.mark.parametrize(
    ("value", "fmt", "reduce", "text"),
    [
        (2.345672, ".5f", None, "2.34567"),
        (0.0001, ".2e", None, "1.00e-04"),
        (8192.0, ",d", None, "8,192"),
        (0.42, ".1%", None, "42.0%"),
        (8192000, "si", None, "8.19M"),
        (2.0e9, "gib", None, "1.863 GiB"),
        (MEMORY, "gib", None, "2.049 GiB"),
        (MEMORY, "gib", "all", "1.863 GiB/2.049 GiB"),
        (MEMORY, "gib", spread, "0.186 GiB"),
        (0.123456, "", None, "0.1235"),
        (1234567, "", None, "1,234,567"),
        ("x", "", None, "x"),
    ],
)
def test_the_table_of_the_specification(
    value: object, fmt: str, reduce: str | Callable[[list[float]], float] | None, text: str
) -> None:
    assert format_value(value, fmt, reduce) == text


@pytest.mark.parametrize(
    ("reduce", "text"),
    [("max", "4.0"), ("min", "1.0"), ("mean", "2.5"), ("sum", "10.0"), ("all", "1.0/4.0/3.0/2.0")],
)
def test_named_reductions(reduce: str, text: str) -> None:
    assert format_value([1.0, 4.0, 3.0, 2.0], ".1f", reduce) == text
    assert format_value((1.0, 4.0, 3.0, 2.0), ".1f", reduce) == text
    assert format_value(7.0, ".1f", reduce) == "7.0"


def test_a_callable_reduction_gets_a_scalar_as_a_list() -> None:
    assert format_value(5.0, ".1f", spread) == "0.0"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.004, "4.0e-03"),
        (999.994, "999.99"),
        (999.996, "1.00K"),
        (41_200, "41.20K"),
        (999_999, "1.00M"),
        (-1_500, "-1.50K"),
        (3.2e18, "3.20E"),
        (3.2e24, "3200000.00E"),
    ],
)
def test_si(value: float, text: str) -> None:
    assert format_value(value, "si") == text


@pytest.mark.parametrize("fmt", ["", ".5f", ".1%", "si", "gib", ",d", "x"])
def test_what_is_not_a_finite_number_is_named(fmt: str) -> None:
    assert format_value(float("nan"), fmt) == "nan"
    assert format_value(float("-inf"), fmt) == "-inf"
    assert format_value("n/a", fmt) == "n/a"
    assert format_value(True, fmt) == "True"


def test_integer_formats_take_floats_and_large_integers() -> None:
    assert format_value(255.9, "x") == "ff"
    assert format_value(2**60 + 1, ",d") == f"{2**60 + 1:,}"


def test_a_callable_format_gets_the_value() -> None:
    assert format_value(90.0, lambda seconds: f"{seconds / 60:.1f} min") == "1.5 min"


def test_an_empty_list_has_no_value() -> None:
    assert format_value([], ".1f") == "n/a"


@pytest.mark.parametrize("fmt", ["", ".5f", "gib", str])
def test_no_value_is_named(fmt: str | Callable[[float], str]) -> None:
    assert format_value(None, fmt) == format_value(None, fmt, spread) == "n/a"
    assert ColumnSpec(fmt=fmt, missing="unknown").text(None) == "unknown"


@pytest.mark.parametrize(
    ("reduce", "text"),
    [(None, "3.0"), ("min", "1.0"), ("mean", "2.0"), ("all", "1.0/n/a/3.0"), (spread, "2.0")],
)
def test_a_rank_without_a_value_is_left_out(
    reduce: str | Callable[[list[float]], float] | None, text: str
) -> None:
    assert format_value([1.0, None, 3.0], ".1f", reduce) == text
    assert format_value([None, None], ".1f", reduce) == "n/a"


@pytest.mark.parametrize("reduce", [None, "max", "min", "mean", "sum"])
def test_a_rank_that_is_not_a_number_shows_wherever_it_stands(reduce: str | None) -> None:
    nan = float("nan")
    assert [format_value(values, ".1f", reduce) for values in ([nan, 1.0], [1.0, nan])] == ["nan", "nan"]


@pytest.mark.parametrize("fmt", [".5q", "gb", "5.5.5f"])
def test_unknown_formats_are_refused(fmt: str) -> None:
    with pytest.raises(ValueError, match="fmt="):
        format_value(1.0, fmt)
    with pytest.raises(ValueError, match="fmt="):
        ColumnSpec("loss", fmt=fmt)


def test_unknown_reductions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reduce='median' must be one of max, min, mean, sum"):
        format_value([1.0], "", "median")  # type: ignore[arg-type]
