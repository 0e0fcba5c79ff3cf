"""Every step of the position of a stream, against the numbers written down by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dataloader_dispatch import DataError
from dataloader_dispatch.rows import Cursor, Owner, Place, StreamPosition, end_of

IDENTITY: dict[str, object] = {"documents": 10, "encoding": None, "seed": 1}


def position(rank: int = 0, world_size: int = 1, shards: int = 4, **identity: object) -> StreamPosition:
    def accepts(encoding: object) -> bool:
        return encoding in (None, "former")

    return StreamPosition(shards, 10, rank, world_size, {**IDENTITY, **identity}, accepts)


def places(one: StreamPosition) -> list[tuple[int, ...]]:
    return [tuple(place) for place in one.cursor.places]


START = [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (2, 0, 0, 0, 0), (3, 0, 0, 0, 0)]


def test_a_new_position_is_at_the_start_of_the_first_epoch() -> None:
    one = position(1, 2)
    assert (one.cursor.epoch, places(one)) == (0, START)
    assert one.owner == Owner(1, 2, 0, 1)
    assert (list(one.own_streams), list(position(0, 2).own_streams)) == ([1, 3], [0, 2])
    assert one.state_dict() == {
        "version": 4,
        "epoch": 0,
        "rank": 1,
        "world_size": 2,
        "worker": 0,
        "workers": 1,
        "places": [[number, 0, 0, 0, 0] for number in range(4)],
        **IDENTITY,
    }
    assert json.loads(json.dumps(one.state_dict())) == one.state_dict()


def test_a_copy_moves_by_itself_and_a_part_has_its_share() -> None:
    one = position(1, 2)
    one.advance(one.begin(), [(1, Place(5, 2, 7))], ended=False)
    other, part = one.copy(), one.part_of(1, 2)
    assert (places(other), other.owner) == (places(one), one.owner)
    assert (places(part), part.owner, list(part.own_streams)) == (places(one), Owner(1, 2, 1, 2), [3])
    assert list(one.part_of(0, 2).own_streams) == [1]
    for moved in (other, part):
        moved.advance(moved.begin(), [(3, Place(7))], ended=False)
        assert places(moved)[3] == (7, 0, 0, 0, 0)
        assert places(one)[3] == START[3]
        moved.load_state_dict({**moved.state_dict(), "epoch": 4, "encoding": "former"})
        assert (moved.cursor.epoch, one.cursor.epoch) == (4, 0)


def test_the_first_row_is_the_lowest_of_what_is_left() -> None:
    one = position(0, 2)
    assert one.first_row == 0
    iteration = one.begin()
    one.advance(iteration, [(0, Place(0, 5, 3)), (2, Place(6, 1, 5))], ended=False)
    assert one.first_row == 3
    one.advance(iteration, [(0, Place(12, 0, 4))], ended=False)  # it is at its end, and has fewer rows
    assert one.first_row == 5
    one.advance(iteration, [(2, Place(10, 0, 6))], ended=False)
    assert one.first_row == 0


def test_progress_is_the_share_of_own_documents() -> None:
    one = position(0, 2)  # it has the documents 0, 4, 8 and 2, 6
    iteration = one.begin()
    found = [one.progress]
    for delivered in (
        [(0, Place(0, 9, 3))],
        [(0, Place(4))],
        [(0, Place(8)), (2, Place(6))],
        [(0, Place(12))],
    ):
        one.advance(iteration, delivered, ended=False)
        found.append(one.progress)
    assert found == [0.0, 0.0, 0.2, 0.6, 0.8]
    one.advance(iteration, [], ended=True)
    assert one.progress == 1.0
    one.cursor.places[0] = Place(40)  # a place may lie further beyond the end
    assert one.progress == 1.0
    assert position(3, 4).part_of(1, 2).progress == 0.0  # it has no shard at all


def test_the_end_of_an_epoch_is_the_start_of_the_next_one_where_nobody_else_has_shards() -> None:
    alone, first = position(), position(0, 2)
    iteration = alone.begin()
    assert alone.advance(iteration, [(0, Place(4, 1, 1))], ended=False) is False
    assert (alone.cursor.epoch, places(alone)[0]) == (0, (4, 1, 1, 0, 0))
    assert alone.advance(iteration, [(1, Place(9, 2, 8))], ended=True) is True
    assert (alone.cursor.epoch, places(alone)) == (1, START)
    iteration = first.begin()
    assert first.advance(iteration, [(0, Place(8, 1, 2))], ended=True) is False
    ended = [(12, 0, 0, 0, 0), START[1], (10, 0, 0, 0, 0), START[3]]
    assert (first.cursor.epoch, places(first)) == (0, ended)
    assert [tuple(end_of(shard, 4, 10)) for shard in (0, 2)] == [ended[0], ended[2]]
    first.finish(iteration)
    assert (first.cursor.epoch, places(first)) == (1, START)


def test_only_the_newest_iteration_moves_it() -> None:
    one = position()
    iterations = [one.begin(), one.begin()]
    assert iterations == [1, 2]
    for stale in (iterations[0], 0, 3):
        with pytest.raises(RuntimeError, match="out of date"):
            one.advance(stale, [(0, Place(4))], ended=True)
        with pytest.raises(RuntimeError, match="out of date"):
            one.finish(stale)
    assert (one.cursor.epoch, places(one)) == (0, START)
    one.advance(iterations[1], [], ended=False)
    for move in (
        lambda: one.move(Cursor.start(0, 4)),
        lambda: one.set_epoch(3),
        lambda: one.load_state_dict(one.state_dict()),
        lambda: one.load_resharded([one.state_dict()], 0, 1),
    ):
        iteration = one.begin()
        move()
        one.begin()
        with pytest.raises(RuntimeError, match="out of date"):
            one.advance(iteration, [], ended=False)


def test_set_epoch_goes_to_the_start_of_another_epoch_only() -> None:
    one = position()
    iteration = one.begin()
    one.advance(iteration, [(0, Place(4, 1, 1))], ended=False)
    one.set_epoch(0)
    assert places(one)[0] == (4, 1, 1, 0, 0)
    one.advance(iteration, [], ended=False)  # the iteration is still good
    one.set_epoch(2)
    assert (one.cursor.epoch, places(one)) == (2, START)
    for wrong in (-1, 1.0, None):
        with pytest.raises(DataError, match="epoch="):
            one.set_epoch(wrong)  # type: ignore[arg-type]
    assert one.cursor.epoch == 2


def test_a_state_is_loaded_by_those_whose_shards_it_knows() -> None:
    first, alone = position(0, 2), position()
    first.advance(first.begin(), [(0, Place(4, 1, 1)), (2, Place(2, 3, 1, 2, 2))], ended=False)
    alone.load_state_dict({**first.state_dict(), "rank": 0, "world_size": 1})
    assert places(alone) == [(4, 1, 1, 0, 0), START[1], (2, 3, 1, 2, 2), START[3]]
    position(1, 2).load_state_dict(alone.state_dict())  # one that knows all
    part = position(0, 2).part_of(1, 2)
    part.load_state_dict(first.state_dict())
    assert places(part)[2] == (2, 3, 1, 2, 2)
    for other in (position(1, 2), position(), position(0, 1)):
        before = other.state_dict()
        with pytest.raises(DataError, match=r"saved by rank 0 of 2, but this is rank \d of \d"):
            other.load_state_dict(first.state_dict())
        assert other.state_dict() == before


def test_states_of_other_ranks_are_merged() -> None:
    first, second = position(0, 2), position(1, 2)
    first.advance(first.begin(), [(0, Place(4, 1, 1))], ended=False)
    second.advance(second.begin(), [(3, Place(7, 2, 2))], ended=False)
    states = [second.state_dict(), first.state_dict()]
    one = position()
    one.load_resharded(states, 0, 1)
    assert places(one) == [(4, 1, 1, 0, 0), START[1], START[2], (7, 2, 2, 0, 0)]
    again = position()
    again.load_resharded([*states, *states], 0, 1)  # of ranks that read the same
    assert places(again) == places(one)
    for rank in range(3):
        third = position(rank, 3)
        third.load_resharded(tuple(states), rank, 3)
        assert [places(third)[shard] for shard in third.own_streams] == [
            places(one)[shard] for shard in third.own_streams
        ]
    for given in (1, 0), (0, 2), (1, 2):
        with pytest.raises(DataError, match=r"contradicts the stream, which was made for rank 0 of 1"):
            one.load_resharded(states, *given)
    wrong: Any
    for wrong in (states[0], None, "states"):
        with pytest.raises(DataError, match="expected a list of what state_dict"):
            one.load_resharded(wrong, 0, 1)
    second.advance(second.begin(), [(3, Place(11, 3, 3))], ended=False)
    for few in ([], states[:1], [*states, second.state_dict()]):
        with pytest.raises(DataError, match="do not cover each of the 4 shards once"):
            one.load_resharded(few, 0, 1)


def test_an_encoding_that_means_the_same_is_taken() -> None:
    one = position(encoding={"0": "digest"})
    one.load_state_dict({**one.state_dict(), "encoding": "former"})
    for wrong in ("another", {"0": "other"}):
        with pytest.raises(DataError, match="saved with encoding="):
            one.load_state_dict({**one.state_dict(), "encoding": wrong})
    with pytest.raises(DataError, match="saved with encoding=None"):
        one.load_state_dict({name: value for name, value in one.state_dict().items() if name != "encoding"})
    with pytest.raises(DataError, match="expected what state_dict"):
        one.load_state_dict("encoding")  # type: ignore[arg-type]
