"""State divided over ranks in one way is loaded in any other, and every rank reads only its own bytes."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_core.manifest import verify_checkpoint

Worked = subprocess.CompletedProcess[str]
SHARDS = ["shards on 1", "shards on 2", "shards on 4"]
OTHERS = ["whole", "columns on 2", "shards on 4", "2 copies of 2 shards", "2 stages", "2 stages of 2 shards"]
HEADERS = 40_000
"""Bytes of all file headers, which every rank reads; the tensors of this model are some 100 kB."""


def table(results: dict, layouts: list[str]) -> str:
    """Rows saved, columns loaded; each cell counts the tensors compared, and those that differ."""
    width = max(map(len, layouts)) + 2
    lines = ["saved \\ loaded".ljust(width) + "".join(name.rjust(width) for name in layouts)]
    for source in layouts:
        cells = []
        for target in layouts:
            ranks = results["load"][f"{source} -> {target}"]
            total, wrong = sum(r["compared"] for r in ranks), sum(len(r["wrong"]) for r in ranks)
            cells.append(f"{total} equal" if not wrong else f"{wrong} WRONG")
        lines.append(source.ljust(width) + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines)


def check(results: dict) -> None:
    for pair, ranks in results["load"].items():
        for rank, seen in enumerate(ranks):
            assert seen["compared"] > 20, pair
            assert (pair, rank, seen["wrong"], seen["missing"]) == (pair, rank, [], [])
            # Its own part, the headers, and not one byte of a tensor more.
            assert seen["own"] <= seen["read"] <= seen["own"] + HEADERS, (pair, rank)


@pytest.fixture(scope="module")
def shards(run_worker: Callable[..., Worked], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    directory = tmp_path_factory.mktemp("shards")
    return json.loads(run_worker("layouts.py", directory, *SHARDS).stdout), directory


@pytest.fixture(scope="module")
def others(run_worker: Callable[..., Worked], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    directory = tmp_path_factory.mktemp("others")
    return json.loads(run_worker("layouts.py", directory, *OTHERS).stdout), directory


# Shards on 4 ranks, and others on 1 and 2, are among those of the next test.
@pytest.mark.full
def test_world_sizes(shards: tuple[dict, Path]) -> None:
    print("\n" + table(shards[0], SHARDS))
    check(shards[0])


def test_every_layout_from_every_other(others: tuple[dict, Path]) -> None:
    print("\n" + table(others[0], OTHERS))
    check(others[0])


def test_the_files_do_not_depend_on_the_layout(others: tuple[dict, Path]) -> None:
    directory = others[1]
    whole, sharded = directory / "whole" / "checkpoint-3", directory / "2 copies of 2 shards" / "checkpoint-3"
    for name in ("optimizer.json", "optimizer.safetensors", "config.json"):
        if (whole / name).exists():
            assert (whole / name).read_bytes() == (sharded / name).read_bytes(), name
    for layout in OTHERS:
        manifest = verify_checkpoint(directory / layout / "checkpoint-3", checksums=True)
        assert dict(manifest.tied_weights["model"]) == {"head.weight": "embed.weight"}


def test_other_readers_take_the_export(others: tuple[dict, Path]) -> None:
    expected: dict[str, torch.Tensor] = {}
    for layout in OTHERS:
        exported = others[1] / f"{layout} exported"
        index = json.loads((exported / "model.safetensors.index.json").read_text())
        found = {}
        for name in set(index["weight_map"].values()):
            found.update(load_file(exported / name))
        assert set(found) == set(index["weight_map"])
        expected = expected or found
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
