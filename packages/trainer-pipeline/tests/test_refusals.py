"""What does not fit the ranks is refused on every rank, before work, by the name of the setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

REFUSED = {
    "model": ("model='Tiny'", "no rank holds the whole model", "Give model_init"),
    "frozen rank": (
        "model_init='Tiny'",
        "leaves nothing to train in the stages (1,)",
        "pipeline.layers_per_stage",
    ),
    "called alone": (
        "model='Tiny'",
        "was called on one of them",
        "inside `with trainer.generating():`",
    ),
    "few blocks": ("num_stages=4", "more than the 3 blocks of layers", "a smaller pipeline.stages_per_rank"),
    "one block": ("num_stages=2", "more than the 1 blocks of layers", "a deeper model"),
    "sum of layers": (
        "pipeline.layers_per_stage=(2, 3)",
        "must add up to the 4 blocks of layers",
        "Change it, or leave it out",
    ),
    "no blocks": ("transformer_layers_path=None", "the blocks of the model, which pipeline needs", "Flat"),
    "path": ("transformer_layers_path='layer'", "is not the name of a module in the model", "layers"),
    "loss of a stage": (
        "rank 1 of 2 cannot make its loss",
        "fused_loss='Tiny' does not say which layer makes the logits",
        "Give it a method get_output_embeddings()",
    ),
    "loss": ("fused_loss='torch' does not support label_smoothing", "Set fused_loss='chunked'"),
    "settings of the rank": ("pipeline.n_microbatches", "rank 0 has 4, rank 1 has 8"),
    "schedule of the rank": ("pipeline.schedule", "rank 0 has 'gpipe', rank 1 has '1f1b'"),
    "layers of the rank": ("parameter layers.4.", "rank 0 has nothing of that name", "rank 1 has 'float32"),
    "values of the rank": (
        "model_init='embed.weight'",
        "different values on ranks that share it",
        "set the same seed everywhere",
    ),
    "too few stages": ("model_splitter=1", "but 2 were asked for", "from 0 to num_stages - 1"),
    "microbatches": (
        "pipeline.schedule='interleaved_1f1b'",
        "cannot be executed with pipeline.n_microbatches=7, 2 ranks and 2 stages on each",
        "multiple of the number of rounds",
    ),
    "microbatches of a factory": (
        "='ScheduleInterleaved1F1B'",
        "cannot be executed with pipeline.n_microbatches=7",
    ),
}
IN_STEPS = {
    "two things": (
        0,
        "TypeError: a stage returned a tuple",
        "every stage except the last one must return",
    ),
    "skipping": (
        0,
        "ConfigurationError: model_splitter='Skipping'",
        "does not call the blocks of layers once each, one after another",
        "give a model_splitter",
    ),
    "reversed": (
        0,
        "ConfigurationError: model_splitter='Reversed'",
        "does not call the blocks of layers once",
    ),
    "twice": (1, "model_splitter='Twice'", "does not call the blocks of layers once"),
    "beside": (
        1,
        "ConfigurationError: model_splitter='BlockSplitter'",
        "needs more than the hidden state that its first block is given",
        "Compute it inside the blocks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses(world: Callable[..., Any], name: str) -> None:
    for error in world("two", "2").errors(name):
        assert error.startswith("DataError: " if name == "loss of a stage" else "ConfigurationError: "), error
        assert [words for words in REFUSED[name] if words not in error] == [], error


@pytest.mark.parametrize("name", IN_STEPS)
def test_what_a_stage_refuses_in_a_step_ends_all_ranks(world: Callable[..., Any], name: str) -> None:
    ended = world("failing", f"2, {name}")
    at_fault, *told = IN_STEPS[name]
    errors = ended.errors("failing")
    assert errors[1 - at_fault].startswith(f"RankFailedError: training: rank {at_fault} on "), ended.told
    for error in errors:
        assert [words for words in told if words not in error] == [], error
    assert ended.codes == [1, 1]
