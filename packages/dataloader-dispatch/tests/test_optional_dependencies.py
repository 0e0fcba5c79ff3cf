"""Without pyarrow everything but Parquet and Arrow works, and Parquet says what is missing."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.modules["pyarrow"] = None  # what an environment without it answers to an import
from dataloader_dispatch import DataError, DocumentStream, StreamLoader, build_loader, open_documents
source = open_documents(sys.argv[1] + "/a.txt")
dataset = DocumentStream(source, sequence_length=4, encode=lambda text: text.encode(), eos_token_id=0)
print([batch["input_ids"].tolist() for batch in StreamLoader(dataset, 2)])
print([batch.tolist() for batch in build_loader([1, 2, 3], 2, shuffle=True)])
try:
    open_documents(sys.argv[1])
except DataError as error:
    print(error)
print(any(name.startswith(("transformers", "matplotlib", "pyarrow.")) for name in sys.modules))
"""


def test_without_optional_packages(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcde")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    packed, built, missing, heavy = result.stdout.splitlines()
    assert packed == "[[[97, 98, 99, 100], [101, 0, 0, 0]]]"
    assert sorted(built.replace("[", "").replace("]", "").split(", ")) == ["1", "2", "3"]
    assert "b.parquet" in missing
    assert "pip install 'dataloader-dispatch[arrow]'" in missing
    assert heavy == "False"
