"""The state that the checkpoint benchmark saves: a decoder's shapes and AdamW after one step."""

from __future__ import annotations

import torch
from _checkpoint_samples import FULL_PARAMETERS
from torch import nn

FULL_LAYERS = 12
FULL_WIDTH = 768


class _Block(nn.Module):
    """The parameters of one decoder layer with grouped-query attention and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 10 // 3
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width // 4, bias=False)
        self.value = nn.Linear(width, width // 4, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.attention_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)


class Decoder(nn.Module):
    """The parameters of a decoder, never run: at full size 111 tensors of 3 kB to 28 MB.

    Args:
        num_parameters: How many parameters, met to within two rows of the vocabulary.
        width: Size of the hidden state, a multiple of 4.
        num_layers: How many layers.
    """

    def __init__(self, num_parameters: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(width) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        used = sum(parameter.numel() for parameter in self.parameters())
        vocabulary = max(1, (num_parameters - used) // (2 * width))
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)


def build(scale: float, seed: int) -> tuple[Decoder, torch.optim.AdamW]:
    """Build a model with random weights, and an optimizer without state.

    Args:
        scale: Size relative to 102.5 million parameters. Layers go first, so that the tensors stay as large
            as they are down to 0.1.
        seed: Of the weights.

    Returns:
        The model and its optimizer.
    """
    torch.manual_seed(seed)
    width = max(64, int(FULL_WIDTH * min(1.0, 10 * scale) ** 0.5) // 64 * 64)
    model = Decoder(round(FULL_PARAMETERS * scale), width, max(1, int(FULL_LAYERS * scale)))
    # One tensor after another: no large temporary memory that later allocations would find touched.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def take_step(model: Decoder, optimizer: torch.optim.AdamW) -> None:
    """Take one optimizer step with random gradients, and free the gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def state_tensors(model: Decoder, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Every tensor of the state by a unique name: the model's first, then the optimizer's."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in values.items()}
    return tensors


def num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of tensor data."""
    return sum(tensor.nbytes for tensor in tensors.values())


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, not a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def digest(model: Decoder, optimizer: torch.optim.AdamW) -> dict[str, int]:
    """A sum over the bits of each tensor, to compare what was loaded with what was saved."""
    return {
        name: int(tensor.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64))
        for name, tensor in state_tensors(model, optimizer).items()
    }
