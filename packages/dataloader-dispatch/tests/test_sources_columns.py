"""Columns of datasets as documents: Hugging Face datasets in memory and on the disk, and lists of dicts."""

from __future__ import annotations

import pickle
from pathlib import Path

import datasets
import numpy
import pytest
import torch
from datasets import Dataset, DatasetDict

from dataloader_dispatch import DataError, DocumentSource, data_fingerprint, open_documents
from dataloader_dispatch.sources.columns import ColumnDocuments

ROWS = {"text": ["a", "", "c ü"], "ids": [[1, 2], [], [70_000]], "score": [0.5, 1.0, 2.0]}

datasets.disable_progress_bars()


def values(source: DocumentSource) -> list[object]:
    found = [source[index] for index in range(len(source))]
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in found]


@pytest.fixture(params=["memory", "disk", "rows"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset | list[dict[str, object]]:
    if request.param == "rows":
        return [{name: column[row] for name, column in ROWS.items()} for row in range(3)]
    made = Dataset.from_dict(ROWS)
    if request.param == "memory":
        return made
    made.save_to_disk(tmp_path / "saved")
    return datasets.load_from_disk(tmp_path / "saved")


def test_columns_with_text_and_token_ids(dataset: Dataset | list[dict[str, object]]) -> None:
    texts, tokens = ColumnDocuments(dataset), ColumnDocuments(dataset, "ids")
    assert isinstance(texts, DocumentSource)
    assert values(texts) == ROWS["text"]
    assert values(tokens) == ROWS["ids"]
    assert tokens[2].dtype == torch.int64  # type: ignore[union-attr]
    assert values(pickle.loads(pickle.dumps(tokens))) == ROWS["ids"]
    assert data_fingerprint(texts) == data_fingerprint(ROWS["text"]) != data_fingerprint(tokens)
    assert tokens.where(2) == "row 2, column 'ids'"
    for index in (-1, 3):
        with pytest.raises(IndexError, match="3 documents"):
            texts[index]


def test_what_is_refused(dataset: Dataset | list[dict[str, object]]) -> None:
    with pytest.raises(DataError, match=r"no column 'txt'. It holds \['text', 'ids', 'score'\].*'text'"):
        ColumnDocuments(dataset, "txt")
    with pytest.raises(
        DataError, match=r"row 1, column 'score' holds a float, 1.0, which is neither text nor"
    ):
        ColumnDocuments(dataset, "score")[1]


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_formats_that_give_arrays(form: str) -> None:
    dataset = Dataset.from_dict(ROWS).with_format(form)
    assert values(ColumnDocuments(dataset, "ids")) == ROWS["ids"]
    assert values(ColumnDocuments(dataset)) == ROWS["text"]
    assert type(ColumnDocuments(dataset)[0]) is str


def test_a_format_that_gives_no_mappings_is_named() -> None:
    with pytest.raises(DataError, match=r"row 0.*the row is a Table.*with_format\(None\)"):
        ColumnDocuments(Dataset.from_dict(ROWS).with_format("arrow"))[0]


def test_other_columns_are_not_decoded() -> None:
    decoded: list[list[str]] = []

    class Watched(Dataset):  # what the rows are made of when they are read
        def __getitem__(self, key: int) -> dict[str, object]:  # type: ignore[override]
            decoded.append(self.column_names)
            return super().__getitem__(key)

    dataset = Dataset.from_dict(ROWS)
    dataset.__class__ = Watched
    assert values(ColumnDocuments(dataset)) == ROWS["text"]
    assert decoded == [["text"]] * 3
    assert dataset.column_names == ["text", "ids", "score"]


def test_a_large_dataset_on_the_disk_is_not_copied(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["x" * 1000] * 20_000}).save_to_disk(tmp_path / "saved")
    dataset = datasets.load_from_disk(tmp_path / "saved")
    source = ColumnDocuments(dataset)
    assert source[19_999] == "x" * 1000
    assert len(pickle.dumps(source)) < 100_000
    # The files of a saved dataset can be opened without the library, too.
    files = open_documents(tmp_path / "saved")
    assert (len(files), files[19_999]) == (20_000, "x" * 1000)


def test_objects_that_are_no_map_style_dataset() -> None:
    made = Dataset.from_dict(ROWS)
    with pytest.raises(DataError, match=r"keys \['train'\].*dataset\['train'\]"):
        ColumnDocuments(DatasetDict(train=made))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"IterableDataset, has no length.*streaming=True"):
        ColumnDocuments(made.to_iterable_dataset())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no rows"):
        ColumnDocuments(made.select([]))
    with pytest.raises(DataError, match="rows of the dataset are of type str"):
        ColumnDocuments(["a", "b"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "holds a NoneType"),
        (b"bytes", "holds a bytes"),
        ({"a": 1}, "holds a dict"),
        ([0.5], "does not hold token ids"),
        ([1, -1], "token id -1"),
        (numpy.ones((2, 2), dtype=numpy.int64), r"shape \[2, 2\]"),
    ],
)
def test_values_that_are_no_documents(value: object, message: str) -> None:
    source = ColumnDocuments([{"text": "fine"}, {"text": value}, {"body": "x"}])
    with pytest.raises(DataError, match=rf"row 1, column 'text'.*{message}"):
        source[1]
    with pytest.raises(DataError, match=r"row 2.*the row holds \['body'\]"):
        source[2]
