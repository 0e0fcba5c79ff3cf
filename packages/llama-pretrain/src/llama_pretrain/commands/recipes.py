"""The command `recipes`: settings of whole runs, to list, to look at and to change."""

from __future__ import annotations

from ..arguments import PretrainArguments
from ..config_files import purpose, recipe_names, recipe_text
from ..console import PROG, table
from ..mesh import parse_mesh
from ..settings import resolve
from .arguments import RecipesArguments

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
