"""The rows of `DDPTrainer`: data-parallel ranks with the global batches of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer_ddp import CompressionArguments, DDPArguments

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
    UNCLIPPED,
    Case,
    SpoilGradient,
    adamw,
    decay_by_name,
    on_ranks,
)

WIDE = replace(PLAIN, width=128, steps=10)
"""More than 2 MiB of weights, so that gradients travel in several buckets of 1 MiB."""
OWN_DATA = {"dispatch_batches": False}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}


_ranks = partial(on_ranks, "DDP")


def _wrapped(name: str, ddp: DDPArguments, **fields: object) -> Case:
    """A row with options of torch's wrapper, that also leaves out communication while it accumulates."""
    given = {"accumulation": 4, "settings": {"ddp": ddp}, "recipe": SHORT, **fields}
    return _ranks(name, **given)  # type: ignore[arg-type]


def _option(name: str, **fields: object) -> Case:
    """A row that switches one thing on; what that changes shows in the first steps, and others train on."""
    return _ranks(name, **{"recipe": SHORT, **fields})  # type: ignore[arg-type]


def _restarted(name: str, **fields: object) -> Case:
    given = {"runner": "ranks, restarted", "recipe": RESTARTED, **fields}
    return _ranks(f"restarted{', ' * bool(name)}{name}", **given)  # type: ignore[arg-type]


def _spoiled() -> dict[str, object]:
    return {"callbacks": [SpoilGradient(9)]}


DDP_CASES = [
    _option("", ranks=1, accumulation=2),
    _ranks(""),
    _ranks("", ranks=4, full=True),
    _ranks("accumulation 2", accumulation=4, full=True),
    _ranks("accumulation 4", accumulation=8, full=True),
    _option("accumulation 2", ranks=4, accumulation=8, full=True),
    _option("Muon, averaged", recipe=MUON, **MUON_BOUND, settings=EVALUATED),
    _option("schedule-free", recipe=SCHEDULE_FREE, settings=EVALUATED),
    _ranks("own data", accumulation=4, settings=OWN_DATA, full=True),
    _option("own data", ranks=4, settings=OWN_DATA, full=True),
    _ranks("tied head", recipe=SHORT_TIED, accumulation=4, full=True),
    _ranks("no clipping", recipe=UNCLIPPED, full=True),
    _option("fused loss torch", settings={"fused_loss": "torch"}, full=True),
    _option(
        "fused loss chunked, tied", settings={"fused_loss": "chunked"}, recipe=SHORT_TIED, accumulation=4
    ),
    _wrapped("gradient_as_bucket_view", DDPArguments(gradient_as_bucket_view=True)),
    _wrapped("find_unused_parameters", DDPArguments(find_unused_parameters=True)),
    _wrapped("static_graph", DDPArguments(static_graph=True), full=True),
    _wrapped("no broadcast_buffers", DDPArguments(broadcast_buffers=False), full=True),
    _wrapped("no init_sync", DDPArguments(init_sync=False), full=True),
    _wrapped("bucket_cap_mb 1, several buckets", DDPArguments(bucket_cap_mb=1), recipe=WIDE),
    _option(
        "compiled blocks, inductor",
        settings={**COMPILED, "torch_compile_scope": "blocks"},
        full=True,
    ),
    _option("compiled model, aot_eager, accumulation 2", settings=BY_EYE, accumulation=4, full=True),
    _option(
        "compiled blocks, aot_eager, tied",
        settings={**BY_EYE, "torch_compile_scope": "blocks", "torch_compile_dynamic": True},
        recipe=SHORT_TIED,
        full=True,
    ),
    _option(
        "compiled model, aot_eager, several buckets",
        settings={**BY_EYE, "ddp": DDPArguments(bucket_cap_mb=1)},
        recipe=WIDE,
        full=True,
    ),
    _option(
        "checkpointing full",
        settings={"activation_checkpointing": "full"},
        accumulation=4,
        full=True,
    ),
    _option(
        "checkpointing full, static_graph",
        settings={"activation_checkpointing": "full", "ddp": DDPArguments(static_graph=True)},
    ),
    _option("evaluation in between", settings=EVALUATED, full=True),
    _option("evaluation in between, own data", settings={**EVALUATED, **OWN_DATA}),
    _option(
        "evaluation in between, own evaluation data",
        settings={**EVALUATED, "dispatch_eval_batches": False},
        full=True,
    ),
    _option("optimizer groups by name", options=decay_by_name, full=True),
    _option("two optimizers (Multiopt)", options=partial(decay_by_name, factory=adamw), accumulation=4),
    _option(
        "nonfinite_policy skip, a step skipped",
        settings={"nonfinite_policy": "skip"},
        options=_spoiled,
        recipe=replace(SHORT, bad_step=9),
    ),
    _option(
        "bf16 compression",
        settings={"compression": CompressionArguments(method="bf16")},
        tolerance=BFLOAT16,
        because="gradients travel as bfloat16",
    ),
    _option(
        "bf16 autocast",
        settings={"mixed_precision": "bf16"},
        recipe=replace(SHORT, autocast=True, fused=True),
        accumulation=4,
        tolerance=BFLOAT16,
        because="what a last bit does in bfloat16",
    ),
    _restarted("", full=True),
    _restarted(
        "built on meta, tied",
        settings={"construct_model_on": "meta"},
        recipe=replace(RESTARTED, tied=True),
        accumulation=4,
    ),
    _restarted("own data", settings=OWN_DATA, accumulation=4),
    _restarted("two optimizers", options=partial(decay_by_name, factory=adamw), full=True),
    _restarted("then 4", next_world_size=4, accumulation=4),
    _restarted("then 1", next_world_size=1, accumulation=4, full=True),
    _restarted("then 2", ranks=1, next_world_size=2, accumulation=4, full=True),
    _restarted("then 2", ranks=4, next_world_size=2, accumulation=4, full=True),
    _restarted("then Trainer", runner="ranks, then here", accumulation=4),
    _restarted("before that Trainer", runner="here, then ranks", accumulation=4, full=True),
]
