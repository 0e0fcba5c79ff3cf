"""Groups by pattern: first match wins, nothing is lost, mistakes are named."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW

from trainer_core import ConfigurationError
from trainer_core.optimization import (
    Multiopt,
    ParameterGroups,
    build_optimizer,
    optimizer_table,
)


def sgd(params):
    return SGD(params, lr=0.1, momentum=0.9)


def by_name(optimizer):
    return {
        name: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def test_first_match_wins_and_the_rest_is_default(net, arguments):
    model = net()
    groups = ParameterGroups({"layers.0.*": {"lr": 1e-4}, r"re:.*linear\.weight": {"lr": 1e-3}})
    assigned = groups.assign(model.named_parameters())
    assert assigned["layers.0.linear.weight"] == "layers.0.*"
    assert assigned["layers.1.linear.weight"] == r"re:.*linear\.weight"
    assert assigned["head.weight"] == "(default)"
    optimizer = build_optimizer(arguments(), model, groups=groups.groups)
    assert type(optimizer) is AdamW
    rates = {name: options["lr"] for name, options in by_name(optimizer).items()}
    assert rates["layers.0.norm.weight"] == 1e-4
    assert rates["layers.1.linear.weight"] == 1e-3
    assert rates["embed.weight"] == 1e-2
    assert sorted(rates) == sorted(name for name, _ in model.named_parameters())


def test_exemption_holds_in_a_pattern_unless_it_sets_the_decay(net, arguments):
    model = net()
    groups = {"layers.0.*": {"lr": 1e-4}, "layers.1.*": {"weight_decay": 0.3}}
    optimizer = build_optimizer(arguments(), model, groups=groups)
    assert len(optimizer.param_groups) == 4  # the rest, two of layer 0, one of layer 1
    decay = {
        name: o["weight_decay"]
        for name, o in by_name(build_optimizer(arguments(), model, groups=groups)).items()
    }
    assert decay["layers.0.linear.weight"] == 0.1
    assert decay["layers.0.linear.bias"] == decay["layers.0.plane.weight"] == 0.0
    assert decay["layers.1.linear.bias"] == decay["layers.1.norm.weight"] == 0.3


def test_frozen_parameters_are_left_out(net, arguments):
    model = net()
    model.embed.requires_grad_(False)
    optimizer = build_optimizer(arguments(), model, groups={"head.*": {"lr": 1e-3}})
    assert "embed.weight" not in by_name(optimizer)
    assert "frozen" in optimizer_table(optimizer, model, groups={"head.*": {"lr": 1e-3}}).splitlines()[1]


def test_several_factories_make_several_optimizers(net, arguments):
    model = net()
    groups = {
        "*.linear.weight": {"factory": sgd},
        "head.*": {"factory": sgd, "lr": 0.5},
        "*.bias": {"lr": 1e-3},
    }
    optimizer = build_optimizer(arguments(), model, groups=groups)
    assert isinstance(optimizer, Multiopt)
    assert [type(member) for member in optimizer.optimizers] == [AdamW, SGD]
    options = by_name(optimizer)
    assert sorted(options) == sorted(name for name, _ in model.named_parameters())
    assert options["head.weight"]["lr"] == 0.5
    assert options["layers.0.linear.weight"]["lr"] == 0.1
    assert options["head.weight"]["momentum"] == 0.9


def test_one_factory_for_all_makes_a_plain_optimizer(net, arguments):
    model = net()
    optimizer = build_optimizer(arguments(), model, groups={"head.*": {"lr": 0.5}}, factory=sgd)
    assert type(optimizer) is SGD
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert type(build_optimizer(arguments(), model, factory=sgd)) is SGD


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"layer.0.*": {"lr": 1.0}}, r"layer\.0\.\*.*matches no parameter.*nearest names: .*layers\.0\."),
        ({"head": {"lr": 1.0}}, r"whole name.*head\.weight"),
        ({"re:head": {"lr": 1.0}}, r"whole name.*head\.weight"),
        ({"layers.*": {}, "layers.0.*": {}}, r"layers\.0\.\*.*comes after 'layers\.\*'"),
        ({"embed.*": {"lr": 1.0}}, "matches only frozen parameters, such as embed.weight"),
        ({"re:head(": {"lr": 1.0}}, "is not a regular expression"),
        ({"head.*": {"weight_decai": 1.0}}, "is not an option of AdamW. Did you mean 'weight_decay'"),
        ({"head.*": {"factory": "sgd"}}, r"factory='sgd' must be callable"),
        ({"head.*": 3}, "must map each pattern"),
        ({"head.*": {"lr": -1}}, r"\['head\.\*'\]\.lr=-1 must be a number from 0"),
        ({"head.*": {"lr": "0.1"}}, r"\.lr='0\.1' must be a number"),
        ({"head.*": {"lr": float("nan")}}, r"\.lr=nan must be a number"),
        ({"head.*": {"weight_decay": -1.0}}, r"\.weight_decay=-1\.0 must be a number from 0"),
        ({"head.*": {"eps": "x"}}, r"\.eps='x' must be a number"),
        ({"head.*": {"betas": (2, 3)}}, r"\.betas=2 must be a number from 0"),
        ({"head.*": {"betas": 0.9}}, r"\.betas=0\.9 must be two numbers"),
        ({"head.*": {"factory": sgd, "lr": -1.0}}, r"\.lr=-1\.0 must be a number from 0"),
    ],
)
def test_mistakes_are_named(net, arguments, groups, message):
    model = net()
    model.embed.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=message) as caught:
        build_optimizer(arguments(), model, groups=groups)
    assert caught.value.setting.startswith("optimizer_groups")


def test_options_of_another_optimizer_have_its_form(net, arguments):
    groups = {"head.*": {"factory": lambda params: Adafactor(params), "eps": (None, 1e-4)}}
    options = by_name(build_optimizer(arguments(), net(), groups=groups))
    assert options["head.weight"]["eps"] == (None, 1e-4)


def test_an_unfused_group_trains_beside_the_fused_rest(make_trainer, curve):
    fused, mixed = (
        make_trainer(max_steps=6, with_trainer={"optimizer_groups": {"mix.*": options}})
        for options in ({"fused": True}, {"fused": False})
    )
    fused.train()
    mixed.train()
    assert {group["fused"] for group in mixed.optimizer.param_groups} == {True, False}
    for one, other in zip(curve(mixed), curve(fused), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_factory_must_return_an_optimizer(net, arguments):
    with pytest.raises(ConfigurationError, match=r"optimizer_factory='list'"):
        build_optimizer(arguments(), net(), factory=list)


def test_table_shows_group_options_and_reason(net, arguments):
    model = net()
    groups = {"layers.1.*": {"lr": 1e-3, "eps": 1e-6}, "head.*": {"factory": sgd}}
    lines = optimizer_table(
        build_optimizer(arguments(), model, groups=groups), model, groups=groups
    ).splitlines()
    cells = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert len(lines) == 1 + len(list(model.parameters()))
    assert "eps" in lines[0]
    assert cells["head.weight"].split()[:4] == ["11x8", "head.*", "SGD", "0.1"]
    assert cells["layers.1.norm.weight"].split()[:4] == ["8", "layers.1.*", "AdamW", "0.001"]
    assert "1e-06" in cells["layers.1.linear.weight"]
    assert cells["layers.0.plane.weight"].endswith("of PlaneNorm")
    assert cells["layers.0.linear.bias"].endswith("bias")


def test_tied_weight_is_one_parameter(net, arguments):
    model = net(tied=True)
    optimizer = build_optimizer(arguments(), model, groups={"embed.*": {"lr": 1e-4}})
    assert sum(p is model.head.weight for group in optimizer.param_groups for p in group["params"]) == 1
    assert torch.is_tensor(model.head.weight)
