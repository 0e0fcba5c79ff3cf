"""Ranks write the texts of one process, token for token, and leave nothing changed."""

from __future__ import annotations

from typing import Any

import pytest

PROMPT, NEW, LAYERS = 4, 12, 8
SCHEDULES = [
    *(("two", schedule) for schedule in ("1f1b", "interleaved_1f1b", "zbv")),
    ("four", "zbv"),
    *(pytest.param("four", schedule, marks=pytest.mark.full) for schedule in ("1f1b", "interleaved_1f1b")),
]
WAYS = ("plain", "temperature", "top k", "top p", "penalty", "all", "greedy penalty")


@pytest.mark.parametrize(("ranks", "schedule"), SCHEDULES, indirect=["ranks"])
def test_the_most_probable_tokens(ranks: Any, schedule: str) -> None:
    for seen in ranks.seen(f"greedy, {schedule}"):
        alone = seen["alone"]
        assert len({tuple(row[PROMPT:]) for row in alone}) == 3, "each row has a text of its own"
        assert seen["without"] == alone
        assert seen["with"] == alone
        assert seen["switched off"] == alone
        assert seen["nothing"] == [row[:PROMPT] for row in alone]


@pytest.mark.parametrize(("ranks", "schedule"), SCHEDULES, indirect=["ranks"])
def test_each_rank_keeps_keys_and_values_of_its_layers(ranks: Any, schedule: str) -> None:
    for seen in ranks.seen(f"greedy, {schedule}"):
        # The last token is never put in.
        assert seen["caches"] == [[LAYERS // len(ranks.codes), PROMPT + NEW - 1]]
        assert seen["made"] == 1, "use_cache=False makes none"


def test_a_row_that_ends_keeps_its_end_and_is_padded(ranks: Any) -> None:
    for seen in ranks.seen("endings"):
        end, ended = seen["end"], 0
        for filler, texts in ((0, seen["padded"]), (end, seen["no pad"])):
            longest = max(map(len, texts))
            for row, whole in zip(texts, seen["whole"], strict=True):
                new = whole[PROMPT:]
                kept = new.index(end) + 1 if end in new else NEW
                ended += kept < NEW
                expected = whole[: PROMPT + kept] + [filler] * NEW
                assert row == expected[:longest]
        assert ended
        row = seen["whole"][0]
        # With nobody left it stops.
        assert seen["one row"] == [row[: row.index(end, PROMPT) + 1]]
        assert len(seen["one row"][0]) < PROMPT + NEW


@pytest.mark.parametrize("way", WAYS)
def test_drawn_texts_are_those_of_one_process_with_the_seed_of_rank_0(ranks: Any, way: str) -> None:
    for seen in ranks.seen("sampling"):
        assert seen["together"][way] == seen["alone"][way]


def test_every_option_changes_the_text(ranks: Any) -> None:
    texts = ranks.seen("sampling")[0]["alone"]
    assert len({str(texts[way]) for way in WAYS}) == len(WAYS)
    greedy = ranks.seen("endings")[0]["whole"]
    assert texts["plain"] != greedy != texts["greedy penalty"]
    for row in texts["greedy penalty"]:
        assert len(set(row)) > len(set(greedy[0])), "what is there already becomes rare"


def test_modes_and_generators_are_put_back(ranks: Any) -> None:
    for seen in ranks.seen("undisturbed"):
        assert seen["modes"]
        assert seen["generators"]
        assert seen["texts"][0] == seen["texts"][1], "nothing is dropped out"
        assert seen["texts"][0][0] == seen["alone"]


def test_texts_in_between_leave_the_curve_alone(ranks: Any) -> None:
    for seen in ranks.seen("undisturbed"):
        plain, disturbed = seen["curves"]
        assert len(plain) > 2
        assert plain == disturbed


def test_a_loop_of_ones_own_may_call_the_model(ranks: Any) -> None:
    for seen in ranks.seen("called together"):
        assert seen["text"] == seen["alone"]


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "temperature": "temperature=-1.0 must be 0 or more",
        "tokens": "max_new_tokens=-1 must be 0 or more",
        "prompt": "input_ids=(2, 0) must be [rows, positions], both 1 or more. Give a prompt",
    }.items(),
)
def test_refused(ranks: Any, name: str, words: str) -> None:
    for error in ranks.errors(f"refused, {name}"):
        assert error.startswith("ConfigurationError: ")
        assert words in error
