"""The command line: `python -m model_parallel plan CONFIG --tensor 4` shows what each rank would hold."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich_argparse import RichHelpFormatter

if TYPE_CHECKING:
    from torch import nn

    from .check import LayerShare

OK, MISSING, REFUSED = 0, 1, 2


def main() -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m model_parallel",
        description="How one model would be computed by several devices.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="show what each rank would hold of a Hugging Face model",
        description="Build a model from its config.json without weights, check that it can be divided over "
        "ranks, and show what each of them would hold: python -m model_parallel plan config.json --tensor 4. "
        "Exit code: 0 it can be divided, 1 transformers is not installed, 2 it cannot be divided, or an "
        "option is wrong.",
        formatter_class=_Help,
    )
    plan.add_argument(
        "config", metavar="CONFIG", type=Path, help="a config.json, or a directory that has one"
    )
    plan.add_argument(
        "--tensor", metavar="RANKS", type=int, required=True, help="ranks to divide each matrix over"
    )
    plan.add_argument(
        "--plan", metavar="FILE", type=Path, help="JSON table of styles in place of the model's plan"
    )
    plan.add_argument("--sequence", action="store_true", help="divide activations by the sequence, too")
    plan.add_argument("--loss", action="store_true", help="leave logits divided by the vocabulary")
    plan.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        print(_report(options))
    except ModuleNotFoundError as error:
        return _complain(error, MISSING)
    except (ValueError, OSError) as error:
        return _complain(error, REFUSED)
    return OK


class _Help(RichHelpFormatter):
    text_markup = help_markup = False  # square brackets are text


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Imported here: it takes longer than all the rest of a help text.
        from importlib.metadata import version

        print(f"model-parallel {version('model-parallel')}")
        parser.exit()


def _complain(error: Exception, code: int) -> int:
    for line in str(error).splitlines():
        print(f"model_parallel plan: {line}", file=sys.stderr)
    return code


def _report(options: argparse.Namespace) -> str:
    config = options.config / "config.json" if options.config.is_dir() else options.config
    settings = _read(config)
    plan = None if options.plan is None else _read(options.plan)
    # Imported when there is something to build: help and usage errors do without torch.
    from .check import cautions, examine, shares

    model = _build(settings)
    found = examine(model, plan, tensor=options.tensor, sequence=options.sequence, loss=options.loss)
    table, told = shares(model, found, options.tensor), cautions(model, found, plan, options.tensor)
    total, local = (sum(getattr(each, name) for each in table) for name in ("parameters", "local_parameters"))
    if options.json:
        layers = [vars(each) for each in table]
        return json.dumps(
            {
                "tensor": options.tensor,
                "parameters": total,
                "local_parameters": local,
                "layers": layers,
                "warnings": told,
            },
            indent=2,
        )
    lines = _lines(table)
    ratio = f"{local / total:.1%}" if total else "none"
    lines += [
        "",
        f"tensor={options.tensor}: {local:,} of {total:,} parameters on the rank that holds most ({ratio})",
    ]
    return "\n".join([*lines, *told])


def _lines(table: list[LayerShare]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("module", "style", "layers", "weight", "on a rank", "parameters on a rank")
    ]
    for each in table:
        shapes = [" x ".join(map(str, shape)) for shape in (each.shape, each.local_shape)]
        rows.append(
            (each.name, each.style or "whole", str(each.layers), *shapes, f"{each.local_parameters:,}")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (2, 5)
    return [
        "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file ({error}). Give a config.json of a model.") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} must be a JSON object. Give a config.json of a model, or a table of styles."
        )
    return found


def _build(settings: Mapping[str, Any]) -> nn.Module:
    """The model on the meta device. Code that comes with a model is never run."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"A model is built from its configuration by transformers, which needs {error.name}. Install it "
            "with `pip install 'model-parallel[hf]'`.",
            name=error.name,
        ) from None
    inner = settings.get("text_config")
    values = dict(inner if isinstance(inner, dict) else settings)
    family = values.pop("model_type", None)
    try:
        config = AutoConfig.for_model(str(family), **values)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # each family checks its settings in its own way
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"model_type={family!r} cannot be built by transformers: {reason}") from error
    return model


if __name__ == "__main__":
    sys.exit(main())
