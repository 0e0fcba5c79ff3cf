"""`plan --config`: recipes fit the GPUs that they name, and what does not fit is told with what would."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llama_pretrain import LlamaConfig
from llama_pretrain.cli import main
from llama_pretrain.config_files import recipe_names
from llama_pretrain.mesh import parse_mesh
from llama_pretrain.settings import resolve

_PIPELINES = [name for name in recipe_names() if resolve({"config": name}).trainer == "pipeline"]
# Large ones have more layers, and other numbers of GPUs.
_PLANNED = [
    pytest.param(name, marks=[] if name.startswith("tiny") else [pytest.mark.full])
    for name in recipe_names()
    if name not in _PIPELINES
]


@pytest.mark.parametrize("name", _PLANNED)
def test_a_recipe_fits_the_gpus_that_it_names(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", "--config", name, "--json", str(file)]) == 0
    assert "\nfits: needs " in capsys.readouterr().out
    figures, args = json.loads(file.read_text()), resolve({"config": name})
    plan = figures["plan"]
    assert figures["fits"]
    assert figures["instead"] is None
    mesh = parse_mesh(args.mesh)
    shared = plan["mesh"]["shards"] * mesh.tensor * mesh.context
    assert shared * plan["mesh"]["replicas"] == figures["count"]
    assert plan["batch_size"] == args.per_device_train_batch_size
    assert plan["sequence_length"] == args.sequence_length
    # Weights and gradients of float32, and AdamW's two moments, on as many ranks as share a copy.
    assert plan["parameters"] == plan["gradients"]
    assert plan["parameters"] >= 4 * plan["parameter_count"] / shared


def test_what_does_not_fit_is_told_with_what_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As wide as 7B, and of three layers.
    shape = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=3,
        num_attention_heads=32,
        max_position_embeddings=4096,
    )
    shape.save(tmp_path)
    file, config = tmp_path / "plan.json", tmp_path / "mine.yaml"
    settings = {"model": str(tmp_path), "mesh": "shard=8", "sequence_length": 4096}
    batch = {"per_device_train_batch_size": 2, "fsdp2": {"param_dtype": "bfloat16"}}
    config.write_text(json.dumps(settings | batch))
    words = ["--config", str(config), "--json", str(file)]
    assert main(["plan", *words]) == 0
    memory = f"{0.85 * json.loads(file.read_text())['plan']['total'] / 2**30:.2f}"
    capsys.readouterr()
    assert main(["plan", *words, "--gpu-memory", memory]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"does not fit: needs [\d.]+ GiB of {memory}", told)
    assert "blocks checkpointed: needs" in told
    start = f"torchrun --standalone --nproc-per-node 8 -m llama_pretrain train --config {config} --mesh "
    (command,) = [line for line in told.splitlines() if line.startswith(start)]
    figures = json.loads(file.read_text())
    assert not figures["fits"]
    assert figures["instead"]["fits"]
    assert figures["instead"]["command"] == command
    # It is the same run but for the layout, and fits as it stands.
    options = command.partition(" train ")[2].split()
    assert main(["plan", *options, "--gpu-memory", memory]) == 0
    assert "\nfits: needs " in capsys.readouterr().out


def test_what_does_not_fit_is_told_where_no_other_layout_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--config", "tiny-sharded", "--mesh", "shard=12", "--gpu-memory", "0.01"]) == 0
    told = capsys.readouterr().out
    assert "does not fit: needs" in told
    assert "the mesh is not a multiple of gpus_per_node=8" in told


@pytest.mark.full
def test_rows_are_longer_where_several_processes_share_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for mesh in ("shard=2", "cp=2"):
        words = ["--config", "tiny-sharded", "--mesh", mesh, "--gpu-memory", "1.3", "--longest-sequence"]
        assert main(["plan", *words, "--json", str(tmp_path / "plan.json")]) == 0
        told = capsys.readouterr().out
        found.append(json.loads((tmp_path / "plan.json").read_text())["longest_sequence"])
        assert f"rows that fit: up to about {found[-1]:,} tokens" in told
    assert 1.5 * found[0] < found[1] < 2.5 * found[0]


def test_too_little_memory_for_any_rows_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "tiny-sharded", "--gpu-memory", "0.5", "--longest-sequence"]) == 0
    assert "rows that fit: not even 256 tokens" in capsys.readouterr().out
    assert main(["plan", "--longest-sequence"]) == 2
    assert "Give --config" in capsys.readouterr().err


def test_gradients_that_are_views_of_the_buckets_count_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    for views in (False, True):
        config = {"model": "tiny", "mesh": "dp=2", "ddp": {"gradient_as_bucket_view": views}}
        (tmp_path / "mine.yaml").write_text(json.dumps(config))
        words = ["--config", str(tmp_path / "mine.yaml"), "--json", str(tmp_path / "plan.json")]
        assert main(["plan", *words]) == 0
        plans.append(json.loads((tmp_path / "plan.json").read_text())["plan"])
        assert ("does without" in capsys.readouterr().out) != views
    assert plans[0]["reduced"] == plans[0]["gradients"]
    assert plans[1]["reduced"] == 0


H100 = ["--gpu", "NVIDIA H100 80GB HBM3"]


def test_time_and_cost_follow_from_the_mfu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    words = ["plan", "--config", "tiny-sharded", *H100, "--mfu", "40%", "--price", "2", "--json", str(file)]
    assert main(words) == 0
    shown, time = capsys.readouterr().out, json.loads(file.read_text())["time"]
    args = resolve({"config": "tiny-sharded"})
    mesh = parse_mesh(args.mesh)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * mesh.data_count
    assert time["tokens"] == args.max_steps * rows * args.sequence_length, "those of the run"
    seconds = time["tokens"] * time["flops_per_token"] / (mesh.world_size * 0.4 * time["peak_flops"])
    assert time["days"] == pytest.approx([seconds / 86_400] * 2)
    assert time["cost"] == pytest.approx([seconds / 3600 * mesh.world_size * 2] * 2)
    assert "MFU 40% (given)" in shown

    log = [
        {"global_step": step, "loss": 1.0, "mfu": mfu / 100} for step, mfu in enumerate([3, *range(30, 41)])
    ]
    (tmp_path / "trainer_logs.json").write_text(json.dumps(log))
    assert main([*words[:5], "--mfu", str(tmp_path), "--tokens", "1e9", "--json", str(file)]) == 0
    time = json.loads(file.read_text())["time"]
    assert time["mfu"] == pytest.approx([0.31, 0.39]), "without the first entry"
    assert time["tokens"] == 1e9
    assert "1 billion tokens: " in capsys.readouterr().out


@pytest.mark.full
def test_time_of_a_model_alone_is_told_of_an_assumed_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "7b", "--gpus", "8", *H100, "--tokens", "2e12"]) == 0
    shown = capsys.readouterr().out
    # 6 x 6.74e9 and attention over rows of 4,096, times 2e12 tokens, over 8 x 989.4e12 x MFU.
    assert "7b: 8 x NVIDIA H100 80GB HBM3, 989.4 TFLOP/s bf16 each; 46.1 GFLOPs per token" in shown
    assert "MFU 30% to 50% (assumed)" in shown
    assert "2,000 billion tokens: 270 to 449 days, 51,754 to 86,257 GPU hours\n" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpu", "H100"], "gpu='H100' is not the name of one GPU, as torch reports it. Use: NVIDIA H100"),
        (["--gpu", "Unheard"], "see `hardware-table list`"),
        (["--gpu", "Tesla V100-PCIE-16GB"], "has no known bf16 peak"),
        (["--mfu", "0.4"], "mfu='0.4' is about the time of a run on a GPU, which is not named. Give --gpu."),
        ([*H100, "--mfu", "40"], "mfu='40' is neither a share above 0, up to 1, nor a run"),
        ([*H100, "--tokens", "-1"], "tokens=-1.0 must be 0 or more"),
        ([*H100, "--price", "nan"], "price=nan must be 0 or more"),
        ([*H100, "--mfu", __file__], "cannot be read"),
    ],
)
def test_wrong_words_about_time_are_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "7b", *words]) == 2
    assert told in capsys.readouterr().err


def test_time_in_float8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: tiny\nmesh: shard=2\nfp8_recipe: tensorwise\nmixed_precision: bf16\n"
    )
    assert main(["plan", "--config", str(tmp_path / "run.yaml"), *H100]) == 2
    assert "is used in float8 and in other types" in capsys.readouterr().err


def test_options_of_train_beat_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("model: 160m\nvocab_size: 512\nmesh: shard=2\nsequence_length: 64\n")
    words = ["--config", str(tmp_path / "mine.yaml"), "--mesh", "dp=2,shard=4"]
    assert main(["plan", *words, "--per-device-train-batch-size", "3"]) == 0
    told = capsys.readouterr().out
    assert "160m with fsdp2 on mesh dp=2,shard=4, 8 GPUs of 80 GiB" in told
    assert "2 copies, each over 4 GPUs; 3 x 64 tokens on each" in told


@pytest.mark.parametrize(
    "kept", [{"diloco": {"enabled": True}}, {"compression": {"method": "powerSGD"}}], ids=str
)
def test_copies_that_no_plan_counts_are_refused(
    kept: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"model": "tiny", "mesh": "dp=2", **kept}))
    assert main(["plan", "--config", str(tmp_path / "mine.yaml")]) == 2
    assert "keeps copies that a plan does not count" in capsys.readouterr().err


@pytest.mark.parametrize("name", _PIPELINES)
def test_each_rank_of_a_pipeline_is_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", "--config", name, "--json", str(file)]) == 0
    told = capsys.readouterr().out
    assert "\nfits: needs 1.0 GiB of 80" in told
    assert "1f1b, 4 microbatches" in told
    figures = json.loads(file.read_text())
    first, last = figures["plan"]["per_rank"]
    assert (first["layers"], last["layers"]) == ([[0, 1]], [[2, 3]])
    # Embedding and head have tables of their own, and the last norm is on the last rank.
    assert first["parameters"] + last["parameters"] == 4 * figures["plan"]["parameter_count"]
    assert first["activations"] > 0
    assert figures["fits"]
    assert figures["instead"] is None


@pytest.mark.full
def test_a_pipeline_that_does_not_fit_is_told_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--config", "tiny-pipeline", "--gpu-memory", "1.08"]
    assert main(["plan", *layout, "--sequence-length", "1024"]) == 0
    told = capsys.readouterr().out
    assert "does not fit: needs" in told
    start = "torchrun --standalone --nproc-per-node 2 -m llama_pretrain train --config tiny-pipeline --mesh "
    (command,) = [line for line in told.splitlines() if line.startswith(start)]
    # Two ranks with four rows each do what the pipeline of two did with eight.
    assert "--per-device-train-batch-size 4" in command
    options = command.partition(" train ")[2].split()
    assert main(["plan", *options, "--gpu-memory", "1.08", "--sequence-length", "1024"]) == 0
    assert "\nfits: needs " in capsys.readouterr().out


def test_rows_that_other_layouts_cannot_divide_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny-pipeline", "--per-device-train-batch-size", "7", "--gpu-memory", "0.5"]
    assert main(["plan", *words]) == 0
    told = capsys.readouterr().out
    assert "no other layout was looked for: 7 rows of a pipeline are not so many for each" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "7b-8gpus", "--gpus", "16"], "gpus=16 contradicts --config"),
        (["--config", "7b-9gpus"], "Did you mean '7b-96gpus'"),
        (["--config", "7b-8gpus", "--sequence-length", "9000"], "sequence_length=9000"),
        (["--config", "tiny-cpu", "--gpus-per-node", "0"], "gpus_per_node=0 must be 1 or more"),
        (["--config", "tiny-cpu", "--gpu-memory", "0"], "gpu_memory=0.0 must be more than 0"),
        (["--config", "tiny-cpu", "--json", "nowhere/plan.json"], "json='nowhere/plan.json' is in nowhere"),
    ],
)
def test_mistakes_are_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
