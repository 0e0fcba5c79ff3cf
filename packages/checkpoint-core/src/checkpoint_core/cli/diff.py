"""``diff``: where two checkpoints differ, and by how much."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoint_core.cli.console import Progress, number_text, print_table, printable
from checkpoint_core.cli.ls_verify import open_checkpoint
from checkpoint_core.cli.show import Section, StoredTensor, other_files, sections
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.encoding import TAG, decode_state
from checkpoint_core.storage.files import checksum_file, read_json

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW_BITS = 32
_LOW_MASK = (1 << _LOW_BITS) - 1
_LONGEST = 60
_MAPPINGS = ("dict", "OrderedDict", "Counter")


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
    """Both as 64-bit numbers, and their distances."""
    if left.is_complex():
        x, y = left.to(torch.complex128), right.to(torch.complex128)
        return x.abs(), y.abs(), (x - y).abs()
    if left.is_floating_point():
        x, y = left.to(torch.float64), right.to(torch.float64)
        return x, y, (x - y).abs()
    # 64-bit integers do not fit a float64; their halves do, so neighbours stay apart.
    (high_x, low_x), (high_y, low_y) = _halves(left), _halves(right)
    scale = float(1 << _LOW_BITS)
    distance = ((high_x - high_y).double() * scale + (low_x - low_y).double()).abs()
    return high_x.double() * scale + low_x.double(), high_y.double() * scale + low_y.double(), distance


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    unsigned = tensor.dtype == torch.uint64
    whole = tensor.view(torch.int64) if unsigned else tensor.to(torch.int64)
    high = whole >> _LOW_BITS
    return high & _LOW_MASK if unsigned else high, whole & _LOW_MASK


@dataclass(frozen=True)
class Difference:
    """One place where two documents differ."""

    path: str
    """Keys and indices on the way there, joined by dots."""
    a: str
    """What the first document has there."""
    b: str
    """What the second document has there."""


ABSENT = "absent"
"""Stands for a value that only the other document has."""


def _document_differences(a: object, b: object, known: Container[str] = ()) -> Iterator[Difference]:
    """Compare two state documents, or any JSON, in the order of the first one.

    Floating point numbers are equal when their bits are, so NaN equals the same NaN. The order of dictionary
    entries does not count. ``known`` are names of tensors that only one side has, as is known already.
    """
    # No recursion: the nesting of a file may be deeper than Python's stack.
    waiting = [("", a, b)]
    while waiting:
        here, left, right = waiting.pop()
        left_kind, left_children = _children(left)
        right_kind, right_children = _children(right)
        if left_children is None or right_children is None or left_kind != right_kind:
            if type(left) is not type(right) or repr(left) != repr(right):
                yield Difference(here or "(document)", _show_node(left), _show_node(right))
            continue
        below = []
        for key in dict.fromkeys([*left_children, *right_children]):
            place = f"{here}.{key}" if here else key
            if key in left_children and key in right_children:
                below.append((place, left_children[key], right_children[key]))
            elif key in left_children and _tensor(left_children[key]) not in known:
                yield Difference(place, _show_node(left_children[key]), ABSENT)
            elif key in right_children and _tensor(right_children[key]) not in known:
                yield Difference(place, ABSENT, _show_node(right_children[key]))
        waiting.extend(reversed(below))


def _children(node: object) -> tuple[str, dict[str, object] | None]:
    """Kind and entries of a container; None for a value."""
    if isinstance(node, list):
        return "list", {str(index): item for index, item in enumerate(node)}
    if not isinstance(node, dict):
        return "value", None
    if TAG not in node:
        return "dict", dict(node)
    kind, items = node[TAG], node.get("items")
    if not isinstance(kind, str) or not isinstance(items, list):
        return "value", None
    if kind in _MAPPINGS and all(isinstance(pair, list) and len(pair) == 2 for pair in items):
        return kind, {_key(pair[0]): pair[1] for pair in items}
    return kind, {str(index): item for index, item in enumerate(items)}


def _key(node: object) -> str:
    return node if isinstance(node, str) else f"[{_show_node(node)}]"


def _tensor(node: object) -> str | None:
    """The name of the tensor that a node stands for."""
    return str(node.get("name")) if isinstance(node, dict) and node.get(TAG) == "tensor" else None


def _show_node(node: object) -> str:
    kind, children = _children(node)
    if kind in ("dict", "list") and children:
        text = f"{kind} with {len(children)} entries"
    elif (name := _tensor(node)) is not None:
        text = f"tensor {name}"
    else:
        try:
            text = repr(_decode(node))
        except ValueError:  # Python shows no integer of more than 4,300 digits; the document has it in hex.
            text = repr(node)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _decode(node: object) -> object:
    try:
        return decode_state(node, lambda name: torch.empty(0))
    except CheckpointError:
        return node  # Not one of our kinds: a file of another program that happens to use the same key.


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
    difference = _compare_values(a, b)
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
    for found in _document_differences(a, b, known):
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
