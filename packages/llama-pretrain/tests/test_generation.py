"""Generation: equal to the plain computation, and its settings do what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llama_pretrain import Llama, generate
from trainer_core import ConfigurationError, Sampling

PROMPT = torch.tensor([[3, 14, 15, 9], [2, 6, 5, 35]])


def _without_cache(model: Llama, ids: Tensor, new: int, temperature: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(temperature=temperature, top_k=20)
    with torch.no_grad():
        for _ in range(new):
            token = sampling.choose(model(ids)[:, -1], generator=generator)
            ids = torch.cat([ids, token[:, None]], dim=1)
    return ids


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_equals_the_computation_without_cache(small_model: Llama, temperature: float) -> None:
    generator = torch.Generator().manual_seed(5)
    quick = generate(
        small_model, PROMPT, max_new_tokens=40, temperature=temperature, top_k=20, generator=generator
    )
    assert torch.equal(quick, _without_cache(small_model, PROMPT, 40, temperature, seed=5))


def test_the_end_token_is_kept_and_fills_up(small_model: Llama) -> None:
    free = generate(small_model, PROMPT, max_new_tokens=30, temperature=0)
    end = int(free[0, 6])
    first = int((free[0, 4:] == end).nonzero()[0]) + 4
    stopped = generate(small_model, PROMPT, max_new_tokens=30, temperature=0, eos_token_id=end)
    assert torch.equal(stopped[0, : first + 1], free[0, : first + 1])
    assert (stopped[0, first:] == end).all()
    alone = generate(small_model, PROMPT[:1], max_new_tokens=30, temperature=0, eos_token_id=end)
    assert torch.equal(alone[0], free[0, : first + 1])


def test_nothing_new_and_the_mode_is_put_back(small_model: Llama) -> None:
    assert torch.equal(generate(small_model, PROMPT, max_new_tokens=0), PROMPT)
    small_model.train()
    small_model.model.layers[1].eval()
    before = {name: module.training for name, module in small_model.named_modules()}
    generate(small_model, PROMPT, max_new_tokens=2)
    assert {name: module.training for name, module in small_model.named_modules()} == before
    assert set(before.values()) == {True, False}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 125}, "needs 129 positions, the model has 128; use at most 124"),
        ({"max_new_tokens": 1, "temperature": -0.1}, "temperature=-0.1"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k=0"),
        ({"max_new_tokens": 1, "top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_bad_settings_are_named(small_model: Llama, settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        generate(small_model, PROMPT, **settings)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused(small_model: Llama) -> None:
    with pytest.raises(ConfigurationError, match="input_ids"):
        generate(small_model, PROMPT[:, :0], max_new_tokens=1)
