"""Replica validation: four real processes over gloo, and the wording of the report."""

import json
import math
import re
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_core.encoding import encode_state
from checkpoint_core.replication import PIECE_BYTES, _who, leaves

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
        f"{who} (tensor 'weight': values differ, first at [2, 1]: -0.1577124446630478 (bits 0xbe217f5f) on "
        f"ranks 0, 2, 3, -0.1577124297618866 (bits 0xbe217f5e) on rank 1). {REMEDY.format(0)}"
    )


def test_bf16_when_the_first_rank_is_the_odd_one(seen: Seen) -> None:
    message = only(seen, "bf16")
    assert "rank 0 differs from ranks 1, 2, 3 (tensor 'half'" in message
    assert "first at [4]: 0.19140625 (bits 0x3e44) on ranks 1, 2, 3, -0.19140625 (bits 0xbe44) on" in message


def test_bits_decide_not_numbers(seen: Seen) -> None:
    for name, index, common, odd in [
        ("zero", [0, 1], "0.0 (bits 0x00000000)", "-0.0 (bits 0x80000000)"),
        ("nan", [0], "nan (bits 0x7fc00000)", "nan (bits 0x7fc00001)"),
        ("number", [], "7 (bits 0x0000000000000007)", "8 (bits 0x0000000000000008)"),
    ]:
        message = only(seen, f"bits of {name}")
        assert f"first at {index}: {common} on ranks 0, 1, 2, {odd} on rank 3" in message


def test_elements_of_other_dtypes(seen: Seen) -> None:
    message = only(seen, "other dtypes")
    for name, index, common, odd in [
        ("complex", 1, "(3-1j)", "(3-2j)"),
        ("flags", 1, "True (bits 0x01)", "True (bits 0x02)"),
        ("fp8", 2, "1.0", "2.0"),
        ("wide", 0, str(2**64 - 1), str(2**64 - 2)),
    ]:
        assert f"tensor {name!r}: values differ, first at [{index}]: {common}" in message
        assert re.search(rf"{re.escape(odd)}[^,;]* on rank 3", message)


def test_only_the_first_differing_piece_travels(seen: Seen) -> None:
    message = only(seen, "beyond the first piece")
    assert "first at [1, 5]: 0 (bits 0x00000000) on ranks 0, 1, 3, 1 (bits 0x00000001) on rank 2" in message
    exchanges, sent = seen["beyond the first piece"]["cost"]
    assert exchanges == 3
    assert PIECE_BYTES <= sent < PIECE_BYTES + 1000


def test_memory_is_bounded(ranks: list[Seen]) -> None:
    # The one tensor has 48 MiB. Beside two pieces there is the memory of gloo and of the messages.
    assert "tensor 'big': values differ, first at" in only(ranks[0], "memory")
    for seen in ranks:
        assert seen["extra memory"] < 4 * PIECE_BYTES


def test_four_versions(seen: Seen) -> None:
    message = only(seen, "all differ")
    assert "rank 1; rank 2; rank 3 differ from rank 0 (tensor 'x': values differ, first at [1]: 1" in message


def test_many_tensors_are_counted(seen: Seen) -> None:
    message = only(seen, "many tensors")
    assert [f"'t{number:02d}'" in message for number in range(12)] == [True] * 5 + [False] * 7
    assert "; and 7 more)" in message


def test_tensor_that_changes_meanwhile(seen: Seen) -> None:
    assert "tensor 'x': values differ, but are equal by now" in only(seen, "changes meanwhile")


@pytest.mark.parametrize("level", ["structure", "tensor", "exact"])
def test_differing_scalar(seen: Seen, level: str) -> None:
    message = only(seen, f"scalar differs, {level}")
    assert "rank 3 differs from ranks 0, 1, 2 (state.param_groups[0].lr: 0.1 on ranks" in message
    assert "0, 1, 2, 0.2 on rank 3)" in message


@pytest.mark.parametrize(
    ("scenario", "report"),
    [
        ("negative zero", "state.x: 0.0 on {}, -0.0 on rank 1)"),
        ("number type", "state.x: 1 on {}, 1.0 on rank 1)"),
        ("truth", "state.x[0]: 1 on {}, true on rank 1)"),
        (
            "NaN bits",
            'state.x: {{"$": "float", "bits": "7ff8000000000000"}} on {}, {{"$": "float"',
        ),
        ("key type", 'state.x.3: nothing on {}, "a" on rank 1; state.x[3]: "a" on {}, nothing on rank 1)'),
        ("container", "state.x: list of 0 on {}, dict on rank 1)"),
        ("tuple", "state.x: list of 2 on {}, tuple of 2 on rank 1)"),
        ("length", "state.x: list of 2 on {}, list of 3 on rank 1; state.x[2]: nothing on {}, 3 on rank 1)"),
        ("order", "state: OrderedDict of keys .a, .b on {}, OrderedDict of keys .b, .a on rank 1)"),
        ("missing place", "state.x.b: nothing on {}, null on rank 1)"),
        ("several places", "state.x: 1 on {}, 2 on rank 1; state.y: 1 on {}, 2 on rank 1)"),
    ],
)
def test_differing_documents(seen: Seen, scenario: str, report: str) -> None:
    ranks = "ranks 0, 2, 3"
    assert f"({report.format(ranks, ranks)}" in only(seen, scenario)


def test_long_values_are_shown_where_they_differ(seen: Seen) -> None:
    message = only(seen, "long text")
    assert "aaab" + "c" * 20 in message
    assert "aaad" + "c" * 20 in message
    assert len(message) < 500


@pytest.mark.parametrize("level", ["structure", "tensor", "exact"])
def test_layouts(seen: Seen, level: str) -> None:
    message = only(seen, f"missing key, {level}")
    assert "rank 2 differs from ranks 0, 1, 3 (" in message
    assert "tensor 'half': bfloat16 [5] on ranks 0, 1, 3, nothing on rank 2)" in message
    message = only(seen, f"dtype and shape differ, {level}")
    assert "rank 1; rank 3 differ from ranks 0, 2 (" in message
    assert "tensor 'weight': float32 [6, 4] on ranks 0, 2, float64 [6, 4] on rank 1" in message


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
    for scenario in ("levels differ", "a holder is missing", "holders differ"):
        message = seen[scenario]["found"]
        assert isinstance(message, str)
        assert "component 'model' is declared on rank" in message
        assert "Declare the same validate_replication, validation_level and process group" in message
    assert seen["good again"] == {"found": [], "cost": [1, 0]}


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
def test_places_differ_exactly_when_states_differ(first: object, second: object) -> None:
    documents = [encode_state(state).document for state in (first, second)]
    places = [list(leaves(document, "state")) for document in documents]
    assert [len(dict(each)) for each in places] == [len(each) for each in places]
    differs = canonical(documents[0]) != canonical(documents[1])
    assert (dict(places[0]) != dict(places[1])) == differs


def canonical(node: object) -> str:
    """A document as text; only an OrderedDict keeps its order."""
    if isinstance(node, dict) and node.get("$") in ("dict", "Counter"):
        return f"{node['$']}({sorted((canonical(key), canonical(item)) for key, item in node['items'])})"
    if isinstance(node, dict):
        return f"{{{sorted((key, canonical(item)) for key, item in node.items())}}}"
    return f"[{', '.join(map(canonical, node))}]" if isinstance(node, list) else json.dumps(node)


def test_order_of_insertion_does_not_count() -> None:
    states = [{1: "a", "x": {"p": 1, "q": 2}}, {"x": {"q": 2, "p": 1}, 1: "a"}]
    first, second = (dict(leaves(encode_state(state).document, "state")) for state in states)
    assert first == second


def test_many_ranks_and_versions_stay_short() -> None:
    sides = [tuple(range(100)), *((rank,) for rank in range(100, 110))]
    assert _who(sides) == (
        "rank 100; rank 101; rank 102; rank 103; rank 104; and 5 more versions differ from ranks 0, 1, 2, 3, "
        "4, 5, 6, 7 and 92 more"
    )
