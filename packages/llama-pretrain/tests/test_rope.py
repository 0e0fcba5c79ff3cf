"""Rotary positions: what their scaling refuses, and tables that stay right wherever a model is moved.

That the logits are those of transformers is in `hf/test_rope_scaling.py`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llama_pretrain import (
    LinearScaling,
    Llama,
    Llama3Scaling,
    LlamaConfig,
    PretrainArguments,
    RopeScaling,
    YarnScaling,
)
from llama_pretrain.model.rope import _KINDS, RotaryEmbedding, scaling_for
from perf_metrics import model_flops_per_token
from trainer_core import ConfigurationError

MakeConfig = Callable[..., LlamaConfig]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, RopeScaling] = {
    "linear": LinearScaling(factor=4.0),
    "llama3": Llama3Scaling(**LLAMA3, original_max_position_embeddings=32),  # type: ignore[arg-type]
    "yarn": YarnScaling(factor=4.0, original_max_position_embeddings=32),
}


@pytest.fixture(params=SCALINGS)
def scaling(request: pytest.FixtureRequest) -> RopeScaling:
    return SCALINGS[request.param]


def test_the_dict_reads_back_equal(small_config: MakeConfig, scaling: RopeScaling) -> None:
    config = small_config(rope_scaling=scaling)
    values = json.loads(json.dumps(config.to_dict()))
    assert LlamaConfig.from_dict(values) == config
    assert values["rope_parameters"] == values["rope_scaling"] | {"rope_theta": 5000.0}
    for key in ("rope_scaling", "rope_parameters"):
        one = {name: value for name, value in values.items() if name != key}
        assert LlamaConfig.from_dict(one) == config


def test_linear_scaling_turns_as_positions_that_are_divided() -> None:
    plain, scaled = RotaryEmbedding(8, 64, 1e4), RotaryEmbedding(8, 256, 1e4, LinearScaling(factor=4.0))
    for mine, theirs in zip(scaled(0, 256), plain(0, 64), strict=True):
        torch.testing.assert_close(mine[::4], theirs)


def test_llama3_keeps_what_turns_often_and_divides_what_turns_rarely() -> None:
    scaling = Llama3Scaling(**LLAMA3, original_max_position_embeddings=8192)  # type: ignore[arg-type]
    per_radian = 500_000.0 ** (torch.arange(0, 128, 2) / 128)
    ratio = scaling.frequencies(per_radian, 500_000.0) * per_radian
    turns = 8192 / (2 * math.pi * per_radian)
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 2
    assert torch.all(between.diff() < 0)


def test_yarn_has_the_factor_of_attention_of_the_paper() -> None:
    scaling = YarnScaling(factor=16.0, original_max_position_embeddings=4096)
    assert scaling.amplitude == pytest.approx(0.1 * math.log(16) + 1)
    cos, sin = RotaryEmbedding(128, 256, 1e4, scaling)(0, 256)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, scaling.amplitude**2))


def test_tables_stay_float32_and_survive_the_meta_device(
    small_config: MakeConfig, scaling: RopeScaling
) -> None:
    config = small_config(rope_scaling=scaling)
    expected = Llama(config).model.rotary_emb
    plain = Llama(replace(config, rope_scaling=None)).model.rotary_emb
    assert not torch.equal(expected.cos, plain.cos)
    with torch.device("meta"):
        model = Llama(config).bfloat16()
    assert model.model.rotary_emb.cos.device.type == "meta"
    for each in (model.to_empty(device="cpu"), Llama(config).bfloat16(), copy.deepcopy(Llama(config)).half()):
        for name in ("cos", "sin"):
            table = getattr(each.model.rotary_emb, name)
            assert table.dtype == torch.float32
            assert torch.equal(table, getattr(expected, name))


def test_parts_of_a_row_have_the_positions_of_the_whole(
    small_config: MakeConfig, scaling: RopeScaling
) -> None:
    rotary = Llama(small_config(rope_scaling=scaling)).model.rotary_emb
    positions = torch.tensor([[100, 3, 127, 0]])
    for part, whole in zip(rotary.at(positions), rotary(0, 128), strict=True):
        assert torch.equal(part[0, 0], whole[positions[0]])


def test_the_cache_changes_nothing(small_config: MakeConfig, scaling: RopeScaling) -> None:
    torch.manual_seed(0)
    model = Llama(small_config(rope_scaling=scaling)).eval()
    ids = torch.randint(0, 61, (1, 100))
    with torch.no_grad():
        cache = model.make_cache(1, 100)
        pieces = [model(part, cache=cache) for part in ids.split(37, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), atol=1e-5, rtol=1e-5)


def test_flops_do_not_change(small_config: MakeConfig, scaling: RopeScaling) -> None:
    counts = {model_flops_per_token(Llama(small_config(rope_scaling=each)), 128) for each in (None, scaling)}
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' is not supported: .* llama3, yarn"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            "rope_type='longrope' is not supported",
        ),
        ({"type": "mrope", "mrope_section": [1]}, "rope_type='mrope'"),
        ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\]"),
        ("yarn", "='yarn' must be a table"),
        ({"rope_type": "default", "factor": 2.0}, "factor=2.0 is a key that .* 'default'"),
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0},
            "beta_fast=3.0 is a key that this model cannot represent in rotary scaling of rope_type 'linear'",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is a key",
        ),
        ({"rope_type": "yarn"}, "has no factor, which rotary scaling of rope_type 'yarn' needs. Add factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "has no low_freq_factor"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor=0.5 must be at least 1"),
        ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor='2' must be float"),
        ({"rope_type": "linear", "factor": True}, "rope_scaling.factor=True must be float"),
        ({"rope_type": "linear", "factor": math.inf}, "rope_scaling.factor=inf must be float"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}, "beta_fast=0.5 must be at least beta_slow"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 0}, "beta_slow=0.0 must be above 0"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}, "attention_factor=-1.0"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": -1.0}, "mscale=-1.0 must be 0 or more"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate=1 must be bool"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings=0 must be an int of at least 1",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta=1.0 must be above 1"),
        (
            {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0},
            "high_freq_factor=1.0 must be above low_freq_factor=1.0",
        ),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 0}, "low_freq_factor=0.0 must be above 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_what_cannot_be_represented_is_refused(
    small_config: MakeConfig, key: str, given: object, words: str
) -> None:
    values = small_config().to_dict()
    del values["rope_parameters"]
    with pytest.raises(ConfigurationError, match=words):
        LlamaConfig.from_dict(values | {key: given})


def test_two_tables_that_differ_are_refused(small_config: MakeConfig) -> None:
    values = small_config(rope_scaling=SCALINGS["yarn"]).to_dict()
    for other in (
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4},
    ):
        with pytest.raises(ConfigurationError, match=r"rope_scaling=.* contradicts rope_parameters=.*yarn"):
            LlamaConfig.from_dict(values | {"rope_scaling": other})


def test_another_type_of_scaling_is_refused(small_config: MakeConfig) -> None:
    with pytest.raises(ConfigurationError, match="rope_scaling='yarn' must be RopeScaling"):
        small_config(rope_scaling="yarn")


def test_stretched_twice_is_stretched_once(scaling: RopeScaling) -> None:
    kind = scaling.rope_type
    once = scaling_for(kind, positions=1024, wanted=8192)
    half = scaling_for(kind, positions=1024, wanted=2048)
    assert scaling_for(kind, positions=2048, wanted=8192, before=half) == once
    assert once.factor == 8.0


def test_the_setting_names_all_kinds() -> None:
    for kind in _KINDS:
        assert PretrainArguments(rope_scaling=kind).rope_scaling == kind
    with pytest.raises(ConfigurationError, match="rope_scaling='dynamic' must be linear, llama3 or yarn"):
        PretrainArguments(rope_scaling="dynamic")
