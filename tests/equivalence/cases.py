"""The rows of the table: each is a way to train that has to give the reference's curve."""

from __future__ import annotations

from dataclasses import replace

from .case import (
    BFLOAT16,
    BY_EYE,
    COMPILED,
    MUON,
    MUON_BOUND,
    PLAIN,
    RESTARTED,
    SCHEDULE_FREE,
    SHORT,
    SHORT_TIED,
    SHORT_UNCLIPPED,
    TIED,
    Case,
    SpoilGradient,
    adamw,
    decay_by_name,
)
from .context_cases import CONTEXT_CASES
from .ddp_cases import DDP_CASES
from .expert_cases import EXPERT_CASES
from .fsdp2_cases import FSDP2_CASES
from .model import Untold
from .pipeline_cases import PIPELINE_CASES
from .tensor_cases import TENSOR_CASES

EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}


def _option(name: str, **fields: object) -> Case:
    """A row that switches one thing on; what that changes shows in the first steps, and others train on."""
    return Case(name=name, **{"recipe": SHORT, **fields})  # type: ignore[arg-type]


ONE_DEVICE_CASES = [
    Case(name="reference, microbatches of 4 rows", runner="reference", accumulation=2, full=True),
    Case(name="reference, microbatches of 8 rows", runner="reference", accumulation=1),
    Case(name="accumulation 1"),
    Case(name="accumulation 2", accumulation=2, full=True),
    Case(name="accumulation 4", accumulation=4),
    _option("tied head", recipe=SHORT_TIED, accumulation=4),
    _option("no clipping", recipe=SHORT_UNCLIPPED),
    Case(name="compiled model, inductor", settings=COMPILED, full=True),
    # For any shape at once: this compiler takes half a minute for each of the shapes that come.
    _option(
        "compiled blocks, inductor",
        settings={**COMPILED, "torch_compile_scope": "blocks", "torch_compile_dynamic": True},
        full=True,
    ),
    Case(name="compiled model, aot_eager, accumulation 4", settings=BY_EYE, accumulation=4, full=True),
    Case(
        name="compiled blocks, aot_eager, tied",
        settings={**BY_EYE, "torch_compile_scope": "blocks"},
        recipe=TIED,
        full=True,
    ),
    Case(
        name="compiled, memory budget 0.5",
        settings={**COMPILED, "activation_memory_budget": 0.5},
        full=True,
    ),
    _option("checkpointing full", settings={"activation_checkpointing": "full"}),
    _option("gradient_checkpointing", settings={"gradient_checkpointing": True}, accumulation=2),
    _option(
        "checkpointing every_n 2",
        settings={"activation_checkpointing": "every_n", "activation_checkpointing_every": 2},
    ),
    _option(
        "checkpointing share 1/3",
        settings={"activation_checkpointing": "share", "activation_checkpointing_share": 1 / 3},
    ),
    _option("checkpointing operators", settings={"activation_checkpointing": "operators"}),
    _option(
        "checkpointing operators, only aten.mm",
        settings={
            "activation_checkpointing": "operators",
            "activation_checkpointing_operators": ("aten.mm",),
        },
    ),
    Case(
        name="checkpointing full, compiled blocks",
        settings={**BY_EYE, "torch_compile_scope": "blocks", "activation_checkpointing": "full"},
        full=True,
    ),
    _option("fused loss torch", settings={"fused_loss": "torch"}),
    _option("fused loss chunked", settings={"fused_loss": "chunked"}, accumulation=4),
    _option("fused loss auto, tied", settings={"fused_loss": "auto"}, recipe=SHORT_TIED),
    Case(
        name="fused loss auto, compiled",
        settings={"fused_loss": "auto", **BY_EYE},
        full=True,
    ),
    _option("built on the device", settings={"construct_model_on": "device"}),
    _option("restarted, built by default", runner="restarted", recipe=RESTARTED),
    _option(
        "restarted, built on meta",
        settings={"construct_model_on": "meta"},
        runner="restarted",
        recipe=RESTARTED,
    ),
    _option(
        "restarted, built on meta, tied, accumulation 4",
        settings={"construct_model_on": "meta"},
        runner="restarted",
        recipe=replace(RESTARTED, tied=True),
        accumulation=4,
    ),
    _option("optimizer in backward", settings={"fuse_optim_with_backward": True}, recipe=SHORT_UNCLIPPED),
    _option(
        "optimizer in backward, tied, restarted",
        settings={"fuse_optim_with_backward": True},
        recipe=replace(RESTARTED, max_grad_norm=None, tied=True),
        runner="restarted",
    ),
    _option("optimizer groups by name", options=decay_by_name),
    _option("two optimizers (Multiopt)", options=lambda: decay_by_name(factory=adamw), accumulation=2),
    _option(
        "two optimizers, restarted",
        options=lambda: decay_by_name(factory=adamw),
        runner="restarted",
        recipe=RESTARTED,
    ),
    Case(name="Muon, averaged", recipe=MUON, **MUON_BOUND, settings=EVALUATED, accumulation=2),
    Case(name="schedule-free", recipe=SCHEDULE_FREE, settings=EVALUATED, accumulation=2),
    _option("nonfinite_policy skip", settings={"nonfinite_policy": "skip"}),
    _option("nonfinite_policy raise", settings={"nonfinite_policy": "raise"}),
    Case(
        name="nonfinite_policy skip, a step skipped",
        settings={"nonfinite_policy": "skip"},
        options=lambda: {"callbacks": [SpoilGradient(9)]},
        recipe=replace(SHORT, bad_step=9),
    ),
    _option("garbage by hand", settings={"gc_steps": 5, "gc_freeze": True}),
    _option("anomaly mode", settings={"detect_anomaly": True}),
    _option("FLOPs counted", settings={"check_flops": True}, options=lambda: {"model_init": Untold}),
    _option("evaluation in between", settings=EVALUATED),
    Case(
        name="evaluation in between, compiled",
        settings={"eval_strategy": "steps", "eval_steps": 10, **BY_EYE},
        full=True,
    ),
    # Weights that differ in a last bit are rounded to bfloat16s that differ in the eighth: here the reference
    # has to round as we do, and without that it is as far from itself as the row below it.
    _option(
        "bf16 autocast",
        settings={"mixed_precision": "bf16"},
        recipe=replace(SHORT, autocast=True, fused=True),
        accumulation=4,
    ),
    Case(
        name="reference in bf16 autocast, another AdamW",
        runner="reference with another AdamW",
        recipe=replace(PLAIN, autocast=True),
        accumulation=4,
        tolerance=BFLOAT16,
        because="what a last bit does in bfloat16",
        full=True,
    ),
    _option(
        "bf16 autocast, beside float32",
        settings={"mixed_precision": "bf16"},
        tolerance=BFLOAT16,
        because="bfloat16 keeps 8 bits of a product",
    ),
]

CASES = [
    *ONE_DEVICE_CASES,
    *DDP_CASES,
    *FSDP2_CASES,
    *PIPELINE_CASES,
    *TENSOR_CASES,
    *CONTEXT_CASES,
    *EXPERT_CASES,
]
