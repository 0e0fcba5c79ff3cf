"""A manager of two tiers, over a state whose values all say one number."""

import torch

from checkpoint_core import CheckpointConfig, CheckpointManager


class Values:
    """A state of some values."""

    def __init__(self, count: int) -> None:
        self.values = torch.zeros(count)

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert isinstance(state["values"], torch.Tensor)
        self.values = state["values"]


def manager(run: str, url: str, count: int = 1000) -> CheckpointManager:
    config = CheckpointConfig(run, remote_dir=url, timeout_seconds=30.0)
    return CheckpointManager(config, {"state": Values(count)})
