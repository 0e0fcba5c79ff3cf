"""Building a model on the host, on the device and on meta: equal tensors, equal ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_core import TrainingArguments
from trainer_core.errors import ConfigurationError
from trainer_core.model import construct, verify_initialised

Arguments = Callable[..., TrainingArguments]
CPU = torch.device("cpu")


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = tensors(model), tensors(other)
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.device == theirs[name].device, name
        assert tensor.requires_grad == theirs[name].requires_grad, name
        assert type(tensor) is type(theirs[name]), name
        assert torch.equal(tensor, theirs[name]), name


class Varied(nn.Module):
    """What real models do with tensors: ties, shared buffers, frozen and marked parameters, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        own = nn.Parameter(torch.randn(3))
        self.first, self.second = own, own
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.frozen.weight_decay = 0.0
        self.lstm = nn.LSTM(4, 4)
        table = torch.arange(5.0) ** 0.5
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("same_table", table, persistent=False)
        self.register_buffer("counts", torch.full((2,), 7))
        self.norm = nn.BatchNorm1d(3)
        self.empty = nn.Linear(2, 2, bias=False)
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.rand(2))])


def test_device_equals_default_under_one_seed(decoder: type[nn.Module], arguments: Arguments) -> None:
    models = []
    for where in ("default", "device"):
        torch.manual_seed(5)
        args = arguments(construct_model_on=where)
        models.append(construct(decoder, args, CPU, weights_will_be_loaded=False))
    assert_same(*models)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("kind", ["decoder", "varied"])
def test_meta_and_load_equals_default_and_load(
    kind: str, dtype: str | None, decoder: type[nn.Module], arguments: Arguments
) -> None:
    source: Any = decoder if kind == "decoder" else Varied
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    saved = construct(source, arguments(default_dtype=dtype), CPU, weights_will_be_loaded=False).state_dict()
    models = []
    for where in ("default", "meta"):
        args = arguments(construct_model_on=where, default_dtype=dtype)
        model = construct(source, args, CPU, weights_will_be_loaded=True)
        model.load_state_dict(saved)
        verify_initialised(model, saved)
        models.append(model)
    assert_same(*models)
    assert torch.get_default_dtype() == before
    built = models[1]
    if kind == "decoder":
        assert built.head.weight is built.embed.weight
        assert built.head.weight.dtype == getattr(torch, dtype or "float32")
    else:
        assert built.first is built.second
        assert built.table is built.same_table
        assert built.frozen.weight_decay == 0.0
        outputs = [m.lstm(torch.ones(2, 4, dtype=m.first.dtype))[0] for m in models]
        assert torch.equal(*outputs)


def test_meta_draws_and_allocates_nothing_while_building(
    decoder: type[nn.Module], arguments: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module keeps a parameter with storage before the model is complete."""
    seen: list[str] = []
    build = decoder.__init__

    def watched(self: nn.Module, *args: Any) -> None:
        build(self, *args)
        seen.extend(str(p.device) for p in self.parameters())

    monkeypatch.setattr(decoder, "__init__", watched)
    state = torch.get_rng_state()
    model = construct(decoder, arguments(construct_model_on="meta"), CPU, weights_will_be_loaded=True)
    assert set(seen) == {"meta"}
    assert {str(p.device) for p in model.parameters()} == {"cpu"}
    assert torch.equal(state, torch.get_rng_state())


def test_meta_without_checkpoint_is_default_with_a_warning(
    decoder: type[nn.Module], arguments: Arguments, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    models = []
    for where in ("default", "meta"):
        torch.manual_seed(9)
        args = arguments(construct_model_on=where)
        models.append(construct(decoder, args, CPU, weights_will_be_loaded=False))
    assert_same(*models)
    assert "construct_model_on='meta' finds no checkpoint" in caplog.text + capfd.readouterr().err


def test_tensors_that_nobody_filled_are_named(decoder: type[nn.Module], arguments: Arguments) -> None:
    args = arguments(construct_model_on="meta")
    model = construct(lambda: decoder(blocks=1), args, CPU, weights_will_be_loaded=True)
    names = [name for name in model.state_dict() if not name.endswith(("down.bias", "embed.weight", "steps"))]
    with pytest.raises(ConfigurationError, match=r"leaves steps, layers\.0\.down\.bias without a value"):
        verify_initialised(model, names)  # embed.weight is filled as head.weight
    verify_initialised(model, [*names, "steps", "layers.0.down.bias"])
    with pytest.raises(ConfigurationError, match=r"embed\.weight"):
        verify_initialised(model, [name for name in names if name != "head.weight"])


class Buffered(nn.Module):
    """A model with a buffer that no checkpoint holds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        values = {"fixed": torch.ones(3), "random": torch.rand(3), "derived": self.weight.detach() * 2}
        self.register_buffer("extra", values[kind], persistent=False)


@pytest.mark.parametrize(
    ("kind", "rule"), [("random", "holds random numbers"), ("derived", "is computed from parameters")]
)
def test_buffers_whose_value_would_be_lost_are_refused(kind: str, rule: str, arguments: Arguments) -> None:
    args = arguments(construct_model_on="meta")
    with pytest.raises(ConfigurationError, match=f"the buffer extra, which is in no checkpoint and {rule}"):
        construct(lambda: Buffered(kind), args, CPU, weights_will_be_loaded=True)
    fixed = construct(lambda: Buffered("fixed"), args, CPU, weights_will_be_loaded=True)
    assert torch.equal(fixed.extra, torch.ones(3))


@pytest.mark.parametrize("settings", [{"construct_model_on": "meta"}, {"default_dtype": "bfloat16"}])
def test_a_model_that_is_built_cannot_be_built_otherwise(
    settings: dict[str, Any], decoder: type[nn.Module], arguments: Arguments
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no effect on a model that is already built\. Pass model_init"
    ):
        construct(decoder(), arguments(**settings), CPU, weights_will_be_loaded=True)
    model = decoder()
    assert construct(model, arguments(), CPU, weights_will_be_loaded=False) is model


def test_model_init_must_return_a_module(arguments: Arguments) -> None:
    with pytest.raises(ConfigurationError, match="model_init='dict' must return"):
        construct(dict, arguments(), CPU, weights_will_be_loaded=False)  # type: ignore[arg-type]


def test_an_error_while_building_leaves_nothing_behind(arguments: Arguments) -> None:
    def fail() -> nn.Module:
        raise RuntimeError("stop")

    args = arguments(construct_model_on="meta", default_dtype="bfloat16")
    with pytest.raises(RuntimeError, match="stop"):
        construct(fail, args, CPU, weights_will_be_loaded=True)
    assert nn.Linear(1, 1).weight.device == CPU
    assert torch.get_default_dtype() == torch.float32
