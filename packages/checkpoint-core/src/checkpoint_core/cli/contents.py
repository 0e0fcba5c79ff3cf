"""``show``, ``diff`` and ``export``: what checkpoints hold, read a piece of a tensor at a time."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from checkpoint_core.cli.checkpoints import (
    find_damage,
    metrics_text,
    number_text,
    open_checkpoint,
    print_table,
    survey,
)
from checkpoint_core.components import SharingPattern
from checkpoint_core.directory import check_space, clean_leftovers, create_staging, discard
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import (
    PartialDigest,
    checksum_file,
    json_bytes,
    read_json,
    sync_descriptor,
    sync_file,
    write_at,
    write_bytes,
)
from checkpoint_core.lease import DirectoryLease
from checkpoint_core.manifest import WEIGHTS_FORMAT, ComponentRecord, Manifest
from checkpoint_core.model_directory import check_export_target, place_files
from checkpoint_core.replication import excerpt, leaves
from checkpoint_core.saving import METRICS_NAME
from checkpoint_core.store_path import RangeReader, StorePath
from checkpoint_core.tensor_files import (
    MODEL_STEM,
    FileLayout,
    Place,
    TensorSpec,
    create_tensor_file,
    plan_weights,
    read_layout,
)
from dist_env import printable, size_text

_PIECE_ELEMENTS = 1024 * 1024
"""Elements held at once."""
_TENSOR_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = "absent"
"""Stands for a value that only the other checkpoint has."""
_DTYPE_ENTRIES = ("dtype", "torch_dtype")
_QUANTIZATION = "quantization_config"
_FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_CONFIG_NAME = "config.json"
_DTYPES: Mapping[str, torch.dtype | None] = {
    "keep": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_OWN_FILES = (SharingPattern.PER_RANK.value, SharingPattern.PER_GROUP.value)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    path: Path
    """The file."""
    name: str
    """Its name in the file."""
    place: Place
    """Where it lies in the file."""

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return self.place.spec

    @property
    def dtype_name(self) -> str:
        """The dtype, such as ``bfloat16``."""
        return str(self.spec.dtype).removeprefix("torch.")

    def raw_pieces(self) -> Iterator[bytearray]:
        """The values as they lie in the file, at most :data:`_PIECE_ELEMENTS` of them at a time."""
        rest, offset = self.spec.nbytes, self.place.start
        with closing(RangeReader(self.path)) as file:
            while rest:
                buffer = bytearray(min(rest, _PIECE_ELEMENTS * self.spec.dtype.itemsize))
                if file.fill([(offset, memoryview(buffer))]) != len(buffer):
                    raise CheckpointError(
                        f"{self.path} became shorter while it was read. Run the command again."
                    )
                rest, offset = rest - len(buffer), offset + len(buffer)
                yield buffer

    def pieces(self) -> Iterator[torch.Tensor]:
        """The same as flat CPU tensors, with memory of their own."""
        for buffer in self.raw_pieces():
            yield torch.frombuffer(buffer, dtype=self.spec.dtype)


@dataclass(frozen=True)
class Section:
    """One copy of a component's state: the only one, or that of one rank or group."""

    checkpoint: Path
    """The checkpoint's directory."""
    label: str
    """The component's key, with the writer where there are several copies."""
    record: ComponentRecord
    """The component."""
    files: Sequence[str]
    """Names of its files, deleted ones too."""

    @property
    def present(self) -> list[Path]:
        """Those of its files that are there."""
        return [path for name in self.files if (path := self.checkpoint / name).is_file()]

    def tensors(self) -> dict[str, StoredTensor]:
        """Its tensors by name, from the headers of the files that are there.

        Raises:
            CheckpointError: A file is damaged, or two files hold the same tensor.
        """
        found: dict[str, StoredTensor] = {}
        for path in self.present:
            if path.name.endswith(_TENSOR_SUFFIX):
                for name, place in read_layout(path).places.items():
                    if name in found:
                        raise CheckpointError(f"{path} repeats tensor {name} of another file.")
                    found[name] = StoredTensor(path, name, place)
        return found

    def document(self) -> object:
        """Its JSON document; an empty one for weights, and where the file was deleted.

        Raises:
            CheckpointError: The file is not JSON.
        """
        documents = [read_json(path) for path in self.present if not path.name.endswith(_TENSOR_SUFFIX)]
        return documents[0] if documents else {}


def sections(checkpoint: Path, manifest: Manifest) -> list[Section]:
    """The component table, with one entry for each copy, in the manifest's order."""
    found = []
    for record in manifest.components:
        if record.pattern in _OWN_FILES:
            who = "rank" if record.pattern == SharingPattern.PER_RANK.value else "group"
            for part in record.parts:
                found.append(Section(checkpoint, f"{record.key} {who} {part.writer}", record, part.files))
        else:
            names = list(dict.fromkeys(name for part in record.parts for name in part.files))
            found.append(Section(checkpoint, record.key, record, names))
    return found


def other_files(manifest: Manifest) -> list[str]:
    """Files that belong to no component: configuration, tokenizer, metrics; but no index of weights."""
    owned = {name for record in manifest.components for part in record.parts for name in part.files}
    return [name for name in manifest.files if name not in owned and not name.endswith(_INDEX_SUFFIX)]


def show_checkpoint(checkpoint: Path) -> int:
    """Print the manifest and every tensor of a checkpoint, from the headers alone.

    Args:
        checkpoint: Its directory.

    Returns:
        0, or 1 when a file is damaged as far as its size and header tell.

    Raises:
        CheckpointError: It is not a checkpoint, or its manifest is damaged.
    """
    manifest = open_checkpoint(checkpoint)
    found = survey(checkpoint, checksums=False)
    problems = list(found.problems)
    facts = {
        "checkpoint": str(checkpoint),
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
    files: list[list[str]] = []
    tensors: list[list[str]] = []
    for section in sections(checkpoint, manifest):
        record, size = section.record, sum(manifest.files[name].size for name in section.files)
        files.append([section.label, record.pattern, record.format, str(size), ", ".join(section.files)])
        try:
            held = section.tensors()
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name, tensor in held.items():
            shape, size = str(list(tensor.spec.shape)), tensor.spec.nbytes
            tensors.append([section.label, name, tensor.dtype_name, shape, str(size)])
        ties = manifest.tied_weights.get(record.key, {})
        tensors += [
            [section.label, alias, "tied", f"to {to}", "0"] for alias, to in ties.items() if to in held
        ]
    files += [
        [f"({name})", "", "file", str(manifest.files[name].size), name] for name in other_files(manifest)
    ]
    print_table(("component", "pattern", "format", "bytes", "files"), files)
    if tensors:
        print()
        print_table(("component", "tensor", "dtype", "shape", "bytes"), tensors)
    for name in found.deleted:
        print(f"deleted: {printable(name)}")
    for problem in problems:
        print(f"damaged: {printable(problem)}")
    return 1 if problems else 0


@dataclass
class ValueDifference:
    """What differs between two tensors of one dtype and shape."""

    elements: int = 0
    """How many elements differ in their bits."""
    max_absolute: float = 0.0
    """The largest ``|a - b|``."""
    max_relative: float = 0.0
    """The largest ``|a - b| / max(|a|, |b|)``."""
    undefined: int = 0
    """Differing elements without a distance, because NaN or infinity is in one of them."""


def _compare_values(a: StoredTensor, b: StoredTensor) -> ValueDifference:
    """Compare two tensors of one dtype and shape a piece at a time, bit by bit."""
    result = ValueDifference()
    for left, right in zip(a.pieces(), b.pieces(), strict=True):
        bits = _BITS[left.element_size()]
        differing = left.view(bits) != right.view(bits)
        count = int(differing.sum())
        if count:
            result.elements += count
            _measure(left, right, differing, result)
    return result


def _measure(
    left: torch.Tensor, right: torch.Tensor, differing: torch.Tensor, result: ValueDifference
) -> None:
    x, y, distance = _distances(left, right)
    distance, larger = distance[differing], torch.maximum(x.abs(), y.abs())[differing]
    defined = distance.isfinite() & larger.isfinite()
    result.undefined += int((~defined).sum())
    distance, larger = distance[defined], larger[defined]
    if distance.numel():
        # The distance of 0.0 and -0.0 is 0, and so is what they are divided by.
        relative = distance / torch.where(larger == 0, 1.0, larger)
        result.max_absolute = max(result.max_absolute, float(distance.max()))
        result.max_relative = max(result.max_relative, float(relative.max()))


def _distances(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both as 64-bit floating point numbers, and their distances."""
    dtype = torch.complex128 if left.is_complex() else torch.float64
    x, y = left.to(dtype), right.to(dtype)
    distance = (x - y).abs()
    if not (left.is_complex() or left.is_floating_point()):
        # Neighbours among large integers are one floating point number.
        whole = [
            side.view(torch.int64) if side.dtype == torch.uint64 else side.long() for side in (left, right)
        ]
        distance = torch.where(distance < 2**53, (whole[0] - whole[1]).abs().double(), distance)
    return x.abs(), y.abs(), distance


@dataclass
class _Findings:
    tensors: list[Sequence[str]] = field(default_factory=list)
    entries: list[Sequence[str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def tensor(self, label: str, name: str, what: str, *numbers: str) -> None:
        row = [label, name, what, *numbers]
        self.tensors.append(row + [""] * (6 - len(row)))


def diff(a: Path, b: Path) -> int:
    """Print how two checkpoints differ. Tensors are read a piece at a time.

    Args:
        a: A checkpoint.
        b: Another one.

    Returns:
        0 when their state is equal, 1 when it differs.

    Raises:
        CheckpointError: One is not a checkpoint, or a file of it cannot be read.
    """
    manifests = open_checkpoint(a), open_checkpoint(b)
    for letter, path, manifest in zip("AB", (a, b), manifests, strict=True):
        print(f"{letter}: {path}, step {manifest.step}")
        for name in manifest.files:
            if not (path / name).is_file():
                print(f"   {printable(name)} is not in {letter}")
    findings = _Findings()
    _compare_sections(sections(a, manifests[0]), sections(b, manifests[1]), findings)
    tied_a, tied_b = (dict(each.tied_weights) for each in manifests)
    _compare_documents("tied weights", tied_a, tied_b, findings)
    _compare_other_files(a, b, *manifests, findings)
    return _report(findings)


def _report(findings: _Findings) -> int:
    if findings.tensors:
        print()
        header = ("component", "tensor", "difference", "max abs", "max rel", "elements")
        print_table(header, findings.tensors)
    if findings.entries:
        print()
        print_table(("where", "entry", "A", "B"), findings.entries)
    compared = findings.counts["compared"]
    kinds = ", ".join(f"{count} {what}" for what, count in findings.counts.items() if what != "compared")
    print()
    print(
        f"{compared} tensors compared: {kinds or 'none there'}; {len(findings.entries)} other entries differ"
    )
    return 1 if findings.tensors or findings.entries else 0


def _compare_sections(a: Sequence[Section], b: Sequence[Section], findings: _Findings) -> None:
    left = {section.label: section for section in a}
    right = {section.label: section for section in b}
    for label in dict.fromkeys([*left, *right]):
        for side, others in ((left, "B"), (right, "A")):
            if label not in side:
                findings.entries.append([label, "(component)", *_sides("declared", others)])
        named_a, named_b = (side[label].tensors() if label in side else {} for side in (left, right))
        for name in dict.fromkeys([*named_a, *named_b]):
            findings.counts["compared"] += 1
            if name in named_a and name in named_b:
                what = _compare_tensor(label, named_a[name], named_b[name], findings)
            else:
                what = "only in A" if name in named_a else "only in B"
                findings.tensor(label, name, what)
            findings.counts[what] += 1
        if label in left and label in right:
            documents = left[label].document(), right[label].document()
            _compare_documents(label, *documents, findings, set(named_a) ^ set(named_b))


def _compare_tensor(label: str, a: StoredTensor, b: StoredTensor, findings: _Findings) -> str:
    if a.spec.dtype != b.spec.dtype:
        findings.tensor(label, a.name, f"dtype {a.dtype_name} | {b.dtype_name}")
        return "of another dtype"
    if a.spec.shape != b.spec.shape:
        findings.tensor(label, a.name, f"shape {list(a.spec.shape)} | {list(b.spec.shape)}")
        return "of another shape"
    difference = _compare_values(a, b)
    if not difference.elements:
        return "equal"
    note = f"values, {difference.undefined} with NaN or inf" if difference.undefined else "values"
    distances = number_text(difference.max_absolute), number_text(difference.max_relative)
    findings.tensor(label, a.name, note, *distances, f"{difference.elements} of {prod(a.spec.shape)}")
    return "of other values"


def _compare_documents(
    where: str, a: object, b: object, findings: _Findings, known: Container[str] = ()
) -> None:
    """Compare two state documents, or any JSON. The order of dictionary entries does not count.

    ``known`` are names of tensors that only one side has, as is known already.
    """
    left, right = dict(leaves(a, "")), dict(leaves(b, ""))
    for place in dict.fromkeys([*left, *right]):
        x, y = left.get(place, _ABSENT), right.get(place, _ABSENT)
        one = y if x == _ABSENT else x
        is_known = _ABSENT in (x, y) and one.startswith("tensor ") and json.loads(one[7:]) in known
        if x != y and not is_known:
            steps = place.replace("\n", "").removeprefix(".")
            findings.entries.append([where, steps or "(document)", excerpt(x, y), excerpt(y, x)])


def _compare_other_files(a: Path, b: Path, left: Manifest, right: Manifest, findings: _Findings) -> None:
    in_left, in_right = (
        {manifest.plain_name(name): name for name in other_files(manifest)} for manifest in (left, right)
    )
    for name in dict.fromkeys([*in_left, *in_right]):
        file_a, file_b = a / in_left.get(name, name), b / in_right.get(name, name)
        in_a, in_b = file_a.is_file(), file_b.is_file()
        if in_a and in_b:
            _compare_other_file(name, file_a, file_b, findings)
        elif in_a or in_b:
            findings.entries.append([name, "(file)", *_sides("there", "A" if in_a else "B")])


def _compare_other_file(name: str, a: Path, b: Path, findings: _Findings) -> None:
    left, right = checksum_file(a), checksum_file(b)
    if left == right:
        return
    try:
        documents = read_json(a), read_json(b)
    except CheckpointError:
        contents = [f"{record.size} bytes, {record.checksum}" for record in (left, right)]
        findings.entries.append([name, "(content)", *contents])
    else:
        _compare_documents(name, *documents, findings)


def _sides(text: str, where: str) -> tuple[str, str]:
    return (text, _ABSENT) if where == "A" else (_ABSENT, text)


def _cast_spec(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """What a tensor is after the cast, which changes floating point tensors only."""
    return TensorSpec(dtype, spec.shape) if dtype is not None and spec.dtype.is_floating_point else spec


def _cast_bytes(tensor: StoredTensor, raw: bytearray, dtype: torch.dtype) -> bytearray:
    """Cast a piece of a stored tensor, from and to its bytes in a file.

    Raises:
        CheckpointError: A value is too large for the new dtype.
    """
    source = tensor.spec.dtype
    if dtype == source:
        return raw
    values = torch.frombuffer(raw, dtype=source)
    result = bytearray(values.numel() * dtype.itemsize)
    cast = torch.frombuffer(result, dtype=dtype)
    cast.copy_(values)
    overflows = torch.finfo(source).max > torch.finfo(dtype).max
    if overflows and bool((cast.isinf() & ~values.isinf()).any()):
        raise CheckpointError(
            f"tensor {tensor.name} of {tensor.path} has values that {dtype} cannot hold, whose largest is "
            f"{torch.finfo(dtype).max:g}. Export with --dtype keep, bf16 or fp32."
        )
    return result


def _cast_config(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Name the new dtype in a model's configuration, where that has an entry for a floating point dtype.

    Parts of the model may have a ``..._config`` in it.
    """
    result = dict(config)
    for key, value in config.items():
        if key in _DTYPE_ENTRIES and _names_float(value):
            result[key] = str(dtype).removeprefix("torch.")
        elif isinstance(value, dict) and key.endswith("_config") and key != _QUANTIZATION:
            result[key] = _cast_config(value, dtype)
    return result


def _names_float(value: object) -> bool:
    """Whether an entry names a floating point dtype, or leaves it open."""
    return value is None or (isinstance(value, str) and value.removeprefix("torch.") in _FLOAT_NAMES)


def export(checkpoint: Path, out: Path, *, dtype: str, max_shard_size: int, overwrite: bool) -> int:
    """Write a Hugging Face directory from a checkpoint, a piece of a tensor at a time.

    Everything is written aside first; then each file takes its place by one rename, the index last.

    Args:
        checkpoint: The checkpoint.
        out: The directory; made if needed. Other files in it stay.
        dtype: ``keep``, or what floating point tensors become: ``bf16``, ``fp16`` or ``fp32``.
        max_shard_size: Bytes of tensor data per file.
        overwrite: Replace weights that are there.

    Returns:
        0.

    Raises:
        CheckpointError: The checkpoint is damaged or has no weights, ``out`` is not free, there is no space,
            or a value does not fit the dtype.
    """
    manifest = open_checkpoint(checkpoint)
    check_export_target(out, overwrite=overwrite, setting="--overwrite")
    key = _weights_key(checkpoint, manifest)
    companions = [name for name in other_files(manifest) if manifest.plain_name(name) != METRICS_NAME]
    _verify(checkpoint, manifest, key, companions)
    target = _DTYPES[dtype]
    tensors = _weights(checkpoint, manifest, key)
    specs = {name: _cast_spec(tensor.spec, target) for name, tensor in tensors.items()}
    ties = manifest.tied_weights.get(key, {})
    layouts, index = plan_weights(specs, MODEL_STEM, max_shard_size, ties)
    total = sum(layout.size for layout in layouts.values())
    # Two exports into one directory would leave the files of both, and who came second would replace what it
    # was not told to replace.
    with DirectoryLease(out):
        check_export_target(out, overwrite=overwrite, setting="--overwrite")
        clean_leftovers(out)
        check_space(out, total)
        staging = create_staging(out, 0)
        try:
            _copy_companions(checkpoint, manifest, companions, staging, target)
            for name, layout in layouts.items():
                _write(staging / name, layout, tensors)
            for name, content in index.items():
                write_bytes(staging / name, content)
            place_files(staging, out)
        finally:
            discard(staging)
    print(f"{out}: {len(tensors)} tensors, {size_text(total)}, {len(layouts)} file(s), dtype {dtype}")
    return 0


def _weights_key(checkpoint: Path, manifest: Manifest) -> str:
    keys = [record.key for record in manifest.components if record.format == WEIGHTS_FORMAT]
    if MODEL_STEM in keys:
        return MODEL_STEM
    if len(keys) == 1:
        return keys[0]
    raise CheckpointError(
        f"{checkpoint} has no component {MODEL_STEM!r} with weights to export. Components with weights: "
        f"{', '.join(keys) or 'none'}. Save the model as a ModelState under that key."
    )


def _verify(checkpoint: Path, manifest: Manifest, key: str, companions: list[str]) -> None:
    weights = [name for s in sections(checkpoint, manifest) if s.record.key == key for name in s.files]
    for name in [*weights, *companions]:
        if (checkpoint / name).exists():
            if problem := find_damage(checkpoint, name, manifest.files[name], checksums=True):
                raise CheckpointError(
                    f"{checkpoint} is damaged: {problem}. Restore the file or export another checkpoint."
                )
        elif name in weights:
            raise CheckpointError(
                f"{checkpoint / name} was deleted, or another node keeps it, so there are no whole weights "
                "to export. Restore the file or export another checkpoint."
            )


def _weights(checkpoint: Path, manifest: Manifest, key: str) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for section in sections(checkpoint, manifest):
        if section.record.key == key:
            tensors = section.tensors()
            if twice := sorted(set(found) & set(tensors)):
                raise CheckpointError(
                    f"{checkpoint}: component {key!r} is stored {section.record.pattern}, and several "
                    f"copies hold {twice[0]}, so there is no one model to export. Load it with "
                    "CheckpointManager."
                )
            found.update(tensors)
    return found


def _write(path: Path, layout: FileLayout, tensors: Mapping[str, StoredTensor]) -> None:
    create_tensor_file(path, layout)
    digest = PartialDigest()
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for name, place in layout.places.items():
            offset = place.start
            for raw in tensors[name].raw_pieces():
                data = _cast_bytes(tensors[name], raw, place.spec.dtype)
                write_at(descriptor, memoryview(data), offset, path, digest)
                offset += len(data)
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def _copy_companions(
    checkpoint: Path, manifest: Manifest, names: list[str], staging: Path, target: torch.dtype | None
) -> None:
    for name in names:
        source, copy = checkpoint / name, staging / manifest.plain_name(name)
        if not source.is_file():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        is_config = manifest.plain_name(name) == _CONFIG_NAME
        config = read_json(source) if is_config and target is not None else None
        if target is not None and isinstance(config, dict):
            write_bytes(copy, json_bytes(_cast_config(config, target)))
        elif isinstance(source, StorePath):
            write_bytes(copy, source.read_bytes())
        else:
            shutil.copyfile(source, copy)
            sync_file(copy)
