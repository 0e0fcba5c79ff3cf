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
    SCHEDULE_FREE,
    TIED,
    UNCLIPPED,
    Case,
    SpoilGradient,
    adamw,
    decay_by_name,
)
from .ddp_cases import DDP_CASES
from .fsdp2_cases import FSDP2_CASES
from .model import Untold
from .pipeline_cases import PIPELINE_CASES

EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}

ONE_DEVICE_CASES = [
    Case(name="reference, microbatches of 4 rows", runner="reference", accumulation=2),
    Case(name="reference, microbatches of 8 rows", runner="reference", accumulation=1),
    Case(name="accumulation 1"),
    Case(name="accumulation 2", accumulation=2),
    Case(name="accumulation 4", accumulation=4),
    Case(name="tied head", recipe=TIED, accumulation=4),
    Case(name="no clipping", recipe=UNCLIPPED),
    Case(name="compiled model, inductor", settings=COMPILED, full=True),
    Case(name="compiled blocks, inductor", settings={**COMPILED, "torch_compile_scope": "blocks"}),
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
    Case(name="checkpointing full", settings={"activation_checkpointing": "full"}),
    Case(name="gradient_checkpointing", settings={"gradient_checkpointing": True}, accumulation=2),
    Case(
        name="checkpointing every_n 2",
        settings={"activation_checkpointing": "every_n", "activation_checkpointing_every": 2},
    ),
    Case(
        name="checkpointing share 1/3",
        settings={"activation_checkpointing": "share", "activation_checkpointing_share": 1 / 3},
    ),
    Case(name="checkpointing operators", settings={"activation_checkpointing": "operators"}),
    Case(
        name="checkpointing operators, only aten.mm",
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
    Case(name="fused loss torch", settings={"fused_loss": "torch"}),
    Case(name="fused loss chunked", settings={"fused_loss": "chunked"}, accumulation=4),
    Case(name="fused loss auto, tied", settings={"fused_loss": "auto"}, recipe=TIED),
    Case(
        name="fused loss auto, compiled",
        settings={"fused_loss": "auto", **BY_EYE},
        full=True,
    ),
    Case(name="built on the device", settings={"construct_model_on": "device"}),
    Case(name="restarted, built by default", runner="restarted"),
    Case(name="restarted, built on meta", settings={"construct_model_on": "meta"}, runner="restarted"),
    Case(
        name="restarted, built on meta, tied, accumulation 4",
        settings={"construct_model_on": "meta"},
        runner="restarted",
        recipe=TIED,
        accumulation=4,
    ),
    Case(name="optimizer in backward", settings={"fuse_optim_with_backward": True}, recipe=UNCLIPPED),
    Case(
        name="optimizer in backward, tied, restarted",
        settings={"fuse_optim_with_backward": True},
        recipe=replace(UNCLIPPED, tied=True),
        runner="restarted",
    ),
    Case(name="optimizer groups by name", options=decay_by_name),
    Case(name="two optimizers (Multiopt)", options=lambda: decay_by_name(factory=adamw), accumulation=2),
    Case(name="two optimizers, restarted", options=lambda: decay_by_name(factory=adamw), runner="restarted"),
    Case(name="Muon, averaged", recipe=MUON, **MUON_BOUND, settings=EVALUATED, accumulation=2),
    Case(name="schedule-free", recipe=SCHEDULE_FREE, settings=EVALUATED, accumulation=2),
    Case(name="nonfinite_policy skip", settings={"nonfinite_policy": "skip"}),
    Case(name="nonfinite_policy raise", settings={"nonfinite_policy": "raise"}),
    Case(
        name="nonfinite_policy skip, a step skipped",
        settings={"nonfinite_policy": "skip"},
        options=lambda: {"callbacks": [SpoilGradient(17)]},
        recipe=replace(PLAIN, bad_step=17),
    ),
    Case(name="garbage by hand", settings={"gc_steps": 5, "gc_freeze": True}),
    Case(name="anomaly mode", settings={"detect_anomaly": True}),
    Case(name="FLOPs counted", settings={"check_flops": True}, options=lambda: {"model_init": Untold}),
    Case(name="evaluation in between", settings=EVALUATED),
    Case(
        name="evaluation in between, compiled",
        settings={"eval_strategy": "steps", "eval_steps": 10, **BY_EYE},
        full=True,
    ),
    # Weights that differ in a last bit are rounded to bfloat16s that differ in the eighth: here the reference
    # has to round as we do, and without that it is as far from itself as the row below it.
    Case(
        name="bf16 autocast",
        settings={"mixed_precision": "bf16"},
        recipe=replace(PLAIN, autocast=True, fused=True),
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
    Case(
        name="bf16 autocast, beside float32",
        settings={"mixed_precision": "bf16"},
        tolerance=BFLOAT16,
        because="bfloat16 keeps 8 bits of a product",
    ),
]

CASES = [*ONE_DEVICE_CASES, *DDP_CASES, *FSDP2_CASES, *PIPELINE_CASES]
