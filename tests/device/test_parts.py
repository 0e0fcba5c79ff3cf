"""What packages do with a device beside training steps: staging, offload, batches, generation, reports."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakecuda
import pytest
import torch
from ports import free_port
from torch.nn.attention.flex_attention import flex_attention

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
)
from checkpoint_core.background import StagingBuffer
from dataloader_dispatch.batches import dense_to_device, to_device
from dist_env import StaticDistributedEnvironment
from llama_pretrain.arguments import PretrainArguments
from llama_pretrain.data import evaluation_loader, open_data, training_loader
from llama_pretrain.model.config import preset
from llama_pretrain.model.llama import Llama, generate
from llama_pretrain.tokenizer import ByteTokenizer
from model_parallel import CausalAttention, attention, attention_kernel
from perf_metrics import measure_peak_flops
from trainer_core import TrainingArguments
from trainer_core.model.offload import ActivationOffload
from trainer_core.model.run_settings import run_settings
from trainer_ddp.compression import LowRankGradient
from trainer_ddp.error_feedback import Residual

from .case import Model, curve, make

MIB = 1 << 20


# ---- Saves


def test_staged_tensors_are_right_with_one_wait(caplog: pytest.LogCaptureFixture) -> None:
    buffer = StagingBuffer()
    tensors = {name: torch.randn(n, device="cuda") for name, n in (("a", 7), ("b", 1000), ("c", 1))}
    tensors["imaginary"] = torch.randn(8, dtype=torch.complex64, device="cuda").conj()
    with caplog.at_level(logging.WARNING), fakecuda.recorded_waits() as waits:
        staged = buffer.copy(tensors)
    assert [wait.what for wait in waits] == ["synchronize"]
    assert not caplog.records
    for name, tensor in tensors.items():
        assert torch.equal(staged[name], tensor.cpu().resolve_conj()), name
    buffer.release()


def test_staging_without_its_wait_gives_wrong_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    expected = torch.randn(1000)
    tensor, buffer = expected.to("cuda"), StagingBuffer()
    staged = buffer.copy({"a": tensor})["a"]
    assert not torch.equal(staged, expected)
    monkeypatch.undo()
    torch.accelerator.synchronize()
    assert torch.equal(staged, expected)
    buffer.release()


def test_memory_that_cannot_be_pinned_is_reported_and_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fakecuda.Runtime, "cudaHostRegister", lambda *_: 2)
    expected, buffer = torch.randn(1000), StagingBuffer()
    with caplog.at_level(logging.WARNING):
        staged = buffer.copy({"a": expected.to("cuda")})["a"]
    assert torch.equal(staged, expected)
    assert "cudaHostRegister returned error 2" in caplog.text
    buffer.release()


def test_an_asynchronous_save_holds_the_weights_of_its_step(tmp_path: Path) -> None:
    model = Model().cuda()
    component = StateComponent(
        key="model", stateful=ModelState(model), sharing_pattern=SharingPattern.REPLICATED
    )
    provider = StaticStatefulProvider([component])
    config = CheckpointConfig(output_dir=tmp_path, async_save=True)
    env = StaticDistributedEnvironment(device=torch.device("cuda", 0))
    with CheckpointManager(config, dist=env, stateful_provider=provider) as manager:
        saved = {name: value.cpu() for name, value in model.state_dict().items()}
        for step in (1, 2):
            with fakecuda.recorded_waits() as waits:
                manager.save_checkpoint(step=step)
            assert [wait.what for wait in waits].count("synchronize") == 1
            for parameter in model.parameters():
                torch.nn.init.zeros_(parameter)
            manager.wait()
            manager.load_checkpoint()
            for name, value in model.state_dict().items():
                assert torch.equal(value.cpu(), saved[name]), (step, name)


def test_a_run_saves_on_the_way_without_a_change(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", device="cuda:0")
    whole.train()
    saved = make(tmp_path / "parts", device="cuda:0", save_strategy="steps", save_steps=1)
    saved.train()
    assert curve(saved) == curve(whole)


# ---- Attention


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as plain operators, as if triton had compiled it for the device."""
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    attention._problem.cache_clear()


def attended(device: str) -> list[torch.Tensor]:
    """Values and gradients of attention within documents, by a model of one layer."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 300, 16, generator=generator).to(device).requires_grad_() for _ in range(3)]
    out = CausalAttention()(*given, (torch.arange(300, device=device) // 70)[None])
    return [each.detach().cpu() for each in (out, *torch.autograd.grad(out.square().sum(), given))]


@pytest.mark.usefixtures("flex")
def test_attention_within_documents_is_computed_by_the_kernel_that_agrees(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said() -> list[str]:
        found = [each.getMessage() for each in caplog.records if each.name == attention.__name__]
        caplog.clear()
        attention._problem.cache_clear()
        return found

    with caplog.at_level(logging.INFO, attention.__name__):
        by_flex = attended("cuda")
        assert said() == ["masked attention of float32 heads of 16 on cuda:0 is computed by FlexAttention"]
        args = TrainingArguments(output_dir=str(tmp_path), sdpa_backend="math")
        with run_settings(args, torch.device("cuda")):
            chosen = attended("cuda")
        assert said() == [], "another kernel was chosen"
        right = attention.block_mask
        monkeypatch.setattr(attention, "block_mask", lambda at, to, documents: right(at, to, None))
        masked = attended("cuda")
        assert "is computed by masks: its values are off by" in said()[0]
    for found in (by_flex, chosen, masked):
        for one, other in zip(found, attended("cpu"), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_attention_without_triton_is_computed_by_masks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    attention._problem.cache_clear()
    for one, other in zip(attended("cuda"), attended("cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert "by masks: triton, with which its kernels are compiled, is not installed" in caplog.text
    refused = pytest.raises(RuntimeError, match="was set to flex, but FlexAttention cannot be used on cuda:0")
    with attention_kernel("flex"), refused:
        attended("cuda")


# ---- Activations


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def test_offloaded_activations_come_back_without_a_wait() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    x = torch.randn(1024, 512, device="cuda")
    expected = gradients(model, x)
    model.zero_grad()
    with fakecuda.recorded_waits() as waits:
        with ActivationOffload(torch.device("cuda", 0)):
            loss = model(x).square().mean()
        loss.backward()
    assert not waits
    found = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_offload_leaves_less_on_the_device() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda()
    x = torch.randn(4096, 256, device="cuda")
    held = []
    for offload in (False, True):
        before = torch.cuda.memory_allocated()
        context = ActivationOffload(torch.device("cuda", 0)) if offload else torch.enable_grad()
        with context:
            loss = model(x).square().mean()
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        del loss
    assert held[1] < held[0] / 4


# ---- Compressed gradients


def test_low_rank_gradients_stay_until_the_stream_that_finishes_them_is_done() -> None:
    # Process groups call `finish` on a stream of their own, and drop the object afterwards.
    residual = Residual(torch.zeros(64, 32, device="cuda"), torch.randn(32, 2, device="cuda"))
    matrix = LowRankGradient(torch.randn(64, 32, device="cuda"), residual)
    mean = matrix.right(matrix.left()).clone()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        matrix.finish(mean)
    sizes = [matrix._basis.shape, matrix._own.shape]
    del matrix
    # Of the same sizes, so that they get the memory if it is free; the fixture looks for races.
    for size in sizes:
        torch.empty(size, device="cuda").zero_()
    main.wait_stream(side)


# ---- Batches


@pytest.mark.parametrize("make_loader", [training_loader, evaluation_loader])
@pytest.mark.parametrize("dispatched", [False, True])
def test_batches_of_llama_pretrain_are_pinned(make_loader: object, dispatched: bool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text to train on\n" * 200)
    args = PretrainArguments(
        output_dir=str(tmp_path / "run"),
        data=str(tmp_path / "text.txt"),
        sequence_length=32,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        trainer="ddp",
        dispatch_batches=dispatched,
    )
    for device, pinned in (("cuda:0", True), ("cpu", False)):
        env = StaticDistributedEnvironment(device=torch.device(device))
        batch = next(iter(make_loader(open_data(args), ByteTokenizer(), args, env)))  # type: ignore[operator]
        assert {values.is_pinned() for values in batch.values()} == {pinned}


def test_llama_pretrain_trains_as_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text to train on, and some more of it\n" * 200)
    curves = []
    for name, more in (("cpu", ["--use-cpu"]), ("cuda", []), ("bf16", ["--mixed-precision", "bf16"])):
        settings = {
            "data": tmp_path / "text.txt",
            "model": "tiny",
            "sequence-length": 32,
            "max-steps": 4,
            "logging-steps": 1,
            "held-out": 0,
            "per-device-train-batch-size": 2,
            "seed": 3,
            "output-dir": tmp_path / name,
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "llama_pretrain", "train", *words, *more]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        entries = json.loads((tmp_path / name / "trainer_logs.json").read_text())
        curves.append([entry["loss"] for entry in entries if "loss" in entry])
        assert any("peak_mem_allocated" in entry for entry in entries) is (name != "cpu")
    assert len(curves[0]) == 4
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=2e-2)


@pytest.mark.parametrize("move", [to_device, dense_to_device])
def test_pinned_batches_go_to_the_device_without_a_wait(move: Callable[..., Any]) -> None:
    batch = {"input_ids": torch.arange(1000).pin_memory(), "other": [torch.ones(7).pin_memory()]}
    with fakecuda.recorded_waits() as waits:
        there = move(batch, torch.device("cuda", 0))
    assert not waits
    assert torch.equal(there["input_ids"].cpu(), torch.arange(1000))


@pytest.mark.parametrize("move", [to_device, dense_to_device])
def test_batches_that_come_back_to_the_host_are_whole(move: Callable[..., Any]) -> None:
    # Ranks without a single batch are sent one by a rank that holds it on its device.
    batch = {"input_ids": torch.arange(1000).cuda(), "other": [torch.ones(7).cuda()]}
    back = move(batch, torch.device("cpu"))
    assert torch.equal(back["input_ids"], torch.arange(1000))
    assert torch.equal(back["other"][0], torch.ones(7))


# ---- Generation and reports


def test_a_peak_is_measured_on_the_device_with_waits() -> None:
    with fakecuda.recorded_waits() as waits:
        assert measure_peak_flops(seconds=1e-6) > 0
    # After the product that warms up, and after each that is timed.
    assert [wait.what for wait in waits].count("synchronize") >= 2


def test_generation_says_what_it_says_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = Llama(preset("tiny", vocab_size=320)).eval()
    prompt = torch.tensor([[1, 2, 3]])
    expected = generate(model, prompt, max_new_tokens=8, temperature=0.0)
    assert torch.equal(
        generate(model.cuda(), prompt.cuda(), max_new_tokens=8, temperature=0.0).cpu(), expected
    )


def test_doctor(tmp_path: Path) -> None:
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = []
    for rank in range(2):
        env = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "dist_env", "doctor", "--json", "--max-bytes", "65536"]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=120) for process in processes]
    report = json.loads(said[0][0])
    # Both devices are the cores of this machine, which others use too, so that one of them may be slow.
    problems = [one for one in report["problems"] if " is slow: its matrix product runs at " not in one]
    assert not problems
    assert [process.returncode for process in processes] == [int(bool(report["problems"]))] * 2, said
    assert [rank["device"] for rank in report["ranks"]] == [
        f"cuda:{index} {fakecuda.NAME}" for index in range(2)
    ]
    assert {rank["collective_library"] for rank in report["ranks"]} == {"2.27.3"}
