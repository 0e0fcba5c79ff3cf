"""The staging buffer: exact copies, in memory that is used again."""

import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint_core.background import ALIGNMENT, StagingBuffer
from checkpoint_core.errors import CheckpointError
from checkpoint_core.tensor_files import DTYPE_CODES

MIB = 1024 * 1024


@pytest.fixture
def buffer() -> Iterator[StagingBuffer]:
    buffer = StagingBuffer()
    yield buffer
    buffer.release()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_every_dtype_shape_and_stride(buffer: StagingBuffer) -> None:
    torch.manual_seed(0)
    sources: dict[tuple[str, str], torch.Tensor] = {}
    for dtype in (*DTYPE_CODES, torch.complex128):
        size = torch.empty(0, dtype=dtype).element_size()
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6, 10 * size), dtype=torch.uint8)
        base = bits.view(dtype)
        name = str(dtype)
        sources |= {
            (name, "whole"): base,
            (name, "transposed"): base.t(),
            (name, "strided"): base[::2, 1::3],
            (name, "expanded"): base[:, :1].expand(6, 4),
            (name, "scalar"): base[2, 3],
            (name, "empty"): base[:0],
        }
    staged = buffer.copy(sources)
    assert list(staged) == list(sources)
    for key, source in sources.items():
        copy = staged[key]
        assert (copy.dtype, copy.shape, copy.device.type) == (source.dtype, source.shape, "cpu"), key
        assert copy.is_contiguous(), key
        assert copy.data_ptr() % ALIGNMENT == 0, key
        # Bits, not values: NaNs must survive as they are.
        assert raw(copy) == raw(source), key


def test_pending_conjugation_and_negation_are_carried_out(buffer: StagingBuffer) -> None:
    values = torch.randn(4, 3, dtype=torch.complex64)
    conjugated, negated = values.conj(), values.conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    staged = buffer.copy({"conj": conjugated, "neg": negated})
    assert not staged["conj"].is_conj()
    assert not staged["neg"].is_neg()
    assert torch.equal(torch.view_as_real(staged["conj"]), torch.view_as_real(conjugated.resolve_conj()))
    assert torch.equal(staged["neg"], -values.imag)


def test_later_changes_of_the_source_do_not_reach_the_copy(buffer: StagingBuffer) -> None:
    source = torch.nn.Parameter(torch.arange(1000.0))
    staged = buffer.copy({0: source})[0]
    assert not staged.requires_grad
    before = staged.clone()
    with torch.no_grad():
        source.mul_(-1).add_(5)
    assert torch.equal(staged, before)
    assert torch.equal(before, torch.arange(1000.0))


def test_memory_is_used_again_and_grows_only_when_it_must(
    buffer: StagingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    large = {"a": torch.rand(3000), "b": torch.rand(5)}
    address = buffer.copy(large)["a"].data_ptr()
    capacity = buffer.capacity
    assert capacity == 12_032 + ALIGNMENT
    assert buffer.copy({"b": torch.rand(7)})["b"].data_ptr() == address
    assert buffer.copy(large)["a"].data_ptr() == address
    assert buffer.capacity == capacity
    kept = buffer.copy({"x": torch.ones(3000)})["x"]
    larger = torch.rand(4000)
    assert torch.equal(buffer.copy({"a": larger})["a"], larger)
    assert buffer.capacity == 16_000
    # What is still referenced keeps its memory, also when the buffer gave it up.
    buffer.release()
    buffer.release()
    assert buffer.capacity == 0
    assert torch.equal(kept, torch.ones(3000))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "from 0 to 12096 bytes" in messages[0]


def test_released_memory_goes_back_to_the_system(buffer: StagingBuffer) -> None:
    buffer.copy({0: torch.ones(16 * MIB)})
    before = resident_bytes()
    buffer.release()
    assert before - resident_bytes() >= 60 * MIB


def test_use_in_and_out_of_inference_mode(buffer: StagingBuffer) -> None:
    with torch.inference_mode():
        inside = buffer.copy({0: torch.ones(3)})[0].tolist()
    assert inside == [1, 1, 1]
    assert buffer.copy({0: torch.zeros(3)})[0].tolist() == [0, 0, 0]
    with torch.inference_mode():
        assert buffer.copy({0: torch.ones(3)})[0].tolist() == [1, 1, 1]


def test_no_memory_is_an_error_that_says_so(buffer: StagingBuffer) -> None:
    with pytest.raises(CheckpointError, match=r"refuses \d+ bytes of memory for staging .*async_save=False"):
        buffer.copy({"layer.weight": torch.zeros(1).expand(1 << 58)})
    # It does not leave the buffer in a state of its own.
    assert buffer.copy({}) == {}
    assert buffer.copy({0: torch.ones(2)})[0].tolist() == [1, 1]


def test_a_forked_child_has_memory_of_its_own(buffer: StagingBuffer) -> None:
    kept = buffer.copy({0: torch.full((1000,), 3.0)})[0]
    child = os.fork()
    if child == 0:
        mine = buffer.copy({0: torch.full((1000,), 4.0)})[0]
        fine = buffer.capacity == 4032 and mine.data_ptr() != kept.data_ptr() and bool((mine == 4).all())
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((kept == 3).all())


def test_a_fork_does_not_make_the_next_copy_touch_new_memory(buffer: StagingBuffer) -> None:
    source = torch.ones(16 * MIB)
    buffer.copy({0: source})
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer.copy({0: source})
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    os.close(write_end)
    os.close(read_end)
    os.waitpid(child, 0)
    # The interpreter itself costs a hundred. Pages shared with the living child would be copied: 16384 more.
    assert faults < 2000
