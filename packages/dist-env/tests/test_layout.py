"""The arithmetic of layouts against brute force, what is refused, and the command that shows a layout."""

from __future__ import annotations

import itertools
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dist_env import DistributedEnvironmentError, ParallelLayout
from dist_env.__main__ import main

NAMES = ("pipeline", "replicate", "shard", "context", "tensor")
VIEWS = {
    "data": {"replicate", "shard"},
    "fsdp": {"shard", "context"},
    "loss": {"replicate", "shard", "context"},
    "replicate": {"replicate"},
    "tensor": {"tensor"},
    "context": {"context"},
    "pipeline": {"pipeline"},
}
SIZES = [sizes for sizes in itertools.product((1, 2, 3), repeat=5) if sum(each > 1 for each in sizes) < 4]


def test_every_view_of_every_rank_is_what_brute_force_finds() -> None:
    for sizes in SIZES:
        layout = ParallelLayout(**dict(zip(NAMES, sizes, strict=True)))
        # The last dimension runs fastest, as ranks do.
        places = [dict(zip(NAMES, at, strict=True)) for at in itertools.product(*map(range, sizes))]
        assert layout.world_size == len(places)
        for rank, place in enumerate(places):
            found = layout.coordinates(rank)
            assert {name: found[name] for name in NAMES} == place
            assert layout.rank_at(place) == rank
            for view, free in VIEWS.items():
                fixed = set(NAMES) - free
                expected = [r for r, other in enumerate(places) if all(other[n] == place[n] for n in fixed)]
                assert list(layout.group(view, rank)) == expected, (str(layout), view, rank)
            readers = layout.data_readers(layout.data_rank(rank))
            same = [r for r, p in enumerate(places) if all(p[n] == place[n] for n in ("replicate", "shard"))]
            assert list(readers) == same
        assert {layout.data_rank(rank) for rank in range(len(places))} == set(range(layout.data_count))
        counting = tuple(rank for rank in range(len(places)) if layout.counts_tokens(rank))
        assert counting == layout.group("loss", counting[0]), "every token is counted once"


@pytest.mark.parametrize("expert", [1, 2, 3, 4, 6, 12])
def test_expert_groups_cross_in_one_rank_and_fill_the_block(expert: int) -> None:
    layout = ParallelLayout(pipeline=2, replicate=2, shard=3, context=2, tensor=2, expert=expert)
    assert layout.world_size == 48
    for rank in range(48):
        experts, shards = layout.group("expert", rank), layout.group("expert_fsdp", rank)
        assert (len(experts), len(shards)) == (expert, 12 // expert)
        assert set(experts) & set(shards) == {rank}
        block = {each for member in experts for each in layout.group("expert_fsdp", member)}
        assert block == {r for r in range(48) if r // 12 == rank // 12}


def test_text_is_read_and_written() -> None:
    layout = ParallelLayout.parse(" tensor = 2, pp=3,shard=4,ep=2 ")
    assert layout == ParallelLayout(pipeline=3, shard=4, tensor=2, expert=2)
    assert ParallelLayout.parse(str(layout)) == layout
    assert str(ParallelLayout()) == "dp=1"
    assert ParallelLayout.parse("shard=8,tp=4,pp=2", 64) == ParallelLayout(shard=8, tensor=4, pipeline=2)
    assert ParallelLayout.parse("shard=auto,tp=2", 8).shard == 4
    assert ParallelLayout.parse("tp=2", 8).replicate == 4
    assert ParallelLayout.parse("shard=auto,ep=4", 8).expert == 4


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        ("", None, "The layout is empty"),
        (" ", 8, "The layout is empty"),
        ("shard=0", None, "shard='0' is not a possible size"),
        ("tp=-1", None, "tensor='-1' is not a possible size"),
        ("tp=2.0", None, "tensor='2.0' is not"),
        ("tp=²", None, "tensor='²' is not"),
        ("tp=" + "9" * 5000, None, r"tensor='9+\.\.\. is not"),
        ("tp=999999999", None, "tensor is 999999999, which is too large"),
        ("tp=16777216,dp=2", None, "The world size is 33554432, which is too large"),
        ("tp=3", 8, "tensor=3 needs a multiple of 3 ranks, but there are 8.*are 1, 2, 4, 8"),
        ("dp=2,tp=2", 8, "needs exactly 4 ranks, but there are 8.*allowed values of replicate are 4"),
        ("dp=3,tp=5", 8, "Choose sizes whose product is 8"),
        ("tp=2,tp=2", None, "tensor is given twice"),
        ("tp=2,tensor=auto", 8, "tensor is given twice"),
        ("tp=2,", None, "'' in the layout is not NAME=SIZE"),
        ("8", None, "'8' in the layout is not NAME=SIZE"),
        ("tensr=2", None, "Did you mean tensor"),
        ("fsdp=2", None, "Did you mean shard"),
        ("zebra=2", None, "'zebra' is not a dimension. Dimensions are"),
        ("shard=auto", None, "shard=auto needs the world size"),
        ("shard=auto,tp=auto", 8, "are both auto"),
        ("ep=auto", 8, "expert=auto cannot be filled in"),
        ("shard=4,ep=3", None, "expert=3 does not divide .* = 4, .*are 1, 2, 4"),
        ("tp=2", 0, "world_size=0 is not a number of ranks"),
    ],
)
def test_what_cannot_be_is_refused(text: str, world: int | None, message: str) -> None:
    with pytest.raises(DistributedEnvironmentError, match=message) as caught:
        ParallelLayout.parse(text, world)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "size", [0, -1, True, 2.0, "2", 10**5000], ids=["zero", "minus", "bool", "float", "text", "huge"]
)
def test_sizes_are_integers_of_1_or_more(size: object) -> None:
    with pytest.raises(DistributedEnvironmentError, match="tensor"):
        ParallelLayout(tensor=size)  # type: ignore[arg-type]


def test_ranks_and_views_that_there_are_not_are_refused() -> None:
    layout = ParallelLayout(tensor=2)
    for call, message in [
        (lambda: layout.coordinates(2), "rank=2 is not a rank.*0 to 1"),
        (lambda: layout.group("dp", 0), "'dp' is not a view"),
        (lambda: layout.rank_at({"tensor": 2}), "tensor=2 is outside"),
        (lambda: layout.rank_at({"expert": 0}), "'expert' does not place"),
        (lambda: layout.data_readers(1), "data_rank=1 is not"),
    ]:
        with pytest.raises(DistributedEnvironmentError, match=message):
            call()


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dist_env", "layout", *arguments])
    return main()


def test_command_prints_and_draws_every_rank_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg = tmp_path / "layout.svg"
    assert _run(monkeypatch, "--world", "64", "shard=8,tp=4,pp=2", "--svg", str(svg)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "host", "pp", "shard", "tp", "data", "counts", "tokens"]
    assert [line.split()[0] for line in lines[1:65]] == [str(rank) for rank in range(64)]
    assert lines[1 + 37].split() == ["37", "4", "1", "1", "1", "1", "no"]
    assert lines[1 + 36].split() == ["36", "4", "1", "1", "0", "1", "yes"]
    assert lines[-1] == "pp=2,shard=8,tp=4: 64 rank(s) on 8 host(s), 8 part(s) of the data"
    root = ET.fromstring(svg.read_text(encoding="utf-8"))
    cells = [each for each in root.iter() if (each.get("id") or "").startswith("rank-")]
    assert [cell.get("id") for cell in cells] == [f"rank-{rank}" for rank in range(64)]
    layout = ParallelLayout(shard=8, tensor=4, pipeline=2)
    colours = {(layout.data_rank(rank), cell[0].get("fill")) for rank, cell in enumerate(cells)}
    assert len(colours) == 8


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--world", "8", "tp=3"), 2, "tensor=3 needs a multiple of 3 ranks"),
        (("--world", "many", "tp=2"), 2, "--world='many' is not a number of ranks"),
        (("--ranks-per-host", "0", "tp=2"), 2, "--ranks-per-host='0' is not"),
        (("tp=1000000",), 2, "At most 65536 are shown"),
        (("",), 2, "The layout is empty"),
        (("tp=2", "--svg", "no-such-folder/layout.svg"), 1, "cannot be written: No such file"),
    ],
)
def test_command_refuses_in_one_line(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run(monkeypatch, *arguments) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.startswith("dist_env layout: ")
    assert told.err.count("\n") == 1
