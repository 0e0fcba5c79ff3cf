"""The starts of a run, on what and with what each was made: `sessions.json` in its directory."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from dist_env import DistributedEnvInterface
from trainer_core import ConfigurationError

from .options import PretrainArguments
from .program import PROG

SESSIONS_NAME = "sessions.json"


def describe_session(args: PretrainArguments, env: DistributedEnvInterface) -> dict[str, object]:
    """Return what this start of a run is made with, as plain JSON values."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "trainer": args.trainer,
        "mesh": args.mesh,
        "processes": env.world_size,
        "device": _device_name(env.device),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        PROG: version(PROG),
    }


def read_sessions(directory: Path) -> list[Mapping[str, object]]:
    """Return the starts of the run in a directory, in their order; none if it does not tell.

    Raises:
        ConfigurationError: If the file was damaged.
    """
    path = directory / SESSIONS_NAME
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(
            "output_dir", str(directory), f"has a damaged {SESSIONS_NAME} ({error})", "remove that file"
        ) from error
    return [session for session in found if isinstance(session, dict)] if isinstance(found, list) else []


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.processor() or platform.machine()})"
