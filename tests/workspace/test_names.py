"""Modules, classes and functions are called by the field's own terms.

The left column is what the first version called them. Read are definitions, not prose.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Package

FIRST_NAMES = {
    "trainer_core": """
        given Ingredients assembly actions make_up interval Interval at_rest said_in_vain undisturbed
        agree guarded consolidated figures counts_data whole_model outline weights_follow Scored
        divisor traffic Traffic add_up_gradients residence without_values has_no_values""",
    "dist_env": "imagined imagined_job survey roll_call joining links host_sums HostSums",
    "dataloader_dispatch": """
        standpoint Standpoint meeting Meeting ahead lane Lane Parcel Stamp aside Root Follower Alone sides
        watch notices Shard shard shards""",
    "checkpoint_core": "latch Latch whole readings receive choosing stored",
    "trainer_pipeline": """
        holding relay Feed Copies ties boundaries standin clock replicas copies""",
    "trainer_ddp": "hosts scoped moments memory consolidated traffic Traffic agree",
    "trainer_fsdp2": "consolidated traffic Traffic",
    "perf_metrics": "mistakes applications Booking",
    "llama_pretrain": "program targets sessions Contender Turn",
}
"""By package, the names that are not used any more."""

EXCEPTIONS = {
    "dist_env.HostSums": "public; it has connections of its own, which cost a step less than gloo",
}
"""`package.name` and why it stays."""


def definitions(package: Package) -> Iterator[tuple[str, str]]:
    """Return (where, name) of each module, class and function of a package."""
    for path in sorted(package.source.rglob("*.py")):
        where = str(path.relative_to(package.source))
        yield where, (path.parent if path.name == "__init__.py" else path).stem
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{where}:{node.lineno}", node.name


def test_names_of_the_field(package: Package) -> None:
    first = set(FIRST_NAMES.get(package.module, "").split())
    found = {
        f"{where}: {name}"
        for where, name in definitions(package)
        if name.lstrip("_") in first and f"{package.module}.{name}" not in EXCEPTIONS
    }
    assert not found
