"""Opening files as documents, what is refused, and what is made of sources."""

import glob
import json
import os
import pickle
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from dataloader_dispatch import (
    DataError,
    DocumentSource,
    FileDocuments,
    TokenDocuments,
    data_fingerprint,
    open_documents,
    split_documents,
)


def texts(source: DocumentSource) -> list[object]:
    return [source[index] for index in range(len(source))]


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write(
        tmp_path / "data",
        {
            "b.md": "bee",
            "a.txt": "ä text\r\n",
            "Z.PY": "upper case ending",
            "sub/c.py": "sea",
            "sub/test/d.py": "a test",
            "sub/deep/test_e.txt": "another",
            "sub/lines.jsonl": '{"text": "one"}\n\n  \n{"id": 2, "text": "two\\n"}\n{"text": "three"}',
            "sub/image.png": b"\x89PNG",
            ".git/config.txt": "hidden",
            "sub/.hidden.py": "hidden too",
            "empty.txt": "",
        },
    )


def test_directory_is_read_with_its_subdirectories_in_name_order(tree: Path) -> None:
    source = open_documents(tree)
    expected = [
        "upper case ending",
        "ä text\r\n",
        "bee",
        "",
        "sea",
        "another",
        "one",
        "two\n",
        "three",
        "a test",
    ]
    assert texts(source) == expected
    assert source.files == 8
    assert source.size == sum(
        path.stat().st_size for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts
    ) - len(b"\x89PNG") - len("hidden too")
    assert source.where(7) == f"{tree}/sub/lines.jsonl:4"
    assert source.where(2) == f"{tree}/b.md"
    for index in (-1, 10):
        with pytest.raises(IndexError, match="10 documents"):
            source[index]


def test_files_globs_and_lists(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts(open_documents(str(tree / "b.md"))) == ["bee"]
    assert texts(open_documents(f"{tree}/sub/**/*.txt")) == ["another"]
    assert texts(open_documents(f"{tree}/**/*.py")) == ["sea", "a test"]
    assert texts(open_documents([tree / "sub" / "c.py", f"{tree}/*.md"])) == ["sea", "bee"]
    monkeypatch.chdir(tree)
    assert texts(open_documents("sub/*.py")) == ["sea"]
    monkeypatch.setenv("HOME", str(tree))
    assert texts(open_documents("~/b.md")) == ["bee"]


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (
            "**/test/**",
            ["upper case ending", "ä text\r\n", "bee", "", "sea", "another", "one", "two\n", "three"],
        ),
        (("test", "*.jsonl"), ["upper case ending", "ä text\r\n", "bee", "", "sea", "another"]),
        ("sub", ["upper case ending", "ä text\r\n", "bee", ""]),
        (["sub/*", "*.txt"], ["upper case ending", "bee"]),
        ("sub/**/test_*.txt", None),
    ],
)
def test_exclude(tree: Path, exclude: str | list[str], left: list[str] | None) -> None:
    found = texts(open_documents(tree, exclude=exclude))
    if left is None:
        assert "another" not in found
        assert len(found) == 9
    else:
        assert found == left


def test_exclude_applies_to_globs_and_not_to_named_files(tree: Path) -> None:
    assert texts(open_documents(f"{tree}/**/*.py", exclude="test")) == ["sea"]
    assert texts(open_documents(tree / "sub" / "test" / "d.py", exclude="test")) == ["a test"]


def test_glob_of_a_directory_with_an_odd_name(tmp_path: Path) -> None:
    root = write(tmp_path / "run [1]*", {"a.txt": "x", "sub/b.txt": "y", "sub/c/d.txt": "z"})
    assert texts(open_documents(root)) == ["x", "y", "z"]
    assert texts(open_documents(f"{glob.escape(str(root))}/**/*.txt")) == ["x", "y", "z"]
    assert texts(open_documents(f"{glob.escape(str(root))}/*/*.txt")) == ["y"]
    assert texts(open_documents(f"{glob.escape(str(root))}/**")) == ["x", "y", "z"]


def test_standard_library_opens_fast_and_reads_lazily() -> None:
    begin = time.process_time()
    source = open_documents(
        Path(os.__file__).parent, exclude=["site-packages", "test", "tests"], undecodable="skip"
    )
    seconds = time.process_time() - begin
    assert len(source) > 300
    assert source.size > 3_000_000
    assert seconds < 10
    data_fingerprint(source)
    train, held_out = split_documents(source, 0.02, seed=0)
    assert len(train) + len(held_out) == len(source)
    assert source.undecodable == 0


def test_parquet_rows_across_row_groups_and_files(tmp_path: Path) -> None:
    rows = [f"row {number} ü" for number in range(25)]
    columns = {"content": rows, "other": list(range(25))}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=7)
    large = pyarrow.table({"content": pyarrow.array(["last"], pyarrow.large_string())})
    pyarrow.parquet.write_table(large, tmp_path / "b.parquet")
    source = open_documents(tmp_path, text_column="content")
    assert texts(source) == [*rows, "last"]
    order = random.Random(0).sample(range(26), 26)
    copy = pickle.loads(pickle.dumps(source))
    assert [copy[index] for index in order] == [[*rows, "last"][index] for index in order]
    with pytest.raises(DataError, match=r"no column 'text'.*'content', 'other'"):
        open_documents(tmp_path)
    with pytest.raises(DataError, match="'other' holds int64"):
        open_documents(tmp_path / "a.parquet", text_column="other")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet row 1: 'text' is null"):
        open_documents(tmp_path / "c.parquet")[1]
    (tmp_path / "d.parquet").write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(DataError, match=r"d\.parquet is not a readable Parquet file"):
        open_documents(tmp_path / "d.parquet")


def test_undecodable_documents(tmp_path: Path) -> None:
    files = {"a.txt": "good", "b.txt": b"caf\xe9", "c.jsonl": b'{"text": "x"}\n{"text": "\xff"}\n'}
    root = write(tmp_path / "data", files)
    strict = open_documents(root)
    with pytest.raises(DataError, match=r"b\.txt: not UTF-8 at byte 3, which is 0xe9.*'skip'"):
        strict[1]
    with pytest.raises(DataError, match=r"c\.jsonl:2: not UTF-8"):
        strict[3]
    skipping = open_documents(root, undecodable="skip")
    assert skipping.undecodable == 0
    assert texts(skipping) == texts(skipping) == ["good", "", "x", ""]
    assert skipping.undecodable == 2
    replacing = open_documents(root, undecodable="replace")
    assert texts(replacing) == ["good", "caf�", "x", "�"]
    assert replacing.undecodable == 2
    # A run that met such a document under "error" must be able to continue with another choice.
    assert len({data_fingerprint(source) for source in (strict, skipping, replacing)}) == 1
    with pytest.raises(DataError, match="undecodable='ignore'"):
        open_documents(root, undecodable="ignore")  # type: ignore[arg-type]


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    files = {"a.txt": b"\xef\xbb\xbfone", "b.jsonl": b'\xef\xbb\xbf{"text": "two"}\n'}
    assert texts(open_documents(write(tmp_path / "data", files))) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r":3: not valid JSON"),
        ('{"body": "x"}', r":3: no key 'text'.*\['body'\].*text_column"),
        ("[1]", r":3: no key 'text'.*a list"),
        ('{"text": 5}', r":3: 'text' holds 5"),
    ],
)
def test_malformed_json_lines_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    source = open_documents(path)
    with pytest.raises(DataError, match=rf"x\.jsonl{message}"):
        source[1]
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl:1"):
        open_documents(path)


def test_bad_paths(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(DataError, match=f"{missing} does not exist"):
        open_documents(missing)
    write(tmp_path / "pictures", {"a.png": b"x"})
    with pytest.raises(
        DataError, match=r"pictures holds no file that ends in \.arrow, \.jsonl, \.md, .*\.txt"
    ):
        open_documents(tmp_path / "pictures")
    with pytest.raises(DataError, match=r"\*\.txt holds no file"):
        open_documents(f"{tmp_path}/pictures/*.txt")
    with pytest.raises(DataError, match=r"a\.png is of no known kind"):
        open_documents(tmp_path / "pictures" / "a.png")
    write(tmp_path / "hollow", {"a.txt": "", "b.md": ""})
    with pytest.raises(DataError, match=r"2 file\(s\), all of them empty.*a\.txt"):
        open_documents(tmp_path / "hollow")
    write(tmp_path / "blank", {"a.jsonl": "\n \n"})
    with pytest.raises(DataError, match="hold no text"):
        open_documents(tmp_path / "blank")
    write(tmp_path / "twice", {"a.txt": "x"})
    with pytest.raises(DataError, match=r"a\.txt is named twice, by .*twice.* and by .*a\.txt"):
        open_documents([tmp_path / "twice", tmp_path / "twice" / "a.txt"])
    with pytest.raises(DataError, match=r"excluded by \['\*\*/a\.txt'\]"):
        open_documents(tmp_path / "twice", exclude="a.txt")
    with pytest.raises(DataError, match=r"cannot read the directory .*nowhere: No such file"):
        open_documents(f"{missing}/*.txt")
    for nothing in ([], "", " "):
        with pytest.raises(DataError, match=r"empty\. Name a directory"):
            open_documents(nothing)
    with pytest.raises(DataError, match="exclude pattern ''"):
        open_documents(tmp_path / "twice", exclude=[""])


def test_dangling_links_and_special_files_are_named(tmp_path: Path) -> None:
    root = write(tmp_path / "data", {"a.txt": "x"})
    (root / "gone.txt").symlink_to(root / "nowhere.txt")
    with pytest.raises(DataError, match=r"gone\.txt: No such file"):
        open_documents(root)
    (root / "gone.txt").unlink()
    os.mkfifo(root / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is not a regular file"):
        open_documents(root)


def test_directory_links_that_form_a_circle_are_not_followed(tmp_path: Path) -> None:
    root = write(tmp_path / "data", {"a.txt": "x", "sub/b.txt": "y"})
    (root / "sub" / "up").symlink_to(root)
    assert texts(open_documents(root)) == ["x", "y"]


def test_unreadable_files_and_directories_are_named(
    ordinary_user: Callable[[], AbstractContextManager[None]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = write(Path(name), {"a.txt": "x", "closed/b.txt": "y"})
        root.chmod(0o755)
        (root / "closed").chmod(0)
        with ordinary_user(), pytest.raises(DataError, match=r"directory .*closed: Permission denied"):
            open_documents(root)
        (root / "closed").chmod(0o755)
        (root / "a.txt").chmod(0)
        with ordinary_user(), pytest.raises(DataError, match=r"a\.txt: no permission"):
            open_documents(root)
        (root / "a.txt").chmod(0o644)
        source = open_documents(root)
        (root / "a.txt").unlink()
        with pytest.raises(DataError, match=r"a\.txt: No such file"):
            source[0]


def test_token_documents_of_every_kind() -> None:
    kinds = [
        [1, 2, 3],
        (4, 5),
        range(3),
        torch.tensor([7, 8], dtype=torch.int32),
        np.array([9, 60000], dtype=np.uint16),
        array("H", [11]),
        b"\x01\x02",
        [],
    ]
    source = TokenDocuments(kinds)
    expected = [[1, 2, 3], [4, 5], [0, 1, 2], [7, 8], [9, 60000], [11], [1, 2], []]
    assert [source[index].tolist() for index in range(len(source))] == expected
    assert {source[index].dtype for index in range(len(source))} == {torch.int64}


@pytest.mark.filterwarnings("error")
def test_token_documents_of_a_read_only_memory_map(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    source = TokenDocuments([tokens[:4], tokens[4:]])
    assert source[1].tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([0.5], "document 0 does not hold token ids.*float32"),
        (["a"], "document 0 does not hold token ids"),
        ([True], "dtype torch.bool"),
        ([3, -1], "token id -1"),
        ([[1, 2]], r"shape \[1, 2\]"),
    ],
)
def test_what_is_no_token_is_refused(document: list[object], message: str) -> None:
    source = TokenDocuments([document])  # type: ignore[list-item]
    with pytest.raises(DataError, match=message):
        source[0]


def test_token_documents_need_one_dimension_and_a_document() -> None:
    with pytest.raises(DataError, match="document 0 has 2 dimensions"):
        TokenDocuments([torch.zeros(2, 2, dtype=torch.int64)])
    with pytest.raises(DataError, match="at least one"):
        TokenDocuments([])


@pytest.mark.parametrize(("total", "share"), [(2, 0.001), (2, 0.999), (3, 0.5), (100, 0.1), (1001, 0.02)])
def test_split_puts_every_document_on_one_side(total: int, share: float) -> None:
    documents = [f"document {number}" for number in range(total)]
    train, held_out = split_documents(documents, share, seed=4)
    assert sorted(map(str, texts(train) + texts(held_out))) == sorted(documents)
    assert len(held_out) == min(max(round(total * share), 1), total - 1)
    again = split_documents(documents, share, seed=4)
    assert (texts(again[0]), texts(again[1])) == (texts(train), texts(held_out))
    if total == 1001:
        assert set(texts(split_documents(documents, share, seed=5)[1])) != set(texts(held_out))


def test_split_refuses_what_cannot_be_split() -> None:
    with pytest.raises(DataError, match="at least two"):
        split_documents(["one"], 0.5, seed=0)
    for share in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(DataError, match="held_out="):
            split_documents(["one", "two"], share, seed=0)


def test_fingerprint_follows_the_data_and_not_their_place(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.txt": "one", "sub/b.jsonl": json.dumps({"text": "x"})}
    first = open_documents(write(tmp_path / "first", files))
    moved = open_documents(write(tmp_path / "moved", files))
    assert data_fingerprint(first) == data_fingerprint(moved)
    changed = [
        {**files, "a.txt": "ones"},
        {"c.txt": "one", "sub/b.jsonl": files["sub/b.jsonl"]},
        {**files, "z.md": "more"},
    ]
    others = [
        data_fingerprint(open_documents(write(tmp_path / f"other{number}", one)))
        for number, one in enumerate(changed)
    ]
    assert len({data_fingerprint(first), *others}) == 4


def test_fingerprint_of_sources_in_memory_and_of_parts() -> None:
    documents = ["a", "b", "c"]
    assert data_fingerprint(documents) == data_fingerprint(tuple(documents))
    assert data_fingerprint(documents) != data_fingerprint(["a", "b", "d"])
    assert data_fingerprint(documents) != data_fingerprint(["a", "b"])
    tokens = [[1, 2], [3]]
    assert data_fingerprint(TokenDocuments(tokens)) == data_fingerprint(
        TokenDocuments([torch.tensor([1, 2]), [3]])
    )
    assert data_fingerprint(TokenDocuments(tokens)) != data_fingerprint(TokenDocuments([[1], [2, 3]]))
    one, two = split_documents(documents, 0.5, seed=0)
    assert data_fingerprint(one) != data_fingerprint(two)
    assert data_fingerprint(one) == data_fingerprint(split_documents(documents, 0.5, seed=0)[0])


def test_parts_name_places_in_the_files(tree: Path) -> None:
    source = open_documents(tree)
    part, _ = split_documents(source, 0.3, seed=1)
    for index in range(len(part)):
        where = part.where(index)
        assert (
            source[next(number for number in range(len(source)) if source.where(number) == where)]
            == part[index]
        )
    assert split_documents(["a", "b"], 0.5, seed=0)[0].where(0) in ("document 0 of 2", "document 1 of 2")


def test_open_documents_returns_a_document_source(tree: Path) -> None:
    source = open_documents(tree)
    assert isinstance(source, FileDocuments)
    assert isinstance(source, DocumentSource)
    assert texts(pickle.loads(pickle.dumps(source))) == texts(source)


def test_a_column_that_no_file_has_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text('{"content": "x"}\n')
    open_documents(tmp_path)
    assert not caplog.messages
    open_documents(tmp_path, text_column="content")
    assert "text_column='content' has no effect: none of the 1 file(s), such as" in caplog.text
    caplog.clear()
    (tmp_path / "b.jsonl").write_text('{"content": "x"}\n')
    open_documents(tmp_path, text_column="content")
    assert not caplog.messages
