"""What cannot work, or would change nothing, is refused before work starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_core import CommBytes, ConfigurationError
from trainer_ddp import CompressionArguments
from trainer_ddp.compression import build_compression

pytestmark = pytest.mark.usefixtures("one_rank")


def refusal(model: nn.Module, **settings: object) -> str:
    with pytest.raises(ConfigurationError, match=r"^compression.method=") as caught:
        build_compression(CompressionArguments(**settings), model, None, CommBytes())
    return str(caught.value)


def test_no_compression_is_none() -> None:
    assert build_compression(CompressionArguments(), nn.Linear(2, 2), None, CommBytes()) is None


@pytest.mark.parametrize("method", ["fp16", "bf16", "powerSGD"])
def test_sparse_gradients(method: str) -> None:
    model = nn.Sequential(nn.Embedding(50, 40, sparse=True), nn.Linear(40, 40))
    message = refusal(model, method=method)
    assert "embedding '0'" in message
    assert "sparse=False" in message


@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_gradients_of_16_bits_cannot_be_made_smaller_by_rounding(method: str) -> None:
    assert "no trainable parameter has more than 16 bits" in refusal(
        nn.Linear(4, 4).bfloat16(), method=method
    )


@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_a_backend_that_fails_the_trial_is_named(method: str) -> None:
    message = refusal(nn.Linear(4, 4, device="meta"), method=method)
    assert "gloo, which could not sum" in message
    assert "on meta" in message


def test_matrices_too_small_for_powersgd() -> None:
    message = refusal(nn.Linear(4, 4), method="powerSGD")
    assert "matrix_rank=2" in message
    assert "1/2" in message


def test_only_trainable_tensors_count() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    refusal(model, method="powerSGD")


def test_first_factors_differ_by_name_and_not_by_seed() -> None:
    def factors(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        compression = build_compression(
            CompressionArguments(method="powerSGD"),
            nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)),
            None,
            CommBytes(),
        )
        assert compression is not None
        zeros = {name: torch.zeros(20, 20) for name in ("0.weight", "1.weight")}
        compression.load_state_dict({"errors": zeros, "factors": {name: torch.empty(0) for name in zeros}})
        return list(compression.state_dict()["factors"].values())

    first, again = factors(0), factors(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(*first)
    assert torch.allclose(first[0].norm(dim=0), torch.ones(2))
