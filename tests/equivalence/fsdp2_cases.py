"""The rows of `FSDP2Trainer`: ranks that hold parts of the model, with the global batches of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer_fsdp2 import FSDP2Arguments

from .case import (
    BFLOAT16,
    BY_EYE,
    COMPILED,
    FLOAT16,
    MUON,
    MUON_BOUND,
    PLAIN,
    RESTARTED,
    SCHEDULE_FREE,
    SHORT,
    SHORT_TIED,
    UNCLIPPED,
    Case,
    Overflow,
    adamw,
    decay_by_name,
    on_ranks,
)

BLOCKS_BY_EYE = {**BY_EYE, "torch_compile_scope": "blocks"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
FULL = {"activation_checkpointing": "full"}


_ranks = partial(on_ranks, "FSDP2")


def _option(name: str, **fields: object) -> Case:
    """A row that switches one thing on; what that changes shows in the first steps, and others train on."""
    return _ranks(name, **{"recipe": SHORT, **fields})  # type: ignore[arg-type]


def _sharded(name: str, fsdp2: FSDP2Arguments, **fields: object) -> Case:
    """A row with other settings of sharding."""
    settings = {"fsdp2": fsdp2, **fields.pop("settings", {})}  # type: ignore[dict-item]
    return _option(name, settings=settings, **fields)


def _restarted(name: str, **fields: object) -> Case:
    """A row that is stopped and continues."""
    given = {"runner": "ranks, restarted", "accumulation": 4, "recipe": RESTARTED, **fields}
    return _ranks(f"restarted{name}", **given)  # type: ignore[arg-type]


def _moved(name: str, **fields: object) -> Case:
    """A row that continues elsewhere; twelve rows can be divided among 1, 2, 3 and 4 ranks."""
    return _restarted(name, recipe=TWELVE, **{"accumulation": 12, **fields})  # type: ignore[arg-type]


TWELVE = replace(RESTARTED, global_batch=12)
HYBRID = "dp=2,shard=2"
OVERFLOWN = replace(SHORT, float16=True, fused=True, bad_step=9)


def _overflow() -> dict[str, object]:
    return {"callbacks": [Overflow(9)]}


FSDP2_CASES = [
    _option("", ranks=1, accumulation=2),
    _ranks("", full=True),
    _ranks("", ranks=4, full=True),
    _ranks("accumulation 2", accumulation=4, full=True),
    _ranks("accumulation 2", ranks=4, accumulation=8, full=True),
    _ranks("own data", ranks=4, settings={"dispatch_batches": False}, full=True),
    _sharded("not resharded", FSDP2Arguments(reshard_after_forward=False), accumulation=4),
    _sharded("reduced each microbatch", FSDP2Arguments(reduce_each_microbatch=True), accumulation=4),
    _sharded("resharded to 2", FSDP2Arguments(reshard_after_forward=2), ranks=4, full=True),
    _option("HSDP 2 x 2", ranks=4, mesh=HYBRID, full=True),
    _sharded("HSDP 2 x 2, as files of old runs say it", FSDP2Arguments(replicas=2), ranks=4, full=True),
    _option(
        "HSDP 2 x 2, tied, accumulation 2", ranks=4, mesh=HYBRID, recipe=SHORT_TIED, accumulation=8, full=True
    ),
    _sharded("the model as one piece", FSDP2Arguments(shard_transformer_layers=False)),
    _sharded(
        "by class, halves of blocks",
        FSDP2Arguments(layer_classes=("Attention", "FeedForward")),
        full=True,
    ),
    _sharded("prefetch 2", FSDP2Arguments(prefetch_depth=2), ranks=4, full=True),
    _sharded("on the host", FSDP2Arguments(cpu_offload=True), accumulation=4),
    # 101 rows of the embedding: 26, 26, 26 and 23.
    _ranks("tied head", ranks=4, recipe=SHORT_TIED, full=True),
    _ranks("no clipping", recipe=UNCLIPPED, full=True),
    _option("fused loss torch", settings={"fused_loss": "torch"}, full=True),
    _ranks("fused loss chunked, tied", settings={"fused_loss": "chunked"}, recipe=SHORT_TIED, accumulation=4),
    _option(
        "fused loss chunked, HSDP 2 x 2",
        ranks=4,
        mesh=HYBRID,
        settings={"fused_loss": "chunked"},
        full=True,
    ),
    _option("evaluation in between", settings=EVALUATED),
    _option("optimizer groups by name", options=decay_by_name, full=True),
    _option("two optimizers (Multiopt)", options=partial(decay_by_name, factory=adamw), accumulation=4),
    _option("Muon, averaged", recipe=MUON, **MUON_BOUND, settings=EVALUATED, accumulation=4, full=True),
    _option("Muon, averaged, HSDP 2 x 2", recipe=MUON, **MUON_BOUND, ranks=4, mesh=HYBRID, full=True),
    _option("schedule-free", recipe=SCHEDULE_FREE, settings=EVALUATED, accumulation=4, full=True),
    _option("compiled model, aot_eager", settings=BY_EYE, full=True),
    _option(
        "compiled blocks, inductor",
        settings={**COMPILED, "torch_compile_scope": "blocks"},
        full=True,
    ),
    _ranks("compiled blocks, aot_eager, tied", settings=BLOCKS_BY_EYE, recipe=SHORT_TIED, full=True),
    _option("checkpointing full", settings=FULL, accumulation=4, full=True),
    _option("checkpointing operators", settings={"activation_checkpointing": "operators"}, full=True),
    _option(
        "checkpointing full, compiled blocks",
        settings={**BLOCKS_BY_EYE, **FULL, "torch_compile_dynamic": True},
        full=True,
    ),
    _option("checkpointing full, HSDP 2 x 2", ranks=4, mesh=HYBRID, settings=FULL, full=True),
    _sharded(
        "bfloat16 policy",
        FSDP2Arguments(param_dtype="bfloat16"),
        recipe=replace(SHORT, autocast=True, fused=True),
        accumulation=4,
        tolerance=BFLOAT16,
        because="layers compute in bfloat16",
    ),
    _ranks(
        "bf16 autocast",
        settings={"mixed_precision": "bf16"},
        recipe=replace(PLAIN, autocast=True, fused=True),
        accumulation=4,
        tolerance=BFLOAT16,
        because="what a last bit does in bfloat16",
        full=True,
    ),
    _ranks(
        "float16, an overflow on one rank",
        settings={"mixed_precision": "fp16"},
        options=_overflow,
        recipe=OVERFLOWN,
        accumulation=4,
        tolerance=FLOAT16,
        because="what a last bit does in float16",
    ),
    _restarted("", full=True),
    _restarted(
        ", built on meta, tied",
        settings={"construct_model_on": "meta"},
        recipe=replace(RESTARTED, tied=True),
    ),
    _restarted(", two optimizers", options=partial(decay_by_name, factory=adamw), full=True),
    _restarted(", HSDP 2 x 2", ranks=4, mesh=HYBRID),
    _restarted(" at 2, then Trainer, Muon, averaged", runner="ranks, then here", recipe=MUON, **MUON_BOUND),
    _restarted(" at 2, then DDP 2, schedule-free", next_trainer="ddp", recipe=SCHEDULE_FREE),
    # Whoever saved it, whoever continues.
    _moved(" at 4, then Trainer", ranks=4, runner="ranks, then here", full=True),
    _moved(" at 4, then 1", ranks=4, next_world_size=1, full=True),
    _moved(" at 4, then 2", ranks=4, next_world_size=2, full=True),
    _moved(" at 4, then 3", ranks=4, next_world_size=3, full=True),
    _moved(" at 4, then DDP 2", ranks=4, next_world_size=2, next_trainer="ddp", full=True),
    _moved(" after Trainer, at 4", ranks=4, runner="here, then ranks", full=True),
    _moved(" at 1, then 4", ranks=1, next_world_size=4, full=True),
    _moved(" at 2, then 4", ranks=2, next_world_size=4, full=True),
    _moved(" at 3, then 4", ranks=3, next_world_size=4, full=True),
    _moved(" after DDP 2, at 4", trainer="ddp", next_world_size=4, next_trainer="fsdp2", full=True),
]
