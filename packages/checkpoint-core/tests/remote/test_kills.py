"""A job that saves to a store may be killed at any instant: what is committed stays, and the rest goes."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "store_kills.py"
Worked = subprocess.CompletedProcess[str]


def campaign(run_worker: Callable[..., Worked], environment: dict[str, str], *arguments: object) -> None:
    directory, address, mode, kills = arguments
    words = [directory, json.dumps(environment), address, mode, kills, 7]
    result = json.loads(run_worker(WORKER, *words, timeout=1800).stdout)
    print(result)
    assert result["failures"] == []
    assert result["kills"] == kills
    # The kills must have hit uploads, and left something to clean, or nothing was tested.
    assert result["phases"].get("uploading", 0) >= int(str(kills)) // 10
    assert result["cleaned"] >= int(str(kills)) // 10


@pytest.mark.parametrize(
    ("mode", "kills"), [pytest.param("async", 4, marks=pytest.mark.full), ("two-ranks", 4)]
)
def test_kills_at_random_instants(run_worker, weed, s3: str, tmp_path: Path, mode: str, kills: int) -> None:
    campaign(run_worker, weed.environment(), tmp_path / "job", s3, mode, kills)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["one", "async", "two-ranks"])
def test_many_kills(run_worker, weed, s3: str, tmp_path: Path, mode: str) -> None:
    campaign(run_worker, weed.environment(), tmp_path / "job", s3, mode, 200)
