from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_core import (
    ConfigurationError,
    TrainingArguments,
    arguments_from_dict,
    field_docs,
    load_config_file,
    suggest,
)
from trainer_core.arguments.config import WARNED, Changes, compare, plain_arguments
from trainer_core.arguments.minimal import UNCHANGEABLE

BAD = [
    # unknown names and wrong types
    ({"max_step": 3}, "max_step=3.*Did you mean 'max_steps'"),
    ({"max_steps": "3"}, "max_steps='3'.*int, got str"),
    ({"max_steps": True}, "max_steps=True"),
    ({"learning_rate": "fast"}, "learning_rate='fast'"),
    ({"fp8_recipe": "rowwise", "fp8_exclude": "head"}, r"fp8_exclude='head'.*tuple.*, got str"),
    ({"sdpa_backend": 3}, "sdpa_backend=3.*int"),
    # single values
    ({"max_steps": -2}, "max_steps=-2"),
    ({"learning_rate": -1.0}, r"learning_rate=-1\.0.*0 to 1000"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
    ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size=0"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0.*at least 1"),
    ({"eval_strategy": "step"}, "eval_strategy='step'.*'steps'"),
    ({"logging_strategy": "epochs"}, "logging_strategy='epochs'.*'epoch'"),
    ({"save_strategy": "best"}, "save_strategy='best'"),
    ({"eval_steps": 0}, "eval_steps=0"),
    ({"logging_steps": 0}, "logging_steps=0"),
    ({"save_steps": 0}, "save_steps=0"),
    ({"eval_delay": -1}, "eval_delay=-1"),
    ({"seed": -2}, "seed=-2"),
    ({"num_train_epochs": -1}, "num_train_epochs.*max_steps=1000"),
    ({"num_train_epochs": float("inf")}, "num_train_epochs=inf"),
    ({"save_total_limit": 0}, "save_total_limit=0"),
    ({"output_dir": ""}, "output_dir=''.*not be empty"),
    ({"save_safetensors": False}, "save_safetensors=False.*pickled"),
    ({"adam_beta2": 1.0}, "adam_beta2"),
    ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ({"warmup_steps": -1}, "warmup_steps=-1"),
    ({"lr_scheduler_type": "cos"}, "lr_scheduler_type='cos'.*'cosine'"),
    (
        {"lr_scheduler_kwargs": {"min_lr": 0.1}},
        r"lr_scheduler_kwargs\.min_lr=0\.1 is not an option of 'linear'",
    ),
    ({"torch_compile": True, "torch_compile_mode": "fast"}, "torch_compile_mode='fast'.*'max-autotune'"),
    ({"mixed_precision": "bf17"}, "mixed_precision='bf17'.*'bf16'"),
    ({"default_dtype": "bf16"}, "default_dtype='bf16'.*'bfloat16'"),
    ({"float32_matmul_precision": "low"}, "float32_matmul_precision='low'"),
    ({"fp8_recipe": "columnwise"}, "fp8_recipe='columnwise'.*'rowwise'"),
    ({"qat_recipe": "int3"}, "qat_recipe='int3'.*'int4-weight-only'"),
    ({"fp8_recipe": "rowwise", "fp8_dim_alignment": -1}, "fp8_dim_alignment=-1"),
    ({"fused_loss": "yes"}, "fused_loss='yes'.*'chunked'"),
    ({"nonfinite_policy": "ignore"}, "nonfinite_policy='ignore'.*'skip'"),
    ({"label_smoothing": 1.0}, r"label_smoothing=1\.0"),
    ({"z_loss": -0.1}, r"z_loss=-0\.1"),
    ({"max_eval_steps": 0}, "max_eval_steps=0"),
    ({"preserve_n_best": 0}, "preserve_n_best=0"),
    ({"sdpa_backend": "cuda"}, "sdpa_backend='cuda'.*'flash'"),
    ({"torch_compile": True, "dynamo_recompile_limit": 0}, "dynamo_recompile_limit=0"),
    ({"construct_model_on": "cpu"}, "construct_model_on='cpu'.*'meta'"),
    ({"activation_checkpointing": "half"}, "activation_checkpointing='half'.*'share'"),
    ({"torch_compile": True, "torch_compile_scope": "layers"}, "torch_compile_scope='layers'.*'blocks'"),
    ({"gc_threshold": 2.0}, r"gc_threshold=2\.0"),
    ({"gc_steps": 0}, "gc_steps=0"),
    ({"max_train_seconds": 0.0}, "max_train_seconds"),
    ({"peak_hardware_flops": 0.0}, "peak_hardware_flops"),
    ({"peak_hardware_flops": "fast"}, "peak_hardware_flops"),
    ({"peak_hardware_flops": "measured", "fp8_recipe": "tensorwise"}, "peak_hardware_flops"),
    ({"speed_metrics_start_step": -1}, "speed_metrics_start_step"),
    # values that exclude each other
    (
        {"fp8_recipe": "rowwise", "qat_recipe": "int4-weight-only"},
        "fp8_recipe.*cannot be combined with qat_recipe.*linear layers",
    ),
    ({"fuse_optim_with_backward": True, "max_grad_norm": 1.0}, r"cannot be combined with max_grad_norm=1\.0"),
    (
        {"fuse_optim_with_backward": True, "gradient_accumulation_steps": 2},
        "cannot be combined with gradient_accumulation_steps=2",
    ),
    (
        {"fuse_optim_with_backward": True, "mixed_precision": "fp16"},
        "cannot be combined with mixed_precision='fp16'",
    ),
    (
        {"fuse_optim_with_backward": True, "nonfinite_policy": "skip"},
        "cannot be combined with nonfinite_policy='skip'",
    ),
    ({"gradient_checkpointing": True, "activation_checkpointing": "share"}, "gradient_checkpointing"),
    ({"activation_checkpointing": "every_n"}, "activation_checkpointing_every=None.*at least 1"),
    ({"activation_checkpointing": "share"}, "activation_checkpointing_share=None.*0 to 1"),
    ({"activation_memory_budget": 0.0}, r"activation_memory_budget=0\.0.*torch_compile=True"),
    (
        {"activation_memory_budget": 0.5, "torch_compile": True, "activation_checkpointing": "full"},
        "activation_memory_budget.*Leave one",
    ),
    ({"load_best_model_at_end": True}, "load_best_model_at_end.*Set eval_strategy"),
    (
        {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "epoch"},
        "load_best_model_at_end.*at every checkpoint.*eval_on_save",
    ),
    (
        {"preserve_best_model": True, "eval_strategy": "steps", "eval_steps": 7, "save_steps": 20},
        "preserve_best_model.*save_steps=20.*eval_steps=7",
    ),
    (
        {"preserve_best_model": True, "eval_strategy": "steps", "save_strategy": "no"},
        "preserve_best_model.*Set save_strategy",
    ),
    (
        {"preserve_best_model": True, "eval_on_save": True, "best_model_metric": "accuracy"},
        "best_model_greater_is_better=None.*eval_accuracy",
    ),
    (
        {
            "load_best_model_at_end": True,
            "eval_on_save": True,
            "metric_for_best_model": "f1",
            "best_model_metric": "accuracy",
        },
        "metric_for_best_model='f1'.*another name",
    ),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau.*Set eval_strategy"),
    # values without effect
    ({"torch_compile_backend": "inductor"}, "torch_compile_backend.*has no effect"),
    ({"torch_compile_mode": "default"}, "torch_compile_mode.*has no effect"),
    ({"torch_compile_dynamic": True}, "torch_compile_dynamic.*has no effect"),
    ({"torch_compile_full_graph": True}, "torch_compile_full_graph.*has no effect"),
    ({"torch_compile_scope": "blocks"}, "torch_compile_scope.*has no effect"),
    ({"dynamo_recompile_limit": 3}, "dynamo_recompile_limit.*has no effect"),
    ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor=2.*dataloader_num_workers"),
    ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers.*dataloader_num_workers"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps=3.*constant_with_warmup"),
    ({"lr_scheduler_type": "", "lr_scheduler_kwargs": {"a": 1}}, "lr_scheduler_kwargs.*without"),
    ({"logging_strategy": "no", "logging_first_step": True}, "logging_first_step.*has no effect"),
    ({"use_cpu": True, "device": "cuda"}, "device='cuda'.*use_cpu"),
    ({"fp8_exclude": ["head"]}, "fp8_exclude.*Set fp8_recipe"),
    ({"fp8_emulate": True}, "fp8_emulate.*Set fp8_recipe"),
    ({"fp8_dim_alignment": 8}, "fp8_dim_alignment.*Set fp8_recipe"),
    ({"sdpa_backend": "math", "sdpa_set_priority": True}, "sdpa_set_priority.*several"),
    ({"preserve_n_best": 2}, "preserve_n_best.*preserve_best_model"),
    ({"best_model_metric": "accuracy"}, "best_model_metric.*has no effect"),
    ({"metric_for_best_model": "accuracy"}, "metric_for_best_model.*has no effect"),
    ({"greater_is_better": True}, "greater_is_better.*has no effect"),
    ({"eval_on_save": True, "save_strategy": "no"}, "eval_on_save.*Set save_strategy"),
    ({"activation_checkpointing_every": 2}, "activation_checkpointing_every.*'every_n'"),
    ({"activation_checkpointing_share": 0.5}, "activation_checkpointing_share.*'share'"),
    ({"activation_checkpointing_operators": ["aten.mm"]}, "activation_checkpointing_operators.*'operators'"),
    ({"transformer_layers_path": "model.layers"}, "transformer_layers_path.*has no effect"),
    ({"seed_per_rank": True}, "seed_per_rank.*Set a seed"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=["-".join(bad) for bad, _ in BAD])
def test_bad_settings_name_setting_value_and_way_out(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments_from_dict(TrainingArguments, settings)


def test_whole_numbers_serve_as_floats_and_arguments_are_frozen() -> None:
    args = arguments_from_dict(TrainingArguments, {"learning_rate": 1, "max_grad_norm": 2})
    assert (args.learning_rate, args.max_grad_norm) == (1.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 3  # type: ignore[misc]


def test_whole_numbers_among_the_options_of_a_mapping_stay_whole() -> None:
    args = arguments_from_dict(TrainingArguments, {"optim": "muon", "optim_kwargs": {"ns_steps": 3, "lr": 1}})
    assert [type(value) for value in args.optim_kwargs.values()] == [int, int]
    schedule = {"num_decay_steps": 2, "num_stable_steps": 2, "min_lr_ratio": 0.5, "decay_type": "linear"}
    args = arguments_from_dict(
        TrainingArguments, {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": schedule}
    )
    assert args.lr_scheduler_kwargs == schedule


def test_every_field_is_documented() -> None:
    docs = field_docs(TrainingArguments)
    assert set(docs) == {field.name for field in dataclasses.fields(TrainingArguments)}
    assert docs["max_steps"].startswith("Most optimizer steps")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "learning_rate: 3e-4\nmax_steps: 10\n"),
        ("run.yml", "learning_rate: 0.0003\nmax_steps: 10\n"),
        ("run.yaml", "learning_rate: 3E-4\nmax_steps: 10\nsave_strategy: no\n"),
        ("run.toml", "learning_rate = 3e-4\nmax_steps = 10\n"),
    ],
)
def test_files_give_the_same_arguments(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    args = arguments_from_dict(TrainingArguments, load_config_file(path))
    assert (args.learning_rate, args.max_steps) == (3e-4, 10)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{}", "must end in"),
        ("run.yaml", "- a\n- b\n", "must have names with values"),
        ("run.yaml", "a: [1\n", "is malformed"),
        ("run.toml", "a = \n", "is malformed"),
        ("run.yaml", "a: 1\nb: 2026-13-45\n", "month must be in 1..12.*line 2"),
        ("run.toml", "a = 1\nb = 2026-02-30\n", "is malformed: Invalid date.*line 2"),
        ("run.yaml", f"a: 1\nb: {'9' * 5000}\n", r"is malformed: .*4300.*line 2"),
        ("run.toml", f"a = 1\nb = {'9' * 5000}\n", r"is malformed in line 2: .*4300"),
        ("run.yaml", "seed: 1\nmax_steps: 2\nseed: 3\n", "'seed' is given twice.*line 3"),
        ("run.yaml", "ddp: {a: 1, a: 2}\n", "'a' is given twice.*line 1"),
        ("run.yaml", "a: 1\nseed: 010\n", "'010' would not be the number.*line 2"),
        ("run.yaml", "max_train_seconds: 1:30\n", "'1:30' would not be the number.*line 1"),
        ("run.yaml", "a: [-1:30.5]\n", "'-1:30.5' would not be the number.*line 1"),
        ("run.toml", "a = 1\na = 2\n", "is malformed: Cannot overwrite a value.*line 2"),
        ("run.yaml", "a: " + "[" * 20_000, "more than 32 levels of nesting.*line 1"),
        ("run.yaml", "a:\n" + "".join(" " * n + "- \n" for n in range(1, 99)), "more than 32 levels"),
        ("run.toml", "a = " + "[" * 20_000, "is nested too deeply"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=f"(?s){message}") as caught:
        load_config_file(path)
    assert name in str(caught.value)


def test_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config_file(tmp_path / "none.toml")
    (tmp_path / "empty.yaml").write_text("")
    assert load_config_file(tmp_path / "empty.yaml") == {}


def test_aliases_and_derived_values() -> None:
    args = TrainingArguments(
        load_best_model_at_end=True,
        eval_on_save=True,
        metric_for_best_model="accuracy",
        greater_is_better=True,
    )
    assert args.tracks_best
    assert (args.best_metric, args.best_is_greater) == ("eval_accuracy", True)
    assert TrainingArguments(gradient_checkpointing=True).recomputation == "full"
    assert TrainingArguments(mixed_precision="no").autocast_dtype is None
    assert TrainingArguments(mixed_precision="fp16").matmul_dtype == "fp16"
    assert TrainingArguments(default_dtype="bfloat16").matmul_dtype == "bf16"


def test_changes_are_told_apart_by_what_they_mean() -> None:
    before = plain_arguments(TrainingArguments(seed=1, max_steps=10, num_train_epochs=-1))

    def changed(examples: int = 16, **settings: object) -> Changes:
        given: dict[str, object] = {"seed": 1, "max_steps": 10, "num_train_epochs": -1} | settings
        return compare(before, arguments_from_dict(TrainingArguments, given), batch=(16, examples))

    assert changed() == Changes((), (), ())
    refused = changed(seed=2).refused
    assert [str(change) for change in refused] == ["seed: 1 before, 2 now"]
    assert [change.name for change in changed(learning_rate=1e-3).warned] == ["learning_rate"]
    assert [change.name for change in changed(logging_steps=5, torch_compile=True).allowed] == [
        "logging_steps",
        "torch_compile",
    ]
    # A schedule that aims at the end of the run bends when the end moves; a constant rate does not.
    assert [change.name for change in changed(max_steps=20).warned] == ["max_steps"]
    constant = plain_arguments(TrainingArguments(max_steps=10, lr_scheduler_type="constant"))
    later = compare(constant, TrainingArguments(max_steps=20, lr_scheduler_type="constant"), batch=(1, 1))
    assert ([change.name for change in later.allowed], later.warned) == (["max_steps"], ())
    # How an optimizer step is divided into microbatches does not touch the curve; its size does.
    split = changed(per_device_train_batch_size=8, gradient_accumulation_steps=2)
    assert ([c.name for c in split.allowed], split.warned) == (
        ["gradient_accumulation_steps", "per_device_train_batch_size"],
        (),
    )
    assert [str(change) for change in changed(32, gradient_accumulation_steps=2).warned] == [
        "examples of an optimizer step, over all ranks: 16 before, 32 now"
    ]


def test_old_and_new_ways_to_say_that_epochs_do_not_limit_a_run_are_one() -> None:
    def changes(before: dict[str, object], now: dict[str, object]) -> list[str]:
        one, other = (arguments_from_dict(TrainingArguments, given) for given in (before, now))
        found = compare(plain_arguments(one), other, batch=(1, 1))
        return [str(change) for change in (*found.allowed, *found.warned, *found.refused)]

    endless = {"max_steps": 10, "num_train_epochs": -1}
    assert changes(endless, {"max_steps": 10}) == changes({"max_steps": 10}, endless) == []
    assert changes({"num_train_epochs": 1}, {}) == []
    assert changes({"max_steps": 10, "num_train_epochs": 1}, {"max_steps": 10}) == [
        "num_train_epochs: 1.0 before, None now"
    ]


def test_every_classified_argument_exists() -> None:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert names >= WARNED | UNCHANGEABLE.keys()
    assert not WARNED & UNCHANGEABLE.keys()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lr", "is not a known setting. Did you mean 'learning_rate'?"),
        ("seed", "cannot change while a run continues: the order of the data"),
        (
            "dataloader_shuffle",
            "cannot change while a run continues: the position in the data has no meaning",
        ),
    ],
)
def test_only_what_can_change_may_be_allowed_to(name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"allow_changes={name!r} {words}")):
        TrainingArguments(allow_changes=("learning_rate", name))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("seed", 2**64, "must be below"),
        ("output_dir", "a\0b", "NUL"),
        ("logging_dir", "\0", "NUL"),
        ("resume_from_checkpoint", "runs/\0", "NUL"),
        ("learning_rate", 10**400, "must be a number from 0"),
    ],
)
def test_values_that_would_fail_later_are_refused(name: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        TrainingArguments(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=rule):
        arguments_from_dict(TrainingArguments, {name: value})


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has replaced that of a file; else a directory named ~ would be made."""
    monkeypatch.setenv("HOME", "/home/of-the-test")
    paths = {"output_dir": "~/runs/a", "logging_dir": "~", "resume_from_checkpoint": "~/runs/b/checkpoint-1"}
    args = arguments_from_dict(TrainingArguments, paths)
    assert (args.output_dir, args.logging_dir) == ("/home/of-the-test/runs/a", "/home/of-the-test")
    assert args.resume_from_checkpoint == "/home/of-the-test/runs/b/checkpoint-1"
    for kept in ("runs/~", "a~b", "s3://bucket/~/run"):
        assert TrainingArguments(output_dir=kept).output_dir == kept


def test_arguments_import_without_torch() -> None:
    script = (
        "import sys\n"
        "from trainer_core import ConfigurationError, TrainingArguments, field_docs, suggest\n"
        "assert field_docs(TrainingArguments)['learning_rate']\n"
        "assert TrainingArguments(max_steps=3).learning_rate\n"
        "assert 'torch' not in sys.modules\n"
        "import trainer_core\n"
        "assert all(hasattr(trainer_core, name) for name in trainer_core.__all__)\n"
        "assert not hasattr(trainer_core, 'nothing') and 'Trainer' in dir(trainer_core)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lr", "Did you mean 'learning_rate'?"),
        ("batch_size", "Did you mean 'per_device_train_batch_size'?"),
        ("bs", "Did you mean 'per_device_train_batch_size'?"),
        ("epochs", "Did you mean 'num_train_epochs'?"),
        ("wd", "Did you mean 'weight_decay'?"),
        ("ga", "Did you mean 'gradient_accumulation_steps'?"),
        ("max_step", "Did you mean 'max_steps'?"),
        ("accumulation", "Did you mean 'gradient_accumulation_steps'?"),
        ("steps", "Did you mean 'max_steps'?"),
        ("torch", "See the list of settings"),
        ("frobnicate", "See the list of settings"),
    ],
)
def test_hints_know_the_names_of_other_trainers(name: str, hint: str) -> None:
    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    assert suggest(name, known).startswith(hint)
    options = ["--" + each.replace("_", "-") for each in known]
    told = suggest("--" + name.replace("_", "-"), options)
    assert told.startswith(re.sub("'.*'", lambda meant: f"--{meant[0][1:-1].replace('_', '-')}", hint))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        # short names
        ({"lr": 1e-3}, "lr=0.001 is not a known setting. Did you mean 'learning_rate'?"),
        ({"epochs": 3}, "Did you mean 'num_train_epochs'?"),
        ({"batch_size": 8}, "Did you mean 'per_device_train_batch_size'?"),
        ({"wd": 0.1}, "Did you mean 'weight_decay'?"),
        ({"ga": 4}, "Did you mean 'gradient_accumulation_steps'?"),
        # Hugging Face
        ({"bf16": True}, "Did you mean mixed_precision='bf16'?"),
        ({"push_to_hub": True}, "Nothing is uploaded. save_model(directory)"),
        ({"fsdp": "full_shard"}, "choose DDPTrainer, FSDP2Trainer or PipelineTrainer"),
        ({"eval_accumulation_steps": 2}, "Metrics are sums and counts, so no outputs pile up: leave it out."),
        ({"evaluation_strategy": "steps"}, "Did you mean 'eval_strategy'?"),
        ({"label_smoothing_factor": 0.1}, "Did you mean 'label_smoothing'?"),
        ({"warmup_step": 10}, "Did you mean 'warmup_steps'?"),
        # Lightning
        ({"max_epochs": 3}, "Did you mean 'num_train_epochs'?"),
        ({"accumulate_grad_batches": 4}, "Did you mean 'gradient_accumulation_steps'?"),
        ({"gradient_clip_val": 1.0}, "Did you mean 'max_grad_norm'?"),
        ({"precision": "bf16-mixed"}, "Did you mean 'mixed_precision'?"),
        ({"strategy": "ddp"}, "choose DDPTrainer, FSDP2Trainer or PipelineTrainer"),
        # slips
        ({"learning_rat": 1e-3}, "Did you mean 'learning_rate'?"),
        ({"ouput_dir": "runs/a"}, "Did you mean 'output_dir'?"),
        ({"zzz": 1}, "zzz=1 is not a known setting. See the list of settings"),
        # several, in their order
        (
            {"epochs": 3, "bs": 4},
            "Did you mean 'num_train_epochs'? bs=4 is not a known setting. Did you mean 'per_device",
        ),
        ({"gradient_clipping": 1.0}, "Did you mean 'max_grad_norm'?"),
    ],
)
def test_a_name_of_others_or_a_slip_in_a_script_is_answered_with_ours(
    given: dict[str, object], hint: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(hint)):
        TrainingArguments(output_dir="runs/a", **given)


def test_a_setting_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="got 'runs/a' without a name"):
        TrainingArguments("runs/a")  # type: ignore[misc]


def test_arguments_can_be_copied_and_pickled() -> None:
    args = TrainingArguments(learning_rate=1e-3)
    assert copy.deepcopy(args) == pickle.loads(pickle.dumps(args)) == dataclasses.replace(args) == args
