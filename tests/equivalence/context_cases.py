"""The rows of context parallelism, alone and with other ways: ranks that compute parts of each sequence."""

from __future__ import annotations

from dataclasses import replace

from dist_env import ParallelLayout
from trainer_core import ContextParallel, TensorParallel
from trainer_pipeline import PipelineArguments

from .case import BY_EYE, PLAIN, RESTARTED, SHORT, SHORT_TIED, Case, on_ranks

EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
CHECKPOINTED = {"activation_checkpointing": "full"}
BRIEF = replace(SHORT, steps=6, evaluated=True)
"""What the default tests do of rows whose steps take long, and all of whose steps do the same."""


def _contiguous() -> dict[str, object]:
    return {"parallel": [ContextParallel(balanced=False)]}


def _ring() -> dict[str, object]:
    return {"parallel": [ContextParallel(exchange="ring")]}


def _by_sequence() -> dict[str, object]:
    return {"parallel": [TensorParallel(sequence=True)]}


def _trainer(mesh: str) -> str:
    return "pipeline" if ParallelLayout.parse(mesh).pipeline > 1 else "fsdp2"


def _row(mesh: str, what: str = "", *, accumulation: int = 1, **fields: object) -> Case:
    layout = ParallelLayout.parse(mesh)
    settings = fields.pop("settings", {})
    if layout.pipeline > 1:
        settings = {"pipeline": PipelineArguments(n_microbatches=4), **settings}  # type: ignore[dict-item]
    return on_ranks(
        "Context",
        ", ".join([mesh, *([what] if what else [])]),
        ranks=layout.world_size,
        accumulation=accumulation * layout.data_count,
        mesh=mesh,
        settings=settings,
        **{"trainer": _trainer(mesh), "recipe": replace(SHORT, steps=12, evaluated=True), **fields},  # type: ignore[arg-type]
    )


def _moved(first: str, then: str, **fields: object) -> Case:
    """A row that continues with another layout; an empty one is one process."""
    given: dict[str, object] = {"recipe": replace(RESTARTED, global_batch=12), **fields}
    given["runner"] = (
        "ranks, restarted" if first and then else "ranks, then here" if first else "here, then ranks"
    )
    if then and first:
        given |= {
            "next_mesh": then,
            "next_world_size": ParallelLayout.parse(then).world_size,
            "next_trainer": _trainer(then),
        }
    pipeline = {"pipeline": PipelineArguments(n_microbatches=3)} if "pp" in first + then else {}
    # In the row of the default tests no layout divides the data further.
    microbatches = 4 if (first, then) in MOVED else 12
    return _row(
        first or then,
        f"restarted as {then or 'one process'}" if first else "restarted after one process",
        accumulation=microbatches // ParallelLayout.parse(first or then).data_count,
        settings=pipeline,
        **given,
    )


LAYOUTS = ("", "cp=2", "shard=2", "shard=2,cp=2", "cp=2,tp=2", "pp=2,cp=2")
"""Each is resumed as each, but for those without parts of sequences."""
MOVED = {("cp=2", "")}
"""The one of them that the default tests have."""

CONTEXT_CASES = [
    _row("cp=2", "accumulation 4, evaluation in between", accumulation=4, settings=EVALUATED, full=True),
    _row(
        "cp=2", "contiguous, tied", options=_contiguous, recipe=replace(SHORT_TIED, steps=6, evaluated=True)
    ),
    _row("cp=2", recipe=PLAIN, full=True),
    _row("cp=4", full=True),
    _row("cp=2", "checkpointing full", settings=CHECKPOINTED, full=True),
    _row("cp=2", "compiled blocks", settings={**BY_EYE, "torch_compile_scope": "blocks"}, full=True),
    _row("cp=2", "fused loss", settings={"fused_loss": "chunked"}, full=True),
    _row(
        "shard=2,cp=2",
        "checkpointing full",
        settings=CHECKPOINTED,
        recipe=BRIEF,
    ),
    _row("cp=2,tp=2", full=True),
    _row("cp=2,tp=2", "sequence", options=_by_sequence, full=True),
    _row("dp=2,cp=2", full=True),
    _row("pp=2,cp=2", full=True),
    *(
        _row(
            "pp=2,cp=2",
            schedule,
            settings={"pipeline": PipelineArguments(schedule=schedule, n_microbatches=4)},
            full=True,
        )
        for schedule in ("gpipe", "interleaved_1f1b", "looped_bfs")
    ),
    *(
        _row(mesh, recipe=replace(SHORT, steps=5), full=True)
        for mesh in (
            "shard=2,cp=2,tp=2",
            "shard=2,pp=2,cp=2",
            "pp=2,cp=2,tp=2",
            "shard=2,cp=4",
            "dp=2,shard=2,cp=2",
            "dp=2,cp=2,tp=2",
            "dp=2,pp=2,cp=2",
        )
    ),
    _row("cp=2", "ring, accumulation 2", accumulation=2, options=_ring, recipe=BRIEF),
    _row(
        "cp=2",
        "ring, compiled blocks",
        settings={**BY_EYE, "torch_compile_scope": "blocks"},
        options=_ring,
        full=True,
    ),
    _row("shard=2,cp=2", "ring, checkpointing full", settings=CHECKPOINTED, options=_ring, full=True),
    *(
        _row(mesh, "ring", options=_ring, full=True)
        for mesh in ("cp=4", "cp=2,tp=2", "dp=2,cp=2", "pp=2,cp=2")
    ),
    _row(
        "pp=2,cp=2",
        "ring, interleaved_1f1b",
        settings={"pipeline": PipelineArguments(schedule="interleaved_1f1b", n_microbatches=4)},
        options=_ring,
        full=True,
    ),
    *(
        _moved(first, then, full=(first, then) not in MOVED)
        for first in LAYOUTS
        for then in LAYOUTS
        if "cp" in first + then
    ),
]
