"""The rows of models with experts: balance losses and biases are the same over every layout."""

from __future__ import annotations

from dataclasses import replace

from dist_env import ParallelLayout
from trainer_core import TensorParallel
from trainer_pipeline import PipelineArguments

from .case import BY_EYE, PLAIN, RESTARTED, Case, on_ranks
from .reference import Recipe

SOFTMAX = replace(PLAIN, steps=14, experts="softmax", balance=0.05)
"""As transformers has it: a balance loss that is the mean over layers."""
SIGMOID = replace(SOFTMAX, experts="sigmoid", bias_rate=0.02)
"""As DeepSeek-V3 has it: balance losses that are added up, and biases that move."""
BIAS_ALONE = replace(SIGMOID, balance=0.0)
OFF = replace(SOFTMAX, balance=0.0)
RECIPES = {"softmax": SOFTMAX, "sigmoid, bias": SIGMOID, "sigmoid, bias alone": BIAS_ALONE, "no balance": OFF}
SCHEDULES = ("gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v")
"""All but 1f1b, which other rows have."""


def _here(what: str, **fields: object) -> Case:
    return Case(name=f"experts, {what}", **fields)  # type: ignore[arg-type]


def _by_sequence() -> dict[str, object]:
    return {"parallel": [TensorParallel(sequence=True)]}


def _trainer(mesh: str) -> str:
    layout = ParallelLayout.parse(mesh)
    return "pipeline" if layout.pipeline > 1 else "fsdp2" if layout.shards_weights else "ddp"


def _on_ranks(
    mesh: str, what: str, *, accumulation: int = 1, schedule: str = "1f1b", **fields: object
) -> Case:
    layout = ParallelLayout.parse(mesh)
    trainer = _trainer(mesh)
    settings = fields.pop("settings", {})
    if layout.pipeline > 1:
        settings = {"pipeline": PipelineArguments(schedule=schedule, n_microbatches=4), **settings}  # type: ignore[dict-item]
    return on_ranks(
        "Experts",
        f"{mesh}, {what}",
        ranks=layout.world_size,
        accumulation=accumulation * layout.data_count,
        mesh=mesh,
        settings=settings,
        **{"trainer": trainer, **fields},  # type: ignore[arg-type]
    )


def _moved(first: str, then: str, **fields: object) -> Case:
    """A row that continues with another layout; an empty one is one process."""
    given: dict[str, object] = {
        "recipe": replace(RESTARTED, global_batch=12, experts="sigmoid", balance=0.05, bias_rate=0.02),
        "runner": "ranks, restarted"
        if first and then
        else "ranks, then here"
        if first
        else "here, then ranks",
        **fields,
    }
    if first and then:
        given |= {
            "next_mesh": then,
            "next_world_size": ParallelLayout.parse(then).world_size,
            "next_trainer": _trainer(then),
        }
    if "pp" in first + then:
        given["settings"] = {"pipeline": PipelineArguments(n_microbatches=3)}
    what = f"restarted as {then or 'one process'}" if first else "restarted after one process"
    # In the row of the default tests no layout divides the data further.
    microbatches = 4 if (first, then) in MOVED else 12
    accumulation = microbatches // ParallelLayout.parse(first or then).data_count
    return _on_ranks(first or then, what, accumulation=accumulation, **given)


DIVIDED = (
    "shard=2,ep=2",
    "shard=4,ep=2",
    "shard=4,ep=4",
    "dp=2,shard=2,ep=2",
    "tp=2,ep=2",
    "tp=4,ep=2",
    "dp=2,tp=2,ep=2",
    "shard=2,tp=2,ep=2",
    "shard=2,tp=2,ep=4",
    "cp=2,ep=2",
    "dp=2,cp=2,ep=2",
    "shard=2,cp=2,ep=4",
    "cp=2,tp=2,ep=2",
    "pp=2,shard=2,ep=2",
    "pp=2,tp=2,ep=2",
)
"""Layouts with experts that are divided."""
OFTEN = {
    ("shard=2,ep=2", "sigmoid, bias"),
    ("pp=2,shard=2,ep=2", "softmax"),
    ("cp=2,ep=2", "sigmoid, bias"),
}
"""Those of them that the default tests have."""
LAYOUTS = ("", "shard=2", "cp=2", "shard=2,ep=2", "shard=4,ep=2", "shard=2,tp=2,ep=2", "pp=2,shard=2,ep=2")
"""Each is resumed as each, but for those without divided experts."""
MOVED = {("shard=2,ep=2", "")}
"""The one of them that the default tests have."""


def _steps_of(mesh: str, name: str, recipe: Recipe) -> Recipe:
    """Brief on eight ranks, and in the default tests, where biases move further in other rows."""
    if ParallelLayout.parse(mesh).world_size == 8:
        return replace(recipe, steps=5)
    return replace(recipe, steps=6) if (mesh, name) in OFTEN else recipe


EXPERT_CASES = [
    _here("reference, microbatches of 8 rows", runner="reference", recipe=SIGMOID),
    _here("softmax, accumulation 4", recipe=SOFTMAX, accumulation=4),
    _here("sigmoid, bias, accumulation 4", recipe=SIGMOID, accumulation=4),
    _here("no balance, accumulation 4", recipe=OFF, accumulation=4, full=True),
    _here("sigmoid, bias alone", recipe=BIAS_ALONE, full=True),
    _here("softmax, checkpointing full", recipe=SOFTMAX, settings={"activation_checkpointing": "full"}),
    _here(
        "sigmoid, bias, compiled blocks",
        recipe=SIGMOID,
        settings={**BY_EYE, "torch_compile_scope": "blocks"},
        full=True,
    ),
    _here("sigmoid, bias, fused loss chunked", recipe=SIGMOID, settings={"fused_loss": "chunked"}, full=True),
    _here(
        "sigmoid, bias, restarted",
        recipe=replace(RESTARTED, experts="sigmoid", balance=0.05, bias_rate=0.02),
        runner="restarted",
    ),
    _on_ranks("dp=2", "sigmoid, bias", recipe=SIGMOID, accumulation=2),
    _on_ranks("shard=2", "sigmoid, bias", recipe=SIGMOID, accumulation=2, full=True),
    _on_ranks("pp=2", "sigmoid, bias", recipe=SIGMOID, accumulation=2),
    _on_ranks("pp=2", "softmax", recipe=SOFTMAX, full=True),
    *(
        _on_ranks(mesh, name, recipe=recipe, full=True)
        for mesh in ("dp=2", "shard=2", "pp=2", "pp=2,dp=2", "pp=2,shard=2", "dp=2,shard=2")
        for name, recipe in RECIPES.items()
        if (mesh, name)
        not in {
            ("dp=2", "sigmoid, bias"),
            ("shard=2", "sigmoid, bias"),
            ("pp=2", "softmax"),
            ("pp=2", "sigmoid, bias"),
        }
    ),
    *(
        _on_ranks(
            "pp=2",
            f"{schedule}, sigmoid, bias",
            recipe=SIGMOID,
            schedule=schedule,
            full=True,
        )
        for schedule in SCHEDULES
    ),
    _on_ranks(
        "shard=2",
        "restarted at 2, then 1",
        recipe=replace(RESTARTED, experts="sigmoid", balance=0.05, bias_rate=0.02),
        runner="ranks, then here",
        full=True,
    ),
    *(
        _on_ranks(
            mesh,
            name,
            recipe=_steps_of(mesh, name, recipe),
            full=(mesh, name) not in OFTEN,
        )
        for mesh in DIVIDED
        for name, recipe in RECIPES.items()
    ),
    *(
        _on_ranks(mesh, "sigmoid, bias", recipe=replace(SIGMOID, steps=5), full=True)
        for mesh in ("shard=4,tp=2,ep=4", "shard=2,cp=2,tp=2,ep=4", "pp=2,shard=2,tp=2,ep=2", "shard=8,ep=2")
    ),
    *(
        _on_ranks(
            mesh,
            "sigmoid, bias, sequence",
            recipe=SIGMOID,
            options=_by_sequence,
            multiple=4,
            full=mesh != often,
        )
        for often in ("tp=2,ep=2",)
        for mesh in ("tp=2,ep=2", "shard=2,tp=2,ep=4", "cp=2,tp=2,ep=2")
    ),
    *(
        _on_ranks("shard=2,ep=2", f"sigmoid, bias, {what}", recipe=SIGMOID, full=True, **fields)  # type: ignore[arg-type]
        for what, fields in {
            "accumulation 2": {"accumulation": 2},
            "checkpointing full": {"settings": {"activation_checkpointing": "full"}},
            "compiled blocks": {"settings": {**BY_EYE, "torch_compile_scope": "blocks"}},
            "fused loss": {"settings": {"fused_loss": "chunked"}},
        }.items()
    ),
    *(
        _on_ranks(
            "pp=2,shard=2,ep=2", f"{schedule}, sigmoid, bias", recipe=SIGMOID, schedule=schedule, full=True
        )
        for schedule in ("gpipe", "interleaved_1f1b", "looped_bfs")
    ),
    *(
        _on_ranks(
            "pp=2,tp=2,ep=2", f"{schedule}, sigmoid, bias", recipe=SIGMOID, schedule=schedule, full=True
        )
        for schedule in ("interleaved_zero_bubble", "zbv", "dualpipe_v")
    ),
    *(
        _moved(first, then, full=(first, then) not in MOVED)
        for first in LAYOUTS
        for then in LAYOUTS
        if "ep" in first + then
    ),
]
