"""What the applications report of themselves: MFU of each job, and what is known of it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path

from ..ofu.job_facts import RATES, JobFacts

_MOST_MFU = 3.0
"""A wrong count gives two or three times too much; more than that is taken for percent."""
_FACTS = {one.name: str(one.type) for one in fields(JobFacts) if one.name not in ("findings", "usual_ofu")}
_COLUMNS = ("job", "mfu", "mfu_percent", "run", "gpus", *_FACTS)
_DTYPES = ("compute_dtype", "peak_dtype")
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True)
class Application:
    """What one job says of itself; None is unknown.

    Attributes:
        mfu: As a share.
        run: Name of the workload, the same over restarts.
        gpus: Number of GPUs of the job.
        facts: What sharpens a diagnosis.
        times: Unix times at which it told MFU, in seconds, to the millisecond; None: it holds for all of it.
        notes: What it says that is not used, in sentences.

    Raises:
        ValueError: `mfu` is no share.
    """

    mfu: float | None
    run: str | None = None
    gpus: int | None = None
    facts: JobFacts = field(default_factory=JobFacts)
    times: frozenset[float] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_mfu(self.mfu)


def read_applications(path: Path) -> dict[str, Application]:
    """Read what jobs report from a .csv file with a header, or a .json file with a list of objects.

    Columns: `job`; `mfu` as a share or `mfu_percent`; and, where known, `run`, `gpus` and the fields of
    `JobFacts`. An empty field or null is unknown.

    Raises:
        OSError: The file cannot be read.
        ValueError: A column is unknown, a job is there twice, or a value is not of its kind; names the row.
    """
    applications: dict[str, Application] = {}
    try:
        rows = list(_rows(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    except csv.Error as error:
        raise ValueError(f"{path} is not a table: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no job; give one row a job below the header")
    for where, row in rows:
        _check_columns(row, where)
        job = _text(row.get("job"))
        if isinstance(row.get("job"), list | dict):
            raise ValueError(f"{where}: job={row['job']!r}: must be text")
        if job is None:
            raise ValueError(f"{where}: has no job")
        if job in applications:
            raise ValueError(f"{where}: job={job!r} is there twice; give one row a job")
        try:
            applications[job] = _application(row)
        except ValueError as error:
            raise ValueError(f"{where}, job {job}: {error}") from None
    return applications


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as lines:
            for row in (reader := csv.DictReader(lines)):
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{where}: has not as many fields as the header")
                yield where, row
        return
    if path.suffix.lower() != ".json":
        raise ValueError(f"mfu={str(path)!r}: must be a .csv or a .json file")
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets within brackets, by thousands
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: must be a list of objects, one for each job")
    for number, entry in enumerate(entries, start=1):
        yield f"{path}, entry {number}", entry


def _check_columns(row: Mapping[str, object], where: str) -> None:
    for column in row:
        if column not in _COLUMNS:
            near = get_close_matches(str(column), _COLUMNS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_COLUMNS)}"
            raise ValueError(f"{where}: unknown column {column!r}{hint}")


def _application(row: Mapping[str, object]) -> Application:
    facts = {name: value for name in _FACTS if (value := _fact(name, row.get(name))) is not None}
    # A type without a rate takes nothing from the report but a sharper diagnosis of this one job.
    strange = [name for name in _DTYPES if name in facts and facts[name] not in RATES]
    notes = tuple(
        f"{name}={facts.pop(name)!r} is none of {', '.join(RATES)} and is taken as unknown"
        for name in strange
    )
    gpus = _number("gpus", row.get("gpus"))
    if gpus is not None and (gpus < 1 or gpus != int(gpus)):
        raise ValueError(f"gpus={gpus:g}: must be a whole number of 1 or more")
    return Application(
        _mfu(row),
        _text(row.get("run")),
        None if gpus is None else int(gpus),
        JobFacts(**facts),  # type: ignore[arg-type]  # each of its field's kind
        notes=notes,
    )


def _mfu(row: Mapping[str, object]) -> float | None:
    share, percent = _number("mfu", row.get("mfu")), _number("mfu_percent", row.get("mfu_percent"))
    if share is not None and percent is not None:
        raise ValueError("give mfu or mfu_percent, not both")
    return check_mfu(percent / 100 if percent is not None else share)


def check_mfu(value: float | None) -> float | None:
    """Return an application's MFU, or None.

    Raises:
        ValueError: It is not a share.
    """
    if value is not None and not 0 <= value < _MOST_MFU:
        raise ValueError(f"mfu={value:g}: must be a share, such as 0.42 for 42 %")
    return value


def _fact(name: str, value: object) -> object:
    kind = _FACTS[name]
    if "bool" in kind:
        return _truth(name, value)
    if "str" in kind:
        return _text(value)
    number = _number(name, value)
    return int(number) if number is not None and "int" in kind else number


def _text(value: object) -> str | None:
    return None if value is None or not str(value).strip() else str(value).strip()


def _number(name: str, value: object) -> float | None:
    text = _text(value)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={text!r}: must be a finite number, or empty where it is not known")
    return number


def _truth(name: str, value: object) -> bool | None:
    text = _text(value)
    if text is None:
        return None
    for words, truth in ((_TRUE, True), (_FALSE, False)):
        if text.lower() in words:
            return truth
    raise ValueError(f"{name}={text!r}: must be true or false, or empty where it is not known")
