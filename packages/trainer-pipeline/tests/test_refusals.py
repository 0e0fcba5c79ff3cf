"""What does not fit the ranks is refused on every rank, before work, by the name of the setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

REFUSED = {
    "model": ("model='Tiny'", "no rank holds the whole model", "give model_init"),
    "few blocks": (
        "pipeline.stages_per_rank=",
        "more than the 3 blocks of layers",
        "use fewer ranks or stages",
    ),
    "one block": ("pipeline.stages_per_rank=", "more than the 1 blocks of layers", "a deeper model"),
    "sum of layers": (
        "pipeline.layers_per_stage=(2, 3)",
        "must add up to the 4 blocks of layers",
        "change it, or leave it out",
    ),
    "no blocks": ("transformer_layers_path=None", "a pipeline needs the blocks of the model", "Flat"),
    "path": ("transformer_layers_path='layer'", "no module of that name", "layers"),
    "settings of the rank": ("pipeline.n_microbatches", "rank 0 has 4, rank 1 has 8"),
    "schedule of the rank": ("pipeline.schedule", "rank 0 has 'gpipe', rank 1 has '1f1b'"),
    "layers of the rank": ("parameter layers.4.", "rank 0 has nothing of that name", "rank 1 has 'float32"),
    "values of the rank": (
        "model_init='embed.weight'",
        "different values on ranks that both have it",
        "set the same seed everywhere",
    ),
    "too few stages": ("model_splitter=1", "where 2 were asked for", "from 0 to num_stages - 1"),
    "microbatches": (
        "pipeline.schedule='interleaved_1f1b'",
        "cannot be carried out with pipeline.n_microbatches=7, 2 ranks and 2 stages on each",
        "multiple of the number of rounds",
    ),
    "microbatches of a factory": (
        "='ScheduleInterleaved1F1B'",
        "cannot be carried out with pipeline.n_microbatches=7",
    ),
}
IN_STEPS = {
    "two things": (
        "TypeError: a stage returned a tuple",
        "every stage but the last one must return the hidden state, one tensor",
    ),
    "skipping": (
        "ConfigurationError: model_splitter='Skipping'",
        "does not call the blocks of layers one after another",
        "give a model_splitter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses(world: Callable[..., Any], name: str) -> None:
    for error in world("two", "2").errors(name):
        assert error.startswith("ConfigurationError: "), error
        assert [words for words in REFUSED[name] if words not in error] == [], error


@pytest.mark.parametrize("name", IN_STEPS)
def test_what_a_stage_refuses_in_a_step_ends_all_ranks(world: Callable[..., Any], name: str) -> None:
    ended = world("failing", f"2, {name}")
    first, second = ended.errors("failing")
    assert second.startswith("RankFailedError: training: rank 0 on "), ended.told
    for error in (first, second):
        assert [words for words in IN_STEPS[name] if words not in error] == [], error
    assert ended.codes == [1, 1]
