"""What the fake device does to programs that are wrong, and to those that are right."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fakecuda
import pytest
import torch

NUMBERS = torch.arange(1.0, 257.0)
WITHOUT_EFFECT = "copy {} pageable memory, non_blocking without effect"


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned buffer that a copy of the tensor is on the way to."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


# ---- Copies and waits


def test_a_copy_to_the_host_arrives_when_the_host_waits() -> None:
    device = NUMBERS.to("cuda")
    host = on_host(device)
    assert not torch.equal(host, NUMBERS)
    torch.cuda.synchronize()
    assert torch.equal(host, NUMBERS)


@pytest.mark.parametrize("wait", ["event", "stream", "item", "query"])
def test_every_way_to_wait(wait: str) -> None:
    device = NUMBERS.to("cuda")
    host = on_host(device)
    event = torch.cuda.Event()
    event.record()
    assert not torch.equal(host, NUMBERS)
    match wait:
        case "event":
            event.synchronize()
        case "stream":
            torch.cuda.current_stream().synchronize()
        case "item":
            device.sum().item()
        case "query":
            assert not event.query()  # asked once, the work may not be done
            assert event.query()
    assert torch.equal(host, NUMBERS)


def test_an_event_before_the_copy_says_nothing_about_it() -> None:
    device = NUMBERS.to("cuda")
    event = torch.cuda.Event()
    event.record()
    host = on_host(device)
    event.synchronize()
    assert not torch.equal(host, NUMBERS)


def test_a_new_tensor_of_the_host_is_pinned_and_late() -> None:
    # torch pins what `to` makes here, so the program reads it too early as well.
    host = NUMBERS.to("cuda").to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert not torch.equal(host, NUMBERS)
    torch.cuda.synchronize()
    assert torch.equal(host, NUMBERS)


def test_a_later_kernel_of_the_stream_does_not_change_what_was_copied() -> None:
    device = NUMBERS.to("cuda")
    host = on_host(device)
    device.zero_()
    torch.cuda.synchronize()
    assert torch.equal(host, NUMBERS)


def test_a_pinned_buffer_changed_too_early_changes_what_the_device_gets() -> None:
    host = NUMBERS.clone().pin_memory()
    device = host.to("cuda", non_blocking=True)
    host.zero_()
    assert device.sum().item() == 0
    again = NUMBERS.clone().pin_memory()
    right = again.to("cuda", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    again.zero_()
    assert torch.equal(right.cpu(), NUMBERS)


def test_down_and_up_again_needs_no_wait_of_the_host() -> None:
    device = NUMBERS.to("cuda")
    with fakecuda.recorded_waits() as waits:
        back = on_host(device).to("cuda", non_blocking=True)
        total = back.sum()
    assert not waits
    assert total.item() == NUMBERS.sum()


def test_registered_memory_is_pinned() -> None:
    buffer = torch.zeros(256)
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(buffer.data_ptr(), 1024, 0) == 0
    assert runtime.cudaHostRegister(buffer.data_ptr(), 1024, 0) != 0
    buffer.copy_(NUMBERS.to("cuda"), non_blocking=True)
    assert not buffer.any()
    torch.cuda.synchronize()
    assert torch.equal(buffer, NUMBERS)
    assert runtime.cudaHostUnregister(buffer.data_ptr()) == 0


@pytest.mark.parametrize(
    ("what", "work"),
    [
        ("item", lambda x: x.sum().item()),
        ("copy to the host", lambda x: x.cpu()),
        (WITHOUT_EFFECT.format("to"), lambda x: torch.empty(4).copy_(x, non_blocking=True)),
        ("copy from the host", lambda x: torch.ones(3).to("cuda")),
        (WITHOUT_EFFECT.format("from"), lambda x: torch.ones(3).to("cuda", non_blocking=True)),
        ("aten::nonzero", lambda x: x.nonzero()),
        ("aten::masked_select", lambda x: x.masked_select(x > 0)),
        ("aten::index", lambda x: x[x > 0]),
        ("copy of indices from the host", lambda x: x[torch.tensor([0, 1])]),
        ("synchronize", lambda x: torch.cuda.synchronize()),
        ("Event.synchronize", lambda x: torch.cuda.current_stream().record_event().synchronize()),
        ("empty_cache", lambda x: torch.cuda.empty_cache()),
    ],
)  # fmt: skip
def test_a_wait_is_counted_with_file_and_line(what: str, work: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.ones(4, device="cuda")
    with fakecuda.recorded_waits() as waits:
        work(tensor)
    assert what in [wait.what for wait in waits]
    assert all(wait.where.startswith(f"{__file__}:") for wait in waits)


def test_kernels_and_pinned_copies_do_not_wait() -> None:
    host = NUMBERS.clone().pin_memory()
    with fakecuda.recorded_waits() as waits:
        device = host.to("cuda", non_blocking=True)
        (device @ device).add_(1).relu()
        on_host(device)
    assert not waits


# ---- Streams


def test_a_stream_that_does_not_wait_reads_too_early() -> None:
    host = NUMBERS.clone().pin_memory()
    device, side = torch.empty(256, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        device.copy_(host, non_blocking=True)
    with fakecuda.recorded_races() as races:
        early = device + 0
        assert not torch.equal(early.cpu(), NUMBERS)
    assert "has not waited for stream" in races[0].what
    assert races[0].where.startswith(f"{__file__}:")


@pytest.mark.parametrize("wait", ["wait_stream", "wait_event", "Event.wait"])
def test_a_stream_that_waits(wait: str) -> None:
    host = NUMBERS.clone().pin_memory()
    device, side, main = torch.empty(256, device="cuda"), torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        device.copy_(host, non_blocking=True)
    match wait:
        case "wait_stream":
            main.wait_stream(side)
        case "wait_event":
            main.wait_event(side.record_event())
        case "Event.wait":
            side.record_event().wait(main)
    with fakecuda.recorded_waits() as waits:
        right = device + 0
    assert not waits  # streams wait, not the host
    assert torch.equal(right.cpu(), NUMBERS)


@pytest.mark.parametrize("kind", ["reads", "overwrites"])
def test_kernels_of_two_streams_without_a_wait_are_a_race(kind: str) -> None:
    device, side = NUMBERS.to("cuda") * 2, torch.cuda.Stream()
    with fakecuda.recorded_races() as races, torch.cuda.stream(side):
        device.add(1) if kind == "reads" else device.add_(1)
    assert any(kind in race.what for race in races)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        device.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    device.add_(1)


def test_a_wait_of_the_host_orders_streams_too() -> None:
    device, side = NUMBERS.to("cuda") * 2, torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        device.add_(1)
    side.synchronize()
    device.add_(1)


def test_elapsed_time() -> None:
    first, second, plain = (
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(),
    )
    first.record()
    torch.ones(64, 64, device="cuda").mm(torch.ones(64, 64, device="cuda"))
    second.record()
    plain.record()
    torch.cuda.synchronize()
    assert 0 < first.elapsed_time(second) < 60_000
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(plain)


# ---- Memory


def test_fresh_memory_is_not_zero() -> None:
    assert not torch.empty(8, device="cuda").cpu().eq(0).any()
    assert torch.empty(8, dtype=torch.float16, device="cuda").isnan().all()
    assert torch.empty(8, pin_memory=True).eq(torch.empty(8, device="cuda").cpu()).all()


def side_copy(*, recorded: bool) -> torch.Tensor:
    """A side stream copies a tensor to the host that is freed meanwhile, and its memory is used again."""
    side = torch.cuda.Stream()
    device = NUMBERS.to("cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host = on_host(device)
    if recorded:
        device.record_stream(side)
    address = device.data_ptr()
    del device
    other = torch.empty(256, device="cuda")
    assert (other.data_ptr() == address) is not recorded
    other.zero_()
    side.synchronize()
    return host


def test_memory_used_again_too_early_shows() -> None:
    with fakecuda.recorded_races() as races:
        assert not torch.equal(side_copy(recorded=False), NUMBERS)
    assert "handed out again while it is being read" in races[0].what


def test_memory_used_again_by_the_same_stream_is_in_order() -> None:
    device = NUMBERS.to("cuda")
    address, host = device.data_ptr(), on_host(device)
    del device
    assert torch.empty(256, device="cuda").zero_().data_ptr() == address
    torch.cuda.synchronize()
    assert torch.equal(host, NUMBERS)


def test_record_stream_keeps_the_memory() -> None:
    assert torch.equal(side_copy(recorded=True), NUMBERS)


def test_recorded_memory_comes_back_when_its_stream_is_done() -> None:
    side, device = torch.cuda.Stream(), torch.ones(12345, device="cuda")
    device.record_stream(side)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        device.add(1)
    address = device.data_ptr()
    del device
    assert torch.empty(12345, device="cuda").data_ptr() != address
    side.synchronize()
    kept = [torch.empty(12345, device="cuda") for _ in range(2)]
    assert address in {tensor.data_ptr() for tensor in kept}


@pytest.mark.parametrize("work", ["empty", "kernel"])
def test_a_full_device_raises(work: str) -> None:
    held = torch.ones(1 << 18, device="cuda")
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (3 << 18)
    with fakecuda.memory_limit(limit):
        assert torch.cuda.get_device_properties(0).total_memory == limit
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            held.add(1) if work == "kernel" else torch.empty(1 << 18, device="cuda")
        assert torch.cuda.memory_stats()["num_ooms"] >= 1
    assert held.add(1).sum().item() == 2 << 18


def test_a_full_device_gives_back_its_cache_first() -> None:
    torch.ones(1 << 18, device="cuda")
    with fakecuda.memory_limit(torch.cuda.memory_reserved() + (1 << 18)), fakecuda.recorded_waits() as waits:
        torch.empty(3 << 17, device="cuda")
    assert [wait.what for wait in waits] == ["allocation that empties the cache"]


def test_statistics_and_snapshot() -> None:
    def in_snapshot() -> int:
        segments = torch.cuda.memory._snapshot()["segments"]
        return sum(segment["allocated_size"] for segment in segments if segment["device"] == 0)

    gc.collect()  # what tests before this one have left
    before, seen = torch.cuda.memory_allocated(), in_snapshot()
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(1 << 16, device="cuda")
    torch.empty(1 << 17, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1 << 18
    assert torch.cuda.max_memory_allocated() - before == 3 << 18
    segments = torch.cuda.memory._snapshot()["segments"]
    mine = [segment for segment in segments if segment["address"] == held.data_ptr()]
    assert [segment["allocated_size"] for segment in mine] == [1 << 18]
    assert in_snapshot() - seen == torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scratch_memory_of_kernels_comes_back(dtype: torch.dtype) -> None:
    # oneDNN, which multiplies in 16 bits, takes its memory raw and gives it back the same way.
    weight = torch.randn(32, 64, dtype=dtype, device="cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.nn.functional.linear(torch.ones(8, 16, 64, dtype=dtype, device="cuda"), weight)
    assert torch.cuda.memory_allocated() == before


# ---- Devices and generators


def test_several_devices() -> None:
    first, second = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        first + second
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        first + torch.ones(4)
    assert (first.to("cuda:1") + second).sum().item() == 8
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device=f"cuda:{torch.cuda.device_count()}")


def test_memory_is_counted_by_device() -> None:
    before = torch.cuda.memory_allocated(0)
    held = torch.empty(1 << 10, device="cuda:1")
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.memory_allocated(1) >= held.nbytes


def test_the_state_of_a_generator_is_seed_and_offset() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    assert state.tolist() == [7, *[0] * 15]
    first = torch.rand(4, device="cuda")
    assert torch.cuda.get_rng_state().tolist() != state.tolist()
    second = torch.rand(4, device="cuda")
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.cuda.set_rng_state(torch.get_rng_state())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="cuda", generator=torch.Generator())


# ---- How it is built and loaded


def test_missing_compiler_fails_and_says_what_to_install(tmp_path: Path) -> None:
    script = Path(fakecuda.__file__).with_name("fakecuda_build.py")
    env = {"PATH": str(tmp_path), "FAKECUDA_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "apt-get install g++" in run.stderr


def test_missing_library_fails_at_the_import_of_torch(tmp_path: Path) -> None:
    env = {
        "FAKECUDA": "1",
        "PYTHONPATH": str(Path(fakecuda.__file__).parent),
        "FAKECUDA_CACHE": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, "-c", "import torch"], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "is not compiled" in run.stderr
