"""The estimate of activations: held against a real forward and backward pass on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from trainer_core import ConfigurationError, EagerExecutor, loss_of, prepare_model
from trainer_fsdp2 import FSDP2TrainingArguments, MemoryPlan, plan

Settings = Callable[..., FSDP2TrainingArguments]
Model = Callable[..., nn.Module]
LENGTH = 128


def _planned(model: Model, args: FSDP2TrainingArguments, length: int = LENGTH, **more: Any) -> MemoryPlan:
    return plan(model, args, world_size=more.pop("world_size", 1), sequence_length=length, **more)


class _Real:
    """One microbatch of a run of one process, on real tensors."""

    def __init__(self, model: Model, args: FSDP2TrainingArguments) -> None:
        self.args = args
        device = torch.device("cpu")
        self.model = prepare_model(model, args, device, weights_follow=False).train()
        self.executor = EagerExecutor(self.model, args, device)
        self.loss = loss_of(args, self.model)
        ids = torch.randint(23, (2, LENGTH))
        self.batch = {"input_ids": ids, "labels": ids}

    def forward(self) -> Tensor:
        """The loss."""
        return self.executor.forward(self.batch, self.loss).loss

    def saved(self) -> int:
        """Bytes of the storages that autograd keeps, without those of parameters and buffers."""
        kept: dict[int, int] = {}
        holders: list[Tensor] = []
        own = {t.untyped_storage().data_ptr() for t in self.model.state_dict().values()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                holders.append(tensor)
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            total = self.forward()
        assert total.requires_grad
        return sum(kept.values())

    def peak(self) -> int:
        """Most bytes that torch's allocator had given out at a time, above what there was before."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        self.forward().backward()  # what is allocated once and for all
        with profile(profile_memory=True, record_shapes=False) as seen:
            self.forward().backward()
        now = most = 0
        for size in _allocations(seen):
            now += size
            most = max(most, now)
        return most


def _allocations(seen: profile) -> Iterator[int]:
    """Sizes as they were allocated and, below 0, freed."""
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    waiting = list(seen.profiler.kineto_results.experimental_event_tree())
    found = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return iter(size for _, size in sorted(found))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"mixed_precision": "bf16"},
    "bf16 weights": {"default_dtype": "bfloat16"},
    "all checkpointed": {"activation_checkpointing": "full"},
    "a third checkpointed": {"activation_checkpointing": "share", "activation_checkpointing_share": 1 / 3},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 1e-4},
}
UNSEEN: dict[str, dict[str, Any]] = {
    "operators": {"activation_checkpointing": "operators"},
    "fused loss": {"fused_loss": "auto"},
    "fused loss, autocast": {"fused_loss": "auto", "mixed_precision": "bf16"},
    "chunked loss": {"fused_loss": "chunked"},
}
"""What keeps tensors past the hooks of autograd."""


@pytest.mark.parametrize("case", CASES)
def test_saved_activations_are_those_of_a_real_forward(tiny: Model, settings: Settings, case: str) -> None:
    args = settings(**CASES[case])
    real = _Real(lambda: tiny(width=32), args).saved()
    # The real forward pass ends with the loss; the step goes on to divide it by the tokens that count.
    scalars = 20
    assert _planned(lambda: tiny(width=32), args).saved_activations == real + scalars


@pytest.mark.parametrize("case", [*CASES, *UNSEEN])
def test_peak_is_that_of_the_allocator(tiny: Model, settings: Settings, case: str) -> None:
    args = settings(**(CASES | UNSEEN)[case])
    real = _Real(lambda: tiny(width=32), args).peak()
    # What kernels allocate inside themselves is not seen, and that of bf16 on a CPU is some.
    assert _planned(lambda: tiny(width=32), args).activations == pytest.approx(real, rel=0.1)


def test_attention_keeps_no_matrix_of_sequence_by_sequence(tiny: Model, settings: Settings) -> None:
    def saved(length: int, **given: Any) -> int:
        return _planned(tiny, settings(**given), length).saved_activations

    assert saved(2048) == pytest.approx(4 * saved(512), rel=1e-4)
    with_matrices = saved(2048, sdpa_backend="math") - saved(2048)
    assert with_matrices > 0.95 * 3 * 2 * 2 * 2048**2 * 4  # layers, examples, heads, float32


def test_dropout_in_attention_keeps_no_matrix(tiny: Model, settings: Settings) -> None:
    usual, dropping = (_planned(lambda p=p: tiny(dropout=p), settings(), 512) for p in (0.0, 0.5))
    assert dropping.saved_activations == usual.saved_activations


def test_fused_loss_leaves_the_logits_away(tiny: Model, settings: Settings) -> None:
    length = 4096
    whole = _planned(tiny, settings(param_dtype="bfloat16"), length)
    for fused in ("chunked", "liger"):
        less = _planned(tiny, settings(param_dtype="bfloat16", fused_loss=fused), length)
        logits = 2 * length * 23 * 4
        assert whole.saved_activations - less.saved_activations > 0.6 * logits
        assert whole.activations - less.activations > 0.5 * logits


def test_batch_counts_instead_of_a_length(tiny: Model, settings: Settings) -> None:
    ids = torch.zeros(3, 40, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    found = plan(tiny, settings(), world_size=2, batch=batch)
    assert (found.batch_size, found.sequence_length) == (3, 40)
    same = plan(tiny, settings(per_device_train_batch_size=3), world_size=2, sequence_length=40)
    assert found.saved_activations == same.saved_activations


def test_autocast_keeps_casts_of_all_weights(tiny: Model, settings: Settings) -> None:
    cast = _planned(tiny, settings(mixed_precision="bf16"), 4, world_size=2)
    gathered = _planned(tiny, settings(param_dtype="bfloat16"), 4, world_size=2)
    matrices = sum(p.numel() for p in tiny().parameters() if p.ndim == 2)
    assert cast.saved_activations - gathered.saved_activations > 2 * matrices
    assert any("mixed_precision" in note for note in cast.notes)
    assert gathered.notes == ()


def test_float8_counts_as_bf16_without_the_gpu_that_has_it(tiny: Model, settings: Settings) -> None:
    plain = _planned(tiny, settings(param_dtype="bfloat16"), world_size=2)
    given = {"fp8_recipe": "tensorwise", "fp8_dim_alignment": 32, "fp8_all_gather": True}
    found = _planned(tiny, settings(param_dtype="bfloat16", **given), world_size=2)
    assert found.total == plain.total
    assert any("fp8_recipe" in note for note in found.notes)


def test_offloaded_activations_are_on_the_host(tiny: Model, settings: Settings) -> None:
    usual, away = (_planned(tiny, settings(enable_activation_offloading=on)) for on in (False, True))
    assert away.on_host == usual.saved_activations
    assert away.activations == usual.activations - usual.saved_activations


def test_models_beyond_this_machine_can_be_planned(tiny: Model, settings: Settings) -> None:
    found = _planned(lambda: tiny(width=2**15, layers=8), settings(param_dtype="bfloat16"), world_size=64)
    assert found.parameter_count > 1e11
    assert 64 * found.parameters == pytest.approx(4 * found.parameter_count, rel=1e-3)


class _Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 23)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.layers[0](input_ids.unsqueeze(-1).float())
        return x * 2 if x.sum() > 0 else x


def test_model_that_reads_values_while_it_runs_is_named(settings: Settings) -> None:
    with pytest.raises(ConfigurationError, match=r"model='_Looks'.*without values"):
        _planned(_Looks, settings())


def test_plan_is_readable(tiny: Model, settings: Settings) -> None:
    found = _planned(tiny, settings(torch_compile=True, param_dtype="bfloat16"), world_size=2)
    lines = str(found).splitlines()
    assert "one copy over 2 GPUs; 2 x 128 tokens on each" in lines[0]
    rows = [line[:22].strip() for line in lines[1:10]]
    assert rows == [
        "parameters",
        "gradients",
        "optimizer state",
        "gathered weights",
        "gradients under way",
        "activations",
        "at one time",
        "margin",
        "total",
    ]
    assert lines[-1].strip() == "torch_compile usually keeps fewer activations than this"
    values = json.loads(json.dumps(found.to_json()))
    assert values["total"] == found.total
    assert values["mesh"] == {"shards": 2, "replicas": 1}
    assert values["per_rank_state"] == list(found.per_rank_state)
