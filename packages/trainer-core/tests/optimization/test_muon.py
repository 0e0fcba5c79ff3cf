"""Muon by name: which parameters it takes, with which options, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import optim
from torch.optim import AdamW

import trainer_core.optimization.muon as muon_module
from trainer_core import ConfigurationError, Multiopt
from trainer_core.optimization import build_optimizer
from trainer_core.optimization.muon import Muon


@pytest.fixture
def named_net(net):
    """The model; it says which its output layer is."""

    def make(**options):
        model = net(**options)
        model.get_output_embeddings = lambda: model.head
        return model

    return make


def members(optimizer):
    assert isinstance(optimizer, Multiopt)
    return optimizer.optimizers


def names_in(model, optimizer):
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in model.named_parameters() if id(p) in held]


HIDDEN = ["layers.0.linear.weight", "layers.1.linear.weight"]


@pytest.mark.parametrize("tied", [False, True])
def test_takes_matrices_of_hidden_layers_alone(named_net, arguments, tied):
    model = named_net(tied=tied)
    adamw, muon = members(build_optimizer(arguments(optim="muon"), model))
    assert (type(adamw), type(muon)) == (AdamW, Muon)
    assert names_in(model, muon) == HIDDEN
    assert names_in(model, adamw) == [name for name, _ in model.named_parameters() if name not in HIDDEN]
    decays = [group["weight_decay"] for group in adamw.param_groups]
    assert decays == [0.1, 0.0], "embedding and head decay, biases and norms do not"


def test_steps_as_the_two_by_hand(named_net, loss_of, arguments):
    model, hand = named_net(), named_net()
    optimizer = build_optimizer(arguments(optim="muon", optim_kwargs={"momentum": 0.8}), model)
    matrices = [layer["linear"].weight for layer in hand.layers]
    decaying = [hand.embed.weight, hand.head.weight]
    taken = {id(p) for p in (*matrices, *decaying)}
    rest = [p for p in hand.parameters() if id(p) not in taken]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    by_hand = [
        AdamW(groups, lr=1e-2, fused=True),
        optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw"),
    ]
    for step in range(6):
        for each in (model, hand):
            each.zero_grad()
            loss_of(each, step).backward()
        optimizer.step()
        for member in by_hand:
            member.step()
    for (name, one), other in zip(model.named_parameters(), hand.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("nesterov", [True, False])
def test_small_matrices_of_a_shape_go_together_with_the_bits_of_torch(monkeypatch, threads, nesterov):
    """Wide, tall, square, too small for a stack, and more than one stack holds; some without a gradient."""
    monkeypatch.setattr("trainer_core.optimization.muon._MOST_STACKED", 3 * 64 * 24)
    stacks = []
    real = muon_module._orthogonal_stack
    monkeypatch.setattr(
        muon_module, "_orthogonal_stack", lambda some, group: stacks.append(some.shape) or real(some, group)
    )
    shapes = (
        [(64, 24)] * 7 + [(24, 64)] * 2 + [(32, 32)] * 2 + [(8, 8)] * 2 + [(7, 90)] * 2 + [(1, 5), (48, 16)]
    )
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, torchs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    options = {"lr": 0.05, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
    one, other = Muon(ours, **options), optim.Muon(torchs, **options)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(8):
            for number, (mine, its) in enumerate(zip(ours, torchs, strict=True)):
                gradient = torch.randn(mine.shape, generator=generator)
                mine.grad, its.grad = (None, None) if number % 5 == step else (gradient, gradient.clone())
            one.step()
            other.step()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(mine, its) for mine, its in zip(ours, torchs, strict=True))
    assert not any(torch.equal(mine, value) for mine, value in zip(ours, values, strict=True))
    assert (3, 64, 24) in stacks
    assert all(shape[0] <= 3 for shape in stacks if shape[1:] == (64, 24))
    assert not any(min(shape) == 1 or 7 in shape for shape in stacks)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("threads", "dtype", "shape", "strided", "stacked"),
    [
        (1, torch.float32, (64, 24), False, True),
        (3, torch.float32, (64, 1000), False, False),
        pytest.param(4, torch.float32, (300, 301), False, False, marks=pytest.mark.full),
        (1, torch.float32, (64, 24), True, False),
        pytest.param(1, torch.float32, (300, 301), True, False, marks=pytest.mark.full),
        (1, torch.bfloat16, (64, 24), False, False),
    ],
)
def test_stacks_are_made_only_where_they_have_the_bits_of_torch(
    named_net, arguments, monkeypatch, threads, dtype, shape, strided, stacked, nesterov
):
    stacks = []
    real = muon_module._orthogonal_stack
    monkeypatch.setattr(
        muon_module, "_orthogonal_stack", lambda some, group: stacks.append(some.shape) or real(some, group)
    )
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(shape[::-1] if strided else shape, generator=generator).to(dtype) for _ in range(3)]
    ours, torchs = (
        [torch.nn.Parameter(each.clone().mT if strided else each.clone()) for each in draw] for _ in range(2)
    )
    args = arguments(optim="muon", optim_kwargs={"nesterov": nesterov})
    one = muon_module.build_muon(args, [{"params": [(str(n), p) for n, p in enumerate(ours)]}])
    options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "nesterov": nesterov}
    other = optim.Muon(torchs, adjust_lr_fn="match_rms_adamw", **options)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            for mine, its in zip(ours, torchs, strict=True):
                mine.grad = torch.randn(shape, generator=generator).to(dtype)
                its.grad = mine.grad.clone()
            one.step()
            other.step()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(mine, its) for mine, its in zip(ours, torchs, strict=True))
    assert bool(stacks) == stacked


def test_complex_matrices_are_refused(arguments):
    layer = torch.nn.Linear(4, 4, dtype=torch.complex64)
    layer.get_output_embeddings = lambda: None
    with pytest.raises(ConfigurationError, match=r"complex parameters, of which weight is one"):
        build_optimizer(arguments(optim="muon"), layer)


def test_the_class_itself_refuses_complex_matrices():
    matrix = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match=r"complex .*, and one of the shape \[4, 6\] is complex64"):
        Muon([matrix])


def test_a_matrix_without_a_gradient_is_told_by_its_shape():
    with pytest.raises(RuntimeError, match=r"shape \[4, 6\] has no gradient.* Call backward\(\) before"):
        muon_module._gradient(torch.nn.Parameter(torch.zeros(4, 6)))


def test_options_and_groups_are_those_given(named_net, arguments):
    given = {"lr": 0.02, "weight_decay": 0.3, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"}
    groups = {"layers.1.*": {"lr": 1e-3}, "embed.*": {"betas": (0.8, 0.9)}}
    args = arguments(optim="muon", optim_kwargs=given)
    adamw, muon = members(build_optimizer(args, named_net(), groups=groups))
    first, second = (group for group in muon.param_groups if group["params"])
    assert {name: first[name] for name in given} == given
    assert {name: second[name] for name in given} == given | {"lr": 1e-3}
    assert [group["betas"] for group in adamw.param_groups if len(group["params"]) == 1][-1] == (0.8, 0.9)


def test_refusals_name_the_setting(net, named_net, arguments):
    with pytest.raises(
        ConfigurationError,
        match=r"optim='muon' needs AdamW for .*, which Net does not name.*get_output_embeddings",
    ):
        build_optimizer(arguments(optim="muon"), net())
    with pytest.raises(ConfigurationError, match=r"betas.*is not an option of Muon"):
        build_optimizer(arguments(optim="muon"), named_net(), groups={"layers.*": {"betas": (0.8, 0.9)}})
    for settings, told in (
        ({"optim": "muonn"}, r"optim='muonn' is not a built-in optimizer. Did you mean 'muon'\?"),
        ({"optim_kwargs": {"momentum": 0.9}}, r"optim_kwargs.momentum=0.9 is not an option of 'adamw'"),
        ({"optim": "muon", "optim_kwargs": {"ns_step": 3}}, r"ns_step=3.*Did you mean 'ns_steps'"),
        ({"optim": "muon", "optim_kwargs": {"momentum": 2.0}}, r"optim_kwargs.momentum=2.0"),
        ({"optim": "muon", "optim_kwargs": {"adjust_lr_fn": "rms"}}, r"optim_kwargs.adjust_lr_fn='rms'"),
        ({"optim": "muon", "fuse_optim_with_backward": True}, "excludes optim='muon'"),
        ({"ema_decay": 1.0}, r"ema_decay=1.0 must lie between 0 and 1"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            arguments(**settings)


def test_nothing_to_train_and_nothing_for_one_of_the_two(named_net, arguments):
    model = named_net()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="has no trainable parameter"):
        build_optimizer(arguments(optim="muon"), model)
    model.layers[0]["linear"].weight.requires_grad_(True)
    adamw, muon = members(build_optimizer(arguments(optim="muon"), model))
    assert (names_in(model, adamw), names_in(model, muon)) == ([], HIDDEN[:1])


def test_a_torch_without_the_private_parts_is_refused_only_where_they_are_used():
    program = """
import sys, torch
sys.modules["torch.optim._muon"] = None  # as in a torch that has moved them
from trainer_core.optimization.muon import Muon
from trainer_core import Trainer, TrainingArguments
TrainingArguments(optim="muon")
try:
    Muon([torch.nn.Parameter(torch.ones(2, 2))])
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("optim='muon' needs parts of torch's Muon that torch ")
