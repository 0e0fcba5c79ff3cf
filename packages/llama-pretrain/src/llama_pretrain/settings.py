"""How defaults, a file or recipe and the command line become the settings of `train`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import cast, get_type_hints

from trainer_core import ConfigurationError, arguments_from_dict, load_config_file, suggest

from .arguments import GROUP_NAMES, WITHOUT_EFFECT, PretrainArguments
from .command_line import Parser, add_field_options
from .commands.arguments import RecipesArguments
from .exit_codes import PROG
from .mesh import follow_mesh, parse_mesh
from .output import table

_RECIPES, _SUFFIX = files("llama_pretrain") / "recipes", ".yaml"


def recipe_names() -> tuple[str, ...]:
    """The names of all recipes: small ones that run anywhere first, then by size of the model and GPUs."""
    entries = (entry.name for entry in _RECIPES.iterdir())
    names = [name.removesuffix(_SUFFIX) for name in entries if name.endswith(_SUFFIX)]
    return tuple(sorted(names, key=_order))


def recipe_text(name: str) -> str:
    """The file of a recipe.

    Raises:
        ConfigurationError: If there is no such recipe.
    """
    if name not in recipe_names():
        raise ConfigurationError("recipe", name, "is no recipe", _suggestion(name))
    return _file(name).read_text(encoding="utf-8")


def purpose(name: str) -> str:
    """What a recipe is for: its first line."""
    return recipe_text(name).partition("\n")[0].removeprefix("#").strip()


def load_config(given: str) -> dict[str, object]:
    """Read the settings of a file, or of a recipe; of two with the same name the file.

    Args:
        given: Path of a TOML or YAML file, or name of a recipe.

    Raises:
        ConfigurationError: If there is neither, or the file cannot be read.
    """
    path = Path(given)
    is_name = not path.suffix and path.name == given
    if path.is_file() or not is_name:
        return load_config_file(path)
    if given not in recipe_names():
        raise ConfigurationError("config", given, "is neither a file nor a recipe", _suggestion(given))
    with as_file(_file(given)) as recipe:
        return load_config_file(recipe)


def _file(name: str) -> Traversable:
    return _RECIPES / f"{name}{_SUFFIX}"


def _suggestion(name: str) -> str:
    return f"{suggest(name, recipe_names(), otherwise='')} `{PROG} recipes` lists them".strip()


def _order(name: str) -> tuple[int, int, str]:
    """Those of a model size by size and number of GPUs, behind all others."""
    numbers = re.fullmatch(r"(\d+)b-(\d+)gpus", name)
    return (int(numbers[1]), int(numbers[2]), name) if numbers else (0, 0, name)


GROUPS: Mapping[str, Sequence[str]] = {
    "what to train, on what": (
        "model",
        "data",
        "text_column",
        "undecodable",
        "shards",
        "tokenizer",
        "vocab_size",
        "sequence_length",
        "held_out",
        "seed",
    ),
    "where": ("output_dir", "logging_dir", "resume_from_checkpoint"),
    "how long, how much at once": (
        "max_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "per_device_eval_batch_size",
    ),
    "optimizer": (
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
    ),
    "when to log, evaluate and save": (
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "eval_strategy",
        "eval_steps",
        "max_eval_steps",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "prompt",
        "sample_tokens",
    ),
    "precision and compilation": (
        "mixed_precision",
        "float32_matmul_precision",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_compile_dynamic",
        "torch_compile_full_graph",
    ),
    "several processes": (
        "trainer",
        "mesh",
        "dispatch_batches",
        "dispatch_eval_batches",
        "uneven_batches",
        "ddp",
        "compression",
        "post_local_sgd",
        "diloco",
        "fsdp2",
        "pipeline",
    ),
}
SHORT: Mapping[str, str] = {"pipeline.schedule": "schedule", "pipeline.n_microbatches": "microbatches"}
"""Settings that have a short name on the command line, and that name."""


def train_parser() -> Parser:
    """Return the parser of the options of `train`."""
    parser = Parser(
        prog=f"{PROG} train",
        usage=f"{PROG} [train] [options]",
        description="Train a Llama, or go on with a run that was stopped: the same command continues it.",
        epilog="Values in [brackets] are defaults. A --config file beats them, an option beats the file. "
        "An option with a dot is a key in a table of the file: --ddp.static-graph is static_graph in ddp.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML or YAML file with the names below, written with underscores; or the name of a recipe",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="begin anew in a directory that holds a run: its files move to previous-<time>/ there",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build what one process of the job would build and make a step, without memory, time or other "
        "processes; write nothing",
    )
    add_field_options(parser, PretrainArguments, GROUPS, leave_out=WITHOUT_EFFECT, short=SHORT)
    return parser


def resolve(given: Mapping[str, object]) -> PretrainArguments:
    """Combine defaults, the file or recipe named by `config`, and given options, in rising order of weight.

    The default of `warmup_steps` is left out where it could have no effect: with the schedule `constant`.

    Args:
        given: Values by name; those of a group of settings as `group.name`, or in a table. `fresh` stands for
            `resume_from_checkpoint=False` with `overwrite_output_dir=True`.

    Raises:
        ConfigurationError: For an unknown name, a wrong type or a broken rule.
    """
    options = dict(given)
    path = options.pop("config", None)
    if options.pop("fresh", False):
        if "resume_from_checkpoint" in options:
            raise ConfigurationError(
                "fresh",
                True,
                f"excludes resume_from_checkpoint={options['resume_from_checkpoint']!r}",
                "leave one of them out",
            )
        options |= {"resume_from_checkpoint": False, "overwrite_output_dir": True}
    from_file = {} if path is None else load_config(str(path))
    above, below = follow_mesh(
        _in_tables(options, PretrainArguments), _in_tables(from_file, PretrainArguments)
    )
    settings = _laid_over(below, above)
    if settings.get("lr_scheduler_type") == "constant":
        settings.setdefault("warmup_steps", 0)
    return arguments_from_dict(PretrainArguments, settings)


def _in_tables(settings: Mapping[str, object], cls: type, prefix: str = "") -> dict[str, object]:
    """Names with underscores, and a table for each group, whether it was written as one or with dots."""
    groups = {name: hint for name, hint in get_type_hints(cls).items() if is_dataclass(hint)}
    tables: dict[str, object] = {}
    for key, value in settings.items():
        name, _, inner = key.replace("-", "_").partition(".")
        group = groups.get(name)
        if not isinstance(group, type) or not (inner or isinstance(value, Mapping)):
            name, table = key.replace("-", "_"), value
        else:
            content = {inner: value} if inner else cast(Mapping[str, object], value)
            table = _in_tables(content, group, f"{prefix}{name}.")
        before = tables.get(name)
        if isinstance(before, dict) and isinstance(table, dict) and not before.keys() & table.keys():
            table = before | table
        elif name in tables:
            raise ConfigurationError(
                f"{prefix}{name}", value, "is given twice", "leave one of them out of the file"
            )
        tables[name] = table
    return tables


def _laid_over(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Both together; of two groups each name by itself, and otherwise `above` wins."""
    both = {**below, **above}
    for name in GROUP_NAMES & below.keys() & above.keys():
        first, second = below[name], above[name]
        # What is no table in the file is wrong, and must be told.
        both[name] = {**first, **second} if isinstance(first, dict) and isinstance(second, dict) else first
    return both


_HEAD = ("recipe", "model", "mesh", "processes", "tokens a step", "what it is for")
_RIGHT = (3, 4)


def show_recipes(args: RecipesArguments) -> None:
    """Print the file of a recipe, or a table of all.

    Raises:
        ConfigurationError: If there is no such recipe.
    """
    if args.name is not None:
        print(recipe_text(args.name), end="")
        return
    rows = [_row(each) for each in recipe_names()]
    print("\n".join(table([_HEAD, *rows], right=_RIGHT)))
    print(f"\n{PROG} train --config RECIPE        train with it; options beat what it says")
    print(f"{PROG} train --config RECIPE --dry-run, {PROG} plan --config RECIPE   what it needs")
    print(f"{PROG} recipes RECIPE > my.yaml      a copy to change, for --config my.yaml")


def tokens_per_step(args: PretrainArguments) -> int:
    """Tokens of one optimizer step, over all processes of the mesh."""
    copies = parse_mesh(args.mesh).data_count
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * copies
    return rows * args.sequence_length


def _row(name: str) -> tuple[str, ...]:
    args = resolve({"config": name})
    processes = parse_mesh(args.mesh).world_size
    return name, args.model, args.mesh, str(processes), f"{tokens_per_step(args):,}", purpose(name)
