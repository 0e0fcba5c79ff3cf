"""What is wrong in silence when it is done naively: each of these fails without the measure against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> dict[str, Any]:
    both = launch("traps.py", 2)
    assert both[0] == both[1], "each rank sees the same"
    return both[0]


def test_torch_unties_weights_and_we_do_not(notes: dict[str, Any]) -> None:
    assert not notes["tied by torch"]
    assert notes["tied"]


def test_gradients_of_norms_on_parts_of_the_sequence_are_summed(notes: dict[str, Any]) -> None:
    # Torch leaves them Partial, and a norm of local parts is another one.
    assert "P(sum)" in notes["placements by torch"] or "Partial" in notes["placements by torch"]
    assert notes["norm of local parts by torch"] != pytest.approx(notes["norm"], rel=1e-3)
    assert notes["norm of local parts"] == pytest.approx(notes["norm"], rel=1e-5)


def test_every_parameter_is_a_dtensor_so_that_clipping_and_fused_steps_work(notes: dict[str, Any]) -> None:
    assert "mixed torch.Tensor and DTensor" in notes["clipping by torch"]
    assert notes["clipping"] == pytest.approx(notes["norm"], rel=1e-5)
    assert notes["fused step"] == "done"


def test_the_gradient_of_a_norm_of_each_head_is_summed(notes: dict[str, Any]) -> None:
    assert notes["q_norm"] < 1e-5


def test_the_gradient_of_a_shared_head_is_summed(notes: dict[str, Any]) -> None:
    assert notes["k_proj of a shared head"] < 1e-5


@pytest.mark.parametrize("case", ["after, False", "before, False", "before, True"])
def test_what_a_module_does_with_its_input_outside_its_layers_is_right(
    notes: dict[str, Any], case: str
) -> None:
    """Its gradient is whole on each rank, and must not be summed."""
    assert notes[f"gated {case}"] < 1e-5


@pytest.mark.parametrize("sequence", [False, True])
def test_an_input_that_meets_what_each_rank_computes_is_refused(
    notes: dict[str, Any], sequence: bool
) -> None:
    """Its gradient would be a part of a sum that nobody adds up."""
    assert "The module model.layers.0.mlp uses its input" in notes[f"gated between, {sequence}"]


def test_the_inputs_of_one_module_are_summed_once(notes: dict[str, Any]) -> None:
    """Two all-reduces forward and two backward for each layer; one each for embedding, logits and head."""
    layers = 2
    assert notes["collectives"] == {"all_reduce": 4 * layers + 2, "all_gather": 1}
    # Divided by the sequence, each all-reduce of a layer is a reduce-scatter and an all-gather.
    divided = notes["collectives, sequence"]
    assert divided["reduce_scatter"] == 4 * layers + 1
    assert divided["all_gather"] == 4 * layers + 3


def test_a_copy_of_the_model_computes_the_same(notes: dict[str, Any]) -> None:
    assert notes["copy"]


def test_a_padding_row_has_no_gradient(notes: dict[str, Any]) -> None:
    assert notes["padding"] == 0.0


def test_activation_checkpointing_and_compiled_layers(notes: dict[str, Any]) -> None:
    assert notes["checkpointed"] < 1e-5
    assert notes["compiled"] < 1e-5


def test_compiled_code_that_does_not_look_at_tokens_makes_nan_of_those_outside(notes: dict[str, Any]) -> None:
    """As on an accelerator, where looking would wait for it."""
    assert notes["tokens outside, compiled"] == [[False, True, True]]


def test_a_part_of_a_fully_sharded_model_is_not_called_with_pieces_of_weights(notes: dict[str, Any]) -> None:
    assert "fully_shard has not gathered" in notes["part of a fully sharded model"]
