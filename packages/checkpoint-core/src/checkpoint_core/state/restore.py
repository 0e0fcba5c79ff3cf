"""Stored state on its way back into an object: what is read, into which memory, and what happens then."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import torch

from checkpoint_core.component_files import STATE_FORMAT, WEIGHTS_FORMAT
from checkpoint_core.components import Stateful
from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.encoding import TAG, decode_state
from checkpoint_core.state.optimizer_rng import OptimizerState
from checkpoint_core.state.optimizer_rng import check_nothing_left as check_no_parameters_left
from checkpoint_core.state.weights import ModelState, check_tie
from checkpoint_core.state.weights import check_nothing_left as check_no_weights_left
from checkpoint_core.storage.files import read_json
from checkpoint_core.storage.tensor_files import (
    DTYPE_CODES,
    DTYPES,
    FORMAT_ENTRY,
    MODEL_STEM,
    FileLayout,
    TensorFileReader,
    TensorSpec,
)
from checkpoint_core.storage.tensors import local_part

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
Fills = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class RestorePlan:
    """How one component takes up stored state."""

    fills: Fills
    """The stored tensors to read, and the memory to read them into."""
    finish: Callable[[], None]
    """Called once all are read."""
    unclaimed: Sequence[str]
    """Stored names that this rank has no use for."""


class Outline(TypedDict):
    """Stored state without the values of its tensors."""

    specs: dict[str, tuple[str, list[int]]]
    aliases: dict[str, str]
    document: object


class StoredState:
    """The files of one component, or of the part of one rank, open for reading.

    Args:
        paths: The files.
        storage_format: Their format.

    Raises:
        CheckpointError: The format is unknown or a file is damaged.
        OSError: A file cannot be read.
    """

    def __init__(self, paths: Sequence[Path], storage_format: str) -> None:
        if storage_format not in (WEIGHTS_FORMAT, STATE_FORMAT):
            raise CheckpointError(
                f"{paths[0]} is stored in the unknown format {storage_format!r}. Upgrade checkpoint-core."
            )
        self.document: object = None
        self.specs: dict[str, TensorSpec] = {}
        self.aliases: dict[str, str] = {}
        self._readers: dict[str, TensorFileReader] = {}
        self._open = ExitStack()
        with ExitStack() as opening:
            for path in paths:
                if path.suffix == ".json":
                    self.document = read_json(path)
                else:
                    self._add(opening.enter_context(TensorFileReader(path)), storage_format)
            self._open = opening.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def outline(self) -> Outline:
        """What matching needs, in a form that travels as JSON."""
        specs = {name: (DTYPE_CODES[spec.dtype], list(spec.shape)) for name, spec in self.specs.items()}
        return Outline(specs=specs, aliases=self.aliases, document=self.document)

    @property
    def bytes_read(self) -> int:
        """Bytes of headers and tensors that were read so far."""
        return sum(reader.bytes_read for reader in set(self._readers.values()))

    def fill(self, fills: Fills, threads: int) -> None:
        """Read tensors.

        Args:
            fills: Stored names and the memory to read them into.
            threads: How many threads read.
        """
        by_reader: dict[TensorFileReader, list[tuple[str, torch.Tensor]]] = {}
        for name, target in fills:
            by_reader.setdefault(self._readers[name], []).append((name, target))
        for reader, some in by_reader.items():
            reader.fill(some, threads)

    def _add(self, reader: TensorFileReader, storage_format: str) -> None:
        for name, place in reader.layout.places.items():
            if name in self.specs:
                raise CheckpointError(f"{reader.path} repeats tensor {name} of another file.")
            self.specs[name] = place.spec
            self._readers[name] = reader
        if storage_format == WEIGHTS_FORMAT:
            self.aliases |= _stored_aliases(reader.layout)


def weight_files(directory: Path, stem: str = MODEL_STEM) -> list[Path]:
    """The weight files of a Hugging Face directory, by its index or as the one file.

    Args:
        directory: The directory.
        stem: Beginning of the file names.

    Returns:
        The shards.

    Raises:
        CheckpointError: No safetensors weights are there, or the index is malformed.
    """
    single = directory / f"{stem}.safetensors"
    index = directory / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        pickles = [name for name in found if Path(name).suffix in _PICKLE_SUFFIXES]
        remedy = "Name a directory that has one of them."
        if pickles:
            remedy = f"It has {pickles[0]}, a pickle that is never read. Convert it to safetensors."
        raise CheckpointError(f"{directory} holds neither {single.name} nor {index.name}. {remedy}")
    document = read_json(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map.")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if Path(name).name != name or name in ("", "..") or "\x00" in name:
            raise CheckpointError(f"{index} points outside its directory: {name!r}. Restore the index.")
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name!r}, which is not a safetensors file. Other formats are never read. "
                "Convert it."
            )
        if not (directory / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is not there. Restore that file.")
    return [directory / name for name in names]


def plan_restore(stateful: Stateful, stored: StoredState) -> RestorePlan:
    """Match stored state with an object. Nothing of the object changes yet.

    Args:
        stateful: The component's object.
        stored: The stored state.

    Returns:
        What to read, and how to finish.

    Raises:
        CheckpointError: The state does not fit the object; names what does not.
    """
    if isinstance(stateful, ModelState):
        return _plan_weights(stateful, stored)
    if isinstance(stateful, OptimizerState):
        return _plan_optimizer(stateful, stored)
    return _plan_state(stateful, stored.document, stored, lambda _, spec: _fresh(spec), [])


def check_outline(stateful: Stateful, outline: Outline) -> None:
    """Compare an object with stored state that another rank has open. Nothing changes.

    Args:
        stateful: The component's object.
        outline: The stored state.

    Raises:
        CheckpointError: The state does not fit the object; names what does not.
    """
    if isinstance(stateful, ModelState):
        stored = outline["specs"].items()
        specs = {name: TensorSpec(DTYPES[code], tuple(shape)) for name, (code, shape) in stored}
        check_unclaimed(stateful, stateful.match(specs, outline["aliases"]).unexpected)
    elif isinstance(stateful, OptimizerState):
        check_unclaimed(stateful, stateful.match(_optimizer_document(outline["document"])))


def check_unclaimed(stateful: Stateful, names: Sequence[str]) -> None:
    """Refuse stored weights, or optimizer state of parameters, that no object has taken.

    Args:
        stateful: The component's object.
        names: Their names; may be empty.

    Raises:
        CheckpointError: There are any; names them.
    """
    if isinstance(stateful, ModelState):
        check_no_weights_left(names)
    elif isinstance(stateful, OptimizerState):
        check_no_parameters_left(names)


def read_all(stored: StoredState, threads: int) -> tuple[object, dict[str, torch.Tensor]]:
    """Read a state without an object to receive it.

    Args:
        stored: The stored state.
        threads: How many threads read.

    Returns:
        The document and the tensors by name, on the CPU. For weights the document tells which names share
        a tensor.
    """
    tensors = {name: _fresh(spec) for name, spec in stored.specs.items()}
    stored.fill(list(tensors.items()), threads)
    if stored.document is not None:
        return stored.document, tensors
    names = {**{name: name for name in tensors}, **stored.aliases}
    return {name: {TAG: "tensor", "name": stored_name} for name, stored_name in names.items()}, tensors


def decode(document: object, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """A state from its document and tensors.

    Args:
        document: The document.
        tensors: The tensors by name.

    Returns:
        The state.

    Raises:
        CheckpointError: The document refers to a tensor that is not there, or is not a dict.
    """

    def find(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"the state refers to tensor {name}, which its files do not hold.")
        return tensors[name]

    state = decode_state(document, find)
    if not isinstance(state, dict):
        raise CheckpointError(f"the stored state is a {type(state).__name__}, not a dict.")
    return cast(dict[str, object], state)


def _plan_weights(model: ModelState, stored: StoredState) -> RestorePlan:
    match = model.match(stored.specs, stored.aliases)
    live = model.tensors()
    for name, other in match.repeated:
        # Files of other programs may hold a tied weight twice; before anything changes, both are compared.
        first, second = torch.empty_like(live[name]), torch.empty_like(live[name])
        stored.fill([(match.sources[name], first), (other, second)], threads=1)
        check_tie(name, local_part(first, name).data, other, local_part(second, name).data)
    fills = [(source, live[name]) for name, source in match.sources.items()]
    return RestorePlan(fills, lambda: None, match.unexpected)


def _plan_optimizer(optimizer: OptimizerState, stored: StoredState) -> RestorePlan:
    document = _optimizer_document(stored.document)
    unclaimed = optimizer.match(document)
    live = optimizer.by_name()
    own = {
        section: {name: node for name, node in document[section].items() if name in live}
        for section in ("parameters", "state")
    }
    owner = {
        stored_name: live[name]
        for name, values in own["state"].items()
        for stored_name in _tensor_names(values)
    }

    def target(name: str, spec: TensorSpec) -> torch.Tensor:
        parameter = owner.get(name)
        if parameter is None or not spec.shape or spec.shape != tuple(parameter.shape):
            return _fresh(spec)
        # State of the parameter's shape is placed as the parameter is: on its device, with its shards.
        return torch.empty_like(parameter.detach(), dtype=spec.dtype)

    return _plan_state(optimizer, own, stored, target, unclaimed)


def _optimizer_document(document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise CheckpointError("the stored optimizer state is not an object, so it is not an OptimizerState.")
    return document


def _plan_state(
    stateful: Stateful,
    document: object,
    stored: StoredState,
    target: Callable[[str, TensorSpec], torch.Tensor],
    unclaimed: Sequence[str],
) -> RestorePlan:
    names = list(dict.fromkeys(_tensor_names(document)))
    if lost := [name for name in names if name not in stored.specs]:
        raise CheckpointError(f"the state refers to tensor {lost[0]}, which its files do not hold.")
    tensors = {name: target(name, stored.specs[name]) for name in names}
    # Now, so that a malformed document is found before anything changes; the values come in place later.
    state = decode(document, tensors)

    def finish() -> None:
        stateful.load_state_dict(state)

    return RestorePlan(list(tensors.items()), finish, unclaimed)


def _tensor_names(document: object) -> Iterator[str]:
    waiting = [document]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict) and node.get(TAG) == "tensor":
            yield str(node.get("name"))
        elif isinstance(node, (dict, list)):
            waiting.extend(reversed(node.values() if isinstance(node, dict) else node))


def _fresh(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype)


def _stored_aliases(layout: FileLayout) -> dict[str, str]:
    """Name of the stored tensor, by alias, as the metadata of a file of weights tells it."""
    return {
        alias: name
        for alias, name in layout.metadata.items()
        if alias != FORMAT_ENTRY and name in layout.places and alias not in layout.places
    }
