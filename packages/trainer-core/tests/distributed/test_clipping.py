"""The gradient norm of every layout on real ranks, against one process that has all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_env import fake_job
from trainer_core import ConfigurationError
from trainer_core.distributed.executor import clip_grad_norm_

pytestmark = pytest.mark.xdist_group("ranks")


class Operators(TorchDispatchMode):
    """Counts the operators of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


def with_gradient(parameter: Tensor, gradient: Tensor | None = None) -> nn.Parameter:
    made = nn.Parameter(parameter)
    made.grad = torch.ones_like(made) if gradient is None else gradient
    return made


def test_plain_gradients_are_read_once_and_scaled_once() -> None:
    parameters = [with_gradient(torch.zeros(number + 1)) for number in range(20)]
    with Operators() as seen:
        clip_grad_norm_(parameters, 1.0)
    assert seen.calls.count("aten._foreach_norm.Scalar") == 1
    assert seen.calls.count("aten._foreach_mul_.Tensor") == 1
    assert len(seen.calls) <= 12, "whatever the number of gradients"
    with Operators() as seen:
        clip_grad_norm_(parameters, 1.0, foreach=False)
    assert seen.calls.count("aten.linalg_vector_norm.default") == 21
    assert seen.calls.count("aten.mul_.Tensor") == 20


def test_nothing_waits_for_the_device_where_sums_are_over_ranks() -> None:
    with fake_job(4):
        mesh = init_device_mesh("cpu", (2, 2))
        whole = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        parameters = [with_gradient(whole), with_gradient(torch.zeros(3))]
        with Operators() as seen:
            norm = clip_grad_norm_(parameters, 1.0, stages=mesh.get_group(0))
    assert seen.calls.count("c10d.allreduce_.default") == 3
    assert "aten._local_scalar_dense.default" not in seen.calls
    assert norm.device == torch.device("cpu")


def test_squares_beyond_float32_are_added_up_over_ranks() -> None:
    with fake_job(2):
        mesh = init_device_mesh("cpu", (2,))
        huge = distribute_tensor(torch.full((2,), 1e25), mesh, [Shard(0)], src_data_rank=None)
        assert clip_grad_norm_([with_gradient(huge, huge)], None).item() == pytest.approx(1e25)


def test_a_gradient_laid_out_like_its_parameter_stays_where_it_is() -> None:
    with fake_job(2):
        mesh = init_device_mesh("cpu", (2,))
        parameter = with_gradient(distribute_tensor(torch.zeros(2), mesh, [Shard(0)], src_data_rank=None))
        gradient = parameter.grad
        clip_grad_norm_([parameter], 0.5)
        assert parameter.grad is gradient
        assert gradient.to_local().tolist() == pytest.approx([0.5])


@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1e-2])
def test_tiny_gradients_are_scaled_as_by_torch(scale: float) -> None:
    ours, theirs = (with_gradient(torch.zeros(4), torch.full((4,), scale)) for _ in range(2))
    clip_grad_norm_([ours], scale)
    nn.utils.clip_grad_norm_([theirs], scale)
    assert torch.equal(ours.grad, theirs.grad)


def test_groups_of_one_rank_are_not_asked() -> None:
    with fake_job(2):
        mesh = init_device_mesh("cpu", (1, 2))
        whole = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Replicate()], src_data_rank=None)
        with Operators() as seen:
            norm = clip_grad_norm_([with_gradient(whole)], None)
    assert norm.item() == 4.0
    assert not [call for call in seen.calls if call.startswith("c10d")]


class Wrapped(Tensor):
    """A tensor that lacks the operators of many tensors, as some of quantization do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "_foreach" in getattr(function, "__name__", ""):
            raise NotImplementedError(function.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_tensors_of_other_classes_are_measured_one_by_one() -> None:
    parameter = with_gradient(torch.zeros(4), torch.full((4,), 3.0).as_subclass(Wrapped))
    norm = clip_grad_norm_([parameter, with_gradient(torch.zeros(64))], 1.0)
    assert norm.item() == 10.0
    torch.testing.assert_close(parameter.grad.as_subclass(Tensor), torch.full((4,), 0.3))


def test_copies_are_scaled_and_not_counted_without_stages_too() -> None:
    counted, copy = (with_gradient(torch.zeros(4)) for _ in range(2))
    assert clip_grad_norm_([counted, copy], 1.0, counted_elsewhere=[copy]).item() == 2.0
    for each in (counted, copy):
        torch.testing.assert_close(each.grad, torch.full((4,), 0.5))


def test_the_norm_is_on_the_device_of_the_parameters_where_there_are_no_gradients() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2, device="meta"))], 1.0).device.type == "meta"


def test_layouts_that_say_nothing_about_the_gradient_are_refused() -> None:
    with fake_job(4):
        mesh, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        rows, none = (distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None) for _ in "ab")
        sums = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
        with pytest.raises(ConfigurationError, match=r"shape \[4\].*itself Partial"):
            clip_grad_norm_([with_gradient(sums)], 1.0)
        elsewhere = distribute_tensor(torch.zeros(4), other, [Replicate(), Shard(0)], src_data_rank=None)
        with pytest.raises(ConfigurationError, match=r"is on .*, and its gradient on"):
            clip_grad_norm_([with_gradient(rows, elsewhere)], 1.0)
        with pytest.raises(ConfigurationError, match="only the parameter is a DTensor"):
            clip_grad_norm_([with_gradient(rows, torch.zeros(4))], 1.0)
        with pytest.raises(ConfigurationError, match="only the gradient is a DTensor"):
            clip_grad_norm_([with_gradient(torch.zeros(4), none)], 1.0)


CASES = {
    2: [
        "plain",
        "full sharding",
        "tensor parallel",
        "sequence parallel",
        "rows, columns and copies",
        "uneven",
        "empty",
        "partial gradients",
        "no gradients on a rank",
        "16 bits",
        "64 bits",
        "two stages",
        "a stage without parameters",
    ],
    4: [
        "hybrid",
        "tensor parallel and full sharding",
        "mixture [0, 1, 2, 3]",
        "mixture [2, 3, 1, 0]",
        "uneven",
        "partial gradients",
        "experts on a mesh of their own",
        "two stages of two shards",
        "two stages of different kinds",
    ],
}
EVERY_CASE = [(ranks, case) for ranks, cases in CASES.items() for case in cases]

Worlds = dict[int, list[dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def worlds(launch: Callable[[str, int], list[dict[str, Any]]]) -> Worlds:
    return {ranks: launch("clipping.py", ranks) for ranks in CASES}


def test_every_case_was_run(worlds: Worlds) -> None:
    for ranks, notes in worlds.items():
        assert [list(each) for each in notes] == [CASES[ranks]] * ranks


@pytest.mark.parametrize(("ranks", "case"), EVERY_CASE)
def test_norm_and_gradients_are_those_of_one_process(worlds: Worlds, ranks: int, case: str) -> None:
    notes = [each[case] for each in worlds[ranks]]
    for note in notes:
        assert note["before"] > 1.0, "so long that it is clipped"
        assert note["norm"] == notes[0]["norm"], "the same on every rank, to the last bit"
        assert note["norm"] == pytest.approx(1.0, abs=1e-6)
        assert note["dtype"] == note["expected dtype"]
        assert max(note["gradients"], default=0.0) <= (1e-2 if case == "16 bits" else 1e-6)


@pytest.mark.parametrize(("ranks", "case"), EVERY_CASE)
def test_there_is_one_sum_for_each_group_and_none_can_be_left_out(
    worlds: Worlds, ranks: int, case: str
) -> None:
    notes = [each[case] for each in worlds[ranks]]
    for note in notes:
        assert sorted(note["sums"]) == sorted(note["expected sums"])
        assert "stages" not in note["sums"][:-1], "stages come last"
    for name in {name for note in notes for name in note["without"]}:
        wrong = [abs(note["without"].get(name, 1.0) - 1.0) for note in notes]
        assert max(wrong) > 1e-3, f"without the sum over {name}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_on_the_host_are_added_up_by_a_group_that_serves_a_gpu_alone(
    launch: Callable[[str, int], list[dict[str, Any]]],
) -> None:
    for notes in launch("clipping_offloaded.py", 2):
        assert notes == {"norm": 10.0, "device": "cpu", "gradient": pytest.approx([0.1] * 4)}
