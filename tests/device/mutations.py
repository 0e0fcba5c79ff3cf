"""Take out one wait, event, stream or pinned copy of the packages at a time, and name those no test notices.

    FAKECUDA=1 PYTHONPATH=tests/device/fakecuda python tests/device/mutations.py LINES
        [--only TEXT] [--seconds 300] [--list] [--json FILE]

LINES is the directory of `FAKECUDA_LINES` of a run of tests/device. A mutant runs the tests that executed its
line, the ones that start no ranks first, until one fails. It is caught if a test fails or takes longer than
the limit. Survivors are a missing test or an equivalent program; `EQUIVALENT` says which, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "packages"
# How the fork with a changed package runs is that of every mutation test.
sys.path.insert(0, str(ROOT / "tests" / "tools"))
mutate = importlib.import_module("mutate")

WAITS = {"synchronize", "wait_stream", "wait_event", "record_stream", "record_event"}
# Work of a process group: the stream waits for it. Other packages wait for groups of the host.
WAITS_FOR_WORK = ("trainer-ddp", "trainer-pipeline", "trainer-core", "trainer-fsdp2")
STREAM_CONTEXTS = ("torch.cuda.stream(", "torch.accelerator.stream(")
RANKS = "test_ranks"
NOTICES = re.compile("wait|pinned|stream")
WORK = {"work", "channel", "event", "handle"}

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "checkpoint-core/src/checkpoint_core/background.py",
        "non_blocking=tensor.device in devices",
        "non_blocking=True",
    ): "a tensor that is on none of these devices is on the host, whose copies ignore it",
    (
        "trainer-core/src/trainer_core/optimization/optimizers.py",
        "non_blocking=True",
        "non_blocking=False",
    ): "the parameters of a process are on one device, so that nothing is copied",
    (
        "llama-pretrain/src/llama_pretrain/bench/baselines.py",
        "non_blocking=True",
        "non_blocking=False",
    ): "the loop that others write does not pin its batches, so that the copy waits anyway",
    (
        "trainer-core/src/trainer_core/verification/probes.py",
        "non_blocking=True",
        "non_blocking=False",
    ): "rows of the loop of plain torch are not pinned, so that the copy waits anyway",
    (
        "trainer-core/src/trainer_core/verification/probes.py",
        "torch.accelerator.synchronize(device)",
        "pass",
    ): "only times depend on it, and kernels of the fake device are done when they return",
}
"""Reasons by file, text before and text after, of mutants that no test on the fake device can see."""


@dataclass(frozen=True)
class Mutant:
    """One changed place of a file."""

    file: str
    line: int
    end_line: int
    before: str
    after: str
    text: str
    """What is put between these two places of the file, in bytes."""
    start: int
    end: int


def replacements(node: ast.AST, package: str, function: str) -> Iterator[tuple[ast.AST, str]]:
    """Nodes below and including this one, with what may stand in their place."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name, owner = _name(node.value.func), _owner(node.value.func)
        event = "event" in owner.lower()
        stages = name in WAITS or name.startswith("ensure_pin") or (name in {"record", "wait"} and event)
        if stages or (name == "wait" and owner in WORK and package in WAITS_FOR_WORK):
            yield node, "pass"
    elif isinstance(node, ast.Call) and _name(node.func) == "pin_memory" and not node.args:
        assert isinstance(node.func, ast.Attribute)
        yield node, ast.unparse(node.func.value)
    elif isinstance(node, ast.Call) and _name(node.func) == "wait" and not node.args and _is_call(node.func):
        # `begin().wait()`, whose beginning stays.
        if package in WAITS_FOR_WORK:
            assert isinstance(node.func, ast.Attribute)
            yield node, ast.unparse(node.func.value)
    elif isinstance(node, ast.Call) and _name(node.func) == "current_stream":
        yield node, f"torch.cuda.default_stream({', '.join(map(ast.unparse, node.args))})"
    elif isinstance(node, ast.keyword) and node.arg in ("non_blocking", "pin_memory"):
        if not (isinstance(node.value, ast.Constant) and node.value.value is False):
            yield node.value, "False"
        # What decides is changed both ways; a name was decided elsewhere.
        if isinstance(node.value, ast.Call | ast.Compare | ast.BoolOp):
            yield node.value, "True"
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Compare | ast.BoolOp):
        if "pinned" in ast.unparse(node.targets[0]):
            yield node.value, "False"
    elif isinstance(node, ast.Return) and "pin" in function.split("_") and node.value is not None:
        if isinstance(node.value, ast.Compare | ast.BoolOp):
            yield node.value, "False"
    elif isinstance(node, ast.withitem) and ast.unparse(node.context_expr).startswith(STREAM_CONTEXTS):
        yield node.context_expr, "torch.cuda.stream(None)"


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _owner(node: ast.AST) -> str:
    return _name(node.value) if isinstance(node, ast.Attribute) else ""


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)


def mutants(path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    file = str(path.relative_to(SOURCES))

    def walk(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        for changed, after in replacements(node, file.partition("/")[0], function):
            assert isinstance(changed, ast.expr | ast.stmt)
            assert changed.end_lineno is not None
            assert changed.end_col_offset is not None
            start = starts[changed.lineno - 1] + changed.col_offset
            end = starts[changed.end_lineno - 1] + changed.end_col_offset
            name = f"{node.arg}=" if isinstance(node, ast.keyword) else ""
            lines = (changed.lineno, changed.end_lineno)
            yield Mutant(file, *lines, name + ast.unparse(changed), name + after, after, start, end)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    yield from walk(ast.parse(source), "")


def tests_by_line(directory: Path) -> dict[tuple[str, int], set[str]]:
    """Names of the tests that executed a line, by file and number."""
    sys.path.insert(0, str(Path(__file__).parent / "fakecuda"))
    lines = importlib.import_module("device_lines")
    found: dict[tuple[str, int], set[str]] = {}
    for test, files in lines.executed_lines(directory).items():
        for name, numbers in files.items():
            file = str(Path(name).relative_to(SOURCES))
            for number in numbers:
                found.setdefault((file, number), set()).add(test)
    return found


def survives(mutant: Mutant, tests: list[str], seconds: float) -> bool:
    """Whether the tests pass with the change."""
    package, _, inside = mutant.file.partition("/src/")
    sources = SOURCES / package / "src"
    whole = (sources / inside).read_bytes()
    text = (whole[: mutant.start] + mutant.text.encode() + whole[mutant.end :]).decode()
    ast.parse(text)
    passed: bool = mutate.passes(sources, Path(inside), text, tests, seconds)
    return passed


def main() -> int:
    """Test all mutants; 0 if each is caught or listed as equivalent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lines", type=Path, help="what FAKECUDA_LINES named when tests/device ran")
    parser.add_argument("--only", default="", help="only mutants whose file contains this")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for the tests of one mutant")
    parser.add_argument("--alone", action="store_true", help="only tests of one process, which are fast")
    parser.add_argument("--list", action="store_true", help="only say which tests each mutant would run")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    by_line = tests_by_line(options.lines)
    found = [mutant for path in sorted(SOURCES.glob("*/src/**/*.py")) for mutant in mutants(path)]
    if not options.list:
        # The forks have these already.
        importlib.import_module("pytest")
        importlib.import_module("torch")
    told: list[dict[str, object]] = []
    for mutant in (one for one in found if options.only in one.file):
        tests = set().union(
            *(by_line.get((mutant.file, n), ()) for n in range(mutant.line, mutant.end_line + 1))
        )
        tests.discard("")
        tests = {test for test in tests if not (options.alone and RANKS in test)}
        # What is likely to notice comes first, as a mutant ends with the first test that fails.
        ordered = sorted(tests, key=lambda test: (RANKS in test, not NOTICES.search(test), test))
        if options.list:
            result = f"{len(ordered)} tests"
        elif (mutant.file, mutant.before, mutant.after) in EQUIVALENT:
            result = "equivalent"
        elif not ordered:
            result = "not executed"
        else:
            result = "survived" if survives(mutant, ordered, options.seconds) else "caught"
        told.append({**asdict(mutant), "result": result, "tests": len(ordered)})
        change = f"{mutant.before}  ->  {mutant.after}"
        print(f"{result:<12}  {mutant.file}:{mutant.line}: {change}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(told, indent=1))
    counts = Counter(str(one["result"]) for one in told)
    summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"fake device: {len(told)} mutants, {summary}")
    return 0 if options.list or counts["caught"] + counts["equivalent"] == len(told) else 1


if __name__ == "__main__":
    raise SystemExit(main())
