"""Whether all ranks of a job were given the same things."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from dist_env import DistributedEnvInterface, gather_objects

from .errors import ConfigurationError


def compare_facts(facts: Mapping[str, object], env: DistributedEnvInterface) -> None:
    """Refuse to start where ranks were given different things; collective.

    Args:
        facts: Plain values by name, with dots for nested tables. All of this is sent only if something
            differs.
        env: Rank and world size.

    Raises:
        ConfigurationError: On every rank, naming the first fact that differs, and who has what.
    """
    flat = dict(_flat(facts, ""))
    digest = hashlib.sha256(repr(sorted(flat.items())).encode()).hexdigest()
    if len(set(gather_objects(digest, env))) == 1:
        return
    ranks = gather_objects({name: repr(value) for name, value in flat.items()}, env)
    names = dict.fromkeys(name for each in ranks for name in each)
    for name in names:
        values = [each.get(name, repr(_ABSENT)) for each in ranks]
        if len(set(values)) > 1:
            told = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise ConfigurationError(
                name, flat.get(name, _ABSENT), f"differs between ranks: {told}", "give all ranks the same"
            )


def model_facts(model: nn.Module) -> dict[str, object]:
    """Shape, dtype and whether it is trained, for each parameter and buffer by name."""
    parameters = {f"parameter {name}": _described(value) for name, value in model.named_parameters()}
    return {**parameters, **{f"buffer {name}": _described(value) for name, value in model.named_buffers()}}


class _Absent:
    def __repr__(self) -> str:
        return "nothing of that name"


_ABSENT = _Absent()


def _described(tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{trained}"


def _flat(facts: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
