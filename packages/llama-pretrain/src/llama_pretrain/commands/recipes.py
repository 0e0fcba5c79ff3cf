"""The command `recipes`: settings of whole runs as files, which `--config` takes by name."""

from __future__ import annotations

import re
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_core import ConfigurationError, load_config_file, suggest

from ..arguments import PretrainArguments
from ..exit_codes import PROG
from ..mesh import parse_mesh
from ..output import table

if TYPE_CHECKING:
    from .arguments import RecipesArguments

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
    from ..settings import resolve  # which loads recipes

    args = resolve({"config": name})
    processes = parse_mesh(args.mesh).world_size
    return name, args.model, args.mesh, str(processes), f"{tokens_per_step(args):,}", purpose(name)
