"""The rows of `PipelineTrainer`: ranks that have different layers, with the global batches of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dist_env import ParallelLayout
from trainer_fsdp2 import FSDP2Arguments, FullyShard
from trainer_pipeline import PipelineArguments

from .case import (
    BFLOAT16,
    BY_EYE,
    MUON,
    MUON_BOUND,
    PLAIN,
    RESTARTED,
    SCHEDULE_FREE,
    TIED,
    UNCLIPPED,
    Case,
    adamw,
    decay_by_name,
    on_ranks,
)

CHUNKED = {"fused_loss": "chunked"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
SHORT = replace(PLAIN, steps=12, evaluated=True)
SHORT_TIED = replace(TIED, steps=12, evaluated=True)
TWELVE = replace(RESTARTED, global_batch=12)
SPLIT = ("interleaved_zero_bubble", "zbv", "dualpipe_v")
"""Schedules that compute the gradients of inputs and of weights apart."""
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", *SPLIT)
SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""
ELSEWHERE = ("interleaved_1f1b", "zbv")
"""Schedules that the default tests have in rows with an option or a restart."""
AS_MANY_AS_STAGES = ("1f1b", "dualpipe_v")
"""Schedules that need as many microbatches as there are stages."""


def _row(
    schedule: str,
    what: str = "",
    *,
    ranks: int = 2,
    n: int = 4,
    accumulation: int = 1,
    mesh: str | None = None,
    **fields: object,
) -> Case:
    """A row with so many batches for each copy of the pipeline and step."""
    pipeline = PipelineArguments(schedule=schedule, n_microbatches=n, **fields.pop("pipeline", {}))  # type: ignore[arg-type]
    parts = [schedule, f"{n} microbatches", *([f"accumulation {accumulation}"] if accumulation > 1 else [])]
    settings = {"pipeline": pipeline, **fields.pop("settings", {})}  # type: ignore[dict-item]
    return on_ranks(
        "Pipeline",
        ", ".join([*parts, *([what] if what else [])]),
        ranks=ranks,
        accumulation=accumulation * (ParallelLayout.parse(mesh).data_count if mesh else 1),
        settings=settings,
        mesh=mesh,
        **{"recipe": SHORT, **fields},
    )


def _every_schedule() -> Iterator[Case]:
    """Each schedule with 2 and 4 ranks, 2, 4 and 8 microbatches, accumulation 1 and 2, tied and untied.

    One row of each is for the tests, unless they have it in another one; that of 1f1b has four ranks.
    """
    for schedule in SCHEDULES:
        for ranks in (2, 4):
            needs_many = schedule in AS_MANY_AS_STAGES
            stages = ranks * (1 if schedule in SINGLE else 2)
            for n in (2, 4, 8):
                if needs_many and n < stages:
                    continue  # torch refuses it
                for accumulation in (1, 2):
                    tied = (n + accumulation) % 2 == 1
                    recipe = replace(SHORT_TIED if tied else SHORT, blocks=max(stages, PLAIN.blocks))
                    tested = (4 if schedule == "1f1b" else 2, max(4, stages) if needs_many else 4, 2)
                    yield _row(
                        schedule,
                        "tied" if tied else "",
                        ranks=ranks,
                        n=n,
                        accumulation=accumulation,
                        recipe=recipe,
                        full=(ranks, n, accumulation) != tested or schedule in ELSEWHERE,
                    )


def _option(what: str, schedule: str = "1f1b", **fields: object) -> Case:
    """A row that switches one thing on."""
    return _row(schedule, what, **fields)  # type: ignore[arg-type]


def _restarted(what: str, schedule: str = "1f1b", **fields: object) -> Case:
    """A row that is stopped and continues."""
    return _row(schedule, f"restarted{what}", **{"runner": "ranks, restarted", "recipe": RESTARTED, **fields})  # type: ignore[arg-type]


def _moved(what: str, schedule: str = "1f1b", **fields: object) -> Case:
    """A row that continues elsewhere; twelve rows can be divided among 1, 2, 3 and 4 ranks."""
    return _restarted(what, schedule, recipe=TWELVE, **{"accumulation": 12, **fields})


TWO = "pp=2,dp=2"
"""Copies of the pipeline."""
SHARED = "pp=2,shard=2"
"""Two pipelines that share out the weights of each stage."""


def _in_bfloat16() -> dict[str, object]:
    return {"parallel": [FullyShard(FSDP2Arguments(param_dtype="bfloat16"))]}


PIPELINE_CASES = [
    *_every_schedule(),
    _row("1f1b", n=1, ranks=1),
    _option(
        "Muon, averaged, tied",
        settings=EVALUATED,
        recipe=replace(MUON, tied=True),
        **MUON_BOUND,
        full=True,
    ),
    _option("schedule-free", settings=EVALUATED, recipe=SCHEDULE_FREE, full=True),
    _row(
        "1f1b",
        "2 copies, sharded, Muon, averaged",
        ranks=4,
        mesh=SHARED,
        recipe=MUON,
        **MUON_BOUND,
        full=True,
    ),
    _restarted(" after Trainer, at 2, Muon, averaged", runner="here, then ranks", recipe=MUON, **MUON_BOUND),
    _restarted(" at 2, then Trainer, schedule-free", runner="ranks, then here", recipe=SCHEDULE_FREE),
    # To the end of the curve, where small errors would have grown.
    _row("1f1b", "50 steps", ranks=4, accumulation=2, recipe=PLAIN, full=True),
    _row("zbv", "tied, 50 steps", recipe=TIED, accumulation=2, full=True),
    _row("1f1b", "2 copies", ranks=4, mesh=TWO, recipe=PLAIN, full=True),
    _row("1f1b", "2 copies, tied", ranks=4, mesh=TWO, accumulation=2, recipe=SHORT_TIED, full=True),
    _row("gpipe", "2 copies", ranks=4, mesh=TWO, accumulation=2, full=True),
    _row("interleaved_1f1b", "2 copies, tied", ranks=4, mesh=TWO, recipe=SHORT_TIED, full=True),
    _row("zbv", "2 copies, tied", ranks=4, mesh=TWO, recipe=SHORT_TIED, full=True),
    _row("interleaved_zero_bubble", "2 copies", ranks=4, mesh=TWO, full=True),
    _row("1f1b", "2 copies, sharded", ranks=4, mesh=SHARED, recipe=PLAIN, full=True),
    _row(
        "1f1b", "2 copies, sharded, tied", ranks=4, mesh=SHARED, accumulation=2, recipe=SHORT_TIED, full=True
    ),
    _row(
        "interleaved_1f1b",
        "2 copies, sharded",
        ranks=4,
        mesh=SHARED,
        accumulation=2,
        settings=EVALUATED,
        full=True,
    ),
    _row(
        "gpipe",
        "2 copies, sharded, fused loss chunked",
        ranks=4,
        mesh=SHARED,
        settings=CHUNKED,
        full=True,
    ),
    _row(
        "1f1b",
        "2 copies, sharded, bfloat16 policy",
        ranks=4,
        mesh=SHARED,
        options=_in_bfloat16,
        recipe=replace(PLAIN, autocast=True, fused=True),
        tolerance=BFLOAT16,
        because="layers compute in bfloat16",
        full=True,
    ),
    _row(
        "1f1b",
        "2 copies of 2, sharded",
        ranks=8,
        n=2,
        mesh="pp=2,dp=2,shard=2",
        recipe=replace(PLAIN, steps=5, warmup=2),
        full=True,
    ),
    _option("no clipping", recipe=replace(UNCLIPPED, steps=12), full=True),
    _option("layers 1 and 3", pipeline={"layers_per_stage": (1, 3)}),
    _option("fused loss torch", settings={"fused_loss": "torch"}, full=True),
    _option("fused loss chunked, tied", settings=CHUNKED, recipe=SHORT_TIED),
    _option("fused loss chunked", "zbv", settings=CHUNKED, full=True),
    _option("evaluation in between", settings=EVALUATED, full=True),
    _option("evaluation in between", "interleaved_1f1b", settings=EVALUATED, full=True),
    _option("evaluation in between", "zbv", settings=EVALUATED),
    _option("optimizer groups by name", options=decay_by_name, full=True),
    _option("two optimizers (Multiopt)", options=partial(decay_by_name, factory=adamw)),
    _option("checkpointing full", settings={"activation_checkpointing": "full"}, full=True),
    _option(
        "checkpointing operators", "interleaved_1f1b", settings={"activation_checkpointing": "operators"}
    ),
    _option("compiled blocks, aot_eager", settings=BY_EYE, accumulation=2, full=True),
    # It compiles once more for each of the shapes that come.
    _option("compiled blocks, aot_eager", settings=BY_EYE, recipe=replace(SHORT, steps=4)),
    _option(
        "bf16 autocast",
        settings={"mixed_precision": "bf16"},
        recipe=replace(SHORT, autocast=True, fused=True),
        tolerance=BFLOAT16,
        because="what a last bit does in bfloat16",
    ),
    _restarted("", full=True),
    _restarted(
        ", tied, built on meta",
        "zbv",
        settings={"construct_model_on": "meta"},
        recipe=replace(RESTARTED, tied=True),
    ),
    _restarted(", 2 copies", ranks=4, mesh=TWO, full=True),
    # Whoever saved it, whoever continues.
    _moved(" at 2, then Trainer", runner="ranks, then here", full=True),
    _moved(" at 4, then Trainer", ranks=4, runner="ranks, then here", full=True),
    _moved(" after Trainer, at 2", runner="here, then ranks", full=True),
    _moved(" after Trainer, at 4", "interleaved_1f1b", ranks=2, runner="here, then ranks", full=True),
    _moved(" at 2, then 4", next_world_size=4, full=True),
    _moved(" at 4, then 2", "gpipe", ranks=4, next_world_size=2, full=True),
    _moved(" at 2, then DDP 2", next_trainer="ddp", full=True),
    _moved(" at 4, then DDP 2", ranks=4, next_world_size=2, next_trainer="ddp", full=True),
    _moved(" after DDP 2, at 4", trainer="ddp", next_world_size=4, next_trainer="pipeline", full=True),
    _moved(" at 2, then FSDP2 4", next_world_size=4, next_trainer="fsdp2", full=True),
    _moved(" at 4, then FSDP2 2", ranks=4, next_world_size=2, next_trainer="fsdp2", full=True),
    _moved(
        " after FSDP2 4, at 2",
        ranks=4,
        trainer="fsdp2",
        next_world_size=2,
        next_trainer="pipeline",
        full=True,
    ),
    _moved(" after FSDP2 2, at 4", trainer="fsdp2", next_world_size=4, next_trainer="pipeline", full=True),
    _moved(
        " at 2 x 2, then Trainer",
        ranks=4,
        mesh=TWO,
        accumulation=6,
        runner="ranks, then here",
        full=True,
    ),
    _moved(
        " after Trainer, at 2 x 2",
        ranks=4,
        mesh=TWO,
        accumulation=6,
        runner="here, then ranks",
        full=True,
    ),
    _moved(
        " at 2 x 2, then FSDP2 4",
        ranks=4,
        mesh=TWO,
        accumulation=6,
        next_trainer="fsdp2",
        full=True,
    ),
    _moved(
        " at 2 x 2, sharded, then Trainer",
        ranks=4,
        mesh=SHARED,
        accumulation=6,
        runner="ranks, then here",
        full=True,
    ),
    _moved(
        " after Trainer, at 2 x 2, sharded",
        ranks=4,
        mesh=SHARED,
        accumulation=6,
        runner="here, then ranks",
        full=True,
    ),
    _moved(
        " after DDP 4, at 2 x 2",
        ranks=4,
        next_mesh=TWO,
        trainer="ddp",
        next_trainer="pipeline",
    ),
]
