"""Settings: command line over file over defaults, and a clear word about each mistake."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from llama_pretrain import PretrainArguments
from llama_pretrain.cli import parser_of
from llama_pretrain.experiment import TRAINERS
from llama_pretrain.settings import _reader, resolve, train_parser
from trainer_core import ConfigurationError, field_docs
from trainer_ddp import CompressionArguments, DDPArguments, PostLocalSGDArguments
from trainer_pipeline import PipelineArguments


def _resolve(*words: str) -> PretrainArguments:
    return resolve(train_parser().parse_args_strictly(words))


def test_without_a_word_the_defaults_hold() -> None:
    args = _resolve()
    assert args == PretrainArguments()
    assert (args.model, args.output_dir, args.data) == ("tiny", "runs/default", None)


def test_a_tilde_behind_an_equals_sign_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of-the-test")
    args = _resolve("--output-dir=~/runs/a", "--data=~/text")
    assert (args.output_dir, args.data) == ("/home/of-the-test/runs/a", "/home/of-the-test/text")
    args = parser_of("report").parse_args(["--output-dir=~/runs/a", "--page=~/page.html"])
    assert (args.output_dir, args.page) == ("/home/of-the-test/runs/a", "/home/of-the-test/page.html")


def test_command_line_beats_file_beats_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'max_steps = 7\nsave-steps = 3\nmodel = "160m"\nlr_scheduler_kwargs = {min_lr_rate = 0.2}\n'
    )
    args = _resolve("--config", str(path), "--max-steps", "9")
    assert (args.max_steps, args.save_steps, args.model) == (9, 3, "160m")
    assert args.lr_scheduler_kwargs == {"min_lr_rate": 0.2}
    assert args.eval_steps == PretrainArguments().eval_steps


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup", "cosine_with_min_lr"])
def test_every_schedule_goes_with_the_defaults(name: str) -> None:
    args = _resolve("--lr-scheduler-type", name)
    assert (args.lr_scheduler_type, args.lr_scheduler_kwargs, args.warmup_steps) == (name, {}, 40)


def test_a_constant_rate_has_no_warmup_unless_one_was_asked_for(tmp_path: Path) -> None:
    assert _resolve("--lr-scheduler-type", "constant").warmup_steps == 0
    path = tmp_path / "run.toml"
    path.write_text('lr_scheduler_type = "constant"')
    assert _resolve("--config", str(path)).warmup_steps == 0
    with pytest.raises(ConfigurationError, match=r"warmup_steps=40 .*constant"):
        _resolve("--config", str(path), "--warmup-steps", "40")
    path.write_text("warmup-steps = 7")
    with pytest.raises(ConfigurationError, match=r"warmup_steps=7 .*constant"):
        _resolve("--config", str(path), "--lr-scheduler-type", "constant")


def test_a_file_of_all_settings_reads_back(tmp_path: Path) -> None:
    args = _resolve("--learning-rate", "1e-3", "--max-grad-norm", "none", "--data", "some/where")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(dataclasses.asdict(args)))
    assert _resolve("--config", str(path)) == args


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--max-steps 5", "max_steps", 5),
        ("--learning-rate=2e-4", "learning_rate", 2e-4),
        ("--save-total-limit none", "save_total_limit", None),
        ("--save-total-limit 3", "save_total_limit", 3),
        ("--torch-compile", "torch_compile", True),
        ("--no-logging-first-step", "logging_first_step", False),
        ("--report-to wandb,tensorboard", "report_to", ("wandb", "tensorboard")),
        ("--resume-from-checkpoint false", "resume_from_checkpoint", False),
        ("--resume-from-checkpoint some/path", "resume_from_checkpoint", "some/path"),
        ("--lr-scheduler-kwargs min_lr_rate=0.5", "lr_scheduler_kwargs", {"min_lr_rate": 0.5}),
        ("--config tiny-muon --optim adamw --optim-kwargs none", "optim_kwargs", {}),
        ("--trainer ddp", "trainer", "ddp"),
        ("--trainer ddp --no-dispatch-batches", "dispatch_batches", False),
        ("--trainer ddp --dispatch-eval-batches false", "dispatch_eval_batches", False),
        ("--trainer ddp --compression.method bf16", "compression", CompressionArguments(method="bf16")),
        (
            "--trainer ddp --ddp.bucket-cap-mb 10 --no-ddp.init-sync --ddp.static-graph",
            "ddp",
            DDPArguments(bucket_cap_mb=10, init_sync=False, static_graph=True),
        ),
        (
            "--trainer pipeline --schedule gpipe --microbatches 8",
            "pipeline",
            PipelineArguments(schedule="gpipe", n_microbatches=8),
        ),
        (
            "--trainer pipeline --pipeline.schedule zbv --pipeline.n-microbatches=2",
            "pipeline",
            PipelineArguments(schedule="zbv", n_microbatches=2),
        ),
        (
            "--trainer pipeline --pipeline.layers-per-stage 3,1",
            "pipeline",
            PipelineArguments(layers_per_stage=(3, 1)),
        ),
        (
            "--trainer pipeline --transformer-layers-path model.layers",
            "transformer_layers_path",
            "model.layers",
        ),
    ],
)
def test_words_become_values(words: str, name: str, value: object) -> None:
    got = getattr(_resolve(*words.split()), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-step 5", "unknown argument '--max-step'. Did you mean --max-steps?"),
        (
            "--frobnicate 5",
            "unknown argument '--frobnicate'. `llama-pretrain train --help` lists the options",
        ),
        ("--lr 1e-3", "unknown argument '--lr'. Did you mean --learning-rate?"),
        ("--epochs=2", "unknown argument '--epochs=2'. Did you mean --num-train-epochs?"),
        ("--batch_size 2", "Did you mean --per-device-train-batch-size?"),
        ("stray", "unknown argument 'stray'"),
        ("--max-steps five", "--max-steps: 'five' is not a whole number"),
        ("--learning-rate fast", "--learning-rate: 'fast' is not a number"),
        ("--lr-scheduler-kwargs half", "name=value"),
        ("--lr-scheduler-kwargs min_lr_rate=0.1,min_lr_rate=0.2", "gives min_lr_rate twice"),
        ("--max-steps", "--max-steps: expected one argument"),
        (
            "--post-local-sgd.perod 5",
            "unknown argument '--post-local-sgd.perod'. Did you mean --post-local-sgd.period?",
        ),
        ("--post-local-sgd.period five", "--post-local-sgd.period: 'five' is not a whole number"),
        (
            "--schedule gpipe --pipeline.schedule gpipe",
            "argument --pipeline.schedule: not allowed with argument --schedule",
        ),
        (
            "--pipeline.n-microbatches 4 --trainer pipeline --microbatches=8",
            "argument --microbatches: not allowed with argument --pipeline.n-microbatches",
        ),
        ("--microbatches few", "--microbatches: 'few' is not a whole number"),
        ("--pipeline.layers-per-stage 3,x", "--pipeline.layers-per-stage: '3,x' is not number,... or none"),
    ],
)
def test_a_mistyped_option_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _resolve(*words.split())
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("kinds", [(dict[str, int],), (dict[str, int], type(None))])
def test_a_table_that_may_be_left_out_is_named_once(kinds: tuple[object, ...]) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        _reader(kinds)("momentum")
    assert str(caught.value) == "'momentum' is not name=value,... or none"


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        # short
        ("-lr 1e-3", "unknown argument '-lr'. Did you mean --learning-rate?"),
        (
            "-b 4 -e 3",
            "Did you mean --per-device-train-batch-size? Unknown argument '-e'. Did you mean --num-train",
        ),
        ("--gpus 2", "Did you mean --mesh dp=2?"),
        ("--wandb", "Did you mean --report-to wandb?"),
        ("--block-size 512", "Did you mean --sequence-length?"),
        ("--gradient-clipping 1", "Did you mean --max-grad-norm?"),
        # Hugging Face
        ("--bf16", "unknown argument '--bf16'. Did you mean --mixed-precision bf16?"),
        ("--per_device_train_batch_size 8", "Did you mean --per-device-train-batch-size?"),
        ("--do_train", "Training and evaluation are calls of their own: leave it out."),
        ("--model_name_or_path 7b", "Did you mean --model?"),
        ("--overwrite_output_dir", "Did you mean --fresh?"),
        ("--fsdp full_shard", "Did you mean --mesh shard=2?"),
        ("--no_cuda", "Did you mean --use-cpu?"),
        # Lightning and torchtitan
        ("--max_epochs=3", "Did you mean --num-train-epochs?"),
        (
            "--devices 4 --strategy ddp",
            "Did you mean --mesh dp=2? Unknown argument '--strategy'. Did you mean --mesh?",
        ),
        ("--fast_dev_run", "Did you mean --dry-run?"),
        (
            "--optimizer.lr 1e-3 --training.steps 5",
            "Did you mean --learning-rate? Unknown argument '--training.steps'",
        ),
        # slips
        ("--learnig-rate 1", "Did you mean --learning-rate?"),
        ("learning_rate=1e-3", "Did you mean --learning-rate?"),
        ("--ddp.find_unused_parameters", "Did you mean --ddp.find-unused-parameters?"),
    ],
)
def test_what_others_call_an_option_is_answered_with_ours(
    words: str, hints: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _resolve(*words.split())
    told = capsys.readouterr().err
    assert (caught.value.code, told.count("\n")) == (2, 1)
    assert hints in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_step: 5", "max_step=5 is not a known setting. Did you mean 'max_steps'"),
        ("ga: 2", "ga=2 is not a known setting. Did you mean 'gradient_accumulation_steps'?"),
        ("max_steps: five", "max_steps='five'"),
        ("held_out: 1.0", "held_out=1.0"),
        ("seed: -1", "seed=-1"),
        ("sequence_length: 1", "sequence_length=1"),
        ("undecodable: ignore", "undecodable='ignore'"),
        ("shards: 0", "shards=0"),
        ("sample_tokens: -1", "sample_tokens=-1"),
        ("prompt: ''", "prompt=''"),
        ("dataloader_num_workers: 2", "dataloader_num_workers=2 has no effect"),
        ("overwrite_output_dir: true", "overwrite_output_dir=True has no effect"),
        ("max-steps: 5\nmax_steps: 6", "given twice"),
        (
            "trainer: dpp",
            "trainer='dpp' must be one of 'single', 'ddp', 'fsdp2', 'pipeline'. Did you mean 'ddp'?",
        ),
        ("trainer: none", "trainer='none' must be one of 'single', 'ddp'"),
        ("dispatch_batches: false", "dispatch_batches=False has no effect with trainer='single'"),
        (
            "ddp: {static_graph: true}",
            "ddp.static_graph=True has no effect with trainer='single'. Leave it out, or use trainer='ddp'",
        ),
        ("diloco: {inner_steps: 5}", "diloco.inner_steps=5 has no effect with trainer='single'"),
        ("trainer: ddp\ndiloco: {inner_steps: 5}", "diloco.inner_steps=5 has no effect while"),
        ("trainer: ddp\nuneven_batches: drop", "uneven_batches='drop'"),
        ("trainer: ddp\nddp: {static_grap: true}", "ddp.static_grap=True is not a known setting. Did you"),
        ("trainer: ddp\nddp.static-grap: true", "ddp.static_grap=True is not a known setting. Did you mean"),
        ("trainer: ddp\nddp: {bucket_cap_mb: big}", "ddp.bucket_cap_mb='big'"),
        ("trainer: ddp\nddp: 5", "ddp=5"),
        ("trainer: ddp\nddp: {bucket_cap_mb: 5, bucket-cap-mb: 6}", "ddp.bucket_cap_mb=6 is given twice"),
        ("trainer: ddp\nddp: {bucket_cap_mb: 5}\nddp.bucket_cap_mb: 6", "given twice"),
        ("trainer: ddp\nfuse_optim_with_backward: true", "fuse_optim_with_backward=True"),
        ("trainer: fsdp2\nfsdp2: {replicas: 0}", "fsdp2.replicas=0"),
        ("trainer: ddp\nfsdp2: {replicas: 2}", "fsdp2.replicas=2 has no effect with trainer='ddp'"),
        (
            "trainer: fsdp2\npipeline: {replicas: 2}",
            "pipeline.replicas=2 has no effect with trainer='fsdp2'",
        ),
        ("pipeline: {schedule: zbv}", "Leave it out, or use trainer='pipeline'"),
        ("ddp: {1: 2}", "ddp.1=2 is not the name of a setting"),
        (
            "trainer: pipeline\npipeline: {schedule: gpip}",
            "pipeline.schedule='gpip' must be one of gpipe, 1f1b",
        ),
        ("trainer: pipeline\npipeline: {layers_per_stage: [3, x]}", "pipeline.layers_per_stage=(3, 'x')"),
        ("trainer: pipeline\nschedule: gpipe", "schedule='gpipe' is not a known setting"),
        ("trainer: pipeline\nmicrobatches: 2", "microbatches=2 is not a known setting"),
        ("max_steps: [", "malformed"),
        ("- 1", "must have names with values"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        _resolve("--config", str(path))
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml"):
        _resolve("--config", str(tmp_path / "nowhere.toml"))


def test_a_file_and_options_may_each_set_a_part_of_a_group(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'trainer = "ddp"\nddp.bucket_cap_mb = 7\n'
        "[post-local-sgd]\nenabled = true\nstart-step = 100\nperiod = 10\n"
    )
    args = _resolve("--config", str(path), "--post-local-sgd.period", "50")
    assert args.post_local_sgd == PostLocalSGDArguments(enabled=True, start_step=100, period=50)
    assert args.ddp == DDPArguments(bucket_cap_mb=7)
    copy = tmp_path / "config.yaml"
    copy.write_text(yaml.safe_dump(dataclasses.asdict(args)))
    assert _resolve("--config", str(copy)) == args
    dotted = tmp_path / "dotted.yaml"
    dotted.write_text("trainer: ddp\nddp: {static_graph: true}\nddp.bucket-cap-mb: 7")
    both = DDPArguments(static_graph=True, bucket_cap_mb=7)
    assert _resolve("--config", str(dotted)).ddp == both
    assert _resolve("--config", str(dotted), "--no-ddp.static-graph").ddp == DDPArguments(bucket_cap_mb=7)


def test_a_short_option_is_laid_over_the_group_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'trainer = "pipeline"\n[pipeline]\nschedule = "1f1b"\nn-microbatches = 6\nlayers-per-stage = [3, 1]\n'
    )
    args = _resolve("--config", str(path), "--schedule", "gpipe")
    assert args.pipeline == PipelineArguments(schedule="gpipe", n_microbatches=6, layers_per_stage=(3, 1))
    copy = tmp_path / "config.yaml"
    copy.write_text(yaml.safe_dump(dataclasses.asdict(args)))
    assert _resolve("--config", str(copy)) == args


def test_an_option_does_not_hide_a_mistake_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: ddp\nddp: 5")
    with pytest.raises(ConfigurationError, match="ddp=5"):
        _resolve("--config", str(path), "--ddp.static-graph")


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_takes_the_settings_as_they_are(name: str) -> None:
    args = PretrainArguments(trainer=name)
    assert isinstance(args, TRAINERS[name].arguments_class)
    assert args.matmul_dtype == "fp32"
    assert args.for_planning(2).trainer == name


def test_only_the_rules_of_the_chosen_trainer_apply() -> None:
    in_backward = {"fuse_optim_with_backward": True, "max_grad_norm": None}
    assert PretrainArguments(**in_backward).trainer == "single"  # type: ignore[arg-type]
    assert PretrainArguments(mixed_precision="fp16", trainer="ddp").mixed_precision == "fp16"
    for name, settings, rule in (
        ("ddp", in_backward, "before its gradient is averaged"),
        ("fsdp2", {"default_dtype": "float16"}, "exceeds the range of float16"),
        ("pipeline", {"mixed_precision": "fp16"}, "needs a loss scale that all stages share"),
    ):
        with pytest.raises(ConfigurationError, match=rule):
            PretrainArguments(trainer=name, **settings)  # type: ignore[arg-type]


def test_a_path_of_blocks_is_refused_where_no_setting_uses_it() -> None:
    path = {"transformer_layers_path": "model.layers"}
    for name, group in (("fsdp2", {"shard_transformer_layers": False}), ("single", {}), ("ddp", {})):
        settings = {"trainer": name, **path, **({name: group} if group else {})}
        with pytest.raises(ConfigurationError, match="transformer_layers_path="):
            resolve(settings)
    assert resolve({"trainer": "fsdp2", **path}).transformer_layers_path == "model.layers"


def test_help_has_every_option_with_its_text() -> None:
    shown = " ".join(train_parser().format_help().split())
    _look_for_options(PretrainArguments, "", shown)
    assert "[runs/default]" in shown
    assert "[0.002]" in shown
    for short, option in (("schedule TEXT", "schedule"), ("microbatches N", "n-microbatches")):
        assert f"--{short} short for --pipeline.{option}" in shown


def _look_for_options(cls: type, prefix: str, shown: str) -> None:
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        assert docs.get(field.name), f"{field.name} has no text"
        if isinstance(field.default_factory, type) and dataclasses.is_dataclass(field.default_factory):
            _look_for_options(field.default_factory, f"{field.name}.", shown)
            continue
        flag = "--" + (prefix + field.name).replace("_", "-")
        left_out = field.name.startswith("dataloader_") or field.name == "overwrite_output_dir"
        assert (f"{flag} " in shown or f"{flag}," in shown) != left_out, flag


def test_the_types_of_all_settings_can_be_told_from_the_constructor() -> None:
    hints, of_class = get_type_hints(PretrainArguments.__init__), get_type_hints(PretrainArguments)
    names = [field.name for field in dataclasses.fields(PretrainArguments)]
    assert {name: hints[name] for name in names} == {name: of_class[name] for name in names}
