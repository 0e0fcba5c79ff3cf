"""Networks that lose, cut and delay answers, and servers that are killed and started again."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from s3_proxy import Fault, Proxy
from s3_servers import end, restart, start_weed

from checkpoint_core import CheckpointConfig, CheckpointError, CheckpointManager, find_latest_checkpoint

FAULTS: tuple[Fault, ...] = ("refuse", "truncate", "late", "lost answer", "close")
Use = Callable[[Mapping[str, str]], None]


@pytest.fixture
def proxy(weed, use: Use) -> Iterator[Proxy]:
    found = Proxy(weed.endpoint)
    use({"AWS_ENDPOINT_URL": found.address})
    yield found
    found.close()


def model_of(step: int) -> torch.nn.Module:
    """Nine MB, so that the upload has several parts."""
    torch.manual_seed(step)
    return torch.nn.Linear(1500, 1501)


def save_and_load(url: str, steps: range) -> None:
    """Each step, and what was loaded of it."""
    model = torch.nn.Linear(1500, 1501)
    config = CheckpointConfig(url, timeout_seconds=120, save_total_limit=2)
    with CheckpointManager(config, {"model": model}) as manager:
        for step in steps:
            model.load_state_dict(model_of(step).state_dict())
            manager.save_checkpoint(step)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            loaded = manager.load_checkpoint()
            assert loaded is not None
            assert loaded.step == step
            assert all(map(torch.equal, model.parameters(), model_of(step).parameters()))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_again_and_again(proxy: Proxy, s3: str, use: Use, fault: Fault) -> None:
    use({"AWS_ENDPOINT_URL": proxy.address})
    every = 12 if fault == "late" else 3
    proxy.fault = lambda method, path, number: fault if number % every == 0 else None
    save_and_load(s3, range(1, 3))
    assert len(proxy.faults) > 4


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_faults_at_random(proxy: Proxy, s3: str, use: Use, seed: int) -> None:
    use({"AWS_ENDPOINT_URL": proxy.address})
    draw = random.Random(seed)
    proxy.fault = lambda method, path, number: draw.choice(FAULTS) if draw.random() < 0.25 else None
    save_and_load(s3, range(1, 5))
    assert len(Counter(proxy.faults)) == len(FAULTS)


def test_a_slow_store_is_waited_for(proxy: Proxy, s3: str, use: Use) -> None:
    use({"AWS_ENDPOINT_URL": proxy.address})
    proxy.bytes_per_s = 4e6
    save_and_load(s3, range(1, 2))


@pytest.fixture
def own_weed(tmp_path: Path) -> Iterator[list]:
    """A server of this test alone: what it is, and its process, which the test may replace."""
    (tmp_path / "weed").mkdir()
    found = list(start_weed(tmp_path / "weed"))
    yield found
    end(found[1])


def kill_amid(found: list, folder: Path, proxy: Proxy, what: str, down_s: float) -> threading.Thread:
    """A thread that kills the server once a request for `what` was answered, and starts it again."""

    def run() -> None:
        until = time.monotonic() + 60
        while not any(what in each.path and each.method == "PUT" for each in proxy.requests):
            assert time.monotonic() < until
            time.sleep(0.005)
        found[1].kill()
        found[1].wait()
        time.sleep(down_s)
        found[1] = restart(found[1], found[0], folder)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_server_killed_amid_a_save_and_started_again(own_weed: list, tmp_path: Path, use: Use) -> None:
    """The save waits for it, or fails with a plain error; what was committed before stays as it is."""
    proxy = Proxy(own_weed[0].endpoint, bytes_per_s=8e6)
    use({**own_weed[0].environment(), "AWS_ENDPOINT_URL": proxy.address})
    url = "s3://tests/restarted/run"
    model = model_of(1)
    with CheckpointManager(CheckpointConfig(url, timeout_seconds=120), {"model": model}) as manager:
        manager.save_checkpoint(1)
        proxy.requests.clear()
        model.load_state_dict(model_of(2).state_dict())
        killer = kill_amid(own_weed, tmp_path / "weed", proxy, "model.safetensors", 1.0)
        failed = ""
        try:
            manager.save_checkpoint(2)
        except CheckpointError as error:
            failed = str(error)
        killer.join()
        assert "cannot be" in failed or not failed
        newest = find_latest_checkpoint(url, verify_checksums=True)
        assert newest is not None
        assert newest.name == ("checkpoint-1" if failed else "checkpoint-2")
        model.load_state_dict(model_of(3).state_dict())
        manager.save_checkpoint(3)
        manager.load_checkpoint()
        assert all(map(torch.equal, model.parameters(), model_of(3).parameters()))
    proxy.close()


def test_a_server_that_stays_away_is_given_up(own_weed: list, use: Use) -> None:
    url = "s3://tests/away/run"
    use(own_weed[0].environment())
    with CheckpointManager(CheckpointConfig(url, timeout_seconds=4), {"model": model_of(1)}) as manager:
        manager.save_checkpoint(1)
        own_weed[1].kill()
        own_weed[1].wait()
        with pytest.raises(CheckpointError, match="the store cannot be reached"):
            manager.save_checkpoint(2)
