from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from checkpoint_core import CheckpointError
from dist_env import StaticDistributedEnvironment
from trainer_core import CausalLMLoss, ConfigurationError, DataError, MeanLoss, Trainer, TrainingArguments


def test_clipping_bounds_the_step_and_logs_the_norm_before(make_trainer: Callable[..., Trainer]) -> None:
    norms: list[float] = []

    class AfterClipping:
        def on_pre_optimizer_step(self, args: object, state: object, control: object, **kw: object) -> None:
            model = kw["model"]
            parameters = model.parameters()  # type: ignore[attr-defined]
            norms.append(float(torch.stack([p.grad.norm() for p in parameters]).norm()))

    trainer = make_trainer(max_grad_norm=0.05, max_steps=3, callbacks=[AfterClipping()])
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norms == pytest.approx([0.05] * 3, rel=1e-3)
    assert all(float(norm) > 0.1 for norm in logged)  # type: ignore[arg-type]


def test_weight_decay_spares_vectors(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(weight_decay=0.5)
    assert trainer.optimizer is not None
    decays = {
        group["weight_decay"]: [p.ndim for p in group["params"]] for group in trainer.optimizer.param_groups
    }
    assert set(decays[0.5]) == {2}
    assert set(decays[0.0]) == {1}


def test_records_carry_counts_totals_and_times(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(num_train_epochs=2, logging_steps=5)
    output = trainer.train()
    records = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [record["global_step"] for record in records] == [5, 10, 12]
    assert sum(int(record["tokens"]) for record in records) == records[-1]["total_tokens"]  # type: ignore[call-overload]
    assert all(float(record["interval_seconds"]) > 0 for record in records)  # type: ignore[arg-type]
    assert output.metrics["timed_steps"] == 11
    assert output.metrics["train_samples"] == 44
    assert output.metrics["total_tokens"] == records[-1]["total_tokens"]
    assert output.metrics["train_runtime"] <= output.metrics["train_runtime_gross"]


def test_speeds_are_left_out_when_nothing_was_timed(make_trainer: Callable[..., Trainer]) -> None:
    metrics = make_trainer(max_steps=1).train().metrics
    assert "train_steps_per_second" not in metrics or metrics["timed_steps"] == 0
    whole = make_trainer(max_steps=2, speed_metrics_start_step=0).train().metrics
    assert whole["timed_steps"] == 2


def test_resume_from_a_path_that_is_none_is_an_error(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        make_trainer(resume_from_checkpoint=str(tmp_path / "nowhere")).train()


def test_datasets_become_shuffled_loaders_and_resume_exactly(tmp_path: Path, tiny_model: type) -> None:
    ids = torch.randint(0, 23, (20, 6), generator=torch.Generator().manual_seed(1))

    def collate(examples: list[object]) -> dict[str, object]:
        rows = torch.stack([example[0] for example in examples])  # type: ignore[index]
        return {"input_ids": rows, "labels": rows}

    def run(directory: str, max_steps: int) -> list[object]:
        trainer = Trainer(
            {
                "output_dir": str(tmp_path / directory),
                "seed": 3,
                "per_device_train_batch_size": 4,
                "max_steps": max_steps,
                "num_train_epochs": -1,
                "logging_steps": 1,
                "lr_scheduler_type": "constant",
                "save_steps": 100,
            },
            model_init=tiny_model,
            train_dataset=TensorDataset(ids),
            data_collator=collate,
            callbacks=[],
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = run("whole", 12)
    assert len(set(whole)) == 12
    for stop in (4, 5, 9):
        assert run("parts", stop) == whole[:stop]
    assert run("parts", 12) == whole


def test_careless_constructions_are_refused_at_once(
    make_trainer: Callable[..., Trainer],
    tiny_model: type,
    ragged_loader: Callable[..., object],
    tmp_path: Path,
) -> None:
    args = TrainingArguments(output_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"model=None.*model_init"):
        Trainer(args)
    with pytest.raises(ConfigurationError, match="Give only one of the two"):
        Trainer(args, model=tiny_model(), model_init=tiny_model)
    with pytest.raises(ConfigurationError, match="MeanLoss"):
        Trainer(args, model=tiny_model(), compute_loss_func=torch.nn.functional.cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"eval_strategy='steps'.*eval_dataset"):
        make_trainer(eval_strategy="steps")
    with pytest.raises(ConfigurationError, match=r"per_device_train_batch_size=3.*4"):
        make_trainer(per_device_train_batch_size=3)
    for name, value in {"dataloader_num_workers": 2, "dataloader_drop_last": True}.items():
        with pytest.raises(ConfigurationError, match=f"{name}={value} has no effect"):
            make_trainer(**{name: value})
    with pytest.raises(ConfigurationError, match=r"data_collator.*has no effect"):
        Trainer(args, model=tiny_model(), train_dataset=ragged_loader(batch_size=16), data_collator=dict)
    with pytest.raises(ConfigurationError, match="world_size=2"):
        Trainer(args, model=tiny_model(), distributed_env=StaticDistributedEnvironment(world_size=2))
    with pytest.raises(DataError, match="train_dataset"):
        Trainer(args, model=tiny_model(), callbacks=[]).train()
    assert list(tmp_path.iterdir()) == []


def test_batches_without_labels_name_their_keys(make_trainer: Callable[..., Trainer]) -> None:
    class NoLabels:
        batch_size = 1

        def __iter__(self) -> object:
            yield {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}

    with pytest.raises(DataError, match=r"\['input_ids'\].*'labels'"):
        make_trainer(loader=NoLabels(), max_steps=1).train()


def test_a_mean_loss_with_a_count_trains_the_same(make_trainer: Callable[..., Trainer]) -> None:
    def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    built_in = make_trainer(max_steps=5)
    built_in.train()
    own = make_trainer(max_steps=5, with_trainer={"compute_loss_func": MeanLoss(mean, CausalLMLoss().count)})
    own.train()
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (built_in, own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_mixed_precision_runs_in_bfloat16_and_keeps_float32_weights(
    make_trainer: Callable[..., Trainer],
) -> None:
    dtypes: set[torch.dtype] = set()

    class Watch:
        def on_init_end(self, args: object, state: object, control: object, **kw: object) -> None:
            kw["model"].mix.register_forward_hook(lambda m, i, out: dtypes.add(out.dtype))  # type: ignore[attr-defined]

    trainer = make_trainer(mixed_precision="bf16", max_steps=3, callbacks=[Watch()])
    trainer.train()
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in trainer.unwrapped_model().parameters()} == {torch.float32}


def test_saved_model_is_a_hugging_face_directory(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_final_record_of_a_run_too_short_to_be_timed(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(max_steps=2, speed_metrics_start_step=5)
    metrics = trainer.train().metrics
    final = trainer.state.log_history[-1]
    assert final["total_tokens"] == metrics["total_tokens"] > 0
    assert final["timed_steps"] == 0
    assert final["train_runtime"] >= 0
    assert "tokens_per_second" not in final


def test_tokens_and_their_rate_count_the_same_positions(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(max_steps=4, speed_metrics_start_step=0)
    final = trainer.train().metrics
    # By their ratio: the times of steps and of the run differ by what a busy machine does in between.
    rates = final["tokens_per_second"] / final["input_tokens_per_second"]
    assert rates == pytest.approx(final["total_tokens"] / final["total_input_tokens"], rel=0.05)
    assert final["total_tokens"] < final["total_input_tokens"]
    # A second call has no step to time, and returns what the run ended with.
    assert trainer.train().metrics == final


def test_the_cause_of_a_stop_and_the_best_checkpoints_are_logged(
    make_trainer: Callable[..., Trainer],
    ragged_loader: Callable[..., object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Impatient:
        def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
            control.should_training_stop |= state.global_step == 4  # type: ignore[attr-defined]

    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(
        callbacks=[Impatient()], eval_loader=ragged_loader(rows=4), preserve_best_model=True, **settings
    )
    trainer.train()
    assert "the run stops after step 4: Impatient, in on_step_end" in caplog.text
    assert "Best checkpoints by eval_loss (lower is better):" in caplog.text
    assert str(trainer.state.best_model_checkpoint) in caplog.text


def test_a_checkpoint_elsewhere_stands_apart_and_is_resumed_by_its_path(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    settings = {"max_steps": 4, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1}
    aside = tmp_path / "kept" / "before the end"
    trainer: Trainer

    class Keep:
        def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
            if state.global_step == 2:  # type: ignore[attr-defined]
                assert trainer.save_checkpoint(aside) == aside

    trainer = make_trainer(callbacks=[Keep()], save_total_limit=1, **settings)
    trainer.train()
    assert [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")] == ["checkpoint-4"]
    with pytest.raises(CheckpointError, match=r"exists already\. Name a new directory"):
        trainer.save_checkpoint(str(aside))
    again = make_trainer(resume_from_checkpoint=str(aside), output_dir=str(tmp_path / "again"), **settings)
    again.train()
    assert [entry["global_step"] for entry in again.state.log_history if "loss" in entry][-2:] == [3, 4]
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_recomputation_by_a_function_changes_no_number(make_trainer: Callable[..., Trainer]) -> None:
    def losses(**settings: object) -> list[object]:
        trainer = make_trainer(max_steps=3, logging_steps=1, **settings)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def some(model: torch.nn.Module) -> list[torch.nn.Module]:
        return [next(iter(model.children()))]

    given = {"activation_checkpointing_fn": some}
    assert losses(activation_checkpointing="custom", with_trainer=given, dropout=0.2) == losses(dropout=0.2)
    with pytest.raises(ConfigurationError, match=r"activation_checkpointing_fn=.*has no effect"):
        make_trainer(with_trainer=given)


def test_a_script_reads_the_parts_of_a_run_and_cannot_replace_them(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=1)
    before = trainer.model
    trainer.train()
    assert trainer.model is before is trainer.unwrapped_model()
    assert trainer.train_dataloader is not None
    loaded = trainer.checkpoint_manager.load_checkpoint()
    assert loaded is not None
    assert loaded.step == 2
    assert not trainer.control.should_training_stop
    assert trainer.is_world_process_zero()
    for name in ("model", "control", "train_dataloader", "checkpoint_manager"):
        with pytest.raises(AttributeError):
            setattr(trainer, name, None)


def test_processes_that_a_launcher_has_not_joined_are_warned_of(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    make_trainer(max_steps=1)
    assert "SLURM_STEP_NUM_TASKS=2 tells of several processes, but WORLD_SIZE is not set" in caplog.text
