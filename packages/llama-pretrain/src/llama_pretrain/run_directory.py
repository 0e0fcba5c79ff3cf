"""The directory of one run: what belongs to it, its history, and whether a command may continue in it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

from checkpoint_core import DirectoryLease, find_latest_checkpoint
from dist_env import (
    DistributedEnvInterface,
    ObjectStore,
    StoreSettingsError,
    open_object_store,
    split_address,
)
from perf_metrics import GOODPUT_FOLDER, load_logs, plot_logs
from trainer_core import (
    MARK_NAME,
    PREVIOUS,
    ConfigurationError,
    arguments_from_dict,
    checkpoints_in,
    load_config_file,
    move_aside,
)

from .arguments import GROUP_NAMES, PretrainArguments
from .console import CONFIG_NAME, LOGS_NAME, PROG, SESSIONS_NAME
from .mesh import names_said_by_mesh
from .settings import follow_mesh


def describe_session(args: PretrainArguments, env: DistributedEnvInterface) -> dict[str, object]:
    """Return what this start of a run is made with, as plain JSON values."""
    return {
        "started": now_text(),
        "trainer": args.trainer,
        "mesh": args.mesh,
        "processes": env.world_size,
        "device": _device_name(env.device),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        PROG: version(PROG),
    }


def now_text() -> str:
    """The time, as `sessions.json` has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_sessions(directory: Path) -> list[Mapping[str, object]]:
    """Return the starts of the run in a directory, in their order; none if it does not tell.

    Raises:
        ConfigurationError: If the file was damaged.
    """
    path = directory / SESSIONS_NAME
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(
            "output_dir", str(directory), f"has a damaged {SESSIONS_NAME} ({error})", "remove that file"
        ) from error
    return [session for session in found if isinstance(session, dict)] if isinstance(found, list) else []


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.processor() or platform.machine()})"


IDENTITY_NAME = "run.json"
CURVE_NAME = "loss_curve.png"

_OF_THE_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Settings that a run keeps, unless `allow_changes` names them."""
_SETTINGS_OF_A_RUN = (
    "seed",
    "sequence_length",
    "document_attention",
    "held_out",
    "shards",
    *_OF_THE_OPTIMIZER,
)
_AS_BEFORE: Mapping[str, object] = {"document_attention": False}
"""What a run has done whose version did not know the setting."""
_UNKNOWN_BEFORE: Mapping[str, object] = {"max_eval_samples": None}
"""The same of settings that may change."""
_MODEL_AS_BEFORE: Mapping[str, object] = {"rope_scaling": None}
"""The same of its model."""
_STORE_TIMEOUT_SECONDS = 600.0
_NOT_WORTH_SAYING = ("output_dir", "logging_dir", "resume_from_checkpoint", "allow_changes")


class RunDirectory:
    """The output directory of `train`, or where its checkpoints go to a store, what is beside them.

    Two files tell which run it is: `config.yaml`, all settings as resolved, which `--config` reads again; and
    `run.json`, the identity: what must not change while the run continues.

    Args:
        path: The directory, which need not exist.
        is_restart: Whether an earlier start of this job has begun the run that is there.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_restart: bool = False) -> None:
        self.path = Path(path)
        self._is_restart = is_restart

    def check(
        self, args: PretrainArguments, subject: Mapping[str, object]
    ) -> dict[str, tuple[object, object]]:
        """Make sure that a run may begin here or continue here; write nothing.

        A run that has no checkpoint yet may become another one: there is nothing to lose but its log.

        Args:
            args: The settings as resolved.
            subject: What is trained, on what: plain JSON values that tell model, tokenizer and data.

        Returns:
            Settings of the run that continues which differ from those of its last start: name to (old, new).

        Raises:
            ConfigurationError: If the directory holds something else, or a run of another identity.
        """
        address = args.store_address
        if args.starts_fresh and address is not None and find_latest_checkpoint(address) is not None:
            raise ConfigurationError(
                "output_dir" if args.saves_to_store else "remote_dir",
                address,
                "has checkpoints, and --fresh moves them aside, which stores cannot do",
                "choose another address, or remove them with `checkpoint-core prune`",
            )
        stored = _stored_identity(args)
        if not self._is_run():
            self._refuse_foreign_files()
        # After the loss of a rank the only checkpoint may be in memory, of some node.
        if args.starts_fresh or not (self._is_restart or self._has_checkpoint(args)):
            return {}
        if stored is not None:
            # A machine that has lost this directory continues the same run, or none.
            self._refuse_other_identity(stored, _identity(args, subject), args.allow_changes, str(address))
        if not self._is_run():
            return {}
        self.check_identity(args, subject)
        self._refuse_fresh_start(args)
        return self._changes(args)

    def begin(
        self,
        args: PretrainArguments,
        subject: Mapping[str, object],
        session: Mapping[str, object] | None = None,
    ) -> dict[str, tuple[object, object]]:
        """Check as `check` does, then claim the directory: write `run.json` and `config.yaml`.

        Args:
            args: As in `check`.
            subject: As in `check`.
            session: On what and with what this start is made, to be added to `sessions.json`.

        Returns:
            As `check`.

        Raises:
            ConfigurationError: As in `check`; nothing is written then.
            OSError: If the directory cannot be made or written.
        """
        changes = self.check(args, subject)
        self.path.mkdir(parents=True, exist_ok=True)
        if args.starts_fresh:
            names = (IDENTITY_NAME, CONFIG_NAME, SESSIONS_NAME, CURVE_NAME, GOODPUT_FOLDER)
            own = [self.path / name for name in names]
            move_aside(self.path, [*checkpoints_in(self.path), *own, self.log_file(args)])
            # A later start with these settings continues with this run.
            args = replace(args, resume_from_checkpoint=True, overwrite_output_dir=False)
        # What was allowed has happened: a later start that says nothing keeps the new values.
        args = replace(args, allow_changes=())
        if session is not None:
            is_same = self._is_restart or self._has_checkpoint(args)
            sessions = [*read_sessions(self.path), session] if is_same else [session]
            _write(self.path / SESSIONS_NAME, json.dumps(sessions, indent=2) + "\n")
        identity = json.dumps(_identity(args, subject), indent=2) + "\n"
        _write(self.path / IDENTITY_NAME, identity)
        if (place := _identity_place(args)) is not None:
            place[0].put(place[1], identity.encode())
        _write(self.path / CONFIG_NAME, yaml.safe_dump(asdict(args), sort_keys=False))
        return changes

    def note_session(self, **facts: object) -> None:
        """Add facts to the last start in `sessions.json`: where training began, and how it ended.

        Args:
            **facts: `first_step` once training begins; `ended`, `last_step` and `outcome` at the end. The
                outcome is "done", "error: ..." or what stopped it.
        """
        sessions = read_sessions(self.path)
        if sessions:
            sessions[-1] = {**sessions[-1], **facts}
            _write(self.path / SESSIONS_NAME, json.dumps(sessions, indent=2) + "\n")

    def holds_run(self) -> bool:
        """Whether a run was begun here, so that `arguments` can read its settings."""
        return self._is_run() and (self.path / CONFIG_NAME).is_file()

    def arguments(self) -> PretrainArguments:
        """Read the settings of the run that is here.

        Raises:
            ConfigurationError: If there is none, or `config.yaml` was damaged.
        """
        if not self.holds_run():
            raise ConfigurationError(
                "output_dir",
                str(self.path),
                "contains no run",
                "name the output directory of a run",
            )
        _, settings = follow_mesh({}, load_config_file(self.path / CONFIG_NAME))
        return arguments_from_dict(PretrainArguments, settings)

    def check_identity(self, args: PretrainArguments, subject: Mapping[str, object]) -> None:
        """Make sure that settings and data are still those with which the run was begun.

        Raises:
            ConfigurationError: If they are not.
        """
        path = self.path / IDENTITY_NAME
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(
                "output_dir",
                str(self.path),
                f"has a damaged {IDENTITY_NAME} ({error})",
                "choose another --output-dir",
            ) from error
        self._refuse_other_identity(before, _identity(args, subject), args.allow_changes, str(self.path))

    def log_file(self, args: PretrainArguments) -> Path:
        """Where the log entries of the run are, also if its directory was moved."""
        own = args.logging_dir is None or args.saves_to_store
        return (self.path if own else Path(str(args.logging_dir))) / LOGS_NAME

    def held_out_losses(self, args: PretrainArguments) -> dict[int, float]:
        """Return the losses of all evaluations in the log, by step."""
        return self.logged(args, "eval_loss")

    def logged(self, args: PretrainArguments, key: str) -> dict[int, float]:
        """Return the values of a key in the log, by step."""
        path = self.log_file(args)
        entries = load_logs(path) if path.is_file() else []
        found = ((entry.get("global_step"), entry.get(key)) for entry in entries)
        return {step: value for step, value in found if isinstance(step, int) and isinstance(value, float)}

    def draw_curve(self, args: PretrainArguments) -> Path | None:
        """Draw the loss curve; None when the log holds no loss yet."""
        path = self.log_file(args)
        entries = load_logs(path) if path.is_file() else []
        if not any(isinstance(entry.get("loss"), float) for entry in entries):
            return None
        return plot_logs(path, self.path / CURVE_NAME)

    def _is_run(self) -> bool:
        return (self.path / IDENTITY_NAME).is_file()

    def _has_checkpoint(self, args: PretrainArguments) -> bool:
        address = args.store_address
        if address is not None and find_latest_checkpoint(address) is not None:
            return True
        return any(self.path.glob("checkpoint-*"))

    def _refuse_foreign_files(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(
                "output_dir", str(self.path), "is not a directory", "choose another output_dir"
            )
        found = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        foreign = [
            name
            for name in found
            if not (
                name in _PARTIAL_NAMES
                or name.startswith((PREVIOUS, MARK_NAME))
                or DirectoryLease.is_lease(name)
            )
        ]
        if foreign:
            raise ConfigurationError(
                "output_dir",
                str(self.path),
                f"contains files that are not a run of llama-pretrain (such as {foreign[0]!r})",
                "choose another --output-dir, or move them away",
            )

    def _refuse_other_identity(
        self, before: object, identity: Mapping[str, object], allowed: Sequence[str], where: str
    ) -> None:
        before = _filled(before) if isinstance(before, dict) else {}
        identity = _filled(identity)
        names = sorted({*before, *identity} - {*allowed})
        changed = [name for name in names if before.get(name) != identity.get(name)]
        changed.sort(key=lambda name: name in _OF_THE_OPTIMIZER)
        for name in changed:
            old, new = before.get(name), identity.get(name)
            may = f", or allow it with --allow-changes {','.join([*allowed, *changed])}"
            raise ConfigurationError(
                name,
                _shorter(new, old),
                f"differs from the run in {where}, which was begun with {_shorter(old, new)!r}",
                f"choose another --output-dir, or go back to that value{may * (name in _OF_THE_OPTIMIZER)}",
            )

    def _refuse_fresh_start(self, args: PretrainArguments) -> None:
        """A run that starts anew beside old checkpoints would later continue from the wrong ones."""
        if args.resume_from_checkpoint is False and self._has_checkpoint(args):
            raise ConfigurationError(
                "resume_from_checkpoint",
                False,
                f"asks for a fresh start, but {self.path} contains checkpoints",
                f"choose another --output-dir, or add --fresh, which moves that run to {PREVIOUS}<time>/",
            )

    def _changes(self, args: PretrainArguments) -> dict[str, tuple[object, object]]:
        if not (self.path / CONFIG_NAME).is_file():
            return {}
        now = _with_epochs(settings_by_name(asdict(args)))
        # Settings that did not exist at the last start were at their defaults, or at what was done then.
        usual = {**settings_by_name(asdict(PretrainArguments())), **_UNKNOWN_BEFORE}
        before = _with_epochs(usual | settings_by_name(load_config_file(self.path / CONFIG_NAME)))
        unsaid = {*_NOT_WORTH_SAYING, *names_said_by_mesh(before, now)}
        return {
            name: (before.get(name), value)
            for name, value in now.items()
            if name not in unsaid and before.get(name) != value
        }


def _identity_place(args: PretrainArguments) -> tuple[ObjectStore, str] | None:
    """Where the identity of a run lies beside its checkpoints in a store; None without a store."""
    address = None if args.store_address is None else split_address(args.store_address)
    if address is None:
        return None
    try:
        return open_object_store(address[0], _STORE_TIMEOUT_SECONDS), f"{address[1]}/{IDENTITY_NAME}"
    except StoreSettingsError as error:
        rule, _, fix = f"cannot be used: {str(error).removesuffix('.')}".partition(". ")
        name = "output_dir" if args.saves_to_store else "remote_dir"
        raise ConfigurationError(name, args.store_address, rule, fix) from None


def _stored_identity(args: PretrainArguments) -> object:
    """The identity of the run in a store; None if there is not any."""
    place = _identity_place(args)
    if place is None:
        return None
    try:
        return json.loads(place[0].get(place[1]))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigurationError(
            "output_dir" if args.saves_to_store else "remote_dir",
            args.store_address,
            f"has a damaged {IDENTITY_NAME} ({error})",
            "choose another address",
        ) from error


def _identity(args: PretrainArguments, subject: Mapping[str, object]) -> dict[str, object]:
    """What must not change, as JSON reads it back."""
    settings = {name: getattr(args, name) for name in _SETTINGS_OF_A_RUN}
    identity: dict[str, object] = json.loads(json.dumps({**subject, **settings}))
    return identity


def _filled(identity: Mapping[str, object]) -> dict[str, object]:
    """An identity as this version writes it, also if an earlier one wrote it."""
    model = identity.get("model")
    shape = {"model": {**_MODEL_AS_BEFORE, **model}} if isinstance(model, Mapping) else {}
    return {**_AS_BEFORE, **identity, **shape}


def settings_by_name(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings as a file has them, with `group.name` for those in a group; a tuple is a list there."""
    plain = yaml.safe_load(yaml.safe_dump(settings))
    groups = {name: value for name, value in plain.items() if name in GROUP_NAMES and isinstance(value, dict)}
    inner = {f"{name}.{key}": item for name, group in groups.items() for key, item in group.items()}
    return {name: value for name, value in plain.items() if name not in groups} | inner


def _with_epochs(settings: Mapping[str, object]) -> dict[str, object]:
    """The same with none for epochs without limit, which were -1 in files of an earlier version."""
    epochs = settings.get("num_train_epochs")
    return {**settings, "num_train_epochs": None if epochs == -1 else epochs}


def _write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


_PARTIAL_NAMES = {
    SESSIONS_NAME,
    *(f".{name}.partial" for name in (SESSIONS_NAME, IDENTITY_NAME, CONFIG_NAME)),
}


def _shorter(value: object, other: object) -> object:
    """Of two tables, the part in which the first differs; any other value as it is."""
    if isinstance(value, dict) and isinstance(other, dict):
        return {key: item for key, item in value.items() if other.get(key) != item}
    return value
