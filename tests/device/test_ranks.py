"""Two ranks on two fake devices: groups of the backend "nccl", and every trainer of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from .case import curve as curve_of
from .case import experts, llama, losses, make, rows

ROOT = Path(__file__).parents[2]
Seen = list[dict[str, Any]]
TRAINERS = ("ddp", "fsdp2", "pipeline")


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[[str], Seen]:
    """Run a scenario of `rank.py` on two ranks, and return what each of them saw."""

    def run(scenario: str) -> Seen:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        path = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
        processes = []
        for rank in range(2):
            env = {
                **os.environ,
                **place,
                "PYTHONPATH": path,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
            }
            command = [sys.executable, "-m", "tests.device.rank", scenario, str(tmp_path)]
            out = (tmp_path / f"{scenario}-rank{rank}.log").open("w")
            processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
        said = "\n".join((tmp_path / f"{scenario}-rank{rank}.log").read_text()[-4000:] for rank in range(2))
        assert codes == [0, 0], said
        seen = [json.loads((tmp_path / f"{scenario}-rank{rank}.json").read_text()) for rank in range(2)]
        assert [one["races"] for one in seen] == [[], []]
        return seen

    return run


def test_groups(ranks: Callable[[str], Seen]) -> None:
    both = ranks("groups")
    assert both[0]["own"] != both[1]["own"]
    assert both[0]["alike"] == both[1]["alike"]
    for rank, seen in enumerate(both):
        assert seen["backend"] == "nccl"
        assert seen["reduced"] == [3.0] * 4
        assert seen["gathered"] == [0.0, 0.0, 1.0, 1.0]
        assert seen["scattered"] == [2.0 * rank]
        assert seen["moved"] == [2.0] * 3
        assert seen["told"] == [[0.0, 0.1], [1.0, 0.1]]
        assert len(seen["refused"]) == 3
        assert all("device type cpu" in reason for reason in seen["refused"])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_curve_of_one_process_on_the_cpu(
    trainer: str, ranks: Callable[[str], Seen], tmp_path: Path
) -> None:
    seen = ranks(f"train-{trainer}")
    alone = make(tmp_path / "alone", use_cpu=True)
    alone.train()
    assert seen[0]["backend"] == "nccl"
    assert [one["devices"] for one in seen] == [["cuda:0"], ["cuda:1"]]
    assert losses(seen[0]["curve"]) == pytest.approx(losses(curve_of(alone)), rel=1e-5)


@pytest.mark.parametrize(("trainer", "precision"), [("ddp", "fp16"), ("fsdp2", "bf16")])
def test_the_curve_of_mixed_precision(
    trainer: str, precision: str, ranks: Callable[[str], Seen], tmp_path: Path
) -> None:
    seen = ranks(f"train-{trainer}:{precision}")
    alone = make(tmp_path / "alone", use_cpu=True, mixed_precision=precision)
    alone.train()
    assert losses(seen[0]["curve"]) == pytest.approx(losses(curve_of(alone)), rel=2e-2)


def test_weights_on_the_host(ranks: Callable[[str], Seen], tmp_path: Path) -> None:
    seen = ranks("train-offload")
    alone = make(tmp_path / "alone", use_cpu=True)
    alone.train()
    assert [one["devices"] for one in seen] == [["cpu"], ["cpu"]]
    assert losses(seen[0]["curve"]) == pytest.approx(losses(curve_of(alone)), rel=1e-5)


def test_weights_on_the_host_are_in_pinned_memory(ranks: Callable[[str], Seen]) -> None:
    # The step waits for its gradients, as the optimizer is on the host; no copy waits for itself.
    for seen in ranks("waits-offload"):
        assert seen["late"]
        assert not [wait for wait in seen["late"] if "pageable" in wait]


def test_compressed_gradients_are_near_the_curve(ranks: Callable[[str], Seen], tmp_path: Path) -> None:
    found = losses(ranks("train-powersgd")[0]["curve"])
    alone = make(tmp_path / "alone", use_cpu=True)
    alone.train()
    expected = losses(curve_of(alone))
    assert found[:3] == pytest.approx(expected[:3], rel=1e-5)  # whole gradients at first
    assert found[3:] != pytest.approx(expected[3:], rel=1e-7)
    assert found == pytest.approx(expected, rel=0.1)


def test_layers_divided_among_ranks(ranks: Callable[[str], Seen], tmp_path: Path) -> None:
    seen = ranks("train-tensor")
    alone = make(tmp_path / "alone", model=llama, use_cpu=True)
    alone.train()
    assert [one["devices"] for one in seen] == [["cuda:0"], ["cuda:1"]]
    assert losses(seen[0]["curve"]) == pytest.approx(losses(curve_of(alone)), rel=1e-5)


@pytest.mark.parametrize("exchange", ["context", "ring"])
def test_sequences_divided_among_ranks(ranks: Callable[[str], Seen], tmp_path: Path, exchange: str) -> None:
    seen = ranks(f"train-{exchange}")
    alone = make(tmp_path / "alone", model=llama, use_cpu=True)
    alone.train()
    assert losses(seen[0]["curve"]) == pytest.approx(losses(curve_of(alone)), rel=1e-5)


def test_experts_on_each_device(ranks: Callable[[str], Seen], tmp_path: Path) -> None:
    seen = ranks("train-experts")
    alone = make(tmp_path / "alone", model=experts, use_cpu=True)
    alone.train()
    assert losses(seen[0]["curve"]) == pytest.approx(losses(curve_of(alone)), rel=1e-5)


def test_experts_divided_among_ranks(ranks: Callable[[str], Seen], tmp_path: Path) -> None:
    seen = ranks("train-exchange")
    alone = make(tmp_path / "alone", model=experts, use_cpu=True)
    alone.train()
    assert losses(seen[0]["curve"]) == pytest.approx(losses(curve_of(alone)), rel=1e-5)


def test_divided_experts_wait_once_in_each_layer(ranks: Callable[[str], Seen]) -> None:
    for seen in ranks("waits-exchange"):
        # For the numbers of tokens that come, in each of two layers of each step; in the backward pass never.
        # Products of float32 are computed one after the other here, and wait as well.
        told = [wait for wait in seen["late"] if " at model_parallel/experts.py" in wait]
        assert all(" at llama_pretrain/model/moe.py" in wait for wait in set(seen["late"]) - set(told))
        steps = Counter(wait.partition(":")[0] for wait in told)
        assert set(steps.values()) == {2}
        assert (seen["steps"], len(steps)) == (8, 6)  # the first two are not looked at


def test_a_trainer_finds_its_ranks_and_devices_itself(ranks: Callable[[str], Seen]) -> None:
    for rank, seen in enumerate(ranks("alone-ddp")):
        assert seen["devices"] == [[f"cuda:{rank}"]] * 2


@pytest.mark.parametrize("trainer", [*TRAINERS, "diloco"])
def test_resume(trainer: str, ranks: Callable[[str], Seen]) -> None:
    seen = ranks(f"resume-{trainer}")[0]
    assert len(seen["curve"]) == 6
    assert seen["curve"] == seen["whole"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_steps_without_a_log_wait_for_nothing(trainer: str, ranks: Callable[[str], Seen]) -> None:
    for seen in ranks(f"waits-{trainer}"):
        assert seen["steps"] == 8
        assert not seen["late"]


@pytest.mark.parametrize("trainer", ["ddp", "fsdp2"])
def test_evaluation_waits_for_no_batch(trainer: str, ranks: Callable[[str], Seen]) -> None:
    for seen in ranks(f"evaluate-{trainer}"):
        # Two evaluations, each of five batches.
        assert seen["batches"] == 8
        assert not seen["late"]
        assert len(seen["losses"]) == 2


def test_divided_layers_wait_only_where_their_inputs_are_compared(ranks: Callable[[str], Seen]) -> None:
    for seen in ranks("waits-tensor"):
        assert seen["steps"] == 8
        # In ever fewer passes: of the last four steps in one.
        compared = [wait for wait in seen["late"] if "model_parallel/same.py" in wait]
        assert compared == seen["late"]
        assert len({wait.partition(":")[0] for wait in compared if wait >= "step 5"}) <= 1


def test_the_doctor_reads_the_clock_when_the_device_is_done(ranks: Callable[[str], Seen]) -> None:
    for seen in ranks("timed"):
        for part in ("examination", "point_to_point"):
            # Work comes before each reading.
            waited = seen[part]
            assert len(waited) > 2
            assert all(before < after for before, after in pairwise(waited)), part
        # Begin and end of each product, with nothing in between two of them.
        waited = seen["device_check"][1:]
        assert all(waited[begin] < waited[begin + 1] for begin in range(0, len(waited), 2))


def test_evaluation_of_a_pipeline(ranks: Callable[[str], Seen], tmp_path: Path) -> None:
    # The next stage waits for the shape of each hidden state, so that its host waits here.
    seen = ranks("evaluate-pipeline")
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "use_cpu": True}
    alone = make(tmp_path / "alone", eval_dataset=rows(40), **settings)
    alone.train()
    expected = [entry["eval_loss"] for entry in alone.state.log_history if "eval_loss" in entry]
    assert seen[0]["losses"] == pytest.approx(expected, rel=1e-5)


def test_dispatched_batches(ranks: Callable[[str], Seen], tmp_path: Path) -> None:
    seen = ranks("dispatched-ddp")
    alone = make(tmp_path / "alone", use_cpu=True)
    alone.train()
    assert losses(seen[0]["curve"]) == pytest.approx(losses(curve_of(alone)), rel=1e-5)
    assert [one["late"] for one in seen] == [[], []]


def test_batches_of_any_length_arrive_in_pinned_memory(ranks: Callable[[str], Seen]) -> None:
    sender, receiver = ranks("delivered")
    for device in ("cuda", "cpu"):
        assert sender[device]["right"] == receiver[device]["right"] == [True] * 4
        assert not receiver[device]["waits"]
    # Where they are wanted on the host, page-locking them would only take time.
    assert receiver["cpu"]["pinned"] == [False] * 4


def test_what_goes_to_a_rank_that_is_late_is_waited_for(ranks: Callable[[str], Seen]) -> None:
    first, second = ranks("handover")
    assert second["received"] == [3.0, 3.0]
    assert first["summed"] == second["summed"] == [[[3.0] * 4], [3.0]]
    for seen in (first, second):
        assert seen["held"][0] == seen["held"][1], "a text leaves nothing on the device"


def test_compressed_gradients_leave_replicas_alike(ranks: Callable[[str], Seen]) -> None:
    first, second = ranks("late-powersgd")
    assert first["weights"] == second["weights"]
