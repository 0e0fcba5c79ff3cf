"""Who writes what of a sharded tensor, against the plain way to say it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_core import tensor_owners
from checkpoint_core.encoding import LocalPart
from checkpoint_core.tensor_files import plan_file, spec_of
from checkpoint_core.tensor_owners import Box, WholeFiles, _divide, send_to_owners


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], Box]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    offsets, sizes = [], []
    for size in shape:
        begin = draw(st.integers(0, size))
        offsets.append(begin)
        sizes.append(draw(st.integers(0, size - begin)))
    return shape, Box(0, offsets, sizes)


@settings(max_examples=300, deadline=None)
@given(boxes(), st.data())
def test_elements_of_a_box(found: tuple[list[int], Box], data: st.DataObject) -> None:
    shape, box = found
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    part = (
        whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].flatten().tolist()
    )
    for index in range(whole.numel() + 1):
        assert box.before(shape, index) == sum(place < index for place in part)
    first = data.draw(st.integers(0, len(part)))
    last = data.draw(st.integers(first, len(part)))
    seen = []
    for place, number, count in box.runs(shape, first, last):
        assert number == first + len(seen)
        seen += range(place, place + count)
    assert seen == part[first:last]


@pytest.mark.parametrize("window", [16, 40, 1000])
def test_a_tensor_larger_than_a_window_is_put_together(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_owners, "WINDOW_BYTES", window)
    values = {
        "a": torch.arange(35, dtype=torch.float64).reshape(5, 7),
        "b": torch.arange(12, dtype=torch.int16).reshape(3, 4),
        "c": torch.tensor(3.0),
        "d": torch.empty(0, 2),
    }
    # Columns of one tensor, rows of another.
    parts = [
        {"a": ((0, 0), values["a"][:, :3]), "b": ((0, 0), values["b"][:2]), "c": ((), values["c"])},
        {"a": ((0, 3), values["a"][:, 3:]), "b": ((2, 0), values["b"][2:])},
    ]
    specs = {name: spec_of(value) for name, value in values.items()}
    held: dict[str, list[Box]] = {name: [] for name in specs}
    for rank, mine in enumerate(parts):
        for name, (offsets, part) in mine.items():
            held[name].append(Box(rank, offsets, tuple(part.shape)))
    layout = plan_file(specs, {})
    files = WholeFiles([specs], [0], held)
    local = [
        {
            name: LocalPart(tuple(values[name].shape), offsets, part, None)
            for name, (offsets, part) in mine.items()
        }
        for mine in parts
    ]
    content = bytearray()
    _run_both(layout, files, local, content)
    expected = layout.header + b"".join(
        bytes(values[name].flatten().view(torch.uint8).tolist())
        for name in layout.places
        if values[name].numel()
    )
    assert bytes(content) == expected


def _run_both(layout, files, local, content: bytearray) -> None:
    """Both ranks in threads of this process; the exchange itself is tested by real ranks."""
    import queue
    import threading

    mail = {(a, b): queue.Queue() for a in range(2) for b in range(2)}
    barrier = threading.Barrier(2)

    class Rank:
        world_size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def exchange(self, phase, sends, receives) -> None:
            for other, data in sends.items():
                mail[self.rank, other].put(data)
            for other, data in receives.items():
                found = mail[other, self.rank].get(timeout=10)
                assert len(found) == len(data)
                data.copy_(found)

        def run(self, phase, action) -> list[object]:
            action()
            barrier.wait(10)
            return []

    def feed(name: str, data: bytes) -> None:
        content.extend(data)

    failures = []

    def work(rank: int) -> None:
        try:
            send_to_owners(Rank(rank), "testing", {"x": layout}, files, local[rank], feed)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures


def test_uneven_shards_do_not_all_go_to_the_first_rank() -> None:
    specs = {f"w{number}": spec_of(torch.empty(101, 10)) for number in range(8)}
    boxes = {name: [Box(0, (0, 0), (51, 10)), Box(1, (51, 0), (50, 10))] for name in specs}
    files = _divide(specs, boxes, range(2), 10**9)
    assert files.owners == [0, 1]
    assert [len(shard) for shard in files.shards] == [4, 4]
    assert files.need_exchange


def test_a_tensor_goes_to_the_rank_that_holds_it() -> None:
    specs = {"first": spec_of(torch.empty(3)), "second": spec_of(torch.empty(400))}
    boxes = {"first": [Box(1, (0,), (3,))], "second": [Box(0, (0,), (400,))]}
    files = _divide(specs, boxes, range(3), 10**9)
    assert not files.need_exchange
    assert list(zip(files.owners, map(list, files.shards), strict=True)) == [(0, ["second"]), (1, ["first"])]
