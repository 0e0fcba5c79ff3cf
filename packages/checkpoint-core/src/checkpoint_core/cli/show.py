"""``show``: what one checkpoint holds."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from checkpoint_core.cli.console import print_table, printable, size_text
from checkpoint_core.cli.contents import Section, other_files, sections
from checkpoint_core.cli.stored import StoredTensor
from checkpoint_core.cli.survey import Survey, metrics_text, open_checkpoint, survey
from checkpoint_core.directory.manifest import Manifest, metrics_document
from checkpoint_core.errors import CheckpointError

_Tensors = Mapping[str, Mapping[str, StoredTensor]]


def show_checkpoint(path: Path, *, as_json: bool) -> int:
    """Print the manifest and every tensor of a checkpoint, from the headers alone.

    Args:
        path: The checkpoint.
        as_json: Print one JSON document instead of tables.

    Returns:
        0, or 1 when a file is damaged as far as its size and header tell.

    Raises:
        CheckpointError: It is no checkpoint, or its manifest is damaged.
    """
    manifest = open_checkpoint(path)
    found = survey(path, checksums=False)
    problems = list(found.problems)
    tensors: dict[str, Mapping[str, StoredTensor]] = {}
    parts = sections(path, manifest)
    for section in parts:
        try:
            tensors[section.label] = section.tensors()
        except CheckpointError as error:
            problems.append(str(error))
    if as_json:
        print(json.dumps(_document(path, manifest, found, parts, tensors, problems), indent=2))
    else:
        _print_text(path, manifest, found, parts, tensors, problems)
    return 1 if problems else 0


def _print_text(
    path: Path,
    manifest: Manifest,
    found: Survey,
    parts: list[Section],
    tensors: _Tensors,
    problems: list[str],
) -> None:
    facts = {
        "checkpoint": str(path),
        "step": str(manifest.step),
        "ranks": str(manifest.world_size),
        "run": manifest.run_id,
        "schema": str(manifest.schema_version),
        "versions": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "size": size_text(sum(record.size for record in manifest.files.values())),
        "metrics": metrics_text(manifest),
    }
    for name, value in facts.items():
        print(f"{name:<11} {printable(value) or '-'}")
    print()
    rows = [
        [s.label, s.record.pattern, s.record.format, _bytes(manifest, s.files), ", ".join(s.files)]
        for s in parts
    ]
    rows += [[f"({name})", "", "file", _bytes(manifest, [name]), name] for name in other_files(manifest)]
    print_table(("component", "pattern", "format", "bytes", "files"), rows)
    lines = [row for section in parts for row in _tensor_rows(section, tensors, manifest)]
    if lines:
        print()
        print_table(("component", "tensor", "dtype", "shape", "bytes"), lines)
    for name in found.deleted:
        print(f"deleted: {printable(name)}")
    for problem in problems:
        print(f"damaged: {printable(problem)}")


def _tensor_rows(section: Section, tensors: _Tensors, manifest: Manifest) -> list[list[str]]:
    rows = [
        [section.label, name, tensor.dtype_name, str(list(tensor.spec.shape)), str(tensor.spec.nbytes)]
        for name, tensor in tensors.get(section.label, {}).items()
    ]
    for alias, name in _ties(section, tensors, manifest).items():
        rows.append([section.label, alias, "tied", f"to {name}", "0"])
    return rows


def _document(
    path: Path,
    manifest: Manifest,
    found: Survey,
    parts: list[Section],
    tensors: _Tensors,
    problems: list[str],
) -> dict[str, object]:
    components = [
        {
            "component": section.record.key,
            "label": section.label,
            "pattern": section.record.pattern,
            "format": section.record.format,
            "files": [
                {"name": name, "bytes": manifest.files[name].size, "deleted": name in found.deleted}
                for name in section.files
            ],
            "tensors": [
                {
                    "name": name,
                    "dtype": tensor.dtype_name,
                    "shape": list(tensor.spec.shape),
                    "bytes": tensor.spec.nbytes,
                    "file": tensor.path.relative_to(path).as_posix(),
                }
                for name, tensor in tensors.get(section.label, {}).items()
            ],
            "tied": _ties(section, tensors, manifest),
        }
        for section in parts
    ]
    return {
        "checkpoint": str(path),
        "schema_version": manifest.schema_version,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "run_id": manifest.run_id,
        "versions": dict(manifest.versions),
        "metrics": None if manifest.metrics is None else metrics_document(manifest.metrics),
        "components": components,
        "other_files": [
            {"name": name, "bytes": manifest.files[name].size, "deleted": name in found.deleted}
            for name in other_files(manifest)
        ],
        "problems": problems,
    }


def _ties(section: Section, tensors: _Tensors, manifest: Manifest) -> dict[str, str]:
    """Stored name by alias, for the tensors of this copy."""
    here = tensors.get(section.label, {})
    ties = manifest.tied_weights.get(section.record.key, {})
    return {alias: name for alias, name in ties.items() if name in here}


def _bytes(manifest: Manifest, names: Sequence[str]) -> str:
    return str(sum(manifest.files[name].size for name in names))
