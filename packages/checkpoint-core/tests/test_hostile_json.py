"""Every field of every JSON document that is read, of a wrong kind: a named error, or no difference.

Seeded random changes; with ``PROPERTY_EXAMPLES=50`` in the environment 50 times as many.
"""

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    ModelState,
    OptimizerState,
    RNGState,
    SharingPattern,
    StateComponent,
    find_latest_checkpoint,
    load_model_weights,
)
from checkpoint_core.cli import main
from checkpoint_core.files import MAX_NESTING, checksum_file, read_json
from checkpoint_core.loading import StoredState, decode
from checkpoint_core.manifest import _digest, read_manifest
from checkpoint_core.tensor_files import read_layout

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))
COUNT = 15 if os.environ.get("FULL_TESTS") else 8
RAW = re.compile(
    r"\b[A-Z][A-Za-z]*(Error|Exception)\b|object has no attribute|not subscriptable|takes \d+ pos"
)
DEEP: object = 1
for _ in range(MAX_NESTING - 40):
    DEEP = [DEEP]
NASTY: list[object] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        7,
        2**63,
        -(2**70),
        10**400,
        0.5,
        -0.0,
        1e308,
        "",
        "x",
        "0",
        "\ud800",
        "../x",
    ),
    *([], {}, [[]], [{}], ["x"], [None], {"a": 1}, {"": {}}, DEEP, "\0", "y" * 300, [1, 2], [2**62, 2**62]),
    *({"$": kind} for kind in ("tensor", "dict", "tuple", "int", "float", "bytes", "str", "?", 1, [])),
    *(
        {"$": kind, "items": [[{"$": "tuple", "items": [[]]}, 1]]}
        for kind in ("dict", "OrderedDict", "Counter")
    ),
    *({"$": kind, "items": items} for kind in ("dict", "tuple") for items in (1, [1], [[1]], [[[], 1]])),
    {"$": "tensor", "name": "x"},
    {"$": "tensor", "name": 3},
    {"$": "int", "hex": "0x" + "f" * 20_000},
    {"$": "float", "bits": "7ff8"},
    {"$": "bytes", "base64": "???"},
    {"$": "str", "base64": "/w=="},
]


class Holder:
    def __init__(self) -> None:
        self.state: dict[str, object] = {
            "plain": {"a": [1, 2.5, None, "text"], "t": torch.arange(3)},
            "odd": {1: (float("nan"), b"bytes", 2**100), ("a", 2): "\ud800"},
        }

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        # As a user's would, it takes what it is given; an integer of so many digits cannot be printed.
        copy.deepcopy(state)


class Objects:
    """A model, an optimizer and more, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        self.model[2].bias = nn.Parameter(self.model[2].bias.detach())
        self.model.config = {"hidden_size": 3, "dtype": "float32"}  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        shared = SharingPattern.REPLICATED
        components = [
            StateComponent(key="model", stateful=ModelState(self.model), sharing_pattern=shared),
            StateComponent(
                key="optimizer", stateful=OptimizerState(self.optimizer, self.model), sharing_pattern=shared
            ),
            StateComponent(key="held", stateful=Holder(), sharing_pattern=SharingPattern.GLOBAL),
            StateComponent(key="rng", stateful=RNGState(), sharing_pattern=SharingPattern.PER_RANK),
        ]
        config = CheckpointConfig(output_dir=directory, max_shard_size=40)
        self.manager = CheckpointManager(config, stateful_provider=components)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    return Objects(directory).manager.save_checkpoint(2, metrics={"eval_loss": 0.5, "worst": float("inf")})


def places(node: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    if isinstance(node, (dict, list)):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(child, (*path, key))


def changed(document: object, generator: random.Random) -> object:
    """A document with one place replaced, removed, or given something more."""
    document = json.loads(json.dumps(document))
    # The generator's state is hundreds of numbers of one kind; one of them stands for all.
    where = [place for place in places(document) if not any(isinstance(k, int) and k > 2 for k in place)]
    place = generator.choice(where)
    if not place:
        return generator.choice(NASTY)
    parent = document
    for key in place[:-1]:
        parent = parent[key]  # type: ignore[index]
    match generator.choice(["replace", "replace", "replace", "remove", "add"]):
        case "replace":
            parent[place[-1]] = generator.choice(NASTY)  # type: ignore[index]
        case "remove":
            del parent[place[-1]]  # type: ignore[attr-defined]
        case _ if isinstance(parent, dict):
            parent[generator.choice(["x", "$", "name", ""])] = generator.choice(NASTY)
        case _:
            parent.append(generator.choice(NASTY))  # type: ignore[attr-defined]
    return document


def seal(checkpoint: Path) -> None:
    """Give the manifest the checksums of what is there now, as somebody with bad intentions would."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    for name in manifest["files"]:
        record = checksum_file(checkpoint / name)
        manifest["files"][name] = {"size": record.size, "checksum": record.checksum}
    path.write_text(json.dumps({**manifest, "checksum": _digest(manifest)}))


def use(checkpoint: Path, objects: Objects, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Everything that reads a checkpoint. Returns the messages of errors."""
    messages = []
    for action in (
        lambda: objects.manager.load_checkpoint(checkpoint),
        lambda: load_model_weights(objects.model, checkpoint),
        lambda: find_latest_checkpoint(checkpoint.parent, verify_checksums=True),
    ):
        try:
            action()
        except CheckpointError as error:
            messages.append(str(error))
    out = checkpoint.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    for command in (
        ["ls", checkpoint.parent],
        ["show", checkpoint],
        ["verify", checkpoint],
        ["diff", checkpoint, checkpoint.parent / "checkpoint-1"],
        ["export", checkpoint, out, "--dtype", "bf16"],
        ["prune", checkpoint.parent, "--keep", "1", "--keep-best", "1", "--metric", "eval_loss"],
    ):
        assert main([str(part) for part in command]) in (0, 1, 2), command
        messages += capsys.readouterr().err.splitlines()
    return messages


FILES = ["manifest.json", "optimizer.json", "held.json", "rng.rank0.json", "config.json"]
FILES += ["model.safetensors.index.json", "model-00001-of-*.safetensors", "held.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_a_field_of_a_wrong_kind_is_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(saved, tmp_path / "checkpoint-1")
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(saved, checkpoint)
    objects = Objects(tmp_path)
    (path,) = checkpoint.glob(name)
    content = path.read_bytes()
    manifest = (checkpoint / "manifest.json").read_bytes()
    binary = name.endswith(".safetensors")
    length = 8 + int.from_bytes(content[:8], "little") if binary else len(content)
    document = json.loads(content[8:length] if binary else content)
    document.pop("checksum", None)
    for seed in range(COUNT * EXAMPLES):
        wrong = changed(document, random.Random(f"{name} {seed}"))
        text = json.dumps(wrong)
        if name == "manifest.json":
            path.write_text(
                json.dumps({**wrong, "checksum": _digest(wrong)}) if isinstance(wrong, dict) else text
            )
        else:
            header = text.encode().ljust(-(-len(text) // 8) * 8)
            start = len(header).to_bytes(8, "little") + header + content[length:]
            path.write_bytes(start if binary else text.encode())
            (checkpoint / "manifest.json").write_bytes(manifest)
            seal(checkpoint)
        for message in use(checkpoint, objects, capsys):
            assert not RAW.search(message), (seed, message)


FIELDS: dict[str, tuple[dict[str, object], str]] = {
    "save": ({"save_id": {}}, "save_id is {}, not text"),
    "run": ({"run_id": None}, "run_id is None, not text"),
    "negative step": ({"step": -1}, "step is -1, which is not from 0 to 2**63 - 1"),
    "huge step": ({"step": 2**63}, "step is 9223372036854775808, which is not from 0 to"),
    "no ranks": ({"world_size": 0}, "world_size is 0, which is not from 1 to"),
    "ties": ({"tied_weights": {"model": {"a": 1}}}, "tied_weights['model']['a'] is 1, not text"),
    "metrics": ({"metrics": {"loss": [1]}}, "metrics['loss'] is [1], not a number"),
    "versions": ({"versions": {"torch": 2}}, "versions['torch'] is 2, not text"),
    "table": ({"components": {}}, "components is {}, not a list"),
    "size": ({"files": {"a": {"size": -1, "checksum": ""}}}, "files['a'].size is -1, which is not from 0"),
    "checksum": ({"files": {"a": {"size": 1, "checksum": 1}}}, "files['a'].checksum is 1, not text"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_fields_of_the_manifest(saved: Path, tmp_path: Path, case: str) -> None:
    changes, part = FIELDS[case]
    manifest = {**json.loads((saved / "manifest.json").read_text()), **changes}
    del manifest["checksum"]
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "checksum": _digest(manifest)}))
    with pytest.raises(CheckpointError, match=rf"manifest\.json is malformed \({re.escape(part)}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("shape", [2.0], "shape of a is not a list of integers"),
        ("shape", [True, 2], "shape of a is not a list of integers"),
        ("shape", 2, "shape of a is not a list of integers"),
        ("data_offsets", [0, 8.0], "data_offsets of a is not a list of integers"),
        ("data_offsets", [False, 8], "data_offsets of a is not a list of integers"),
        ("dtype", ["F32"], "dtype of a is not text"),
    ],
)
def test_fields_of_the_header_of_tensors(tmp_path: Path, field: str, value: object, part: str) -> None:
    """Python takes some of them for the number that belongs there."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], field: value}
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=re.escape(part)):
        read_layout(path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "it has the key 'c' twice in one object"),
        ("[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1), "nested deeper than 320 levels"),
        ("[" * 100_000, "nested deeper than 320 levels"),
        ("[1e999]", "it holds 1e999, which is beyond the largest float"),
        ("[-Infinity]", "it holds -Infinity, which is not JSON"),
        ("1" * 5000, "Exceeds the limit"),
        ("{", "Expecting property name"),
    ],
    ids=["twice", "deep", "deeper", "float", "infinity", "digits", "torn"],
)
def test_documents_that_python_would_read(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=rf"x\.json is not valid JSON \(.*{re.escape(part)}.*Restore the file"
    ):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[" * MAX_NESTING + "]" * MAX_NESTING)
    read_json(tmp_path / "x.json")


def test_the_deepest_state_that_is_saved_is_read(tmp_path: Path, store) -> None:
    state: object = 1
    for _ in range(99):
        state = {1: state}
    holder = Holder()
    holder.state = {"deep": state}
    directory = store(holder, "held", tmp_path / "deep")
    stored = StoredState([directory / "held.json"], "state")
    assert decode(stored.document, {}) == {"deep": state}
