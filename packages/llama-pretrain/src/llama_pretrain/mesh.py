"""The setting `mesh`: how many processes share the work along which axis, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from trainer_core import ConfigurationError, suggest

_AXES = {
    "dp": "copies that work on different data",
    "shard": "processes that share the weights of a copy",
    "pp": "stages of layers",
}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Processes along each axis; their product is the number of processes.

    Attributes:
        dp: Copies of the model, each of which works on different data.
        shard: Processes that share weights, gradients and optimizer of a copy, and work on different data.
        pp: Stages, each of which has some of the layers.
    """

    dp: int = 1
    shard: int = 1
    pp: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read a text such as "dp=2,shard=4"; an axis that is left out has 1.

        Raises:
            ConfigurationError: If an axis is unknown, given twice or no positive number, or if no trainer has
                all three.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = (word.strip() for word in part.partition("="))
            if axis not in _AXES:
                choices = ", ".join(f"{name} ({what})" for name, what in _AXES.items())
                raise ConfigurationError(
                    "mesh", text, f"{axis!r} is no axis; there are {choices}", suggest(axis, _AXES)
                )
            if axis in sizes:
                raise ConfigurationError("mesh", text, f"gives {axis} twice", "give each axis once")
            if not size.isdecimal() or int(size) < 1:
                raise ConfigurationError(
                    "mesh", text, f"{axis} needs a number of 1 or more", f"write {axis}=2, say"
                )
            sizes[axis] = int(size)
        mesh = cls(**sizes)
        if all(getattr(mesh, axis) > 1 for axis in _AXES):
            raise ConfigurationError(
                "mesh",
                text,
                "has more than 1 along dp, shard and pp: copies of a pipeline are either held or sharded",
                "use dp and pp, or shard and pp",
            )
        return mesh

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.dp * self.shard * self.pp

    @property
    def data_parallel_size(self) -> int:
        """Processes, or pipelines, that work on different data."""
        return self.dp * self.shard

    @property
    def trainer(self) -> str:
        """The trainer that works on such a mesh."""
        if self.pp > 1:
            return "pipeline"
        if self.shard > 1:
            return "fsdp2"
        return "ddp" if self.dp > 1 else "single"

    def settings(self) -> dict[str, object]:
        """Settings that follow from it, by name, with dots for nested ones."""
        found: dict[str, object] = {"trainer": self.trainer}
        if self.trainer == "fsdp2":
            found["fsdp2.replicas"] = self.dp
        if self.trainer == "pipeline":
            found["pipeline.replicas"] = self.dp * self.shard
            found["pipeline.shard_replicas"] = self.shard > 1
        return found

    def __str__(self) -> str:
        sizes = ((axis.name, getattr(self, axis.name)) for axis in fields(self))
        return ",".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp=1"


def follow_mesh(
    options: Mapping[str, object], from_file: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return options and file with what follows from the mesh that one of them has.

    A mesh on the command line replaces that of the file with all that followed from it, so that the settings
    of one run can be taken for another number of processes.

    Args:
        options: Settings of the command line, those of a group in a table.
        from_file: Those of the file, likewise.

    Raises:
        ConfigurationError: If a setting contradicts the mesh.
    """
    options, from_file = dict(options), dict(from_file)
    text = options.get("mesh", from_file.get("mesh"))
    if "mesh" in options:
        from_file = _without(from_file, _FOLLOWING)
    if not isinstance(text, str) or not text:
        return options, from_file
    following = Mesh.parse(text).settings()
    for settings in (options, from_file):
        for name in _FOLLOWING:
            value = _value(settings, name)
            if value is not None and value != following.get(name, value):
                raise ConfigurationError(
                    name,
                    value,
                    f"contradicts mesh={text!r}, which makes it {following[name]!r}",
                    "leave one out",
                )
    return _with(options, following), from_file


def check_mesh(text: str, settings: Mapping[str, object]) -> None:
    """Make sure that settings are those that follow from a mesh.

    Args:
        text: The mesh; empty for none.
        settings: All settings, those of a group in a table.

    Raises:
        ConfigurationError: If they are not.
    """
    for name, value in Mesh.parse(text).settings().items() if text else ():
        if _value(settings, name) != value:
            raise ConfigurationError(
                name,
                _value(settings, name),
                f"contradicts mesh={text!r}",
                f"make it {value!r}, or leave out mesh",
            )


_FOLLOWING = ("trainer", "fsdp2.replicas", "pipeline.replicas", "pipeline.shard_replicas")


def _value(settings: Mapping[str, object], name: str) -> object:
    group, _, inner = name.partition(".")
    value = settings.get(group)
    return (value.get(inner) if isinstance(value, Mapping) else None) if inner else value


def _with(settings: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    found = dict(settings)
    for name, value in more.items():
        group, _, inner = name.partition(".")
        table = found.get(group)
        found[group] = {**(table if isinstance(table, Mapping) else {}), inner: value} if inner else value
    return found


def _without(settings: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in settings.items():
        if key not in names:
            inner = {name.partition(".")[2] for name in names if name.startswith(f"{key}.")}
            table = isinstance(value, Mapping) and {k: v for k, v in value.items() if k not in inner}
            found[key] = value if table is False else table
    return found
