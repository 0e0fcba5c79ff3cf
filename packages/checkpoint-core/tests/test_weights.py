"""Weights: the model's own names, ties, shards, and what other readers make of the files."""

import json
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from checkpoint_core import CheckpointError, ModelState, OptimizerState, load_model_weights
from checkpoint_core.encoding import copy_values
from checkpoint_core.model_directory import weight_files
from checkpoint_core.model_state import unwrap
from checkpoint_core.tensor_files import DTYPE_CODES

Write = Callable[..., Path]


class Tied(nn.Module):
    """A language model in miniature: the head is the embedding."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 7, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("dropped", torch.arange(3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


@pytest.fixture
def write(store: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a model's weights into a directory."""

    def weights(model: nn.Module, directory: Path, max_shard_size: int = 10**9) -> Path:
        return store(ModelState(model), "model", directory, max_shard_size)

    return weights


def test_tied_weights_once_with_alias(write: Write, tmp_path: Path) -> None:
    model = Tied()
    write(model, tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert "embed.weight" in stored
    assert not {"head.weight", "dropped"} & set(stored)
    assert torch.equal(stored["kept"], model.kept)

    tied, untied, other_reader = Tied(), Tied(tie=False), Tied()
    load_model_weights(tied, tmp_path / "m")
    assert torch.equal(tied.embed.weight, model.embed.weight)
    assert tied.head.weight is tied.embed.weight
    load_model_weights(untied, tmp_path / "m")
    assert torch.equal(untied.head.weight, model.embed.weight)
    assert untied.head.weight is not untied.embed.weight
    load_model(other_reader, tmp_path / "m" / "model.safetensors")
    assert torch.equal(other_reader.head.weight, model.embed.weight)


def test_untied_file_into_tied_model_is_refused(write: Write, tmp_path: Path) -> None:
    write(Tied(tie=False), tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"ties embed\.weight and head\.weight"):
        load_model_weights(Tied(), tmp_path / "m")


def test_wrappers_do_not_show(write: Write, tmp_path: Path) -> None:
    model = Tied()
    expected = set(model.state_dict()) - {"head.weight"}
    model.block[0] = torch.compile(model.block[0], backend="eager")
    model.block[1] = checkpoint_wrapper(model.block[1])
    compiled = torch.compile(model, backend="eager")
    assert any("_orig_mod" in name for name in compiled.state_dict())
    write(compiled, tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert set(stored) == expected
    plain = Tied()
    load_model_weights(plain, tmp_path / "m")
    assert torch.equal(plain.block[0].weight, stored["block.0.weight"])
    write(plain, tmp_path / "n")
    with torch.no_grad():
        model.block[1].weight.zero_()
    load_model_weights(compiled, tmp_path / "n")
    assert torch.equal(model.block[1].weight, plain.block[1].weight)


def test_a_wrapper_that_looks_inside_for_submodules_is_unwrapped() -> None:
    class Inward(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

        def get_submodule(self, target: str) -> nn.Module:
            return self._orig_mod.get_submodule(target)

    model = nn.Linear(2, 2)
    assert unwrap(Inward(model)) is model


def test_a_submodule_called_module_keeps_its_name(write: Write, tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    write(model, tmp_path / "m")
    assert set(load_file(tmp_path / "m" / "model.safetensors")) == {"module.weight", "module.bias"}


def test_shards_and_index(write: Write, tmp_path: Path) -> None:
    model = Tied()
    write(model, tmp_path / "m", max_shard_size=100)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    union = {}
    for name in files:
        union.update(load_file(tmp_path / "m" / name))
    assert {name: tensor.shape for name, tensor in union.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items() if name != "head.weight"
    }
    assert set(index["weight_map"]) == set(union)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in union.values())
    fresh = Tied()
    load_model_weights(fresh, tmp_path / "m")
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_every_dtype_is_read_by_safetensors(write: Write, tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(5, 3).to(dtype), requires_grad=False)})
    model.register_buffer("odd", torch.tensor([True, False, True]))
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("scalar", torch.tensor(3, dtype=torch.int16))
    model.register_buffer("strided", torch.arange(6).reshape(2, 3).t())
    write(model, tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert stored[name].dtype == tensor.dtype
        assert stored[name].shape == tensor.shape
        assert stored[name].tolist() == tensor.tolist()


def test_mismatches_are_named_and_change_nothing(write: Write, tmp_path: Path) -> None:
    write(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), tmp_path / "m")
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "c": nn.Linear(2, 2)})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_model_weights(model, tmp_path / "m")
    message = str(caught.value)
    assert "missing: c.weight, c.bias" in message
    assert "unexpected: b.weight" in message or "unexpected: b.bias" in message
    assert "a.weight ([2, 2] in the file, [2, 3] in the model)" in message
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_rotary_frequencies_of_old_files_may_be_left_over(tmp_path: Path) -> None:
    """Which the files of Llama 2 hold, and follow from the configuration."""
    values = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    save_file(
        {**values, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors"
    )
    model = nn.Linear(2, 2)
    load_model_weights(model, tmp_path)
    assert torch.equal(model.weight, torch.ones(2, 2))
    save_file(
        {**values, "layers.0.self_attn.rotary_emb.scale": torch.ones(4)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="unexpected: layers"):
        load_model_weights(model, tmp_path)


def test_dtype_difference_casts_with_one_warning(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = nn.Linear(4, 4)
    write(source, tmp_path / "m")
    target = nn.Linear(4, 4).bfloat16()
    with caplog.at_level(logging.WARNING):
        load_model_weights(target, tmp_path / "m")
    assert target.weight.dtype == torch.bfloat16
    assert torch.equal(target.weight, source.weight.bfloat16())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "casting 2 tensors" in caplog.text


CAST = {
    "complex to real": (torch.tensor([1 + 1j]), torch.float32, False),
    "no imaginary part": (torch.tensor([2 + 0j]), torch.float32, True),
    "float to integer": (torch.tensor([0.5]), torch.int64, False),
    "a count as float": (torch.tensor([7.0]), torch.int64, True),
    "not a number": (torch.tensor([torch.nan]), torch.int32, False),
    "to bool": (torch.tensor([2]), torch.bool, False),
    "sign": (torch.tensor([-1], dtype=torch.int8), torch.uint8, False),
    "large count": (torch.tensor([2**24 + 1]), torch.float32, False),
    "overflow": (torch.tensor([1.0, 65520.0]), torch.float16, False),
    "overflow beside nan": (torch.tensor([torch.nan, -1e6]), torch.float16, False),
    "overflow that saturates": (torch.tensor([1e6]), torch.float8_e4m3fn, False),
    "of float8": (torch.tensor([57344.0]).to(torch.float8_e5m2), torch.float8_e4m3fn, False),
    "overflow of a part": (torch.tensor([1e300], dtype=torch.float64), torch.complex64, False),
    "rounds to the largest": (torch.tensor([65519.0, torch.inf, torch.nan]), torch.float16, True),
    "rounds": (torch.tensor([1 / 3, 1e-30, -3e38]), torch.bfloat16, True),
}


@pytest.mark.parametrize("case", CAST)
def test_a_cast_rounds_and_loses_nothing_else(write: Write, tmp_path: Path, case: str) -> None:
    values, dtype, fits = CAST[case]

    def model(values: torch.Tensor) -> nn.Module:
        module = nn.Module()
        module.register_buffer("scale", values)
        return module

    source = model(values)
    write(source, tmp_path / "m")
    for load in (
        lambda to: load_model_weights(to, tmp_path / "m"),
        lambda to: ModelState(to).load_state_dict(ModelState(source).state_dict()),
    ):
        target = model(torch.zeros(values.shape, dtype=dtype))
        if fits:
            load(target)
            expected = (values.real if values.is_complex() else values).to(dtype)
            assert torch.equal(target.scale.nan_to_num(1), expected.nan_to_num(1))
        else:
            with pytest.raises(
                CheckpointError, match=rf"^scale is stored as {values.dtype}, with .* {dtype} "
            ):
                load(target)
            assert not target.scale.to(torch.complex64).any()


def test_every_dtype_takes_what_it_can_hold() -> None:
    for stored, dtype in product(DTYPE_CODES, DTYPE_CODES):
        target = torch.empty(3, dtype=dtype)
        copy_values(target, torch.tensor([0, 1, 1]).to(stored), "scale")
        assert target.to(torch.complex64).tolist() == [0, 1, 1]


def test_extra_state_is_refused_by_name() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None:
            pass

    with pytest.raises(CheckpointError, match=r"layer .*_extra_state"):
        ModelState(nn.ModuleDict({"layer": WithExtra(2, 2)})).state_dict()


def test_a_copy_that_state_dict_makes_is_refused_by_name() -> None:
    """What is loaded into it would not reach the model."""

    def hooked(change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].register_buffer("none", torch.empty(0))
        model[0].register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({key: change(state[key]) for key in state})
        )
        return model

    for change in (torch.clone, torch.Tensor.half):
        with pytest.raises(CheckpointError, match=r"weight 0\.weight is a copy that state_dict\(\) of"):
            ModelState(hooked(change)).state_dict()
    saved, loaded = hooked(torch.Tensor.detach), hooked(lambda tensor: tensor.data)
    ModelState(loaded).load_state_dict(ModelState(saved).state_dict())
    assert torch.equal(saved[0].weight, loaded[0].weight)


def test_index_cannot_point_outside_and_pickles_are_not_read(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle that is never read"):
        load_model_weights(nn.Linear(2, 2), tmp_path)


def test_wrappers_inside_wrappers_do_not_show(write: Write, tmp_path: Path) -> None:
    model = nn.Sequential(
        checkpoint_wrapper(torch.compile(nn.Linear(2, 2), backend="eager")),
        checkpoint_wrapper(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))),
    )
    write(model, tmp_path / "m")
    expected = {"0.weight", "0.bias", "1.0.weight", "1.0.bias"}
    assert set(load_file(tmp_path / "m" / "model.safetensors")) == expected
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert set(OptimizerState(optimizer, model).names()) == expected
    load_model_weights(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), tmp_path / "m")


def test_a_pending_conjugation_or_negation_is_loaded_into(write: Write, tmp_path: Path) -> None:
    def model(value: torch.Tensor) -> nn.Module:
        module = nn.Module()
        module.register_buffer("conjugated", value.clone().conj())
        module.register_buffer("negated", value.clone().conj().imag)
        return module

    source = model(torch.randn(40, dtype=torch.complex64))
    write(source, tmp_path / "m")
    target = model(torch.zeros(40, dtype=torch.complex64))
    load_model_weights(target, tmp_path / "m")
    assert torch.equal(target.conjugated, source.conjugated)
    assert torch.equal(target.negated, source.negated)
