"""The workflows of the forge run what is run on any machine, with no more rights than they need."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import version_matrix
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"
CI = ROOT / ".github" / "workflows" / "ci.yml"


def sessions() -> dict[str, bool]:
    """{session of the noxfile: whether it is among the defaults}, but for those of a single package."""
    found = {}
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        for call in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
            options = call.keywords if isinstance(call, ast.Call) else []
            told = {each.arg: each.value.value for each in options if isinstance(each.value, ast.Constant)}
            found[str(told.get("name", node.name))] = bool(told.get("default", True))
    return found


def steps(workflow: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each (job, step)."""
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            yield job, step


def named_sessions(workflow: dict[str, Any]) -> Iterator[str]:
    """The sessions that a workflow names, by itself or by its matrix."""
    for job, step in steps(workflow):
        for name in re.findall(r"nox -s (\$\{\{[^}]*\}\}|\S+)", step.get("run", "")):
            if name == "${{ matrix.session }}":
                yield from job["strategy"]["matrix"]["session"]
            else:
                yield name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_sessions_that_exist(path: Path) -> None:
    named = set(named_sessions(yaml.safe_load(path.read_text())))
    assert named
    assert not named - set(sessions())


def test_every_default_session_runs_for_a_change() -> None:
    workflow = yaml.safe_load(CI.read_text())
    by_default = {name for name, default in sessions().items() if default}
    assert not by_default - set(named_sessions(workflow))
    # Defined in loops: the tests of packages are cells of the matrix, and this one is a default by its name.
    assert "matrix" in named_sessions(workflow)
    assert 'BY_ITSELF = {"tests-dataloader-dispatch-ray"}\n' in (ROOT / "noxfile.py").read_text()
    assert " tests-dataloader-dispatch-ray\n" in CI.read_text()


def test_a_change_is_tested_on_every_python_and_torch() -> None:
    jobs = yaml.safe_load(CI.read_text())["jobs"]
    supported = {"python": version_matrix.pythons(), "torch": version_matrix.torches()}
    nightly = supported["torch"].pop()
    assert nightly == version_matrix.NIGHTLY
    chosen = jobs["packages"]["strategy"]["matrix"]
    assert {name: sorted(values) for name, values in chosen.items()} == {
        name: sorted(values) for name, values in supported.items()
    }
    assert jobs["nightly"]["strategy"]["matrix"] == {"python": supported["python"]}
    lines = [step["run"] for job in ("packages", "nightly") for step in jobs[job]["steps"] if "run" in step]
    session = "uv run --only-group dev nox -s matrix -- --python ${{ matrix.python }} --torch"
    assert f"{session} ${{{{ matrix.torch }}}}" in lines
    assert f"{session} {nightly}" in lines


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_unless_a_job_says_why(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert set(more) == ({"publish", "announce"} if path.stem == "release" else set())
    # What may write runs no code of the repository, and a checkout leaves no token behind.
    for job, step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
            assert "permissions" not in job


def test_actions_are_pinned_by_their_commits() -> None:
    files = [*WORKFLOWS, *(ROOT / ".github" / "actions").glob("*/action.yml")]
    used = [line for path in files for line in re.findall(r"uses: (.*)", path.read_text())]
    foreign = {line for line in used if not line.startswith("./")}
    assert foreign
    assert not [line for line in foreign if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line)]
    # One commit for each action, wherever it is used.
    assert len(foreign) == len({line.partition("@")[0] for line in foreign})


def test_hooks_need_nothing_from_elsewhere() -> None:
    hooks = yaml.safe_load(HOOKS.read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]
    entries = [hook["entry"] for hook in hooks[0]["hooks"]]
    assert all(entry.startswith("uv run ") for entry in entries)
    named = [name for entry in entries for name in entry.partition(" nox -s ")[2].split()]
    assert named
    assert not set(named) - set(sessions())
