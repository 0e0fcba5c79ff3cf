"""``diff``: where two checkpoints differ, and by how much."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint_core.cli.compare import compare_values
from checkpoint_core.cli.console import Progress, number_text, print_table, printable
from checkpoint_core.cli.contents import Section, other_files, sections
from checkpoint_core.cli.documents import ABSENT, document_differences
from checkpoint_core.cli.stored import StoredTensor
from checkpoint_core.cli.survey import open_checkpoint
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.files import checksum_file, read_json


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
        CheckpointError: One is no checkpoint, or a file of it cannot be read.
    """
    manifests = open_checkpoint(a), open_checkpoint(b)
    for letter, path, manifest in zip("AB", (a, b), manifests, strict=True):
        print(f"{letter}: {path}, step {manifest.step}")
        for name in manifest.files:
            if not (path / name).is_file():
                print(f"   {printable(name)} was deleted in {letter}")
    findings = _Findings()
    _compare_sections(sections(a, manifests[0]), sections(b, manifests[1]), findings)
    _compare_ties(*manifests, findings)
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
    tensors_a = {label: section.tensors() for label, section in left.items()}
    tensors_b = {label: section.tensors() for label, section in right.items()}
    total = sum(tensor.spec.nbytes for named in tensors_a.values() for tensor in named.values())
    with Progress("comparing", total) as progress:
        for label in dict.fromkeys([*left, *right]):
            for side, others in ((left, "B"), (right, "A")):
                if label not in side:
                    findings.entries.append([label, "(component)", *_sides("declared", others)])
            named_a, named_b = tensors_a.get(label, {}), tensors_b.get(label, {})
            _compare_tensors(label, named_a, named_b, findings, progress)
            if label in left and label in right:
                documents = left[label].document(), right[label].document()
                _compare_documents(label, *documents, findings, set(named_a) ^ set(named_b))


def _compare_tensors(
    label: str,
    a: Mapping[str, StoredTensor],
    b: Mapping[str, StoredTensor],
    findings: _Findings,
    progress: Progress,
) -> None:
    for name in dict.fromkeys([*a, *b]):
        findings.counts["compared"] += 1
        if name not in b or name not in a:
            where = "only in A" if name in a else "only in B"
            findings.tensor(label, name, where)
            findings.counts[where] += 1
            continue
        progress.show(name)
        findings.counts[_compare_tensor(label, a[name], b[name], findings)] += 1
        progress.advance(a[name].spec.nbytes)


def _compare_tensor(label: str, a: StoredTensor, b: StoredTensor, findings: _Findings) -> str:
    if a.spec.dtype != b.spec.dtype:
        findings.tensor(label, a.name, f"dtype {a.dtype_name} | {b.dtype_name}")
        return "of another dtype"
    if a.spec.shape != b.spec.shape:
        findings.tensor(label, a.name, f"shape {list(a.spec.shape)} | {list(b.spec.shape)}")
        return "of another shape"
    difference = compare_values(a, b)
    if not difference.elements:
        return "equal"
    note = f"values, {difference.undefined} with NaN or inf" if difference.undefined else "values"
    findings.tensor(
        label,
        a.name,
        note,
        number_text(difference.max_absolute),
        number_text(difference.max_relative),
        f"{difference.elements} of {a.elements}",
    )
    return "of other values"


def _compare_documents(
    where: str, a: object, b: object, findings: _Findings, known: Container[str] = ()
) -> None:
    for found in document_differences(a, b, known):
        findings.entries.append([where, found.path, found.a, found.b])


def _compare_ties(a: Manifest, b: Manifest, findings: _Findings) -> None:
    ties_a = {key: dict(ties) for key, ties in a.tied_weights.items()}
    ties_b = {key: dict(ties) for key, ties in b.tied_weights.items()}
    _compare_documents("tied weights", ties_a, ties_b, findings)


def _compare_other_files(a: Path, b: Path, left: Manifest, right: Manifest, findings: _Findings) -> None:
    for name in dict.fromkeys([*other_files(left), *other_files(right)]):
        in_a, in_b = (a / name).is_file(), (b / name).is_file()
        if in_a and in_b:
            _compare_other_file(name, a / name, b / name, findings)
        elif in_a or in_b:
            findings.entries.append([name, "(file)", *_sides("there", "A" if in_a else "B")])


def _compare_other_file(name: str, a: Path, b: Path, findings: _Findings) -> None:
    left, right = checksum_file(a), checksum_file(b)
    if left == right:
        return
    try:
        documents = read_json(a), read_json(b)
    except CheckpointError:
        findings.entries.append(
            [name, "(content)", *(f"{r.size} bytes, {r.checksum}" for r in (left, right))]
        )
    else:
        _compare_documents(name, *documents, findings)


def _sides(text: str, where: str) -> tuple[str, str]:
    return (text, ABSENT) if where == "A" else (ABSENT, text)
