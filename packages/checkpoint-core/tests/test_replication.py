"""Replica validation: four real processes over gloo, and the wording of the report."""

import json
import math
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_core.replication import (
    PIECE_BYTES,
    TensorEntry,
    Version,
    canonical_document,
    canonical_text,
    describe,
    find_differences,
    name_sides,
)
from checkpoint_core.state.encoding import encode_state

Worked = subprocess.CompletedProcess[str]
REMEDY = "Make the replicas equal, e.g. broadcast the state from rank {}, or declare the component PER_RANK"
Seen = dict[str, dict[str, object]]


@pytest.fixture(scope="module")
def ranks(run_worker: Callable[..., Worked], tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    directory = tmp_path_factory.mktemp("replicas")
    run_worker("replicas.py", directory)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def seen(ranks: list[Seen]) -> Seen:
    return ranks[0]


def only(seen: Seen, scenario: str) -> str:
    """The one message of a scenario."""
    found = seen[scenario]["found"]
    assert isinstance(found, list)
    assert len(found) == 1, found
    return str(found[0])


def test_every_rank_reports_the_same(ranks: list[Seen]) -> None:
    for scenario, outcome in ranks[0].items():
        if scenario != "extra memory":
            assert [seen[scenario] for seen in ranks] == [outcome] * 4, scenario


@pytest.mark.parametrize("level", ["structure", "tensor", "exact"])
def test_equal_replicas_cost_one_exchange(seen: Seen, level: str) -> None:
    assert seen[f"equal, {level}"] == {"found": [], "cost": [1, 0]}


def test_flipped_bit_at_each_level(seen: Seen) -> None:
    assert seen["flipped bit, structure"]["found"] == []
    who = "component 'model' is not the same on all its ranks: rank 1 differs from ranks 0, 2, 3"
    assert only(seen, "flipped bit, tensor") == f"{who} (tensor 'weight': values differ). {REMEDY.format(0)}"
    assert only(seen, "flipped bit, exact") == (
        f"{who} (tensor 'weight': values differ, first at [2, 1], where ranks 0, 2, 3 have "
        f"-0.1577124446630478 and rank 1 has -0.1577124297618866). {REMEDY.format(0)}"
    )


def test_bf16_when_the_first_rank_is_the_odd_one(seen: Seen) -> None:
    message = only(seen, "bf16")
    assert "rank 0 differs from ranks 1, 2, 3 (tensor 'half'" in message
    assert "first at [4], where ranks 1, 2, 3 have 0.19140625 and rank 0 has -0.19140625" in message


def test_bits_decide_not_numbers(seen: Seen) -> None:
    message = only(seen, "zeros and NaNs")
    assert "rank 2; rank 3 differ from ranks 0, 1 and from one another (" in message
    assert (
        "tensor 'zero': rank 3 differs from ranks 0, 1, 2 in values, first at [0, 1], "
        "where ranks 0, 1, 2 have 0.0 and rank 3 has -0.0"
    ) in message
    assert (
        "tensor 'nan': rank 2 differs from ranks 0, 1, 3 in values, first at [0], where ranks 0, 1, 3 "
        "have nan (bits 0x7fc00000) and rank 2 has nan (bits 0x7fc00001)"
    ) in message
    assert (
        "tensor 'number': ranks 2, 3 differ from ranks 0, 1 in values, "
        "where ranks 0, 1 have 7 and ranks 2, 3 have 8"
    ) in message


def test_elements_of_other_dtypes(seen: Seen) -> None:
    message = only(seen, "other dtypes")
    for name, index, common, odd in [
        ("complex", 1, "(3-1j)", "(3-2j)"),
        ("flags", 1, "True (bits 0x01)", "True (bits 0x02)"),
        ("fp8", 2, "1.0", "2.0"),
        ("wide", 0, str(2**64 - 1), str(2**64 - 2)),
    ]:
        assert (
            f"tensor {name!r}: values differ, first at [{index}], where ranks 0, 1, 2 have {common} "
            f"and rank 3 has {odd}"
        ) in message


def test_only_the_first_differing_piece_travels(seen: Seen) -> None:
    assert "first at [1, 5], where ranks 0, 1, 3 have 0 and rank 2 has 1" in only(
        seen, "beyond the first piece"
    )
    exchanges, sent = seen["beyond the first piece"]["cost"]
    assert exchanges == 3
    assert PIECE_BYTES <= sent < PIECE_BYTES + 1000


def test_memory_is_bounded(ranks: list[Seen]) -> None:
    # The one tensor has 48 MiB. Beside two pieces there is the memory of gloo and of the messages.
    assert "tensor 'big': rank 3 differs from ranks 0, 1, 2 in values" in only(ranks[0], "memory")
    for seen in ranks:
        assert seen["extra memory"] < 4 * PIECE_BYTES


def test_four_versions(seen: Seen) -> None:
    message = only(seen, "all differ")
    assert message.count("rank 1; rank 2; rank 3 differ from rank 0 and from one another") == 1
    for rank in (1, 2, 3):
        assert f"first at [1], where rank 0 has 1 and rank {rank} has 0" in message


def test_many_tensors_are_counted(seen: Seen) -> None:
    message = only(seen, "many tensors")
    assert [f"'t{number:02d}'" in message for number in range(12)] == [True] * 5 + [False] * 7
    assert "; and 7 more tensors)" in message


def test_tensor_that_changes_meanwhile(seen: Seen) -> None:
    assert "tensor 'x': values differ, but changed on ranks 0, 1 meanwhile" in only(seen, "changes meanwhile")


@pytest.mark.parametrize("level", ["structure", "tensor", "exact"])
def test_differing_scalar(seen: Seen, level: str) -> None:
    message = only(seen, f"scalar differs, {level}")
    assert "rank 3 differs from ranks 0, 1, 2 (" in message
    assert "(state.param_groups[0].lr: ranks 0, 1, 2 have 0.1, rank 3 has 0.2)" in message


@pytest.mark.parametrize(
    ("scenario", "report"),
    [
        ("negative zero", "state.x: {} have 0.0, rank 1 has -0.0)"),
        ("number type", "state.x: {} have 1, rank 1 has 1.0)"),
        ("truth", "state.x[0]: {} have 1, rank 1 has true)"),
        ("NaN bits", "state.x: {} have nan (bits 7ff8000000000000), rank 1 has nan (bits 7ff8000000000001))"),
        ("key type", 'state.x[3]: {} have "a", rank 1 has nothing; and 1 more place)'),
        ("container", "state.x: {} have list of 0, rank 1 has dict)"),
        ("tuple", "state.x: {} have list of 2, rank 1 has tuple of 2)"),
        ("length", "state.x: {} have list of 2, rank 1 has list of 3; and 1 more place)"),
        ("order", "state: {} have OrderedDict of keys .a, .b, rank 1 has OrderedDict of keys .b, .a)"),
        ("missing place", "state.x.b: {} have nothing, rank 1 has null)"),
        ("several places", "state.x: {} have 1, rank 1 has 2; and 1 more place)"),
    ],
)
def test_differing_documents(seen: Seen, scenario: str, report: str) -> None:
    assert f"({report.format('ranks 0, 2, 3')}" in only(seen, scenario)


def test_long_values_are_shown_where_they_differ(seen: Seen) -> None:
    message = only(seen, "long text")
    assert "aaab" + "c" * 20 in message
    assert "aaad" + "c" * 20 in message
    assert len(message) < 500


@pytest.mark.parametrize("level", ["structure", "tensor", "exact"])
def test_layouts(seen: Seen, level: str) -> None:
    message = only(seen, f"missing key, {level}")
    assert "rank 2 differs from ranks 0, 1, 3 (" in message
    assert "tensor 'half': ranks 0, 1, 3 have bfloat16 [5], rank 2 has nothing)" in message
    message = only(seen, f"dtype and shape differ, {level}")
    assert "tensor 'weight': ranks 0, 2, 3 have float32 [6, 4], rank 1 has float64 [6, 4]" in message
    assert "tensor 'half': ranks 0, 1, 2 have bfloat16 [5], rank 3 has bfloat16 [4]" in message


def test_groups_are_compared_apart(seen: Seen) -> None:
    assert seen["groups differ"] == {"found": [], "cost": [1, 0]}
    message = only(seen, "one group has a flip")
    assert "rank 3 differs from rank 2 (tensor 'own': values differ, first at [1]" in message
    assert message.endswith(REMEDY.format(2))


def test_components_of_some_ranks(seen: Seen) -> None:
    message = only(seen, "only some hold it")
    assert message.startswith(
        "component 'some' is not the same on all its ranks: rank 3 differs from rank 1 ("
    )
    assert seen["nobody holds any"] == {"found": [], "cost": [1, 0]}


def test_failure_of_one_rank_is_raised_on_all(seen: Seen) -> None:
    message = seen["dtype that cannot be stored"]["found"]
    assert isinstance(message, str)
    assert message.startswith("saving checkpoint-7: rank 1 (")
    assert "component 'model': tensor 'x' has dtype torch.complex128, which cannot be stored" in message
    for scenario in ("levels differ", "a holder is missing", "holders differ", "declared twice"):
        message = seen[scenario]["found"]
        assert isinstance(message, str)
        assert "component 'model' is declared on rank" in message
        assert "Declare the same validate_replication, validation_level and process group" in message
    assert seen["good again"] == {"found": [], "cost": [1, 0]}


def version(state: object, *ranks: int, tensors: dict[str, TensorEntry] | None = None) -> Version:
    return Version(ranks, canonical_document(encode_state(state).document), tensors or {})


SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, -0.0, 1.0, math.inf, math.nan])
)
LEAVES = SCALARS | st.sampled_from(["", "1", "nothing", "dict", "list of 0", b"", b"1", "null"])
KEYS = st.sampled_from(["a", "1", "[1]", "$", "", ".a"]) | st.integers(0, 1)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(first=STATES, second=STATES)
def test_a_report_names_a_place_exactly_when_states_differ(first: object, second: object) -> None:
    versions = [version(first, 0), version(second, 1)]
    differs = canonical_text(versions[0].document) != canonical_text(versions[1].document)
    assert bool(find_differences(versions).places) == differs


def test_order_of_insertion_does_not_count() -> None:
    states = [{1: "a", "x": {"p": 1, "q": 2}}, {"x": {"q": 2, "p": 1}, 1: "a"}]
    texts = {canonical_text(canonical_document(encode_state(state).document)) for state in states}
    assert len(texts) == 1


def test_many_ranks_and_versions_stay_short() -> None:
    sides = [tuple(range(100)), *((rank,) for rank in range(100, 110))]
    assert name_sides(sides) == (
        "rank 100; rank 101; rank 102; rank 103; and 6 more versions differ from ranks 0, 1, 2, 3, 4, 5, 6, "
        "7 and 92 more and from one another"
    )


def test_layouts_leave_less_room_for_values() -> None:
    tensors = [
        {
            **{f"shape{number}": TensorEntry("float32", (rank + 1,), ()) for number in range(3)},
            **{f"value{number}": TensorEntry("float32", (2,), (7, rank)) for number in range(4)},
        }
        for rank in range(2)
    ]
    differences = find_differences([version(None, rank, tensors=tensors[rank]) for rank in range(2)])
    assert [item.name for item in differences.told_values] == ["value0", "value1"]
    assert [item.first_piece(item.sides[1]) for item in differences.told_values] == [1, 1]
    message = describe("model", [(0,), (1,)], differences, {"value0": "first at [3]"})
    assert "tensor 'shape2': rank 0 has float32 [1], rank 1 has float32 [2]" in message
    assert (
        "tensor 'value0': values differ, first at [3]; tensor 'value1': values differ; and 2 more tensors"
        in message
    )
