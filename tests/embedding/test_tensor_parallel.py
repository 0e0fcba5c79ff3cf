"""A dimension that the packages know nothing of, by public names: with sharding, the curve of one process."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from warm_start import WarmStart

from dist_env import ParallelLayout, fake_job
from trainer_core import DataParallelArguments, Trainer, plan

pytestmark = pytest.mark.xdist_group("embedding")
SCRIPT = Path(__file__).with_name("tensor_parallel.py")
STEPS, SAVED = 6, 3
FULL = bool(os.environ.get("FULL_TESTS"))
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRON = {name: value for name, value in os.environ.items() if name not in LAUNCHED} | {
    "OMP_NUM_THREADS": "1"
}


def run(warm: WarmStart, folder: Path, words: list[str], mesh: str | None, *more: str) -> Any:
    """What each rank of a mesh prints alike behind "points", as JSON."""
    port = str(free_port())
    told = folder.with_name(f"{folder.name}-told-{mesh}")
    told.mkdir(exist_ok=True)
    size = str(ParallelLayout.parse(mesh).world_size) if mesh else "1"
    ranks = (
        [(str(rank), size, str(rank), size, "localhost", port) for rank in range(int(size))] if mesh else [()]
    )
    started = [
        warm.start(
            [*words, *([mesh] if mesh else []), *more],
            ENVIRON | dict(zip(LAUNCHED, rank, strict=False)),
            told / f"out-{number}",
            told / f"err-{number}",
        )
        for number, rank in enumerate(ranks)
    ]
    try:
        codes = [process.wait(300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert set(codes) == {0}, "".join(path.read_text() for path in told.glob("err-*"))
    printed = "".join((told / f"out-{number}").read_text() for number in range(len(ranks)))
    found = re.findall(r"points (.*)", printed)
    assert len(found) == len(ranks)
    assert len(set(found)) == 1
    return json.loads(found[0])


def points(warm: WarmStart, folder: Path, batch: int, mesh: str | None = None) -> list[list[float]]:
    """Loss and gradient norm of every logged step."""
    curve: list[list[float]] = run(warm, folder, [str(SCRIPT), str(folder), str(batch)], mesh)
    return curve


def test_divided_mlps_and_sharded_weights_train_as_one_process(warm: WarmStart, tmp_path: Path) -> None:
    whole = points(warm, tmp_path / "whole", 8)
    assert len(whole) == STEPS
    assert any(norm > 0.5 for _, norm in whole), "gradients are clipped"
    together = points(warm, tmp_path / "together", 4, "shard=2,tp=2")
    for found, expected in zip(together, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(tmp_path / "together" / f"checkpoint-{STEPS}")
    resumed = points(warm, tmp_path / "together", 8)
    for found, expected in zip(resumed[-(STEPS - SAVED) :], whole[SAVED:], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_transform_is_small_and_uses_public_names() -> None:
    text = SCRIPT.read_text()
    body = text[text.index("class TensorParallelMLPs") : text.index("\n\n\nclass MLP")]
    assert len(body.splitlines()) < 60
    packages = ("trainer_core", "trainer_fsdp2", "dist_env", "checkpoint_core")
    imported = re.findall(rf"from ((?:{'|'.join(packages)})[\w.]*) import", text)
    assert imported
    assert all("." not in module for module in imported)
    assert not re.search(r"\._[a-z]", inspect.cleandoc(body))


MEMORY_SCRIPT = SCRIPT.with_name("tensor_memory.py")
HF_SCRIPT = SCRIPT.with_name("hf_tensor_trainer.py")


def test_stages_with_divided_experts_see_lengths_together(warm: WarmStart, tmp_path: Path) -> None:
    script = str(SCRIPT.with_name("unlike_lengths.py"))
    whole = run(warm, tmp_path / "whole", [script, str(tmp_path / "whole"), "2"], None)
    parts = run(warm, tmp_path / "parts", [script, str(tmp_path / "parts"), "1"], "pp=2,shard=2,ep=2")
    for found, expected in zip(parts, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def trained(warm: WarmStart, folder: Path, name: str, mesh: str | None, batch: int) -> Any:
    """What a model of transformers prints, and its weights before and after."""
    printed = run(warm, folder, [str(HF_SCRIPT), name, str(folder), str(batch)], mesh)
    return printed, *(load_file(folder / each / "model.safetensors") for each in ("initial", "weights"))


@pytest.fixture(scope="module")
def alone(warm: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The same of one process, which trains each model once."""
    return cache(lambda name: trained(warm, tmp_path_factory.mktemp(name) / "run", name, None, 8))


MESHES = {
    "llama": (("tp=2", 8), ("shard=2,tp=2", 4)),
    "llama everywhere": (("pp=2,tp=2", 8),),
    "mixtral": (("shard=2,ep=2", 4), ("pp=2", 8)),
    "mixtral everywhere": (
        ("pp=2,dp=2", 4),
        ("shard=4,ep=2", 2),
        ("tp=2,ep=2", 8),
        ("cp=2,ep=2", 8),
        ("pp=2,shard=2,ep=2", 4),
    ),
    "qwen3_moe": (("tp=2,ep=2", 8),),
    "qwen3_moe everywhere": (("shard=2,ep=2", 4), ("shard=2,tp=2,ep=4", 4), ("dp=2,shard=2,ep=2", 2)),
}
"""What a model trains on, and with how many rows at a time; others with tp=2."""


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "qwen3_moe",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("gpt_neox", "qwen3", "mixtral", *(n for n in MESHES if " " in n))
        ),
    ],
)
def test_models_of_transformers_train_and_write_as_one_process(
    warm: WarmStart, alone: Callable[[str], Any], tmp_path: Path, case: str
) -> None:
    name = case.partition(" ")[0]
    (whole, written), initial, weights = alone(name)
    for mesh, batch in MESHES.get(case, (("tp=2", 8),)):
        (together, same), begun, divided = trained(warm, tmp_path / f"run-{mesh}", name, mesh, batch)
        assert all(torch.equal(begun[key], value) for key, value in initial.items())
        for found, expected in zip(together, whole, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        assert same == written
        assert divided.keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(divided[key], value, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("mesh", "batch"), [("pp=2,tp=2", "8"), pytest.param("shard=2,tp=2", "4", marks=pytest.mark.full)]
)
def test_sequences_are_divided_under_a_trainer(
    warm: WarmStart, alone: Callable[[str], Any], tmp_path: Path, mesh: str, batch: str
) -> None:
    whole, written = alone("llama")[0]
    words = [str(HF_SCRIPT), "llama", str(tmp_path / "parts"), batch]
    parts, same = run(warm, tmp_path / "parts", words, mesh, "sequence")
    for found, expected in zip(parts, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert same == written


def test_masks_of_dropout_are_the_same_after_a_resume(warm: WarmStart, tmp_path: Path) -> None:
    words = [str(HF_SCRIPT), "llama", str(tmp_path / "run"), "8"]
    whole, written = run(warm, tmp_path / "run", words, "tp=2", "dropout")
    for name in (f"checkpoint-{STEPS}", "initial", "weights"):
        shutil.rmtree(tmp_path / "run" / name)
    assert run(warm, tmp_path / "run", words, "tp=2", "dropout") == [whole, written]


def test_flops_are_equal_over_layouts(warm: WarmStart, tmp_path: Path) -> None:
    """Of the model and as executed, so that MFU and HFU differ by time alone."""
    counted = {}
    meshes = {"": "8", "tp=2": "8", "pp=2": "8", **({"shard=2": "4"} if FULL else {})}
    for number, (mesh, batch) in enumerate(meshes.items()):
        folder = tmp_path / f"run-{number}"
        words = [str(HF_SCRIPT), "llama", str(folder), batch, *(() if mesh else ("",))]
        counted[mesh], _ = run(warm, folder, words, mesh or None, "flops")
        assert len(counted[mesh]) == STEPS
        assert all(hardware > model > 0 for model, hardware, _ in counted[mesh])
    assert {mesh: found for mesh, found in counted.items() if found != counted[""]} == {}


def test_a_rank_holds_its_part_and_sends_what_the_formula_says(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    config = LlamaConfig(num_attention_heads=4, **sizes)
    tokens = torch.randint(0, 256, (64, 32))
    args = DataParallelArguments(
        output_dir=str(tmp_path),
        mesh="shard=2,tp=2",
        per_device_train_batch_size=8,
        max_steps=1,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        use_cpu=True,
    )
    with fake_job(4) as env:
        trainer = Trainer(
            args,
            model_init=lambda: LlamaForCausalLM(config),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[],
            distributed_env=env,
        )
        found = trainer.dry_run()
    norms = 7 * 64  # whole on both ranks of tp
    held = 4 * ((found.parameters - norms) // 4 + norms // 2)
    assert (found.weights, found.gradients) == (held, held)
    assert found.optimizer == pytest.approx(2 * held, rel=1e-2)  # AdamW's two moments, and counts of steps
    sent = {each.kind: each for each in found.collectives if each.ranks == 2}
    hidden, logits = 8 * 32 * 64 * 4, 8 * 32 * 256 * 4
    # Behind attention and MLP, forward and backward; behind the embedding; before the head, backward. The
    # rest are norms of gradients.
    assert sent["all-reduce"].bytes == pytest.approx((4 * 3 + 2) * hidden, rel=1e-3)
    # Weights of FSDP for the forward pass and, but for those of the root, for the backward pass; the logits.
    layers = sum(each.numel() for each in LlamaForCausalLM(config).model.layers.parameters()) - 6 * 64
    root = found.parameters - layers - norms
    weights = 4 * (2 * (layers // 2 + 6 * 64) + root // 2 + 64)
    assert sent["all-gather"].bytes == weights + logits


def test_the_fused_loss_never_holds_the_logits(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = LlamaConfig(num_attention_heads=4, **sizes)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (32, 256))]
    peaks = {}
    for fused in ("no", "chunked"):
        args = DataParallelArguments(
            output_dir=str(tmp_path),
            mesh="tp=2",
            per_device_train_batch_size=16,
            max_steps=1,
            use_cpu=True,
            fused_loss=fused,
        )
        with fake_job(2) as env:
            trainer = Trainer(
                args,
                model_init=lambda: LlamaForCausalLM(config),
                train_dataset=data,
                callbacks=[],
                distributed_env=env,
            )
            memory = trainer.dry_run().memory
        assert memory is not None
        peaks[fused] = memory.peak
    logits = 16 * 256 * 8192 * 4
    assert peaks["chunked"] + 2 * logits < peaks["no"]


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["shard=2,tp=2", "tp=2"])
def test_a_plan_is_the_memory_of_real_ranks(warm: WarmStart, tmp_path: Path, mesh: str) -> None:
    ranks = run(warm, tmp_path / "run", [str(MEMORY_SCRIPT), str(tmp_path / "run")], mesh)
    made = runpy.run_path(str(MEMORY_SCRIPT))
    found = plan(
        made["arguments"](str(tmp_path), mesh),
        model_init=made["build"],
        world_size=len(ranks),
        sequence_length=made["LENGTH"],
    )
    parameters, optimizer, peak = ranks[0]
    assert (found.parameters, found.optimizer) == (parameters, optimizer)
    print(f"{mesh}: planned {found.peak:,} bytes in the passes, measured {peak:,.0f}")
    assert 0.98 * peak <= found.peak <= 1.05 * peak
