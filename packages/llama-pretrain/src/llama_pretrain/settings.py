"""How words of the command line, a file or recipe, and defaults become settings.

`Parser` and `add_field_options` make options of the fields of any dataclass. `train_parser` and `resolve` are
those of `train`: an option beats the file, and the file the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, NoReturn, Union, get_args, get_origin, get_type_hints

from trainer_core import ConfigurationError, arguments_from_dict, field_docs, suggest

from .console import PROG
from .mesh import MOVED, parse_mesh, said_before, trainer_for

if TYPE_CHECKING:
    from .arguments import PretrainArguments

PATHS = (
    "config",
    "data",
    "tokenizer",
    "output_dir",
    "logging_dir",
    "checkpoint",
    "directory",
    "source",
    "json",
    "page",
    "runs",
)
"""Settings that are paths."""
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
        "document_attention",
        "rope_scaling",
        "held_out",
        "seed",
    ),
    "where": ("output_dir", "logging_dir", "resume_from_checkpoint", "allow_changes"),
    "how long, how much at once": (
        "max_steps",
        "num_train_epochs",
        "epoch_train_steps",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "per_device_eval_batch_size",
    ),
    "optimizer": (
        "optim",
        "optim_kwargs",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "ema_decay",
    ),
    "when to log, evaluate and save": (
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "report_to",
        "eval_strategy",
        "eval_steps",
        "max_eval_steps",
        "max_eval_samples",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "remote_dir",
        "remote_save_total_limit",
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
    # Here and below: the options of other commands need none of the settings of training.
    from .arguments import WITHOUT_EFFECT, PretrainArguments

    parser = Parser(
        prog=f"{PROG} train",
        usage=f"{PROG} [train] [options]",
        description="Train a Llama, or continue with a run that was stopped: the same command continues it.",
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
    from .arguments import PretrainArguments
    from .config_files import load_config

    options = dict(given)
    path = options.pop("config", None)
    if options.pop("fresh", False):
        if "resume_from_checkpoint" in options:
            raise ConfigurationError(
                "fresh",
                True,
                f"cannot be combined with resume_from_checkpoint={options['resume_from_checkpoint']!r}",
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
        if not isinstance(key, str):
            raise ConfigurationError(
                f"{prefix}{key}", value, "is not the name of a setting", "write a name, such as max_steps"
            )
        name, _, inner = key.replace("-", "_").partition(".")
        group = groups.get(name)
        content = {inner: value} if inner else value
        if isinstance(group, type) and isinstance(content, Mapping):
            table: object = _in_tables(content, group, f"{prefix}{name}.")
        else:
            name, table = key.replace("-", "_"), value
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
    from .arguments import GROUP_NAMES

    both = {**below, **above}
    for name in GROUP_NAMES & below.keys() & above.keys():
        first, second = below[name], above[name]
        # What is not a table in the file is wrong, and must be told.
        both[name] = {**first, **second} if isinstance(first, dict) and isinstance(second, dict) else first
    return both


def follow_mesh(
    options: Mapping[str, object], from_file: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return options and file with the trainer that follows from the mesh that one of them has.

    A mesh on the command line replaces that of the file with all that followed from it, so that the settings
    of one run can be taken for another number of processes. Files of old runs have deprecated settings beside
    their mesh; they are left out where they say the same.

    Args:
        options: Settings of the command line, those of a group in a table.
        from_file: Those of the file, likewise.

    Raises:
        ConfigurationError: If a setting contradicts the mesh.
    """
    options, from_file = dict(options), dict(from_file)
    text = options.get("mesh", from_file.get("mesh"))
    if "mesh" in options:
        from_file = _without(from_file, ("trainer", *MOVED))
    if not isinstance(text, str) or not text:
        return options, from_file
    layout = parse_mesh(text)
    trainer, moved = trainer_for(layout), said_before(layout)
    for settings in (options, from_file):
        for name, follows in {"trainer": trainer, **moved}.items():
            value = _value(settings, name)
            if value not in (None, follows, MOVED.get(name)):
                raise ConfigurationError(
                    name,
                    value,
                    f"contradicts mesh={text!r}, which makes it {follows!r}",
                    "leave one of them out",
                )
    return {**_without(options, moved), "trainer": trainer}, _without(from_file, moved)


def _value(settings: Mapping[str, object], name: str) -> object:
    group, _, inner = name.partition(".")
    value = settings.get(group)
    return (value.get(inner) if isinstance(value, Mapping) else None) if inner else value


def _without(settings: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in settings.items():
        if key not in names:
            inner = {name.partition(".")[2] for name in names if name.startswith(f"{key}.")}
            table = isinstance(value, Mapping) and {k: v for k, v in value.items() if k not in inner}
            found[key] = value if table is False else table
    return found


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest option for a mistyped one."""

    def __init__(
        self, *, prog: str, description: str, usage: str | None = None, epilog: str | None = None
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            usage=usage,
            epilog=epilog,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Formatter,
        )

    def parse_args_strictly(self, argv: Sequence[str]) -> dict[str, object]:
        """Return the options that were given, by field name; a mistake exits with code 2 and one line."""
        given, unknown = self.parse_known_args(argv)
        if unknown:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            # The others are the values of unknown options, or belong to none.
            named = [word for word in unknown if re.match("-+[A-Za-z]", word)] or unknown[:1]
            hints = [
                suggest(word.split("=")[0], options, otherwise=f"`{self.prog} --help` lists the options.")
                for word in named
            ]
            told = (f"nknown argument {word!r}. {hint}" for word, hint in zip(named, hints, strict=True))
            self.error("u" + " U".join(told))
        return vars(given)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        stop = "" if message.endswith((".", "?")) else "."
        print(f"{self.prog}: error: {message}{stop}", file=sys.stderr)
        raise SystemExit(2)


def add_field_options(
    parser: Parser,
    cls: type,
    groups: Mapping[str, Sequence[str]],
    *,
    positional: Sequence[str] = (),
    leave_out: Collection[str] = (),
    short: Mapping[str, str] | None = None,
) -> None:
    """Add one option per field of a dataclass; none has a default, so that only given values are returned.

    A field that is a dataclass itself gives an option `--field.name` for each of its own fields, under a
    heading of its own; what is returned for them is called `field.name`.

    Args:
        parser: Where to add them.
        cls: A dataclass. The string below each field is its help.
        groups: Heading and the names below it, in the order to show. Other fields come under a last heading.
        positional: Fields that are given without a name, in this order.
        leave_out: Fields that get no option.
        short: Second options, by what the first one is called: `field` or `field.name`. What is returned has
            the name of the first one; both at once are an error that names them.
    """
    second = short or {}
    hints, docs = get_type_hints(cls), field_docs(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in positional:
        _add_positional(parser, fields[name], hints[name], docs[name])
    named = {*positional, *leave_out, *(name for names in groups.values() for name in names)}
    rest = [name for name in fields if name not in named]
    for title, names in {**groups, "other settings" if groups else "settings": rest}.items():
        group = parser.add_argument_group(title)
        nested = [name for name in names if dataclasses.is_dataclass(hints[name])]
        for name in names:
            if name not in nested:
                _add_option(group, name, hints[name], docs.get(name, ""), _default(fields[name]), second)
        for name in nested:
            _add_nested_options(parser, name, hints[name], docs.get(name, ""), _default(fields[name]), second)


def _add_positional(parser: Parser, field: dataclasses.Field[object], hint: object, doc: str) -> None:
    default = _default(field)
    optional = default is not dataclasses.MISSING
    text = f"{doc} [{_shown(default)}]" if optional else doc
    count = "*" if get_origin(hint) is tuple else "?" if optional else None
    parser.add_argument(field.name, nargs=count, help=text.replace("%", "%%"))


def _add_nested_options(
    parser: Parser, name: str, cls: type, doc: str, defaults: object, short: Mapping[str, str]
) -> None:
    group = parser.add_argument_group(f"{name}: {doc.rstrip('.')}")
    hints, docs = get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        default = getattr(defaults, field.name)
        _add_option(
            group, f"{name}.{field.name}", hints[field.name], docs.get(field.name, ""), default, short
        )


def _default(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _add_option(
    group: argparse._ArgumentGroup,
    name: str,
    hint: object,
    doc: str,
    default: object,
    short: Mapping[str, str],
) -> None:
    text = f"{doc} [{_shown(default)}]".replace("%", "%%").strip()
    if name not in short:
        _add_flag(group, _flag(name), name, hint, text)
        return
    either = group.add_mutually_exclusive_group()
    _add_flag(either, _flag(name), name, hint, text)
    _add_flag(either, _flag(short[name]), name, hint, f"short for {_flag(name)}")


def _add_flag(group: argparse._ActionsContainer, flag: str, name: str, hint: object, text: str) -> None:
    if hint is bool:
        group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
        return
    kinds = _members(hint)
    read = _reader(kinds)

    def read_path(value: str) -> object:
        return read(os.path.expanduser(value))  # noqa: PTH111  (may be an address)

    kind = read_path if name in PATHS else read
    group.add_argument(flag, dest=name, type=kind, metavar=_metavar(kinds), help=text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _members(hint: object) -> tuple[object, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _reader(kinds: tuple[object, ...]) -> Callable[[str], object]:
    """Make the function that turns a word of the command line into a value of one of these types."""

    def read(text: str) -> object:
        for kind in sorted(kinds, key=_strictness):
            value = _read_as(kind, text)
            if value is not _NO_VALUE:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {_expected(kinds)}")

    return read


_NO_VALUE = object()
_ORDER = (type(None), bool, int, float)


def _strictness(kind: object) -> int:
    """Types that few words fit come first; `str` fits every word."""
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER) + (kind is str)


def _read_as(kind: object, text: str) -> object:
    if kind is type(None):
        return None if text.lower() in ("none", "null") else _NO_VALUE
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), _NO_VALUE)
    if kind is str:
        return text
    if get_origin(kind) is dict:
        return _read_table(text)
    if get_origin(kind) is tuple:
        return _read_list(get_args(kind)[0], text)
    if kind not in (int, float):
        raise TypeError(f"no option can be made for the type {kind!r}.")
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        return _NO_VALUE


def _read_list(kind: object, text: str) -> object:
    """Read `item,item`, each as a value of one type."""
    items = tuple(_read_as(kind, part.strip()) for part in text.split(",") if part.strip())
    return _NO_VALUE if _NO_VALUE in items else items


def _read_table(text: str) -> object:
    """Read `name=value,name=value`, with a whole number, number, truth value or text as value.

    `none` is the empty table: it leaves out what a recipe or file sets.
    """
    table: dict[str, object] = {}
    if text.strip().lower() == "none":
        return table
    read = _reader((bool, int, float, str))
    for part in filter(None, text.split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not name or not value:
            return _NO_VALUE
        if name in table:
            raise argparse.ArgumentTypeError(f"{text!r} gives {name} twice")
        table[name] = read(value)
    return table


def _expected(kinds: tuple[object, ...]) -> str:
    words: Mapping[object, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        type(None): "none",
        str: "a text",
        tuple[str, ...]: "name,...",
        tuple[int, ...]: "number,...",
    }
    told = [_word(kind, words, "name=value,...") for kind in kinds]
    # The empty table is written as none, too, whether or not the setting may be None.
    empty = ["none"] if any(get_origin(kind) is dict for kind in kinds) else []
    return " or ".join(dict.fromkeys([*told, *empty]))


def _metavar(kinds: tuple[object, ...]) -> str:
    words: Mapping[object, str] = {
        int: "N",
        float: "X",
        bool: "true|false",
        type(None): "",
        str: "TEXT",
        tuple[str, ...]: "NAME,...",
        tuple[int, ...]: "N,...",
    }
    return "|".join(filter(None, (_word(kind, words, "NAME=X,...") for kind in kinds)))


def _word(kind: object, words: Mapping[object, str], table: str) -> str:
    return table if get_origin(kind) is dict else words[kind]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "none"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value)


class _Formatter(argparse.HelpFormatter):
    """Wide enough to read, with the help beside the option."""

    def __init__(self, prog: str) -> None:
        width = min(110, shutil.get_terminal_size((100, 24)).columns)
        super().__init__(prog, max_help_position=38, width=width)
