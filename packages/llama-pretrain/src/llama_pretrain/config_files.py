"""Files that `--config` takes: the user's by path, and by name the recipes that come with the package."""

from __future__ import annotations

import re
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path

from trainer_core import ConfigurationError, load_config_file, suggest

from .console import PROG

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
        raise ConfigurationError("recipe", name, "is not a recipe", _suggestion(name))
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
    return f"{suggest(name, recipe_names(), otherwise='')} `{PROG} recipes` lists them.".strip()


def _order(name: str) -> tuple[int, int, str]:
    """Those of a model size by size and number of GPUs, behind all others."""
    numbers = re.fullmatch(r"(?:mixtral-)?(\d+)(?:x\d+)?b-(\d+)gpus(?:-[a-z]+)?", name)
    return (int(numbers[1]), int(numbers[2]), name) if numbers else (0, 0, name)
