"""What a rank tells the others about itself."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass

import torch.distributed as dist

from dist_env.interface import DistributedEnvInterface

UNKNOWN_HOST = "unknown host"


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One process in its place. `token` tells it from any other process that ever had this rank."""

    rank: int
    host: str
    pid: int
    token: str
    world_size: int
    device: str
    device_identity: str | None
    backend: str | None

    @classmethod
    def of(cls, env: DistributedEnvInterface, *, device_identity: str | None = None) -> RankRecord:
        """The record of this process, with a new token."""
        return cls(
            rank=env.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            token=secrets.token_hex(8),
            world_size=env.world_size,
            device=str(env.device),
            device_identity=device_identity,
            backend=env.backend,
        )

    @classmethod
    def of_default_group(cls) -> RankRecord:
        """The record of this process in the default group, whoever formed it."""
        return cls(
            rank=dist.get_rank(),
            host=socket.gethostname(),
            pid=os.getpid(),
            token=secrets.token_hex(8),
            world_size=dist.get_world_size(),
            device="unknown",
            device_identity=None,
            backend=dist.get_backend(),
        )

    def to_text(self) -> str:
        """The record for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> RankRecord:
        """The record from the store."""
        return cls(**json.loads(text))
