"""The command line end to end: real runs in real processes, on a very small model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint_core import LeaseLostError
from checkpoint_core.manifest import read_manifest
from llama_pretrain import LlamaConfig, PretrainArguments, load_pretrained
from llama_pretrain.cli import COMMANDS, main

Start = Callable[..., list[Any]]
PROGRAM = ("-m", "llama_pretrain")
STEPS = 60
ENTRY_KEYS = {
    "global_step",
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "tokens",
    "total_tokens",
    "tok_per_sec",
    "mfu",
}


def _words(work: Path, output: str, *more: str) -> list[str]:
    """A run of a fraction of a second per ten steps: 2 layers of 32, rows of 64 bytes."""
    settings = {
        "model": work / "shape",
        "data": work / "data",
        "output-dir": work / output,
        "sequence-length": 64,
        "held-out": 0.2,
        "max-steps": STEPS,
        "warmup-steps": 5,
        "logging-steps": 5,
        "eval-steps": 20,
        "save-steps": 25,
        "sample-tokens": 12,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))] + list(more)


def _entries(output: Path) -> list[dict[str, float]]:
    entries = json.loads((output / "trainer_logs.json").read_text())
    assert isinstance(entries, list)
    return entries


def _curve(output: Path, key: str) -> dict[int, float]:
    return {int(entry["global_step"]): entry[key] for entry in _entries(output) if key in entry}


def _result(capsys: pytest.CaptureFixture[str]) -> str:
    """What `eval` has found out: count of tokens and loss, without the time it took."""
    lines = capsys.readouterr().out.splitlines()
    scored = next(line.partition(" tokens")[0] for line in lines if line.startswith("scored"))
    return f"{scored}; {next(line for line in lines if line.startswith('loss'))}"


@pytest.fixture(scope="module")
def work(
    tmp_path_factory: pytest.TempPathFactory, write_inputs: Callable[[Path], Path], start: Start
) -> Path:
    """A directory with data, a model's shape, and an uninterrupted run in `whole`."""
    work = write_inputs(tmp_path_factory.mktemp("work"))
    [run] = start([*PROGRAM, *_words(work, "whole")])
    code, out, err = run.finish()
    assert code == 0, err
    (work / "stdout.txt").write_text(out)
    return work


def test_a_run_leaves_logs_a_picture_and_checkpoints(work: Path) -> None:
    run = work / "whole"
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == {
        "trainer_logs.json",
        "loss_curve.png",
        "config.yaml",
        "run.json",
        "sessions.json",
        "goodput",
        "checkpoint-50",
        "checkpoint-60",
    }
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    losses = [entry for entry in _entries(run) if "loss" in entry]
    assert all(0 < entry["mfu"] < 1.5 for entry in losses), "of a measured rate"
    assert [entry["global_step"] for entry in losses] == [1, *range(5, STEPS + 1, 5)]
    assert all(set(entry) >= ENTRY_KEYS for entry in losses)
    assert losses[-1]["loss"] < losses[0]["loss"] / 1.5
    assert losses[-1]["total_tokens"] == sum(entry["tokens"] for entry in losses)
    assert sorted(_curve(run, "eval_loss")) == [20, 40, 60]
    shown = (work / "stdout.txt").read_text()
    assert "16 documents to train on, 4 held out" in shown
    assert f"held-out loss   {_curve(run, 'eval_loss')[60]:.4f} nats per byte" in shown
    assert "sample, temperature 0.8; the prompt is 'def ':" in shown
    plot = shown.partition("loss by step: * training, o held out\n")[2].splitlines()[1:13]
    assert [line.count("|") for line in plot[:10]] == [1] * 10
    assert sum(line.count("o") for line in plot[:10]) == 3
    assert plot[-1].split() == ["1", str(STEPS)]
    tried = shown.partition("\nnext\n")[2]
    assert f"llama-pretrain train --config {run / 'config.yaml'} --max-steps 120" in tried
    assert f"llama-pretrain generate 'def ' --output-dir {run}; llama-pretrain export" in tried
    assert "    def " in shown
    assert str(run / "loss_curve.png") in shown


def test_ctrl_c_and_the_same_command_give_the_uninterrupted_curve(work: Path, start: Start) -> None:
    words = _words(work, "interrupted")
    [run] = start([*PROGRAM, *words])
    while f"10/{STEPS} " not in run.stdout.read_text() and run.process.returncode is None:
        time.sleep(0.002)
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.finish()
    assert code == 75, out + err
    assert "Traceback" not in err
    saved = (work / "interrupted").glob("checkpoint-*")
    stopped_at = max(int(path.name.rpartition("-")[2]) for path in saved)
    assert 10 <= stopped_at < STEPS
    assert f"stopped by SIGINT after step {stopped_at}" in out
    assert "The same command continues" in out
    assert max(_curve(work / "interrupted", "loss")) <= stopped_at

    [again] = start([*PROGRAM, *words])
    code, out, err = again.finish()
    assert code == 0, err
    assert f"at step {stopped_at}" in err
    for key in ("loss", "grad_norm", "learning_rate", "total_tokens", "eval_loss"):
        assert _curve(work / "interrupted", key) == _curve(work / "whole", key), key
    assert (work / "interrupted" / "loss_curve.png").is_file()
    ours, theirs = (load_pretrained(work / name / "checkpoint-60") for name in ("interrupted", "whole"))
    for name, value in ours.state_dict().items():
        assert bool((value == theirs.state_dict()[name]).all()), name


def test_a_finished_run_says_so_again_and_can_be_made_longer(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _curve(work / "whole", "loss"), _curve(work / "whole", "eval_loss")
    assert main(_words(work, "whole")) == 0
    assert (_curve(work / "whole", "loss"), _curve(work / "whole", "eval_loss")) == before
    shown = capsys.readouterr().out
    assert "the run had reached its end, step 60: a larger --max-steps continues, --fresh begins" in shown
    assert "held-out loss" in shown
    shutil.copytree(work / "whole", work / "longer")
    assert main(_words(work, "longer", "--max-steps", "65")) == 0
    assert max(_curve(work / "longer", "loss")) == 65
    assert "had reached its end" not in capsys.readouterr().out
    rate = ("--max-steps", "70", "--learning-rate", "5e-4")
    assert main(_words(work, "longer", *rate)) == 2
    assert "or allow it with --allow-changes learning_rate" in capsys.readouterr().err
    assert main(_words(work, "longer", *rate, "--allow-changes", "learning_rate")) == 0
    assert "changed    learning_rate: 0.002 at the last start, now 0.0005" in capsys.readouterr().out
    rates = _curve(work / "longer", "learning_rate")  # at both ends near the floor, a tenth of the highest
    assert rates[70] < 1e-4 < 2e-4 < rates[65]


def test_a_document_that_cannot_be_read_ends_the_run_and_may_be_left_out(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(work / "data", work / "damaged")
    words = _words(work, "unread", "--data", str(work / "damaged"), "--save-steps", "5", "--max-steps", "30")
    assert main(words) == 0
    for path in (work / "damaged").rglob("*.py"):
        text = path.read_bytes()
        path.write_bytes(b"\xff" + text[1:])
    longer = [*words, "--max-steps", "40"]
    assert main(longer) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "not UTF-8 at byte 0" in message
    assert "undecodable" in message
    assert main([*longer, "--undecodable", "replace"]) == 0
    assert max(_curve(work / "unread", "loss")) == 40


def test_eval_gives_the_figure_of_the_run(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--output-dir", str(work / "whole")]) == 0
    last = _curve(work / "whole", "eval_loss")[60]
    assert f"loss        {last:.4f} nats per byte" in capsys.readouterr().out
    checkpoint = str(work / "whole" / "checkpoint-60")
    words = ["eval", "--checkpoint", checkpoint, "--data", str(work / "data")]
    assert main([*words, "--sequence-length", "64"]) == 0
    as_in_the_run = _result(capsys)
    assert "nats per byte" in as_in_the_run
    assert main(words) == 0
    assert _result(capsys) == as_in_the_run


def test_eval_of_a_run_reads_no_setting_of_its_training(
    work: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    output = work / "with_best"
    shutil.copytree(work / "whole", output)
    changed = {
        "load_best_model_at_end": "true",
        "ema_decay": "0.9",
        "report_to": "tensorboard",
        "save_steps": "20",
    }
    settings = (output / "config.yaml").read_text()
    for name, value in changed.items():
        settings = re.sub(f"^{name}: .*$", f"{name}: {value}", settings, count=1, flags=re.MULTILINE)
    (output / "config.yaml").write_text(settings)
    assert main(["eval", "--output-dir", str(work / "whole")]) == 0
    of_the_run = _result(capsys)
    assert main(["eval", "--output-dir", str(output)]) == 0
    assert _result(capsys) == of_the_run
    assert not caplog.records
    assert not any(output.rglob("*tfevents*"))


def test_eval_takes_rows_of_another_length(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--output-dir", str(work / "whole")]
    assert main([*words, "--sequence-length", "32"]) == 0
    shorter = _result(capsys)
    assert main(words) == 0
    assert _result(capsys) != shorter


def test_eval_of_a_model_of_no_run_fills_its_positions(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = work / "copy"
    assert main(["export", str(target), "--output-dir", str(work / "whole")]) == 0
    capsys.readouterr()
    words = ["eval", "--checkpoint", str(target), "--data", str(work / "data")]
    results = {}
    for positions, more in ((1024, []), (2048, []), (2048, ["--sequence-length", "1024"]), (96, [])):
        replace(LlamaConfig.load(target), max_position_embeddings=positions).save(target)
        assert main([*words, *more]) == 0
        results[positions, bool(more)] = _result(capsys)
    assert results[1024, False] == results[2048, False] == results[2048, True] != results[96, False]


def test_a_directory_with_weights_is_trained_on(work: Path) -> None:
    weights = work / "whole" / "checkpoint-60"
    assert (
        main(_words(work, "further", "--model", str(weights), "--max-steps", "2", "--logging-steps", "1"))
        == 0
    )
    first = _curve(work / "further", "loss")[1]
    assert first < _curve(work / "whole", "loss")[1] - 1.0
    assert first == pytest.approx(_curve(work / "whole", "loss")[60], abs=0.5)


def test_one_process_computes_as_fsdp2_is_told(work: Path) -> None:
    low = ("--trainer", "fsdp2", "--fsdp2.param-dtype", "bfloat16")
    assert main(_words(work, "low", *low, "--max-steps", "2", "--logging-steps", "1")) == 0
    first, whole = _curve(work / "low", "loss")[1], _curve(work / "whole", "loss")[1]
    assert first != whole
    assert first == pytest.approx(whole, rel=1e-2)


def test_generate_repeats_itself_by_seed(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        words = ["--output-dir", str(work / "whole"), "--max-new-tokens", "30", "--seed", seed]
        assert main(["generate", "def f1(", *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def f1(") for text in texts)


def test_export_is_a_hugging_face_directory(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = work / "export"
    words = ["export", str(target), "--output-dir", str(work / "whole"), "--dtype", "bfloat16"]
    assert main(words) == 0
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "model.safetensors",
        "byte_tokenizer.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert main(["generate", "def ", "--checkpoint", str(target), "--max-new-tokens", "5"]) == 0
    assert "def " in capsys.readouterr().out
    assert main(words) == 2
    assert "is not an empty directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--data {work}/missing", "missing"),
        ("--data {work}/empty", "empty"),
        ("--data {work}/shape/config.json", "config.json"),
        ("--data {work}/data/02.py", "hold out"),
        ("--sequence-length 1025", "max_position_embeddings=1024"),
        ("--sample-tokens 1021", "needs 1025 positions"),
        ("--model 170m", "Did you mean '160m'"),
        ("--model {work}/data", "neither a preset nor a directory with a config.json"),
        ("--tokenizer {work}/data", "tokenizer="),
        ("--config {work}/missing.toml", "missing.toml"),
        ("--output-dir {work}/data", "not a run of llama-pretrain"),
        ("--output-dir {work}/whole --seed 5", "was begun with 1"),
        ("--output-dir {work}/whole --data {work}/data/deep", "data="),
        ("--output-dir {work}/whole --model tiny", "was begun with {'hidden_size': 32"),
        ("--output-dir /proc/nowhere", "/proc/nowhere"),
        ("--mixed-precision fp64", "mixed_precision='fp64'"),
        ("--lr-scheduler-kwargs half=2", "lr_scheduler_kwargs.half=2"),
        ("--optim-kwargs lr=1", "or empty optim_kwargs (on a command line: none)"),
        ("--num-train-epochs nan", "num_train_epochs=nan"),
        ("--num-train-epochs inf", "num_train_epochs=inf"),
        ("--max-steps -1 --num-train-epochs 1", "Set max_steps or epoch_train_steps"),
        ("--resume-from-checkpoint {work}/data", "is not a checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    work: Path, changes: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "empty").mkdir(exist_ok=True)
    whole = {path: path.stat().st_mtime_ns for path in (work / "whole").rglob("*")}
    words = _words(work, "refused", *changes.replace("{work}", str(work)).split())
    assert main(words) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("llama-pretrain: error: ")
    assert shown.err.count("\n") == 1
    assert not (work / "refused").exists()
    assert {path: path.stat().st_mtime_ns for path in (work / "whole").rglob("*")} == whole


def test_a_full_disk_is_told_and_earlier_checkpoints_stay(work: Path, start: Start) -> None:
    """Files may not grow beyond a limit that the weights keep and the optimizer state breaks."""
    script = work / "on_a_full_disk.py"
    script.write_text(
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "from llama_pretrain.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    [run] = start([str(script), *_words(work, "full", "--save-steps", "5")])
    code, out, err = run.finish()
    assert code == 1, out + err
    assert "Traceback" not in err
    assert "space" in err.lower() or "file too large" in err.lower()
    assert not list((work / "full").glob("checkpoint-*"))
    assert _entries(work / "full")[-1]["global_step"] == 5


def test_a_directory_that_was_lost_is_no_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(words: Sequence[str]) -> int:
        raise LeaseLostError("runs/mine is no longer this run's own")

    monkeypatch.setitem(COMMANDS, "train", lose)
    assert main(["train"]) == 1


def test_the_overview_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"llama-pretrain {name}" in shown for name in ("[train]", "eval", "generate", "export"))
    defaults = PretrainArguments()
    for value in (defaults.output_dir, defaults.model, defaults.max_steps, defaults.learning_rate):
        assert f"[{value}]" in shown


@pytest.mark.parametrize("name", ["train", "eval", "generate", "export"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: llama-pretrain" in shown
    assert "--output-dir" in shown


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert (
        "unknown command 'trian'. Did you mean 'train'? The commands are train, plan"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval --output-dir {work}/nowhere", "contains no checkpoint"),
        ("generate --checkpoint {work}/data", "contains no config.json"),
        ("generate --output-dir {work}/whole --temperature -1", "temperature=-1.0"),
        ("generate --output-dir {work}/whole --max-new-tokens 5000", "the model has 1024"),
        ("export {work}/out --output-dir {work}/whole --dtype int4", "dtype='int4'"),
        ("eval --checkpoint {work}/whole/checkpoint-60", "--data"),
        (
            "eval --checkpoint {work}/whole/checkpoint-60 --data {work}/data --sequence-length 1025",
            "needs 1025 positions, but the model in",
        ),
        (
            "eval --output-dir {work}/whole --data {work}/data --sequence-length 1025",
            "max_position_embeddings=1024",
        ),
        ("eval --output-dir {work}/whole --sequence-length 1025", "max_position_embeddings=1024"),
        ("eval --output-dir {work}/whole --sequence-length 1", "sequence_length=1"),
    ],
)
def test_mistakes_of_the_other_commands(
    work: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.replace("{work}", str(work)).split()) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not (work / "out").exists()


def test_a_part_of_a_checkpoint_is_named(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = work / "part" / "checkpoint-60"
    shutil.copytree(work / "whole" / part.name, part)
    (part / "manifest.json").write_bytes(replace(read_manifest(part), nodes=2).to_bytes())
    (part / "model.safetensors").unlink()
    for command in ("eval", "generate", "export out"):
        assert main([*command.split(), "--output-dir", str(part.parent)]) == 2
        shown = capsys.readouterr().err
        assert "holds only a part of checkpoint-60, of which other nodes have the other files." in shown
        assert "`checkpoint-core export REMOTE_DIR/checkpoint-60 model`" in shown


def told_by(script: str) -> list[str]:
    """The lines that a script prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_training_imports_neither_the_compiler_nor_what_only_several_ranks_use() -> None:
    # Torch's optimizers import the compiler, with DTensor and sympy; what needs none of them saves 2 s.
    heavy = ("torch._dynamo", "torch.distributed.tensor", "sympy", "matplotlib", "transformers", "obstore")
    assert told_by(
        "import sys, llama_pretrain.train\n"
        "from llama_pretrain import Llama, preset\n"
        "Llama(preset('tiny'))\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
    ) == ["[]"]


def test_commands_are_imported_without_looking_for_garbage() -> None:
    assert told_by(
        "import gc\n"
        "from llama_pretrain.cli import _collection_paused\n"
        "before = gc.get_stats()\n"
        "with _collection_paused():\n"
        "    import llama_pretrain.train\n"
        "    after = gc.get_stats()\n"
        "print([now['collections'] - then['collections'] for then, now in zip(before, after)])\n"
        # The next collection does not begin with all that was imported, and nothing stays frozen.
        "print(gc.isenabled(), gc.get_count()[0] < 1000, gc.get_freeze_count())\n"
    ) == ["[0, 0, 0]", "True True 0"]


def test_ranks_are_started_before_the_launcher_imports_torch(tmp_path: Path) -> None:
    assert told_by(
        "import subprocess, sys\n"
        "from llama_pretrain.cli import main\n"
        "def start(*_, **__):\n"
        "    print('torch' in sys.modules)\n"
        "    raise SystemExit\n"
        "subprocess.Popen = start\n"
        f"main(['train', '--mesh', 'dp=2', '--output-dir', {str(tmp_path / 'run')!r}])\n"
    ) == ["False"]


def test_no_help_needs_torch_and_threads_are_set_before_it_is_loaded() -> None:
    start = (
        "import os, sys\n"
        "from llama_pretrain.cli import COMMANDS, main\n"
        "assert main(['train', '--learning-rate', '-1']) == 2\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'))\n"
    )
    helps = (
        "assert main(['--help']) == 0 and main(['--version']) == 0\n"
        "assert main(['nothing']) == 2\n"
        "assert main(['recipes']) == main(['completion', 'bash', '--show']) == 0\n"
        "for name in COMMANDS:\n"
        "    try:\n"
        "        main([name, '--help'])\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "assert 'torch' not in sys.modules\n"
        "import llama_pretrain\n"
        "assert all(hasattr(llama_pretrain, name) for name in llama_pretrain.__all__)\n"
        "assert set(llama_pretrain.__all__) <= set(dir(llama_pretrain))\n"
        "assert not hasattr(llama_pretrain, 'nothing')\n"
    )
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    for given, told, script in (
        ({"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": ""}, "PASSIVE 1000", start + helps),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None", start),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE 7", start),
    ):
        result = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment | given,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines().count(told) == 1


@pytest.mark.parametrize("words", ["--help", "--version", "recipes", "completion bash --show"])
def test_a_reader_that_has_seen_enough_is_no_error(words: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "llama_pretrain", *words.split()],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
