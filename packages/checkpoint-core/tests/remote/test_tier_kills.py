"""A job of two tiers may be killed at any instant: both hold whole checkpoints, and the newest is resumed."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "tier_kills.py"
Worked = subprocess.CompletedProcess[str]


def campaign(
    run_worker: Callable[..., Worked],
    environment: dict[str, str],
    folder: Path,
    address: str,
    mode: str,
    kills: int,
) -> None:
    words = [folder, json.dumps(environment), address, mode, kills, 7]
    result = json.loads(run_worker(WORKER, *words, timeout=1800).stdout)
    print(result)
    assert result["failures"] == []
    assert result["kills"] == kills
    assert result["wipes"] == kills // 7
    # The kills must have hit uploads, and left something to clean, or nothing was tested.
    assert result["phases"].get("uploading", 0) >= kills // 20
    assert result["cleaned"] >= kills // 20


@pytest.mark.parametrize(
    ("mode", "kills"), [pytest.param("two-ranks", 3, marks=pytest.mark.full), ("parts", 3)]
)
def test_kills_at_random_instants(run_worker, weed, s3: str, tmp_path: Path, mode: str, kills: int) -> None:
    campaign(run_worker, weed.environment(), tmp_path / "job", s3, mode, kills)


@pytest.mark.full
@pytest.mark.parametrize(("mode", "kills"), [("one", 100), ("async", 50), ("two-ranks", 60), ("parts", 60)])
def test_many_kills(run_worker, weed, s3: str, tmp_path: Path, mode: str, kills: int) -> None:
    campaign(run_worker, weed.environment(), tmp_path / "job", s3, mode, kills)
