"""The steps of one trace: each nanosecond has one category, whatever the trace holds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from perf_metrics import StepBreakdown, TraceFileError, read_steps
from perf_metrics.traces.classify import (
    CATEGORIES,
    collective_kind,
    kernel_category,
    operator_category,
    span_category,
)

from .conftest import Trace

GEMM = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 64, 64, 4>>"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


def microseconds(step: StepBreakdown) -> dict[str, float]:
    return {name: time / 1000 for name, time in step.nanoseconds.items() if time}


def test_a_step_of_a_gpu(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(5, 1000, 1000)
    trace.event("user_annotation", "data wait", 1000, 50)
    trace.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1050, 20, 8, stream=8)
    trace.kernel(GEMM, 1070, 200)
    trace.kernel(FLASH, 1270, 100)
    trace.nccl("_allgather_base", 1170, 300)  # 200 behind computation, 100 alone
    trace.kernel(ADD, 1500, 100)
    trace.kernel("a_kernel_that_nobody_knows", 1600, 50)
    trace.event("gpu_user_annotation", "ProfilerStep#5", 1070, 580, 7)
    trace.event("gpu_user_annotation", "nccl:_all_gather_base", 1170, 300, 20)
    trace.event("user_annotation", "checkpoint", 1700, 200)
    found = read_steps(trace.write(tmp_path / "trace.json.gz"))
    (step,) = found.steps
    assert (found.rank, found.on_device, step.number, step.seconds) == (0, True, 5, 1e-3)
    assert microseconds(step) == {
        "matmul": 200,
        "attention": 100,
        "other_kernels": 150,
        "exposed_communication": 100,
        "memory_copies": 20,
        "checkpoint": 200,
        "data_wait": 50,
        "host_gap": 180,
    }
    assert step.overlapped_ns == 200_000
    (gather,) = found.communications
    assert gather.collective.label == "all_gather (shard)"
    assert gather.collective.ranks == (0, 1)
    assert gather.exposed == [(1_370_000, 1_470_000)]


def test_the_published_case_of_exposed_and_overlapped_network_time(tmp_path: Path) -> None:
    """All-gathers prefetched one block ahead: all but those of the first and the last block are hidden.

    IBM's account of FSDP on H100: about 90 % of the time of the network overlaps, and 10 % is exposed.
    """
    trace, blocks, gather = Trace(), 20, 50.0
    trace.step(0, 0, blocks * 100 + 2 * gather)
    trace.nccl("_allgather_base", 0, gather)
    for block in range(blocks):
        start = gather + 100 * block
        trace.kernel(GEMM, start, 100)
        if block < blocks - 2:
            trace.nccl("_allgather_base", start + 5, gather)
    trace.nccl("_reduce_scatter_base", gather + blocks * 100, gather)
    (step,) = read_steps(trace.write(tmp_path / "trace.json")).steps
    exposed = step.nanoseconds["exposed_communication"]
    assert exposed / (exposed + step.overlapped_ns) == pytest.approx(0.10)
    assert sum(step.nanoseconds.values()) == step.end_ns - step.start_ns


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_random_traces_add_up(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    trace = Trace()
    now = chance.uniform(0, 1e15)
    begin = now
    for number in range(chance.randint(0, 4)):
        length = chance.uniform(10, 1000)
        trace.step(number, now, length)
        now += length + chance.choice([0, 0.001, 7])
    on_device = seed % 2 == 0
    for _ in range(chance.randint(1, 120)):
        start, length = begin + chance.uniform(-200, 3000), chance.choice([0, 0.001, chance.uniform(0, 400)])
        kind = chance.randrange(7)
        if kind < 2 and on_device:
            trace.kernel(chance.choice([GEMM, FLASH, ADD]), start, length, chance.randint(7, 9))
        elif kind == 2 and on_device:
            trace.nccl(chance.choice(["allreduce", "send", "nothing known"]), start, length)
        elif kind == 3 and on_device:
            trace.event("gpu_memset", "Memset", start, length, 7)
        elif kind == 4:
            trace.event("user_annotation", chance.choice(["data wait", "checkpoint"]), start, length)
        elif kind == 5:
            trace.event("user_annotation", "gloo:all_reduce", start, length, 2)
        else:
            name = chance.choice(["aten::mm", "aten::add", "autograd::engine::evaluate_function: X", "Node"])
            trace.event("cpu_op", name, start, length)
    trace.event("cpu_op", "aten::mm", begin, 5)
    found = read_steps(trace.write(tmp_path / "trace.json"))
    for step in found.steps:
        assert set(step.nanoseconds) == set(CATEGORIES)
        assert min(step.nanoseconds.values()) >= 0
        assert sum(step.nanoseconds.values()) == step.end_ns - step.start_ns
    exposed = sum(step.nanoseconds["exposed_communication"] for step in found.steps)
    overlapped = sum(step.overlapped_ns for step in found.steps)
    assert sum(each.exposed_ns for each in found.communications) == exposed
    assert sum(each.overlapped_ns for each in found.communications) == overlapped
    if found.steps[0].number is not None:
        starts = [step.start_ns for step in found.steps[1:]]
        assert starts == [step.end_ns for step in found.steps[:-1]]


@pytest.mark.parametrize("seed", range(10))
def test_each_microsecond_against_a_count_by_hand(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    trace, length = Trace(), 400
    trace.step(0, 0, length)
    order = ["matmul", "attention", "other_kernels", "network", "memory_copies", "checkpoint", "data_wait"]
    running: list[set[str]] = [set() for _ in range(length)]
    for _ in range(30):
        start, kind = chance.randrange(length), chance.choice(order)
        end = min(length, start + chance.randrange(1, 60))
        if kind == "network":
            trace.nccl("allreduce", start, end - start)
        elif kind == "memory_copies":
            trace.event("gpu_memcpy", "Memcpy DtoD", start, end - start, 7)
        elif kind in ("checkpoint", "data_wait"):
            # Before all communication, which would be part of it.
            start, end = 0, chance.randrange(1, 40)
            trace.event("user_annotation", kind.replace("_", " "), start, end)
        else:
            name = {"matmul": GEMM, "attention": FLASH, "other_kernels": ADD}[kind]
            trace.kernel(name, start, end - start)
        for instant in range(start, end):
            running[instant].add(kind)
    trace.events = [
        event
        for event in trace.events
        if not (event["tid"] == 20 and isinstance(event["ts"], int) and event["ts"] < 40)
    ]
    expected = dict.fromkeys(CATEGORIES, 0)
    overlapped = 0
    network = {event["ts"]: event for event in trace.events if event["tid"] == 20}
    for instant, kinds in enumerate(running):
        kinds.discard("network")
        if any(
            start <= instant < start + event["dur"]  # type: ignore[operator]
            for start, event in network.items()
        ):
            kinds.add("network")
        first = next((kind for kind in order if kind in kinds), "host_gap")
        expected["exposed_communication" if first == "network" else first] += 1000  # type: ignore[index]
        overlapped += 1000 * ("network" in kinds and first != "network")
    (step,) = read_steps(trace.write(tmp_path / "trace.json")).steps
    assert step.nanoseconds == expected
    assert step.overlapped_ns == overlapped


@pytest.mark.parametrize(
    "field",
    [
        {"ts": float("nan")},
        {"ts": "12"},
        {"dur": float("inf")},
        {"dur": -5},
        {"ts": 10**400},
        {"pid": []},
        {"name": None},
    ],
    ids=str,
)
def test_events_of_another_form_do_no_harm(tmp_path: Path, field: dict[str, object]) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    for category in ("cpu_op", "user_annotation", "kernel"):
        trace.event(category, "aten::mm", 10, 20)
        trace.events[-1] |= field
    (step,) = read_steps(trace.write(tmp_path / "trace.json")).steps
    assert sum(step.nanoseconds.values()) == step.end_ns - step.start_ns


def test_operators_of_a_cpu_count_as_what_they_call(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.event("cpu_op", "aten::linear", 0, 100)
    trace.event("cpu_op", "aten::t", 10, 20)
    trace.event("cpu_op", "aten::addmm", 40, 50)
    trace.event("cpu_op", "aten::scaled_dot_product_attention", 100, 100)
    trace.event("cpu_op", "aten::bmm", 120, 50)  # of the attention
    # A node of autograd that waits 90 of its 100 for communication, of which 20 are behind an operator.
    trace.event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 200, 100)
    trace.event("cpu_op", "aten::mul", 210, 20)
    trace.event("user_annotation", "gloo:all_reduce", 205, 90, 2)
    trace.event("cpu_op", "aten::mm", 400, 100, 9)  # another thread
    # Collation within a wait for data is part of it.
    trace.event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 500, 200)
    trace.event("cpu_op", "aten::stack", 600, 50)
    trace.event("user_annotation", "gloo:broadcast", 510, 100, 2)
    found = read_steps(trace.write(tmp_path / "trace-rank3.json"))
    assert microseconds(found.steps[0]) == {
        "matmul": 80,
        "attention": 100,
        "other_kernels": 40,
        "exposed_communication": 70,
        "data_wait": 200,
        "host_gap": 510,
    }
    assert found.steps[0].overlapped_ns == 20_000
    assert [each.collective.label for each in found.communications] == ["all_reduce", "broadcast"]


def test_the_last_step_has_what_the_device_still_does(tmp_path: Path) -> None:
    trace = Trace(rank=None)
    trace.step(0, 0, 100)
    trace.step(1, 110, 100)
    trace.kernel(GEMM, 150, 200)
    trace.kernel(ADD, -50, 30)
    found = read_steps(trace.write(tmp_path / "step-00000007-rank5.json"))
    assert found.rank == 5
    assert [(step.start_ns, step.end_ns) for step in found.steps] == [(0, 110_000), (110_000, 350_000)]
    assert microseconds(found.steps[1]) == {"matmul": 200, "host_gap": 40}
    assert found.outside_ns == 30_000


def test_agreements_within_a_save_are_part_of_it(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.event("user_annotation", "checkpoint", 20, 60)
    trace.event("user_annotation", "gloo:barrier", 30, 40, 2)
    trace.event("user_annotation", "gloo:all_reduce", 85, 10, 2)
    trace.kernel(GEMM, 0, 10)
    (step,) = read_steps(trace.write(tmp_path / "trace.json")).steps
    assert microseconds(step) == {
        "matmul": 10,
        "checkpoint": 60,
        "exposed_communication": 10,
        "host_gap": 20,
    }


def test_a_trace_without_steps_is_one(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(GEMM, 10, 20)
    trace.kernel(ADD, 50, 10)
    (step,) = read_steps(trace.write(tmp_path / "trace.json")).steps
    assert (step.number, microseconds(step)) == (
        None,
        {"matmul": 20, "other_kernels": 10, "host_gap": 20},
    )


def test_a_backend_without_annotations_shows_by_its_operators(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.event("cpu_op", "c10d::allreduce_", 10, 30)
    found = read_steps(trace.write(tmp_path / "trace.json"))
    assert microseconds(found.steps[0]) == {"exposed_communication": 30, "host_gap": 70}


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name"}], [{"cat": "kernel", "dur": 3}]])
def test_a_trace_without_times_is_refused(tmp_path: Path, events: list[dict[str, object]]) -> None:
    trace = Trace()
    trace.events = events
    with pytest.raises(TraceFileError, match="no events with a time"):
        read_steps(trace.write(tmp_path / "trace.json"))


@pytest.mark.parametrize(
    ("name", "category"),
    [
        (GEMM, "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn>", "matmul"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1", "matmul"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_bf16bf16_bf16f32", "matmul"),
        (FLASH, "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        (ADD, "other_kernels"),
        ("triton_poi_fused_convert_element_type_3", "other_kernels"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", "exposed_communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "exposed_communication"),
    ],
)
def test_kernels(name: str, category: str) -> None:
    assert kernel_category(name) == category


def test_operators_spans_and_collectives() -> None:
    operators = {
        "aten::mm": "matmul",
        "aten::_scaled_mm_v2": "matmul",
        "aten::mul": "other_kernels",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "c10d::allreduce_": None,
        "_c10d_functional::wait_tensor": None,
        "record_param_comms": None,
        "AddmmBackward0": None,
        "graph_0_cpp_fused_add_1": "other_kernels",
        "fsdp::chunk_cat": "other_kernels",
    }
    assert {name: operator_category(name) for name in operators} == operators
    spans = {
        "data wait": "data_wait",
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": "data_wait",
        "[pl][profile][_TrainingEpochLoop].train_dataloader_next": "data_wait",
        "checkpoint": "checkpoint",
        "save_checkpoint": "checkpoint",
        "CheckpointFunctionBackward": None,
        "FSDP::all_gather (0)": None,
    }
    assert {name: span_category(name) for name in spans} == spans
    kinds = {
        "_allgather_base": "all_gather",
        "allgather_into_tensor_coalesced": "all_gather",
        "_reduce_scatter_base": "reduce_scatter",
        "allreduce": "all_reduce",
        "all_to_allv": "all_to_all",
        "ncclDevKernel_SendRecv": "send_recv",
        "recvAnySource": "recv",
        "broadcast": "broadcast",
        "something else": "communication",
    }
    assert {name: collective_kind(name) for name in kinds} == kinds


def test_steps_of_another_thread_and_steps_that_overlap_do_not_count_twice(tmp_path: Path) -> None:
    trace = Trace()
    for number, start in ((1, 0), (2, 100), (4, 150)):  # the third is left out, and the second ends late
        trace.step(number, start, 100)
    trace.event("user_annotation", "ProfilerStep#7", 50, 100, 2)
    trace.event("cpu_op", "aten::mm", 20, 220)
    steps = read_steps(trace.write(tmp_path / "trace.json")).steps
    assert [(step.number, step.start_ns, step.end_ns) for step in steps] == [
        (1, 0, 100_000),
        (2, 100_000, 150_000),
        (4, 150_000, 250_000),
    ]
    assert all(sum(step.nanoseconds.values()) == step.end_ns - step.start_ns for step in steps)


def test_what_the_host_does_after_the_last_step_is_not_part_of_it(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.kernel(GEMM, 10, 110)
    trace.event("user_annotation", "checkpoint", 130, 1000)
    (step,) = read_steps(trace.write(tmp_path / "trace.json")).steps
    assert (step.end_ns, microseconds(step)) == (120_000, {"matmul": 110, "host_gap": 10})


def test_communication_within_the_outer_of_two_spans_is_part_of_it(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.kernel(GEMM, 0, 5)
    trace.event("user_annotation", "checkpoint", 5, 90)
    trace.event("user_annotation", "data wait", 10, 5)
    trace.nccl("allreduce", 50, 20)
    (step,) = read_steps(trace.write(tmp_path / "trace.json")).steps
    assert "exposed_communication" not in microseconds(step)


def test_an_event_whose_kind_is_no_text_is_left_out(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.events.append({"ph": "X", "cat": ["x"], "name": "a", "pid": 0, "tid": 1, "ts": 0, "dur": 5})
    assert len(read_steps(trace.write(tmp_path / "trace.json")).steps) == 1
