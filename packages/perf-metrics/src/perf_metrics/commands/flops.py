"""`perf-metrics flops`: what one token of a model costs, by layer type and by convention."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..display import text_table
from ..flops.architecture import CONVENTIONS, Architecture, FlopsUnknownError, hardware_flops_per_token
from ..flops.attention import Settings
from ..flops.per_token import FlopsComparison, compare_flops
from ..flops.read_architecture import FAMILIES, architecture_of_config, architecture_of_model

if TYPE_CHECKING:
    from torch import nn

    from . import OneLineParser


def fill_flops(parser: OneLineParser) -> None:
    """Add what `flops` takes."""
    parser.description = (
        "Training FLOPs per token by layer type, and in the conventions of published tables. "
        "Known families need neither torch nor the model; others are built without values if transformers "
        "is installed."
    )
    parser.add_argument("--hf-config", required=True, type=Path, metavar="FILE", help="a config.json")
    parser.add_argument("--seq", required=True, type=int, metavar="TOKENS", help="sequence length")
    parser.add_argument(
        "--causal",
        choices=["full", "half", "dense"],
        default="full",
        help="keys that count for a query: all, or those within its window (default); what a causal mask "
        "leaves; all whatever the window",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="build the model without values and hold the formula against torch's counter",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_flops)


def run_flops(options: argparse.Namespace) -> int:
    """Print the tables.

    Raises:
        ValueError: The file is not a configuration, or the FLOPs are not known.
        ModuleNotFoundError: The model must be built, and transformers is not installed.
        FileNotFoundError: There is no such file.
    """
    print(_report(options))
    return 0


def _report(options: argparse.Namespace) -> str:
    config = _read(options.hf_config)
    note = "the text model alone; " if isinstance(config.get("text_config"), dict) else ""
    model = _build(config) if options.check or Settings(config).family not in FAMILIES else None
    architecture = architecture_of_config(config) if model is None else architecture_of_model(model)
    comparison = compare_flops(model, options.seq) if options.check and model is not None else None
    if options.json:
        return json.dumps(_as_json(architecture, options, comparison), indent=2)
    blocks = [
        note + _heading(architecture, options),
        _parts(architecture, options),
        _conventions(architecture, options.seq),
    ]
    if comparison is not None:
        blocks.append(_comparison(comparison))
    return "\n\n".join(blocks)


def _read(path: Path) -> Mapping[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"), object_hook=_float_or_object)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets as deep
        raise ValueError(f"--hf-config={path} is not a JSON file ({error}).") from None
    if not isinstance(config, dict):
        raise ValueError(f"--hf-config={path} must be a JSON object, as in a model's config.json.")
    return config


def _float_or_object(found: dict[str, object]) -> object:
    """Read what transformers 5 writes for a number that JSON lacks, such as {"__float__": "Infinity"}."""
    text = found.get("__float__")
    return float(text) if len(found) == 1 and text in ("Infinity", "-Infinity", "NaN") else found


def _build(config: Mapping[str, object]) -> nn.Module:
    """The model on the meta device. Code that comes with a model is never run."""
    family = config.get("model_type")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"model_type={family!r} must be built to be counted, which needs {error.name}. Install it with "
            "`pip install 'perf-metrics[torch]' transformers`.",
            name=error.name,
        ) from None
    inner = config.get("text_config")
    settings = dict(inner if isinstance(inner, dict) else config)
    try:
        known = AutoConfig.for_model(str(settings.pop("model_type", None)), **settings)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(known)
    except Exception as error:  # each family checks its settings in its own way
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise FlopsUnknownError(f"transformers cannot build model_type={family!r}: {reason}.") from error
    return model


def _heading(architecture: Architecture, options: argparse.Namespace) -> str:
    used = sum(group.active for group in architecture.weights)
    return (
        f"{architecture.name}: {len(architecture.mixing)} layers, {architecture.parameters:,} parameters, "
        f"{used:,.0f} weights used a token; sequence {options.seq:,}, causal {options.causal}"
    )


def _parts(architecture: Architecture, options: argparse.Namespace) -> str:
    flops = architecture.per_token(options.seq, options.causal)
    stored = {group.kind: group for group in architecture.weights}
    rows = [
        (
            part.kind,
            f"{stored[part.kind].stored:,}" if part.kind in stored else "",
            f"{stored[part.kind].active:,.0f}" if part.kind in stored else "",
            _giga(part.forward),
            _giga(part.total),
            f"{part.total / flops.total:.1%}",
        )
        for part in flops.parts
    ]
    rows.append(
        ("total", "", "", _giga(sum(part.forward for part in flops.parts)), _giga(flops.total), "100.0%")
    )
    twice = hardware_flops_per_token(flops, "full")
    rows.append(("with full recomputation", "", "", "", _giga(twice), f"{twice / flops.total:.1%}"))
    header = ("layer type", "weights", "used a token", "forward GFLOP", "training GFLOP", "share")
    return text_table(header, rows)


def _conventions(architecture: Architecture, length: int) -> str:
    own = CONVENTIONS[0].per_token(architecture, length)
    rows = []
    for convention in CONVENTIONS:
        flops = convention.per_token(architecture, length)
        rows.append((convention.name, _giga(flops), f"{flops / own:.3f}", convention.counts))
    return text_table(("convention", "GFLOP a token", "of model", "what counts"), rows, left=(0, 3))


def _comparison(comparison: FlopsComparison) -> str:
    rows = [
        (part.kind, _or_none(part.formula), _or_none(part.counted), "agrees" if part.agrees else "differs")
        for part in comparison.parts
    ]
    rows.append(("compared, formula of counted", "", "", f"{comparison.ratio:.4f}"))
    table = text_table(("every score counted", "formula GFLOP", "counted GFLOP", ""), rows)
    warning = comparison.warning()
    return table if warning is None else f"{table}\nwarning: {warning}"


def _as_json(
    architecture: Architecture, options: argparse.Namespace, comparison: FlopsComparison | None
) -> dict[str, object]:
    flops = architecture.per_token(options.seq, options.causal)
    answer: dict[str, object] = {
        "name": architecture.name,
        "parameters": architecture.parameters,
        "active_parameters": architecture.active_parameters,
        "sequence_length": options.seq,
        "causal": options.causal,
        "flops_per_token": flops.total,
        "parts": {part.kind: {"forward": part.forward, "backward": part.backward} for part in flops.parts},
        "conventions": {known.name: known.per_token(architecture, options.seq) for known in CONVENTIONS},
    }
    if comparison is not None:
        answer["check"] = {
            "ratio": comparison.ratio,
            "warning": comparison.warning(),
            "parts": {p.kind: {"formula": p.formula, "counted": p.counted} for p in comparison.parts},
        }
    return answer


def _giga(flops: float) -> str:
    return f"{flops / 1e9:,.3f}"


def _or_none(flops: float | None) -> str:
    return "none" if flops is None else _giga(flops)
