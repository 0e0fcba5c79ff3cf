"""Traces of torch.profiler: joined, summed, and what cannot be told is told."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from perf_metrics.ofu.kernels import TileShape, effective_sizes, parse_kernel
from perf_metrics.ofu.trace import TraceOverhead, matmul_sizes, trace_overhead
from perf_metrics.traces.trace_file import TraceFileError

H100_SMS = 132
TILE = "nvjet_tst_256x160_64x4_2x1"
PLAIN = "void at::native::vectorized_elementwise_kernel<4>"


class TraceWriter:
    """A trace with the structure of Kineto's: operators on the CPU, kernels joined to them by external id."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "args": {"name": "python"}}
        ]
        self.next_id = 1

    def operator(self, name: str, shapes: list[list[int]] | None) -> int:
        self.next_id += 1
        arguments: dict[str, object] = {"External id": self.next_id, "Ev Idx": self.next_id}
        if shapes is not None:
            arguments["Input Dims"] = shapes
        self._event("cpu_op", name, 5.5, arguments)
        return self.next_id

    def kernel(
        self, name: str, microseconds: float, by: int | None, grid: tuple[int, ...] | None = None
    ) -> None:
        arguments: dict[str, object] = {"device": 0, "stream": 7}
        if by is not None:
            arguments["External id"] = by
        if grid is not None:
            arguments["grid"] = list(grid)
        self._event("kernel", name, microseconds, arguments)

    def _event(self, category: str, name: str, microseconds: float, arguments: dict[str, object]) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": 1.25, "dur": microseconds,
             "args": arguments}
        )  # fmt: skip

    def document(self) -> dict[str, object]:
        device = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": H100_SMS}
        return {
            "schemaVersion": 1,
            "deviceProperties": [device],
            "traceEvents": self.events,
            "traceName": "t",
        }

    def write(self, path: Path) -> Path:
        text = json.dumps(self.document(), indent=1).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


def one(found: TraceOverhead, name: str) -> tuple[int, int, int]:
    grids = next(kernel.grids for kernel in found.kernels if name in kernel.kernel.name)
    return grids.agree, grids.differ, grids.unchecked


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_overhead_is_the_sum_of_effective_over_the_sum_of_asked(tmp_path: Path, suffix: str) -> None:
    trace = TraceWriter()
    for size, microseconds in ((4096, 200.0), (4000, 190.0)):
        operator = trace.operator("aten::mm", [[size, size], [size, size]])
        trace.kernel(TILE, microseconds, operator, (132, 1, 1))
    trace.kernel(PLAIN, 610.0, trace.operator("aten::add", [[8], [8]]))
    found = trace_overhead(trace.write(tmp_path / f"trace{suffix}"))
    asked = 4096**3 + 4000**3
    effective = 4096 * 4160 * 4096 + 4096 * 4000 * 4032
    assert found.overhead == pytest.approx(effective / asked - 1, rel=1e-12)
    (kernel,) = found.kernels
    assert (kernel.calls, kernel.seconds, kernel.flops) == (2, pytest.approx(390e-6), 2 * asked)
    assert found.device_seconds == pytest.approx(1e-3)
    assert found.exact
    assert (found.unreadable, found.without_sizes, found.plain_cores) == ((), (), ())


def test_random_traces_against_a_sum_by_hand(tmp_path: Path) -> None:
    chance = random.Random(10)
    names = [
        TILE,
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
        "cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_bf16_bf16_128x128x64_2x1x1_0_tnt_align8",
    ]
    trace, asked, effective = TraceWriter(), 0, 0
    for _ in range(200):
        batch, tokens, features, k = (chance.randint(1, high) for high in (4, 900, 5000, 3000))
        name = chance.choice(names)
        operator = trace.operator("aten::bmm", [[batch, tokens, k], [batch, k, features]])
        trace.kernel(name, 1.0, operator)
        asked += 2 * batch * tokens * features * k
        # By hand, on torch's axes: these names have clusters along m, which is features except for rows.
        high, wide, deep, cluster = [int(part) for part in {
            names[0]: (256, 160, 64, 2), names[1]: (128, 256, 64, 2), names[2]: (64, 8, 64, 4),
            names[3]: (128, 128, 64, 2)}[name]]  # fmt: skip
        along_m, along_n = (tokens, features) if name == names[3] else (features, tokens)
        whole = [
            -(-size // step) * step for size, step in ((along_m, high * cluster), (along_n, wide), (k, deep))
        ]
        effective += 2 * batch * whole[0] * whole[1] * whole[2]
    found = trace_overhead(trace.write(tmp_path / "trace.json"))
    assert (found.flops, found.effective_flops) == (asked, effective)
    assert sum(kernel.calls for kernel in found.kernels) == 200


def test_launched_grids_are_held_against_the_formula(tmp_path: Path) -> None:
    trace = TraceWriter()
    # The four of a public B200 trace, as they were launched, in torch's shapes.
    for name, left, right, grid in (
        ("nvjet_tst_144x128_64x6_2x1_v_bz_TNN", [888, 512], [512, 2880], (2, 70, 1)),
        ("nvjet_tst_64x16_64x16_2x4_2cta_h_bz_TNT", [888, 2880], [2880, 128], (2, 4, 14)),
        ("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_TNT", [888, 2880], [2880, 640], (2, 5, 14)),
        ("nvjet_tst_192x8_64x8_4x1_v_bz_TNT", [1, 2880], [2880, 25136], (132, 1, 1)),
        # One block less than the formula gives.
        ("nvjet_tst_128x128_64x8_1x1_v_bz_TNT", [512, 512], [512, 512], (15, 1, 1)),
        # 1024 blocks on 132 multiprocessors: persistent.
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", [8192, 512], [512, 4096], (132, 1, 1)),
        # The same sizes, with more blocks than a persistent kernel has.
        ("nvjet_tst_128x256_64x6_2x1_v_bz_TNT", [8192, 512], [512, 4096], (200, 1, 1)),
        # k in three parts, as in a public trace of an H100 with m of 128.
        ("nvjet_hss_64x8_64x16_1x1_h_bz_splitK_NNT", [8, 4096], [4096, 128], (2, 3, 1)),
        (
            "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x6_tn_align8",
            [64, 64],
            [64, 128],
            (8, 1, 1),
        ),
    ):
        trace.kernel(name, 1.0, trace.operator("aten::mm", [left, right]), grid)
    path = trace.write(tmp_path / "trace.json")
    document = trace.document()
    found = trace_overhead(path)
    for tile in ("144x128", "64x16_64", "64x64_64", "192x8", "splitK"):
        assert one(found, tile) == (1, 0, 0), tile
    assert one(found, "128x128_64x8") == (0, 1, 0)
    assert one(found, "128x256_64x4") == (0, 0, 1)
    assert one(found, "128x256_64x6") == (0, 1, 0)
    assert one(found, "cutlass_80") == (0, 0, 1)
    differing = next(kernel for kernel in found.kernels if "128x128_64x8" in kernel.kernel.name)
    assert "grid (15, 1, 1) where the formula gives 16 blocks for [512, 512] x [512, 512]" in str(
        differing.grids.example
    )
    # Without the number of multiprocessors, fewer blocks may mean a persistent kernel.
    path.write_text(json.dumps({"traceEvents": document["traceEvents"]}))
    assert one(trace_overhead(path), "128x128_64x8") == (0, 0, 1)


def test_the_check_could_tell_swapped_axes() -> None:
    """The other way round, the formula contradicts the launched grids of two of the four kernels."""
    launched = {
        ("nvjet_tst_144x128_64x6_2x1_TNN", 2880, 888, 512): 140,
        ("nvjet_tst_64x16_64x16_2x4_2cta", 128, 888, 2880): 112,
        ("nvjet_tst_64x64_64x16_2x1_2cta", 640, 888, 2880): 140,
        ("nvjet_tst_192x8_64x8_4x1", 25136, 1, 2880): 132,
    }
    agree = 0
    for (name, m, n, k), grid in launched.items():
        kernel = parse_kernel(name)
        assert kernel is not None
        assert effective_sizes(kernel, m, n, k).blocks == grid
        agree += effective_sizes(kernel, n, m, k).blocks == grid
    assert agree == 2


def test_what_is_left_out_is_listed_with_time_and_reason(tmp_path: Path) -> None:
    trace = TraceWriter()
    good = trace.operator("aten::mm", [[128, 64], [64, 128]])
    trace.kernel(TILE, 40.0, good)
    newthing = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_newthing_TNT"
    trace.kernel(newthing, 10.0, trace.operator("aten::mm", [[8, 8], [8, 8]]))
    trace.kernel("flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", 20.0, trace.operator("aten::_flash", None))
    trace.kernel("something_new", 5.0, trace.operator("aten::addmm", [[8], [8, 8], [8, 8]]))
    trace.kernel("void cublasLt::splitKreduce_kernel<32>", 1.0, good)
    # No shapes recorded; launched by no known operator; by none; two tiled kernels for one operator.
    other = "nvjet_tst_192x8_64x8_2x1_v_bz_TNT"
    trace.kernel(other, 2.0, trace.operator("aten::mm", None))
    trace.kernel(other, 3.0, trace.operator("aten::conv2d", [[1, 1], [1, 1]]))
    trace.kernel(other, 4.0, None)
    twice = trace.operator("aten::mm", [[8, 8], [8, 8]])
    trace.kernel(other, 7.0, twice)
    trace.kernel(TILE, 8.0, twice)
    # Of these two, one has a tile that is not known.
    mixed = trace.operator("aten::mm", [[8, 8], [8, 8]])
    trace.kernel(TILE, 9.0, mixed)
    trace.kernel("sm75_new_gemm", 9.0, mixed)
    found = trace_overhead(trace.write(tmp_path / "trace.json"))
    assert [(kernel.calls, kernel.seconds) for kernel in found.kernels] == [(1, pytest.approx(40e-6))]
    unreadable = {left.name.split("<")[0]: (left.reason, left.seconds) for left in found.unreadable}
    assert set(unreadable) == {"something_new", newthing, "flash_fwd_kernel", "sm75_new_gemm"}
    assert unreadable["something_new"][0].startswith("follows no naming scheme")
    assert unreadable["something_new"][1] == pytest.approx(5e-6)
    assert "newthing" in unreadable[newthing][0]
    assert [left.name for left in found.plain_cores] == ["void cublasLt::splitKreduce_kernel<32>"]
    assert sorted((left.reason, left.calls, round(left.seconds * 1e6)) for left in found.without_sizes) == [
        ("aten::mm has no usable shapes; profile with record_shapes=True", 1, 2),
        ("aten::mm launched 2 such kernels, and which computed what is not told", 1, 7),
        ("aten::mm launched 2 such kernels, and which computed what is not told", 2, 17),
        ("not launched by an operator for matrix multiplication that is known here", 2, 7),
    ]


def test_an_external_id_of_two_operators_tells_nothing(tmp_path: Path) -> None:
    trace = TraceWriter()
    first = trace.operator("aten::mm", [[8, 8], [8, 8]])
    trace.next_id = first - 1
    trace.operator("aten::mm", [[16, 8], [8, 8]])
    trace.kernel(TILE, 1.0, first)
    found = trace_overhead(trace.write(tmp_path / "trace.json"))
    assert found.overhead is None
    assert len(found.without_sizes) == 1


def test_two_fp4_values_are_one_element_of_a_shape(tmp_path: Path) -> None:
    trace = TraceWriter()
    name = "nvjet_sm100_ootst_128x128_256x7_4x1_2cta_v_bx_Avec16UE4M3_Bvec16UE4M3_TNT"
    trace.kernel(name, 1.0, trace.operator("aten::_scaled_mm", [[512, 256], [256, 512], [1], [1]]))
    (kernel,) = trace_overhead(trace.write(tmp_path / "trace.json")).kernels
    assert kernel.flops == 2 * 512 * 512 * 512


def test_shapes_as_torch_records_them(tmp_path: Path) -> None:
    """A real profile gives the operators; a machine without a GPU has no kernels, so those are added."""
    a, b, bias = torch.ones(6, 8), torch.ones(8, 10), torch.ones(10)
    batched = torch.ones(3, 6, 8), torch.ones(3, 8, 10)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        torch.mm(a, b)
        torch.addmm(bias, a, b)
        torch.bmm(*batched)
        torch.baddbmm(torch.ones(3, 6, 10), *batched)
        torch._addmm_activation(bias, a, b)
        torch.nn.functional.linear(torch.ones(2, 3, 8), torch.ones(10, 8), bias)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    with pytest.raises(TraceFileError, match=r"no kernels of a GPU. .*ProfilerActivity.CUDA"):
        trace_overhead(path)
    recorded = json.loads(path.read_text())
    wanted = {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_addmm_activation",
        "aten::linear",
    }
    seen = set()
    for event in list(recorded["traceEvents"]):
        if event.get("cat") == "cpu_op" and event["name"] in wanted:
            seen.add(event["name"])
            sizes = matmul_sizes(event["name"], event["args"]["Input Dims"])
            batch = 3 if "bmm" in event["name"] else 1
            assert sizes is not None, event
            assert (sizes.batch, sizes.tokens, sizes.features, sizes.k) == (batch, 6, 10, 8)
            arguments = {"External id": event["args"]["External id"], "device": 0}
            recorded["traceEvents"].append({"cat": "kernel", "name": TILE, "dur": 2.0, "args": arguments})
    assert seen == wanted
    path.write_text(json.dumps(recorded))
    found = trace_overhead(path)
    assert found.without_sizes == ()
    one_product = effective_sizes(TileShape(256, 160, 64, 2, 1), 10, 6, 8).flops
    kernels = sum(event.get("cat") == "kernel" for event in recorded["traceEvents"])
    batches = sum("bmm" in event["name"] for event in recorded["traceEvents"] if event.get("cat") == "cpu_op")
    assert found.effective_flops == one_product * (kernels + 2 * batches)
