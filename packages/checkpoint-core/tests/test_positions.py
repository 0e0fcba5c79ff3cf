"""Positions that every rank keeps for itself become one for all ranks, and one becomes many; real ranks."""

import json
import subprocess
from collections.abc import Callable

import pytest

Worked = subprocess.CompletedProcess[str]
Seen = list[dict[str, dict[str, object]]]
WORLDS = (1, 2, 4)
ITEMS = list(range(37))


@pytest.fixture(scope="module")
def outcome(run_worker: Callable[..., Worked], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    """What every rank saw, by the number of ranks that loaded."""
    printed = run_worker("positions.py", tmp_path_factory.mktemp("positions"), timeout=120).stdout
    return {int(world): ranks for world, ranks in json.loads(printed).items()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
@pytest.mark.parametrize("saved", ["global", "replicated", "per_rank"])
def test_every_item_comes_once_for_each_reader(
    outcome: dict[int, Seen], saved: str, before: int, world: int
) -> None:
    for wanted in ("global", "replicated", "per_rank") if saved == "per_rank" else ("per_rank",):
        ranks = [seen[f"{saved}{before} -> {wanted}"] for seen in outcome[world]]
        assert [rank.get("missing") for rank in ranks] == [[]] * world, (wanted, ranks)
        left = [rank["left"][0] for rank in ranks]
        if wanted == "per_rank":
            assert left == [ITEMS[rank::world] for rank in range(world)]
        else:
            assert left == [ITEMS] * world


def test_states_are_distributed_anew_only_where_their_number_changes(outcome: dict[int, Seen]) -> None:
    def took(pair: str, world: int) -> list[object]:
        return [seen[pair]["took"][0] for seen in outcome[world]]

    assert took("global4 -> per_rank", 1) == took("per_rank1 -> per_rank", 1) == ["plain"]
    assert took("per_rank1 -> global", 4) == ["plain"] * 4
    assert took("per_rank2 -> per_rank", 2) == ["plain"] * 2
    assert took("per_rank2 -> global", 4) == took("per_rank2 -> replicated", 4) == [[2, 0, 1]] * 4
    assert took("global2 -> per_rank", 4) == [[1, rank, 4] for rank in range(4)]


@pytest.mark.parametrize("kind", ["Position", "AtTimes"])
@pytest.mark.parametrize("world", [2, 4])
def test_what_cannot_be_distributed_anew_is_refused_before_anything_changes(
    outcome: dict[int, Seen], kind: str, world: int
) -> None:
    for seen in outcome[world]:
        each, one = seen[f"{kind}, one for each"], seen[f"{kind}, one for all"]
        assert "component 'data' was saved as global, not per_rank. Declare it as global" in each["error"]
        assert "component 'data' was saved as per_rank, not global. Declare it as per_rank" in one["error"]
        assert (each["first"], one["first"]) == ([], [])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_on_failures(outcome: dict[int, Seen], world: int) -> None:
    for name, parts, first in (
        ("failing on rank 1", ["rank 1 (", "Failing.load_resharded() failed (RuntimeError: does"], [1]),
        ("other kind on rank 1", ["rank 1 (", "2 ranks saved a state each, and a Position has no"], []),
        ("flipped", ["data.rank1.safetensors is damaged"], []),
    ):
        ranks = [seen[name] for seen in outcome[world]]
        assert all(part in ranks[0]["error"] for part in parts), ranks[0]
        assert [(rank["error"], rank["first"]) for rank in ranks] == [(ranks[0]["error"], first)] * world


def test_only_the_reader_needs_to_declare_it(outcome: dict[int, Seen]) -> None:
    seen = [rank["on rank 0 only"] for rank in outcome[4]]
    assert [rank["left"] for rank in seen] == [[ITEMS], [], [], []]


@pytest.mark.parametrize("world", WORLDS)
def test_a_part_that_was_deleted_is_fresh_state_for_all(outcome: dict[int, Seen], world: int) -> None:
    assert [seen["deleted"]["missing"] for seen in outcome[world]] == [["data"]] * world
