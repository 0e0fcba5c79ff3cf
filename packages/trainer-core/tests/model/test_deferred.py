"""Deferred construction: every initial value bit for bit that of a model built at once; little memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from trainer_core.model import InitialValues, construct_deferred
from trainer_core.model import deferred as deferred_module
from trainer_core.model.recording import storage_cache

Build = Callable[[], nn.Module]


def same(ours: Tensor, theirs: Tensor, name: str) -> None:
    assert ours.dtype == theirs.dtype, name
    assert ours.device == theirs.device, name
    assert ours.stride() == theirs.stride(), name
    assert torch.equal(ours, theirs), name


def assert_deferred_equals_built(build: Build) -> tuple[nn.Module, InitialValues]:
    """Build at once and deferred under one seed, and compare everything."""
    torch.manual_seed(17)
    built = build()
    after = torch.get_rng_state()
    torch.manual_seed(17)
    model, values = construct_deferred(build)
    assert torch.equal(torch.get_rng_state(), after)
    theirs = dict(built.named_parameters())
    ours = dict(model.named_parameters())
    assert list(ours) == list(theirs)
    assert sorted(values) == sorted(theirs)
    for name in [*reversed(theirs), *theirs]:  # in two orders, and each twice
        same(values[name], theirs[name].detach(), name)
    for name, parameter in ours.items():
        assert parameter.is_meta
        assert type(parameter) is type(theirs[name])
        assert (parameter.shape, parameter.dtype) == (theirs[name].shape, theirs[name].dtype)
        assert parameter.requires_grad == theirs[name].requires_grad
        assert parameter.__dict__ == theirs[name].__dict__
    buffers = dict(model.named_buffers())
    assert list(buffers) == [name for name, _ in built.named_buffers()]
    for name, buffer in built.named_buffers():
        same(buffers[name], buffer, name)
    assert torch.equal(torch.get_rng_state(), after)
    return model, values


@pytest.fixture(params=["freed as ever", "freed at once"])
def pressure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models keep their temporary tensors; with no room for them, all are computed again and again."""
    if request.param == "freed at once":
        monkeypatch.setattr(storage_cache, "ALWAYS_KEPT", 0)
        monkeypatch.setattr(storage_cache, "LARGEST_KEPT", 0)


class LlamaLike(nn.Module):
    """Default initialisation, then normal for all matrices, a zero padding row, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Linear(16, width, bias=width == 7) for width in (16, 7, 1))
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.RMSNorm(16)])
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16), persistent=False)
        self.register_buffer("drawn", torch.rand(5))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.frozen.weight_decay = 0.0  # type: ignore[attr-defined]
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02 / 2**0.5 if "blocks.1" in name else 0.02
                nn.init.normal_(parameter, mean=0.0, std=std)
        with torch.no_grad():
            self.embed.weight[3].zero_()


KINDS = ("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "orthogonal_", "trunc_normal_")


class Initialisers(nn.Module):
    """All of torch's initialisers, at sizes on both sides of 16, whole and odd."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 5), (4, 4), (17, 9), (40, 3)]
        for kind in KINDS:
            for rows, columns in sizes:
                weight = nn.Parameter(torch.empty(rows, columns))
                self.register_parameter(f"{kind}{rows}", weight)
                getattr(nn.init, kind)(weight)
        self.tail = nn.Parameter(torch.empty(33))
        nn.init.trunc_normal_(self.tail, mean=0.0, std=1.0, a=1.0, b=2.5)
        self.sparse = nn.init.sparse_(nn.Parameter(torch.empty(9, 6)), sparsity=0.4)
        self.eye = nn.init.eye_(nn.Parameter(torch.empty(4, 6)))
        self.dirac = nn.init.dirac_(nn.Parameter(torch.empty(4, 4, 3)))
        self.constant = nn.init.constant_(nn.Parameter(torch.empty(3)), 0.3)


class InPlace(nn.Module):
    """Values by other ways: .data, slices, transposed and strided views, own generators, lists."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 8))
        self.weight.data.normal_(std=0.1)
        self.weight.data[2:4] = 0.5
        self.weight.data[:, ::2].uniform_(-1, 1)
        self.weight.data.t()[1].mul_(3).clamp_(max=0.2)
        own = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.empty(20).normal_(generator=own) + torch.rand(20, generator=own))
        self.turned = nn.Parameter(torch.empty(5, 4).t())
        nn.init.normal_(self.turned)
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.listed.data.mul_(2)
        self.scaled = nn.Parameter(torch.randn(4, 3) / torch.randn(()).abs().item())
        self.experts = nn.Parameter(torch.empty(3, 4, 4))
        for expert in self.experts:
            nn.init.kaiming_uniform_(expert)
        self.norm = nn.Parameter(self.weight.detach().norm(dim=1))
        self.copied = nn.Parameter(torch.empty(8))
        with torch.no_grad():
            self.copied.copy_(self.weight[0])
            self.weight.add_(1)
        self.short = nn.Parameter(torch.empty(9, dtype=torch.bfloat16).uniform_())
        self.part = nn.Parameter(torch.randn(10)[2:5])
        self.register_buffer("derived", self.weight.detach() * 2)
        self.register_buffer("row", self.weight.detach()[1], persistent=False)


def encoder() -> nn.Module:
    """Deep copies of one layer."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ConvTranspose1d(4, 2, 2), nn.Bilinear(2, 3, 4))


def reparametrised() -> nn.Module:
    made = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    return nn.Sequential(made, nn.utils.spectral_norm(nn.Linear(8, 4)), nn.BatchNorm1d(4))


def trained() -> nn.Module:
    """One step of training while building; running statistics change outside of what operators declare."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    torch.autograd.backward(model(torch.randn(5, 6)).square().mean())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
    model.zero_grad()
    return model


BUILDS: dict[str, Build] = {
    "llama": LlamaLike,
    "initialisers": Initialisers,
    "in_place": InPlace,
    "lstm": lambda: nn.LSTM(5, 7, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=8),
    "encoder": encoder,
    "sixteen_bit": lambda: encoder().to(torch.bfloat16),
    "copy": lambda: copy.deepcopy(LlamaLike()),
    "convolutions": convolutions,
    "reparametrised": reparametrised,
    "trained": trained,
}


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.usefixtures("pressure")
def test_values_are_those_of_a_model_built_at_once(kind: str) -> None:
    model, _ = assert_deferred_equals_built(BUILDS[kind])
    if kind in ("llama", "copy"):
        assert model.head.weight is model.embed.weight
    if kind == "llama":
        assert model.frozen.weight_decay == 0.0


@pytest.mark.parametrize("kind", ["llama", "initialisers"])
def test_the_default_dtype_and_device_of_the_time_of_building_count(kind: str) -> None:
    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cpu"):
                return BUILDS[kind]()
        finally:
            torch.set_default_dtype(before)

    if kind == "initialisers":  # there is no orthogonal matrix in 16 bit
        with pytest.raises(RuntimeError, match="not implemented for 'BFloat16'"):
            construct_deferred(build)
        return
    _, values = assert_deferred_equals_built(build)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert values["embed.weight"].dtype == torch.bfloat16
        assert values["embed.weight"].device == torch.device("cpu")


def test_values_are_tensors_of_their_own() -> None:
    """Writing to one, and drawing random numbers in between, changes nothing."""
    for build in (LlamaLike, InPlace):
        torch.manual_seed(1)
        expected = dict(build().named_parameters())
        torch.manual_seed(1)
        _, values = construct_deferred(build)
        for name in values:
            values[name].zero_()
            torch.rand(3)
            same(values[name], expected[name].detach(), name)
            assert values[name].untyped_storage().nbytes() == values[name].nbytes
            assert not values[name].requires_grad
        assert "nothing" not in values
        with pytest.raises(KeyError, match="nothing"):
            values["nothing"]


class Loaded(nn.Module):
    """Weights from elsewhere; the buffer that they come through is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        raw = bytearray(4 * 16)
        for layer, value in ((self.first, 1.5), (self.second, 2.5)):
            raw[:] = memoryview(bytes(torch.full((16,), value).view(torch.uint8).tolist()))
            layer.weight.data.copy_(torch.frombuffer(raw, dtype=torch.float32).view(4, 4))
        raw[:] = bytes(len(raw))
        saved = torch.frombuffer(bytearray(b"\x01\x02\x03\x04" * 16), dtype=torch.float32).view(4, 4)
        self.third = nn.Linear(4, 4, bias=False)
        self.third.load_state_dict({"weight": saved})


def test_loaded_weights_are_held_and_mentioned(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    assert_deferred_equals_built(Loaded)
    assert "held in memory" not in caplog.text + capfd.readouterr().err
    monkeypatch.setattr(deferred_module, "HELD_UNMENTIONED", 100)
    assert_deferred_equals_built(Loaded)
    text = caplog.text + capfd.readouterr().err
    assert text.count("initial values are held in memory, 0 MiB of them") == 1
    assert "among them those of first.weight, second.weight, third.weight" in text


class Reached(nn.Module):
    """Code that goes around operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.same_place = self.first.weight.data_ptr() == self.second.weight.data_ptr()
        values = self.first.weight.tolist()
        self.register_buffer("values", torch.tensor(values))
        self.first.weight.detach().untyped_storage()[5] = 63
        self.third = nn.Parameter(self.first.weight.detach() + 1)
        self.register_buffer("copied", copy.deepcopy(self.second.weight.detach()))


@pytest.mark.usefixtures("pressure")
def test_code_that_reaches_the_memory_finds_values_there() -> None:
    model, _ = assert_deferred_equals_built(Reached)
    assert not model.same_place


@pytest.mark.usefixtures("pressure")
def test_parameters_of_a_tensor_subclass_are_held() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        pair = TwoTensor(model[0].weight.detach().clone(), torch.randn(3, 3))
        model[0].weight = nn.Parameter(pair)
        with torch.no_grad():
            model[0].weight.mul_(2)
        return model

    torch.manual_seed(17)
    expected = dict(build().named_parameters())
    torch.manual_seed(17)
    model, values = construct_deferred(build)
    assert isinstance(model[0].weight, TwoTensor)
    assert model[0].weight.a.is_meta
    for name in ("a", "b"):
        assert torch.equal(getattr(values["0.weight"], name), getattr(expected["0.weight"], name))
    same(values["1.weight"], expected["1.weight"].detach(), "1.weight")


def test_a_failed_operator_leaves_its_tensor_as_it_was() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match="normal expects std >= 0"):
            model[0].weight.data.normal_(0, -1)
        model[0].weight.data[0].add_(1)
        return model

    assert_deferred_equals_built(build)
