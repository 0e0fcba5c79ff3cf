"""Change one place of a source file at a time, and name the changes that no test notices.

    python tests/tools/mutate.py packages/checkpoint-core/src/checkpoint_core/files.py \
        --tests packages/checkpoint-core/tests/test_checksum.py [more tests] [-k EXPRESSION]
        [--function NAME] [--seconds 60] [--json FILE]

Each mutant is written into a copy of the package's `src` folder, which comes first on the path of the tests
and of every process that they start. The tests run in a fork of a process that has imported pytest and torch,
so that a mutant costs little more than its tests. A mutant is killed if a test fails, or if the tests take
longer than the limit. Survivors are printed with their line, before and after: a missing test, or an
equivalent program.

Mutated are: comparisons, arithmetic, `and`/`or`, `not`, conditions, numbers, booleans, returned values,
`break`/`continue`, and whole statements (calls, assignments to what exists already, raises). Annotations,
docstrings, messages and what only logs stay.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_LOGS = {"debug", "info", "warning", "error", "critical", "exception", "print"}


@dataclass(frozen=True)
class Mutant:
    """A changed copy of a file."""

    line: int
    before: str
    after: str
    source: str


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in _COMPARISONS[type(operator)]:
                changed = copy.deepcopy(node)
                changed.ops[index] = other()
                yield changed
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        changed = copy.deepcopy(node)
        changed.op = _OPERATORS[type(node.op)]()
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
        if node.value not in (0, 1):
            yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        for value in (True, False):
            if not (isinstance(node, ast.While) and value):
                changed = copy.deepcopy(node)
                changed.test = ast.Constant(value)
                yield changed
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    # A deleted first assignment is a NameError, which says nothing.
    if isinstance(node, ast.Raise | ast.AugAssign | ast.Expr) or (
        isinstance(node, ast.Assign) and not all(isinstance(target, ast.Name) for target in node.targets)
    ):
        yield ast.Pass()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_left_out(node: ast.AST) -> bool:
    """Whether nothing below a node is worth a mutant: documentation, messages, logging."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Global | ast.Nonlocal):
        return True
    if not isinstance(node, ast.Expr):
        return False
    called = node.value.func if isinstance(node.value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return isinstance(node.value, ast.Constant) or name in _LOGS


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where a node may be replaced: its parent, the field of it, and the place in a list."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "type_params", "decorator_list"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield tree, field, index
                # The message of an error is prose; whether it is raised is a mutant of its own.
                if not isinstance(child, ast.Raise):
                    yield from places(child)


def mutants(text: str, function: str | None) -> list[Mutant]:
    """All changed copies of a file, or of one function or class in it."""
    tree = ast.parse(text)
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    roots: list[ast.AST] = [tree]
    if function is not None:
        roots = [node for node in ast.walk(tree) if isinstance(node, named) and node.name == function]
    if not roots:
        raise SystemExit(f"there is no function or class named {function!r}")
    found = []
    for parent, field, index in [place for root in roots for place in places(root)]:
        holder = getattr(parent, field)
        original = holder if index is None else holder[index]
        for other in replacements(original):
            _put(parent, field, index, ast.copy_location(other, original))
            source = ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, field, index, original)
            before, after = (ast.unparse(node).splitlines()[0] for node in (original, other))
            found.append(Mutant(original.lineno, before, after, source))
    return found


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def passes(
    sources: Path, inside: Path, text: str, tests: list[str], seconds: float, keep_output: bool = False
) -> bool:
    """Whether the tests pass with a text in place of a file, in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copied = Path(folder) / "src"
        shutil.copytree(sources, copied, ignore=shutil.ignore_patterns("__pycache__"))
        (copied / inside).write_text(text)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os._exit(_test(copied, tests, keep_output))
        with contextlib.suppress(OSError):  # the child may have done so itself
            os.setpgid(child, child)
        try:
            return _exit_code(child, seconds) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):  # of ranks that a test has left
                os.killpg(child, signal.SIGKILL)


def _exit_code(child: int, seconds: float) -> int | None:
    """The exit code of a process; None if it took too long and was ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _test(sources: Path, tests: list[str], keep_output: bool) -> int:
    """Run pytest on a copy of the sources; in the fork."""
    import pytest

    if not keep_output:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(sources), os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(sources))
    importlib.invalidate_caches()
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def main() -> int:
    """Test all mutants of a file; 0 if none survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tests", nargs="+", required=True, metavar="PATH")
    parser.add_argument("-k", dest="expression", help="only tests of such names, as in pytest")
    parser.add_argument("--function", help="only this function or class of the file")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for the tests of one mutant")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    path = options.file.resolve()
    sources = next(parent for parent in path.parents if parent.name == "src")
    tests = [*options.tests, *(["-k", options.expression] if options.expression else [])]
    importlib.import_module("pytest")
    with contextlib.suppress(ImportError):  # some packages do without it
        importlib.import_module("torch")
    inside, text = path.relative_to(sources), path.read_text()
    if not passes(sources, inside, text, tests, options.seconds * 4, keep_output=True):
        print("the tests fail without any change")
        return 2
    todo = mutants(text, options.function)
    survivors: list[Mutant] = []
    for number, mutant in enumerate(todo, 1):
        if passes(sources, inside, mutant.source, tests, options.seconds):
            survivors.append(mutant)
            print(f"survived  line {mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
        elif number % 20 == 0:
            print(f"          {number} of {len(todo)}, {len(survivors)} survived", flush=True)
    killed = len(todo) - len(survivors)
    print(f"{inside}: {killed} of {len(todo)} mutants killed ({killed / max(1, len(todo)):.1%})")
    if options.json:
        told = [{"line": each.line, "before": each.before, "after": each.after} for each in survivors]
        options.json.write_text(json.dumps({"file": str(inside), "mutants": len(todo), "survivors": told}))
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
