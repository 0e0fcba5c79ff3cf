"""The rows of tensor parallelism, alone and with every other way: ranks that compute parts of each layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dist_env import ParallelLayout
from trainer_core import TensorParallel
from trainer_pipeline import PipelineArguments

from .case import (
    BFLOAT16,
    BY_EYE,
    PLAIN,
    RESTARTED,
    SCHEDULE_FREE,
    SHORT,
    SHORT_TIED,
    Case,
    adamw,
    decay_by_name,
    on_ranks,
)


def _by_sequence() -> dict[str, object]:
    return {"parallel": [TensorParallel(sequence=True)]}


SEQUENCE = {"options": _by_sequence, "multiple": 4}
"""Activations between layers are divided, too; the rows' lengths are what tp=2 and tp=4 divide."""
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
SCHEDULES = ("gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v")
"""All but 1f1b, which other rows have."""
CHECKPOINTED = {"activation_checkpointing": "full"}
TWELVE = replace(RESTARTED, global_batch=12)


def _trainer(mesh: str) -> str:
    layout = ParallelLayout.parse(mesh)
    return "pipeline" if layout.pipeline > 1 else "fsdp2" if layout.shard > 1 else "ddp"


def _row(mesh: str, what: str = "", *, accumulation: int = 1, **fields: object) -> Case:
    """A row with so many microbatches for each copy of the model and step, the trainer that of the mesh."""
    layout = ParallelLayout.parse(mesh)
    settings = fields.pop("settings", {})
    if layout.pipeline > 1:
        settings = {"pipeline": PipelineArguments(n_microbatches=4), **settings}  # type: ignore[dict-item]
    name = ", ".join([f"{mesh}", *([what] if what else [])])
    return on_ranks(
        "Tensor",
        name,
        ranks=layout.world_size,
        accumulation=accumulation * layout.data_count,
        mesh=mesh,
        settings=settings,
        **{"trainer": _trainer(mesh), "recipe": replace(SHORT, steps=12, evaluated=True), **fields},  # type: ignore[arg-type]
    )


def _moved(first: str, then: str, **fields: object) -> Case:
    """A row that continues with another layout; an empty one is one process."""
    given = {"runner": "ranks, restarted", "recipe": TWELVE, **fields}
    if not first or not then:
        given["runner"] = "here, then ranks" if not first else "ranks, then here"
    if then and first:
        given |= {
            "next_mesh": then,
            "next_world_size": ParallelLayout.parse(then).world_size,
            "next_trainer": _trainer(then),
        }
    data = ParallelLayout.parse(first or then).data_count
    # In the row of the default tests no layout divides the data further.
    microbatches = 4 if (first, then) in MOVED else 12
    pipeline = {"pipeline": PipelineArguments(n_microbatches=3)} if "pp" in first + then else {}
    return _row(
        first or then,
        f"restarted as {then or 'one process'}" if first else "restarted after one process",
        accumulation=microbatches // data,
        settings=pipeline,
        **given,
    )


LAYOUTS = ("", "tp=2", "tp=4", "dp=2,tp=2", "shard=2,tp=2", "pp=2,tp=2", "shard=2")
"""Each is resumed as each."""
MOVED = {("tp=2", "")}
"""The one of them that the default tests have."""

TENSOR_CASES = [
    _row("tp=2", recipe=PLAIN, full=True),
    _row(
        "tp=2", "tied, accumulation 4", accumulation=4, recipe=replace(SHORT_TIED, evaluated=True), full=True
    ),
    _row("tp=4", "evaluation in between", settings=EVALUATED, full=True),
    _row("tp=2", "checkpointing full", settings=CHECKPOINTED, full=True),
    _row("tp=2", "compiled blocks", settings={**BY_EYE, "torch_compile_scope": "blocks"}, full=True),
    _row(
        "tp=2",
        "bf16 autocast",
        settings={"mixed_precision": "bf16"},
        tolerance=BFLOAT16,
        because="bfloat16 keeps 8 bits of a product",
    ),
    _row("tp=2", "two optimizers", options=partial(decay_by_name, factory=adamw), full=True),
    _row("tp=2", "schedule-free", recipe=SCHEDULE_FREE, settings=EVALUATED, full=True),
    _row(
        "tp=2",
        "average of the weights",
        recipe=replace(SHORT, steps=14, ema_decay=0.9, evaluated=True),
        full=True,
    ),
    _row(
        "dp=2,tp=2", "accumulation 2, fused loss", accumulation=2, settings={"fused_loss": "auto"}, full=True
    ),
    _row("tp=2", "fused loss, tied", recipe=SHORT_TIED, settings={"fused_loss": "chunked"}, full=True),
    _row("shard=2,tp=2", "fused loss", settings={"fused_loss": "chunked"}, full=True),
    _row(
        "pp=2,tp=2",
        "fused loss",
        settings={"fused_loss": "chunked", "pipeline": PipelineArguments(n_microbatches=4)},
        full=True,
    ),
    _row(
        "shard=2,tp=2",
        "tied, checkpointing full",
        recipe=SHORT_TIED,
        settings=CHECKPOINTED,
        full=True,
    ),
    _row("shard=2,tp=2", "compiled blocks", settings={**BY_EYE, "torch_compile_scope": "blocks"}, full=True),
    _row("pp=2,tp=2", "tied", recipe=replace(SHORT_TIED, steps=12, evaluated=True), full=True),
    *(
        _row(
            "pp=2,tp=2",
            schedule,
            settings={"pipeline": PipelineArguments(schedule=schedule, n_microbatches=4)},
            full=True,
        )
        for schedule in ("gpipe", "interleaved_1f1b", "zbv", "dualpipe_v")
    ),
    *(
        _row(mesh, recipe=replace(SHORT, steps=5), full=True)
        for mesh in ("dp=2,shard=2,tp=2", "shard=2,tp=4", "dp=2,pp=2,tp=2", "shard=2,pp=2,tp=2", "pp=2,tp=4")
    ),
    _row("tp=2", "sequence", recipe=replace(SHORT_TIED, steps=12, evaluated=True), full=True, **SEQUENCE),
    _row("shard=2,tp=2", "sequence, checkpointing full", settings=CHECKPOINTED, full=True, **SEQUENCE),
    _row("pp=2,tp=2", "sequence, tied", recipe=replace(SHORT_TIED, steps=6, evaluated=True), **SEQUENCE),
    _row(
        "pp=2,tp=2",
        "sequence, fused loss, checkpointing full",
        settings={
            "fused_loss": "chunked",
            "pipeline": PipelineArguments(n_microbatches=4),
            **CHECKPOINTED,
        },
        full=True,
        **SEQUENCE,
    ),
    *(
        _row(
            "pp=2,tp=2",
            f"sequence, {schedule}",
            settings={"pipeline": PipelineArguments(schedule=schedule, n_microbatches=4)},
            full=True,
            **SEQUENCE,
        )
        for schedule in SCHEDULES
    ),
    *(
        _row(mesh, "sequence", recipe=replace(SHORT, steps=5), full=True, **SEQUENCE)
        for mesh in ("shard=2,pp=2,tp=2", "pp=2,tp=4")
    ),
    _row("tp=2", "restarted", runner="ranks, restarted", recipe=RESTARTED, full=True),
    *(
        _moved(first, then, full=(first, then) not in MOVED)
        for first in LAYOUTS
        for then in LAYOUTS
        if (first or then) and not (first == then == "shard=2")
    ),
]
