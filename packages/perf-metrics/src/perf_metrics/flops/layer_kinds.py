"""Which layer type a module belongs to, told by its place in the model."""

from __future__ import annotations

import re

from .accounts import (
    ATTENTION_PROJECTIONS,
    MLP,
    OTHER,
    OUTPUT_PROJECTION,
    ROUTED_EXPERTS,
    ROUTER,
    SHARED_EXPERTS,
    STATE_PROJECTIONS,
)

_OUTPUTS = {"output", "head", "unembed", "output_projection"}
_ANYWHERE = {"lm_head", "embed_out"}
_RULES = (
    # In this order: an expert lies in an mlp, a gate beside the experts.
    (SHARED_EXPERTS, re.compile(r"shared_?experts?|shared_mlp")),
    (ROUTED_EXPERTS, re.compile(r"(^|\.)(experts?|input_linear|output_linear)(\.|$)")),
    (ROUTER, re.compile(r"(^|\.)(gate|router|wg|gating)(\.|$)")),
    (STATE_PROJECTIONS, re.compile(r"mamba|ssm|linear_attn|delta_?net|lightning|recurrent")),
    (ATTENTION_PROJECTIONS, re.compile(r"attn|attention|(^|\.)[qkvo]_proj(\.|$)")),
    (STATE_PROJECTIONS, re.compile(r"mixer\.(in|out)_proj|mixer\.conv1d|(^|\.)mixer$")),
    (MLP, re.compile(r"mlp|ffn|feed_?forward|(^|\.)(fc\d?|w[123]|(gate|up|down)_proj)(\.|$)")),
)


def kind_of(path: str) -> str:
    """Return the layer type of the module at a path, "other linear" where its name does not tell."""
    name = path.rpartition(".")[2]
    if name in _ANYWHERE or (name in _OUTPUTS and path.count(".") <= 1):
        return OUTPUT_PROJECTION
    return next((kind for kind, rule in _RULES if rule.search(path)), OTHER)
