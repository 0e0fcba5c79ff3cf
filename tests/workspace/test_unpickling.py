"""No package unpickles what another process or a file says: read from the syntax trees of their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Package

PICKLES = {"pickle", "_pickle", "pickletools", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
READING = {"load", "loads", "Unpickler", "open"}
# What unpickles without the word: reading of files, collectives of objects, and connections of Python's own.
UNPICKLING = {
    "torch.load",
    "torch.serialization",
    "torch.jit.load",
    "torch.hub",
    "torch.package",
    "torch.distributed.rpc",
    "torch.distributed.checkpoint",
    "multiprocessing.managers",
    "multiprocessing.connection",
    "multiprocessing.Pipe",
    "multiprocessing.Queue",
    "multiprocessing.Pool",
    "torch.multiprocessing.Queue",
    "asyncore",
    "xmlrpc",
}
COLLECTIVES = {
    "all_gather_object",
    "all_gather_object_enforce_type",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
ALLOWED = {
    # The one place where bytes of another rank are unpickled, behind the setting `unpickle_batches`.
    ("dataloader_dispatch/connection.py", "pickle.loads"),
    # Traces that NCCL writes as pickles: this Unpickler makes no object of any class.
    ("dist_env/hang_report.py", "pickle.Unpickler"),
    # Pipes between a command and the workers that it has started; nobody else has their ends.
    ("dataloader_dispatch/cli/parts.py", "multiprocessing.connection.Connection"),
    ("dataloader_dispatch/cli/parts.py", "multiprocessing.connection.wait"),
}


def unpickling(source: str) -> Iterator[str]:
    """Names in a module that read pickles, in full, or run text as code."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield from _forbidden(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _forbidden(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from _forbidden(_full_name(node, names))
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec"):
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            yield node.arg


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _forbidden(name: str) -> Iterator[str]:
    module, _, last = name.rpartition(".")
    reads_pickles = module in PICKLES and last in READING
    if (
        last in COLLECTIVES
        or reads_pickles
        or f"{name}.".startswith(tuple(f"{each}." for each in UNPICKLING))
    ):
        yield name


def test_no_package_unpickles(package: Package) -> None:
    found = {
        (path.relative_to(package.source.parent).as_posix(), name)
        for path in package.source.rglob("*.py")
        for name in unpickling(path.read_text())
    }
    allowed = {entry for entry in ALLOWED if entry[0].startswith(f"{package.module}/")}
    assert found == allowed


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\nread = p.load",
        "from pickle import loads as read",
        "from pickle import Unpickler",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch import distributed\ndistributed.broadcast_object_list([])",
        "from torch.distributed import scatter_object_list",
        "import torch.distributed.rpc",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import rpc",
        "from multiprocessing import connection",
        "import multiprocessing.managers",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "eval('1')",
        "def __reduce__(self):\n    return exec, ('1',)",
        "if True:\n    import torch\n    torch.jit.load('x')",
    ],
)
def test_such_reading_is_seen(source: str) -> None:
    assert list(unpickling(source))


def test_writing_and_other_loading_is_not() -> None:
    assert not list(unpickling("import json, pickle\njson.loads('1')\npickle.dumps(1)\nmodel.eval()"))
