"""Where two JSON documents of stored state differ."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch

from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.encoding import TAG, decode_state

_LONGEST = 60
_MAPPINGS = ("dict", "OrderedDict", "Counter")


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


def document_differences(a: object, b: object, known: Container[str] = ()) -> Iterator[Difference]:
    """Compare two documents that :func:`checkpoint_core.state.encoding.encode_state` made, or any JSON.

    Floating point numbers are equal when their bits are, so NaN equals the same NaN. The order of
    dictionary entries does not count.

    Args:
        a: The first document.
        b: The second one.
        known: Names of tensors that only one side has, as is known already.

    Yields:
        The differences, in the order of the first document.
    """
    # No recursion: the nesting of a file may be deeper than Python's stack.
    waiting = [("", a, b)]
    while waiting:
        here, left, right = waiting.pop()
        left_kind, left_children = _children(left)
        right_kind, right_children = _children(right)
        if left_children is None or right_children is None or left_kind != right_kind:
            if type(left) is not type(right) or repr(left) != repr(right):
                yield Difference(here or "(document)", _show(left), _show(right))
            continue
        below = []
        for key in dict.fromkeys([*left_children, *right_children]):
            place = f"{here}.{key}" if here else key
            if key in left_children and key in right_children:
                below.append((place, left_children[key], right_children[key]))
            elif key in left_children and _tensor(left_children[key]) not in known:
                yield Difference(place, _show(left_children[key]), ABSENT)
            elif key in right_children and _tensor(right_children[key]) not in known:
                yield Difference(place, ABSENT, _show(right_children[key]))
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
    return node if isinstance(node, str) else f"[{_show(node)}]"


def _tensor(node: object) -> str | None:
    """The name of the tensor that a node stands for."""
    return str(node.get("name")) if isinstance(node, dict) and node.get(TAG) == "tensor" else None


def _show(node: object) -> str:
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
