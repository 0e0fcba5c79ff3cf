"""The console script over real checkpoints: diff and export."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    DirectoryLease,
    ModelState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    load_model_weights,
)
from checkpoint_core.cli import main
from dist_env import StaticDistributedEnvironment

SHARED, OWN = SharingPattern.REPLICATED, SharingPattern.PER_RANK


class State:
    def __init__(self, state: dict[str, object]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


class Tokenizer:
    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
        (Path(directory) / "extra").mkdir()
        (Path(directory) / "extra" / "merges.txt").write_text("a b")


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {
            "model_type": "tied",
            "torch_dtype": "float32",
            "text_config": {"dtype": "float32", "layers": 2},
            "vision_config": {"dtype": None},
            "quantization_config": {"dtype": "float32"},
        }
        self.embed = nn.Embedding(12, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3, 2**40]))
        self.register_buffer("scale", torch.randn(5, dtype=torch.float16))


def save(directory: Path, components: list[StateComponent], **options: object) -> Path:
    manager = CheckpointManager(
        CheckpointConfig(output_dir=directory),
        dist=StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider(components),
        preprocessor=options.pop("preprocessor", None),
    )
    return manager.save_checkpoint(1, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Saves states, and a model where given, as the checkpoint of step 1 under a name."""

    def make(name: str, model: nn.Module | None = None, **states: dict[str, object]) -> Path:
        components = [
            StateComponent(key=key, stateful=State(state), sharing_pattern=OWN if key == "own" else SHARED)
            for key, state in states.items()
        ]
        if model is not None:
            weights = StateComponent(key="model", stateful=ModelState(model), sharing_pattern=SHARED)
            return save(tmp_path / name, [weights, *components], preprocessor=Tokenizer())
        return save(tmp_path / name, components)

    return make


def row(out: str, *words: str) -> list[str]:
    """The cells of the one row that begins with these words."""
    [found] = [line.split() for line in out.splitlines() if line.split()[: len(words)] == list(words)]
    return found[len(words) :]


def test_equal_checkpoints(saved, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = TiedModel()
    nan = float("nan")
    a = saved("a", model, train={"x": nan, "t": torch.tensor([nan, math.inf])}, own={"n": 1})
    b = saved("b", model, train={"x": nan, "t": torch.tensor([nan, math.inf])}, own={"n": 1})
    assert main(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "6 tensors compared: 6 equal; 0 other entries differ"


def test_every_kind_of_difference(saved, capsys: pytest.CaptureFixture[str]) -> None:
    long = torch.zeros(2_500_000, dtype=torch.float32)  # Several pieces.
    other = long.clone()
    other[2_400_000] = -0.25
    other[5] = 4.0
    other[7] = -0.0
    a = saved(
        "a",
        train={
            "long": long,
            "whole": torch.tensor([2**62, 1, -5]),
            "unsigned": torch.tensor([2**63, 1], dtype=torch.uint64),
            "flags": torch.tensor([True, False]),
            "complex": torch.tensor([3 + 4j]),
            "tiny": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
            "not": torch.tensor([float("nan"), 1.0, math.inf]),
            "same": torch.arange(4),
            "shape": torch.zeros(2, 3),
            "dtype": torch.zeros(3),
            "gone": torch.zeros(1),
            "nested": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], 1: "one", "steps": 3, "k": None},
            "rates": [1, 2, 3],
        },
        own={"n": 1},
    )
    b = saved(
        "b",
        train={
            "long": other,
            "whole": torch.tensor([2**62 + 1, 1, -7]),
            "unsigned": torch.tensor([2**63 + 3, 1], dtype=torch.uint64),
            "flags": torch.tensor([True, True]),
            "complex": torch.tensor([0j]),
            "tiny": torch.tensor([1.0, 1.0]).to(torch.float8_e4m3fn),
            "not": torch.tensor([0.0, 1.0, 1.0]),
            "same": torch.arange(4),
            "shape": torch.zeros(3, 2),
            "dtype": torch.zeros(3, dtype=torch.bfloat16),
            "new": torch.zeros(1),
            "nested": {"groups": [{"lr": 0.2, "betas": (0.9, 0.95)}], 1: "uno", "steps": 3.0, "k": None},
            "rates": [1, 2],
        },
        own={"n": float("inf")},
        late={"z": 0},
    )
    assert main(["diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    values = {
        "long": ["4", "1", "3", "of", "2500000"],
        "whole": ["2", "0.285714", "2", "of", "3"],
        "unsigned": ["3", f"{3 / 2**63:.6g}", "1", "of", "2"],
        "flags": ["1", "1", "1", "of", "2"],
        "complex": ["5", "1", "1", "of", "1"],
        "tiny": ["1", "0.5", "1", "of", "2"],
    }
    for name, expected in values.items():
        assert row(out, "train", name) == ["values", *expected], name
    assert row(out, "train", "not") == ["values,", "2", "with", "NaN", "or", "inf", "0", "0", "2", "of", "3"]
    assert row(out, "train", "shape") == ["shape", "[2,", "3]", "|", "[3,", "2]"]
    assert row(out, "train", "dtype") == ["dtype", "float32", "|", "bfloat16"]
    assert row(out, "train", "gone") == ["only", "in", "A"]
    assert row(out, "train", "new") == ["only", "in", "B"]
    assert row(out, "train", "nested.groups[0].lr") == ["0.1", "0.2"]
    assert row(out, "train", "nested.groups[0].betas[1]") == ["0.99", "0.95"]
    assert row(out, "train", "nested[1]") == ['"one"', '"uno"']
    assert row(out, "train", "nested.steps") == ["3", "3.0"]
    assert row(out, "train", "rates[2]") == ["3", "absent"]
    assert row(out, "own", "rank", "0", "n")[0] == "1"
    assert row(out, "late") == ["(component)", "absent", "declared"]
    assert " same " not in out
    summary = out.splitlines()[-1]
    assert summary.startswith("12 tensors compared: ")
    assert "1 equal" in summary
    assert "7 of other values" in summary


def test_diff_of_files_beside_the_components(saved, capsys: pytest.CaptureFixture[str]) -> None:
    model = TiedModel()
    a = saved("a", model)
    model.config["text_config"]["layers"] = 3
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    b = saved("b", model)
    (b / "extra" / "merges.txt").write_text("a c")
    (b / "tokenizer.json").unlink()
    assert main(["diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert row(out, "config.json", "text_config.layers") == ["2", "3"]
    assert row(out, "model", "head.weight") == ["only", "in", "B"]
    assert row(out, "tied", "weights", "model.head.weight")[-1] == "absent"
    assert row(out, "extra/merges.txt")[0] == "(content)"
    assert row(out, "tokenizer.json", "(file)") == ["there", "absent"]
    assert "tokenizer.json is not in B" in out
    (b / "model.safetensors").write_bytes((b / "model.safetensors").read_bytes()[:-4])
    assert main(["diff", str(a), str(b)]) == 2
    error = capsys.readouterr().err
    assert f"{b / 'model.safetensors'} is not a readable safetensors file" in error
    assert len(error.splitlines()) == 1


def contents(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_export_writes_a_model_directory(saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = TiedModel()
    checkpoint = saved("a", model, train={"n": 1})
    (checkpoint / "planted.bin").write_bytes(b"\x80\x04]\x94.")
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 5 tensors, ")
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == {
        "config.json",
        "extra/merges.txt",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (out / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert (out / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    fresh = TiedModel()
    load_model_weights(fresh, out)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    assert fresh.head.weight is fresh.embed.weight


@pytest.mark.parametrize(
    ("option", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_export_casts_only_floating_point(saved, tmp_path: Path, option: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TiedModel()
    checkpoint = saved("a", model)
    out = tmp_path / "out"
    command = ["export", str(checkpoint), str(out), "--dtype", option, "--max-shard-size", "300"]
    assert main(command) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 1
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors = contents(shard)
        assert {index["weight_map"][name] for name in tensors} == {shard.name}
        found.update(tensors)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    assert set(found) == {"embed.weight", "body.weight", "body.bias", "seen", "scale"}
    for name, tensor in found.items():
        original = model.state_dict()[name]
        expected = original.to(dtype) if original.is_floating_point() else original
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    config = json.loads((out / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    assert config == {
        "model_type": "tied",
        "torch_dtype": name,
        "text_config": {"dtype": name, "layers": 2},
        "vision_config": {"dtype": name},
        "quantization_config": {"dtype": "float32"},
    }
    fresh = TiedModel().to(dtype)
    load_model_weights(fresh, out)
    assert torch.equal(fresh.head.weight, model.head.weight.to(dtype))


def test_export_refuses(saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = TiedModel()
    checkpoint = saved("a", model)
    out = tmp_path / "out"
    command = ["export", str(checkpoint), str(out)]
    assert main([*command, "--max-shard-size", "100"]) == 0
    (out / "README.md").write_text("mine")
    assert main(command) == 2
    assert f"{out / 'model-00001-of-00004.safetensors'} exists. Pass --overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    # Old shards and their index would be a second model beside the new one.
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "extra",
        "model.safetensors",
        "tokenizer.json",
    ]
    before = (out / "model.safetensors").read_bytes()
    for target in (checkpoint, checkpoint / "inside", saved("other", train={"n": 1})):
        assert main(["export", str(checkpoint), str(target), "--overwrite"]) == 2
        assert "is a checkpoint, which must not change" in capsys.readouterr().err
    with torch.no_grad():
        model.body.weight[3, 3] = 70000.0
    large = saved("large", model)
    assert main(["export", str(large), str(out), "--overwrite", "--dtype", "fp16"]) == 2
    assert "tensor body.weight of" in capsys.readouterr().err
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(data)
    assert main([*command, "--overwrite"]) == 2
    assert "model.safetensors does not match its checksum" in capsys.readouterr().err
    (checkpoint / "model.safetensors").unlink()
    assert main([*command, "--overwrite"]) == 2
    assert "model.safetensors was deleted" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "other" / "checkpoint-1"), str(out), "--overwrite"]) == 2
    assert "Components with weights: none" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before
    assert not list(out.glob(".*"))


MEMORY = """
import resource, sys
import torch
from checkpoint_core.cli import main
small, large, out = sys.argv[1:]
for options in (["export", small, out + "/s", "--dtype", "bf16"], ["diff", small, small], ["verify", small]):
    assert main(options) == 0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for options in (["export", large, out + "/l", "--dtype", "bf16"], ["diff", large, large], ["verify", large]):
    assert main(options) == 0
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("grew by", (after - before) // 1024, "MiB")
"""


def test_memory_does_not_grow_with_the_model(saved, tmp_path: Path) -> None:
    small = saved("small", nn.Linear(4, 4))
    large = saved("large", nn.ModuleList([nn.Linear(4096, 4096, bias=False) for _ in range(2)]))  # 128 MiB
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, small, large, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
    )
    grown = int(done.stdout.splitlines()[-1].split()[2])
    assert grown < 48


def test_two_exports_into_one_directory(saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither was told to replace what the other writes."""
    checkpoint = str(saved("a", TiedModel()))
    out = tmp_path / "out"
    with DirectoryLease(out):
        assert main(["export", checkpoint, str(out)]) == 2
        assert f"{out} is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert not out.exists()
    assert main(["export", checkpoint, str(out)]) == 0
    assert not list(out.glob(".lease-*"))
