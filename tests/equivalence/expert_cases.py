"""The rows of models with experts: balance losses and biases are the same over every layout."""

from __future__ import annotations

from dataclasses import replace

from dist_env import ParallelLayout
from trainer_pipeline import PipelineArguments

from .case import BY_EYE, PLAIN, RESTARTED, Case, on_ranks

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


def _on_ranks(
    mesh: str, what: str, *, accumulation: int = 1, schedule: str = "1f1b", **fields: object
) -> Case:
    layout = ParallelLayout.parse(mesh)
    trainer = "pipeline" if layout.pipeline > 1 else "fsdp2" if layout.shard > 1 else "ddp"
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


EXPERT_CASES = [
    _here("reference, microbatches of 8 rows", runner="reference", recipe=SIGMOID),
    _here("softmax, accumulation 4", recipe=SOFTMAX, accumulation=4),
    _here("sigmoid, bias, accumulation 4", recipe=SIGMOID, accumulation=4),
    _here("no balance, accumulation 4", recipe=OFF, accumulation=4),
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
    _on_ranks("shard=2", "sigmoid, bias", recipe=SIGMOID, accumulation=2),
    _on_ranks("pp=2", "sigmoid, bias", recipe=SIGMOID, accumulation=2),
    _on_ranks("pp=2", "softmax", recipe=SOFTMAX),
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
            full=schedule != "dualpipe_v",
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
]
