"""Random number generators continue where they were."""

import json
import random

import numpy as np
import pytest
import torch

from checkpoint_core import CheckpointError, RNGState
from checkpoint_core.encoding import decode_state, encode_state


def draw() -> list[object]:
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.standard_normal(3).tolist(),
        torch.rand(3).tolist(),
        torch.randperm(5).tolist(),
        torch.nn.functional.dropout(torch.ones(16)).tolist(),
    ]


def test_the_same_numbers_again() -> None:
    np.random.seed(3)
    np.random.standard_normal()  # Leaves half of a pair behind, which is part of the state.
    random.gauss(0, 1)
    encoded = encode_state(RNGState().state_dict())
    text = json.dumps(encoded.document, allow_nan=False)
    expected = draw()
    draw()
    RNGState().load_state_dict(decode_state(json.loads(text), encoded.tensors.__getitem__))
    assert draw() == expected


def test_malformed_state_changes_no_generator() -> None:
    state = RNGState().state_dict()
    draw()
    now = RNGState().state_dict()
    expected = draw()
    RNGState().load_state_dict(now)
    version, (_, *words), spare = random.getstate()
    wrong: list[tuple[str, object]] = [
        ("python", (1, 2, 3)),
        ("python", ()),
        ("python", (version, (-1, *words), spare)),
        ("torch", torch.zeros(3)),
        ("numpy", {"bit_generator": "x"}),
        ("numpy", 0),
    ]
    for key, value in wrong:
        with pytest.raises(CheckpointError, match="generator state is malformed"):
            RNGState().load_state_dict({**state, key: value})
    with pytest.raises(CheckpointError, match="malformed"):
        RNGState().load_state_dict({})
    assert draw() == expected
