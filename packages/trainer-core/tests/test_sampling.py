"""The next token: what each setting leaves, how often it is drawn, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer_core import ConfigurationError, Sampling

PROBABILITIES = torch.tensor([[0.15, 0.25, 0.10, 0.50]])


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _share_of_the_second(sampling: Sampling, logits: Tensor, seen: Tensor | None = None) -> float:
    """How often the second of two tokens is drawn, in 4000 rows."""
    rows = logits.expand(4000, -1)
    texts = None if seen is None else seen.expand(4000, -1)
    return float(sampling.choose(rows, texts, _generator()).double().mean())


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=0.0), {3}),
        (Sampling(temperature=0.0, top_k=2, top_p=0.9), {3}),
        (Sampling(top_k=1), {3}),
        (Sampling(top_k=2), {3, 1}),
        (Sampling(top_k=9), {0, 1, 2, 3}),
        (Sampling(top_p=0.01), {3}),
        (Sampling(top_p=0.45), {3}),
        (Sampling(top_p=0.51), {3, 1}),
        (Sampling(top_p=1.0), {0, 1, 2, 3}),
        # Of the two that top_k leaves, the first has 2/3 of the mass: enough for top_p, which comes after.
        (Sampling(top_k=2, top_p=0.6), {3}),
        (Sampling(top_k=2, top_p=0.7), {3, 1}),
        (Sampling(), {0, 1, 2, 3}),
    ],
)
def test_settings_leave_these_tokens(sampling: Sampling, allowed: set[int]) -> None:
    drawn = sampling.choose(PROBABILITIES.log().expand(400, -1), generator=_generator())
    assert drawn.dtype == torch.int64
    assert set(drawn.tolist()) == allowed


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.2, 0.8]]).log()
    assert _share_of_the_second(Sampling(), logits) == pytest.approx(0.8, abs=0.03)
    colder = Sampling(temperature=0.5)
    assert _share_of_the_second(colder, logits) == pytest.approx(0.64 / 0.68, abs=0.03)


def test_a_generator_repeats_its_draws_and_leaves_the_default_one_alone() -> None:
    logits = PROBABILITIES.log().expand(50, -1)
    before = torch.get_rng_state()
    first, again, other = (Sampling().choose(logits, generator=_generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    from_default = Sampling().choose(logits)
    torch.manual_seed(5)
    assert torch.equal(Sampling().choose(logits), from_default)


def test_each_row_is_chosen_by_itself() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [7.0, 5.0, 1.0], [0.0, 0.0, 9.0]])
    assert Sampling(temperature=0.0).choose(logits).tolist() == [1, 0, 2]
    assert Sampling(top_k=1).choose(logits, generator=_generator()).tolist() == [1, 0, 2]
    assert Sampling(top_p=0.5).choose(logits, generator=_generator()).tolist() == [1, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_floating_dtype_are_taken_and_kept(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-1.0, 2.0, 0.5]], dtype=dtype)
    kept = logits.clone()
    for sampling in (Sampling(temperature=0.0, repetition_penalty=1.5), Sampling(top_k=1, top_p=0.5)):
        assert sampling.choose(logits, torch.tensor([[0]]), _generator()).tolist() == [1]
    assert torch.equal(logits, kept)


def test_the_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0, -1.5]])
    greedy = Sampling(temperature=0.0, repetition_penalty=2.0)
    assert greedy.choose(logits).tolist() == [0]  # nothing was seen
    assert greedy.choose(logits, torch.tensor([[3]])).tolist() == [0]
    assert greedy.choose(logits, torch.tensor([[0]])).tolist() == [1]  # 1.5, 2
    # A token that was seen twice is penalised once: 1.5, 1.
    assert greedy.choose(logits, torch.tensor([[0, 1, 1]])).tolist() == [0]
    below = logits - 4  # -1, -2, -5, -5.5
    assert greedy.choose(below, torch.tensor([[0]])).tolist() == [0]  # -2, -2: the first of equal ones
    stronger = Sampling(temperature=0.0, repetition_penalty=2.1)
    assert stronger.choose(below, torch.tensor([[0]])).tolist() == [1]  # -2.1, -2
    favouring = Sampling(temperature=0.0, repetition_penalty=0.5)
    assert favouring.choose(logits, torch.tensor([[1]])).tolist() == [1]  # 3, 4


def test_the_penalty_is_of_each_rows_own_text_and_comes_before_the_temperature() -> None:
    logits = torch.tensor([[3.0, 2.0], [3.0, 2.0]])
    greedy = Sampling(temperature=0.0, repetition_penalty=2.0)
    assert greedy.choose(logits, torch.tensor([[0], [1]])).tolist() == [1, 0]
    # After it the logits are 1.5 and 2; then they are divided by the temperature.
    halved = Sampling(temperature=0.5, repetition_penalty=2.0)
    share = _share_of_the_second(halved, logits[:1], torch.tensor([[0, 0]]))
    assert share == pytest.approx(torch.tensor((2.0 - 1.5) / 0.5).sigmoid().item(), abs=0.03)


def test_without_a_penalty_the_text_does_not_matter() -> None:
    logits = PROBABILITIES.log().expand(200, -1)
    seen = torch.full((200, 3), 3)
    assert torch.equal(
        Sampling().choose(logits, seen, _generator()), Sampling().choose(logits, generator=_generator())
    )


def test_logits_that_are_no_numbers_are_not_drawn_from() -> None:
    logits = torch.full((2, 3), float("nan"))
    with pytest.raises(RuntimeError, match="nan"):
        Sampling().choose(logits, generator=_generator())


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(4000, -1)
    assert set(Sampling().choose(logits, generator=_generator()).tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0 or more. Use 0 for the most probable token"),
        ({"temperature": float("inf")}, "temperature=inf must be 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan must be 0 or more"),
        ({"top_k": 0}, "top_k=0 must be 1 or more. Leave it out to draw from all tokens"),
        ({"top_k": -3}, "top_k=-3 must be 1 or more"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1. Leave it out to draw from all tokens"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p=nan must be above 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0. Use 1 for no penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0 must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf must be above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan must be above 0"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Sampling(**settings)  # type: ignore[arg-type]
    assert words in str(caught.value)
