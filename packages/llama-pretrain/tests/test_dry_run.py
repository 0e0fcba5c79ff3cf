"""`train --dry-run`: recipes of every layout, and what it tells against the plan and counts by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dist_env import fake_job
from llama_pretrain import PretrainArguments, preset
from llama_pretrain.cli import main
from llama_pretrain.commands.plan_config import show_plan
from llama_pretrain.commands.recipes import tokens_per_step
from llama_pretrain.experiment import build_trainer, prepare
from llama_pretrain.mesh import parse_mesh
from llama_pretrain.settings import resolve
from trainer_core import DryRun


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 short documents: enough for as many processes."""
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n} " * 20_000}) + "\n" for n in range(600)))
    return file


def _settings(texts: Path, folder: Path, **given: object) -> PretrainArguments:
    return resolve({"data": str(texts), "output_dir": str(folder / "run"), "use_cpu": True, **given})


def _dry_run(args: PretrainArguments) -> DryRun:
    with fake_job(parse_mesh(args.mesh).world_size) as env:
        return build_trainer(prepare(args), env).dry_run()


# One for each way to lay a model out; the others differ from these in numbers only.
@pytest.mark.parametrize(
    "name",
    ["tiny-cpu", "tiny-2-processes", "tiny-hybrid", pytest.param("13b-96gpus", marks=pytest.mark.full)],
)
def test_a_dry_run_holds_what_is_planned(name: str, texts: Path, tmp_path: Path) -> None:
    args = _settings(texts, tmp_path, config=name)
    found = _dry_run(args)
    show_plan({"config": name, "json": str(tmp_path / "plan.json")})
    plan = json.loads((tmp_path / "plan.json").read_text())["plan"]
    assert found.parameters == plan["parameter_count"]
    assert (found.weights, found.gradients) == (plan["parameters"], plan["gradients"])
    # The plan leaves out a step count for each tensor.
    assert found.optimizer == pytest.approx(plan["optimizer"], abs=4 * 1000)
    assert found.tokens == tokens_per_step(args)
    # 6 FLOPs a parameter and token, without the table of the embedding, with attention.
    assert 5.5 < found.flops / found.tokens / found.parameters < 9  # type: ignore[operator]
    recomputes = args.activation_checkpointing != "no"
    assert (found.executed_flops > found.flops) == recomputes  # type: ignore[operator]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_hybrid_sharding_asks_for_what_it_should(texts: Path, tmp_path: Path) -> None:
    found = _dry_run(_settings(texts, tmp_path, config="tiny-hybrid"))
    seen = {each.kind: (each.ranks, each.bytes) for each in found.collectives}
    whole, root = 4 * found.parameters, 4 * (2 * 320 * 128 + 128)
    assert seen["all-gather"] == (2, 2 * (whole - root) + root)
    assert seen["reduce-scatter"] == (2, whole)
    # Gradients travel between the copies; the square of the norm, 8 bytes, between those that share one.
    assert seen["all-reduce"] == (2, whole // 2 + 8)


@pytest.mark.parametrize(
    "name", ["tiny-sharded", "tiny-pipelines", pytest.param("tiny-pipeline", marks=pytest.mark.full)]
)
def test_the_command_tells_what_was_done_and_what_was_not(
    name: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", name, "--data", str(texts), "--output-dir", str(tmp_path / "run")]
    assert main(["train", *words, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "step       1,024 tokens in 8 rows" in told
    assert "done: checks, data, model, optimizer, schedule, and a step" in told
    assert re.search(r"^(all-gather|send) +\d+", told, re.M)
    assert "left out: the other ranks" in told
    assert "nothing was written" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer", "fsdp2"], "trainer='fsdp2' does not say how many processes"),
        (
            ["--mesh", "dp=2", "--compression.method", "bf16"],
            "compression.method='bf16' needs real tensor values",
        ),
        (
            ["--mesh", "dp=601", "--dispatch-batches", "--no-dispatch-batches"],
            "cannot be divided among 601 ranks",
        ),
        (["--mesh", "pp=9"], "9"),
        (["--data", "no/such/file.jsonl"], "no/such/file.jsonl"),
    ],
)
def test_what_training_would_refuse_is_refused(
    words: list[str], message: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["--data", str(texts), "--output-dir", str(tmp_path / "run"), "--dry-run"]
    assert main(["train", *usual, *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [4, pytest.param(32, marks=pytest.mark.full)])
def test_it_fits_a_laptop(layers: int, texts: Path, tmp_path: Path) -> None:
    """7B on 512 processes, in one that may take 3 GiB of memory in all; the weights alone are 25 GiB.

    An eighth of its layers weighs 4 GiB.
    """
    shape = preset("7b", num_hidden_layers=layers)
    (tmp_path / "shape").mkdir()
    shape.save(tmp_path / "shape")
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30,) * 2); "
        "from llama_pretrain.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [
        "--config",
        "7b-512gpus",
        "--model",
        str(tmp_path / "shape"),
        "--data",
        str(texts),
        "--output-dir",
        str(tmp_path / "run"),
        "--dry-run",
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, "train", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count = 262_148_096 + layers * 202_383_360
    assert count == 6_738_415_616 or layers < 32
    assert f"{count:,} parameters" in done.stdout
    assert "512 processes (dp=64,shard=8), of which this is rank 0" in done.stdout
    assert "left out: torch_compile" in done.stdout
