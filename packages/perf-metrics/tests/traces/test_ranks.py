"""Ranks side by side: clocks, waiting, who is late, what is lost most, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf_metrics import (
    TraceFileError,
    breakdown_as_json,
    breakdown_as_text,
    largest_loss,
    losses_of,
    plot_breakdown,
    read_breakdown,
)
from perf_metrics.commands import OneLineParser
from perf_metrics.commands.trace import fill_trace

from .conftest import Trace

GEMM = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"
UPDATE = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>"


def late_rank(folder: Path, *, late: int = 1, hosts: tuple[str, str] = ("a", "b"), ahead: float = 0) -> Path:
    """Two ranks, of which one computes 300 us longer before it reduces; the clock of rank 1 is ahead."""
    folder.mkdir(exist_ok=True)
    for rank in (0, 1):
        trace = Trace(rank, host_name=hosts[rank], baseTimeNanoseconds=rank * 1000)
        base = rank * (ahead - 1)
        for number in (3, 4):
            start = base + number * 1000
            trace.step(number, start, 1000)
            length = 500 if rank == late else 200
            trace.kernel(GEMM, start + 100, length)
            trace.nccl("allreduce", start + 100 + length, 600 - length + 50)
            trace.kernel(UPDATE, start + 750, 220)
        trace.write(folder / f"step-00000010-rank{rank}.json.gz")
    return folder


@pytest.mark.parametrize("ahead", [0, -12_345, 5_000_000])
def test_waiting_for_a_late_rank_and_the_transfer_are_told_apart(tmp_path: Path, ahead: float) -> None:
    found = read_breakdown(late_rank(tmp_path, ahead=ahead))
    first, second = found.ranks
    assert (first.waiting_ns, second.waiting_ns) == ({1: 600_000}, {})
    # 50 us after both are there, and 100 us that the kernel of the late rank takes.
    assert [each.transfer_ns for each in first.communications] == [2 * 150_000]
    assert [each.transfer_ns for each in second.communications] == [2 * 150_000]
    assert found.clock_offsets_ns == {0: 0, 1: ahead * 1000}
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.category) == (1, "matmul")
    assert largest_loss(found).startswith(
        "Largest loss: 30.0% of a step is spent waiting for rank 1, which spends 50.0% of its own steps on "
        "matmul (the others 20.0%). Look at its clocks"
    )


def test_ranks_of_one_host_have_one_clock(tmp_path: Path) -> None:
    # Their ends differ, which is no offset then.
    found = read_breakdown(late_rank(tmp_path, hosts=("a", "a"), ahead=40))
    assert found.clock_offsets_ns == {0: 0, 1: 0}


def test_steps_that_not_all_ranks_have_are_left_out(tmp_path: Path) -> None:
    folder = late_rank(tmp_path)
    trace = Trace(1, host_name="b")
    trace.step(4, 4000, 1000)
    trace.kernel(GEMM, 4100, 500)
    trace.nccl("allreduce", 4600, 150)
    trace.nccl("allreduce", 4800, 50)
    trace.write(folder / "step-00000010-rank1.json.gz")
    found = read_breakdown(folder)
    assert [[step.number for step in one.steps] for one in found.ranks] == [[4], [4]]
    assert found.notes[0].startswith("1 steps that are not in the traces of all ranks are left out")
    assert found.notes[1].startswith("2 collectives could not be matched over ranks")
    assert found.ranks[0].waiting_ns == {}


def test_captures_of_one_run_go_together(tmp_path: Path) -> None:
    folder = late_rank(tmp_path)
    for path in sorted(folder.iterdir()):
        path.with_name(path.name.replace("10", "90")).write_bytes(path.read_bytes())
    found = read_breakdown(folder)
    assert [len(one.steps) for one in found.ranks] == [4, 4]
    assert found.ranks[0].waiting_ns == {1: 1_200_000}


def test_replicas_wait_for_the_rank_at_the_root(tmp_path: Path) -> None:
    # Rank 2 is late, and rank 3 with it in their shard group; 0 and 1 wait for those of their replicas.
    for rank in range(4):
        trace = Trace(rank, host_name="a")
        trace.step(0, 0, 1000)
        shard = "[0, 1]" if rank < 2 else "[2, 3]"
        begun = 600 if rank == 2 else 100
        trace.kernel(GEMM, 0, begun)
        ended = 200 if rank < 2 else 700
        trace.nccl("_reduce_scatter_base", begun, ended - begun, "mesh_shard", shard)
        replicas = str([rank % 2, rank % 2 + 2])
        trace.nccl("allreduce", ended, 800 - ended, "mesh_replicate", replicas)
        trace.write(tmp_path / f"trace-rank{rank}.json")
    found = read_breakdown(tmp_path)
    # 0 waits for 2 itself from 200 to 700; 1 for 3, which waits for 2 until 600, and transfers until 700.
    waits = {one.rank: {rank: time // 1000 for rank, time in one.waiting_ns.items()} for one in found.ranks}
    assert waits == {0: {2: 500}, 1: {2: 400, 3: 100}, 2: {}, 3: {2: 500}}
    labels = [each.collective.label for each in found.ranks[0].communications]
    assert labels == ["all_reduce (replicate)", "reduce_scatter (shard)"]


def test_a_pipeline_waits_for_its_slowest_stage(tmp_path: Path) -> None:
    for rank, (work, wait) in enumerate([(300, 600), (700, 200), (300, 600)]):
        trace = Trace(rank)
        trace.step(0, 0, 900)
        trace.kernel(GEMM, 0, work)
        trace.nccl("coalesced", work, wait, "mesh_pipeline")
        trace.write(tmp_path / f"trace-rank{rank}.json")
    found = read_breakdown(tmp_path)
    assert [one.waiting_ns for one in found.ranks] == [{1: 400_000}, {}, {1: 400_000}]
    first, second = losses_of(found)[:2]
    assert (first.kind, first.subject) == ("waiting", "rank 1")
    assert (second.kind, second.share) == ("pipeline", pytest.approx(200 / 900))


def test_ranks_that_take_turns_in_being_late(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = Trace(rank)
        for number in (0, 1):
            start = 1000 * number
            late = number == rank
            trace.step(number, start, 1000)
            trace.kernel(GEMM, start, 900 if late else 500)
            trace.nccl("allreduce", start + (900 if late else 500), 100 if late else 500)
        # A bit later than the other at the end, which decides nothing.
        trace.write(tmp_path / f"trace-rank{rank}.json")
    found = read_breakdown(tmp_path)
    assert losses_of(found)[0].share == pytest.approx(0.2)
    assert found.straggler is None or found.straggler.waiting_share == pytest.approx(0.2)


def test_one_rank_says_what_it_cannot_tell(tmp_path: Path) -> None:
    found = read_breakdown(late_rank(tmp_path) / "step-00000010-rank0.json.gz")
    assert (found.straggler, found.ranks[0].waiting_ns) == (None, {})
    assert "exposed all_reduce (shard) over the network" in largest_loss(found)
    assert "read those of all" in largest_loss(found)
    assert "exposed communication" in breakdown_as_text(found)


def test_no_loss(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.kernel(GEMM, 0, 99)
    found = read_breakdown(trace.write(tmp_path / "trace.json"))
    assert largest_loss(found) == "No loss takes 2% of a step or more: the rest is computation."


def test_files_that_do_not_tell_their_rank_are_numbered(tmp_path: Path) -> None:
    for name in "ab":
        trace = Trace(rank=None)
        trace.step(0, 0, 100)
        trace.kernel(GEMM, 0, 99)
        trace.write(tmp_path / f"{name}.json")
    found = read_breakdown([tmp_path / "a.json", tmp_path / "b.json"])
    assert [one.rank for one in found.ranks] == [0, 1]
    assert found.notes[0].startswith("2 traces do not tell their rank")


def test_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="has no traces"):
        read_breakdown(tmp_path)


def command(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    parser = OneLineParser(prog="perf-metrics")
    fill_trace(parser)
    parsed = parser.parse_args([*map(str, options)])
    assert parsed.run(parsed) == 0
    return capsys.readouterr().out


def test_the_command_shows_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late_rank(tmp_path / "profile")
    picture = tmp_path / "steps.png"
    out = command(capsys, tmp_path, "--plot", picture)
    assert out.startswith("Largest loss: 30.0% of a step is spent waiting for rank 1")
    header, *rows = (" ".join(line.split()) for line in out.splitlines()[3:6])
    assert header == (
        "rank ms a step matmul attention other kernels waiting transfer memory copies checkpoint data wait "
        "host gap overlapped"
    )
    assert rows == [
        "0 1.000 20.0% 0.0% 22.0% 30.0% 15.0% 0.0% 0.0% 0.0% 13.0% + 0.0%",
        "1 1.000 50.0% 0.0% 22.0% 0.0% 15.0% 0.0% 0.0% 0.0% 13.0% + 0.0%",
    ]
    assert "all_reduce (shard)" in out
    assert "tile overhead: unavailable" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_has_all_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(command(capsys, late_rank(tmp_path), "--json"))
    breakdown = told["breakdown"]
    assert breakdown == json.loads(json.dumps(breakdown_as_json(read_breakdown(tmp_path))))
    for rank in breakdown["ranks"]:
        assert sum(rank["shares"].values()) == pytest.approx(1, abs=1e-12)
        assert sum(rank["seconds"].values()) == pytest.approx(2e-3)
        for step in rank["steps"]:
            assert sum(step["category_seconds"].values()) == pytest.approx(step["seconds"])
    assert breakdown["straggler"]["rank"] == 1
    assert [loss["kind"] for loss in breakdown["losses"]] == ["waiting", "transfer", "host_gap"]
    # Tiles are of one rank; what is no matrix work is there, too.
    assert told["device_seconds"] == pytest.approx(2 * 870e-6)
    assert told["other_seconds"] == pytest.approx(2 * 670e-6)


def test_picture_of_many_ranks(tmp_path: Path) -> None:
    for rank in range(40):
        trace = Trace(rank)
        trace.step(0, 0, 100)
        trace.kernel(GEMM, 0, 50 + rank)
        trace.nccl("allreduce", 20, 70)
        trace.write(tmp_path / f"trace-rank{rank}.json")
    found = read_breakdown(tmp_path)
    assert [one.rank for one in found.ranks] == list(range(40))
    assert plot_breakdown(found, tmp_path / "steps.svg").read_text().count("rank ") >= 20
    with pytest.raises(ValueError, match=r"must end in"):
        plot_breakdown(found, tmp_path / "steps.txt")


def test_a_trace_counts_once_and_two_runs_are_refused(tmp_path: Path) -> None:
    folder = late_rank(tmp_path / "a")
    alone = read_breakdown(folder)
    again = read_breakdown([folder, *folder.iterdir()])
    assert breakdown_as_json(again) == breakdown_as_json(alone)
    with pytest.raises(
        TraceFileError, match=r"Rank 0 has several traces of one capture: .*Give those of one"
    ):
        read_breakdown([folder, late_rank(tmp_path / "b")])


def test_a_number_that_comes_again_is_another_step(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = Trace(rank)
        for start in (0, 1000):
            for number in (1, 2):
                trace.step(number, start + 100 * number, 100)
                trace.kernel(GEMM, start + 100 * number, 50)
                trace.nccl("allreduce", start + 100 * number + 50, 40)
        trace.write(tmp_path / f"rank{rank}.json")
    first, _ = read_breakdown(tmp_path).ranks
    assert len(first.steps) == 4
    assert first.communications[0].calls == 4


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = Trace(rank)
        trace.step(1, 0, 100)
        trace.nccl("allreduce", 5, 90, ranks="[0, 1, 2, 3]")
        trace.write(tmp_path / f"rank{rank}.json")
    assert read_breakdown(tmp_path).notes == (
        "Traces of ranks 2, 3 are missing: waiting for them counts as transfer.",
    )


def test_a_long_chain_of_ranks_that_wait_for_one_another(tmp_path: Path) -> None:
    count = 1100
    for rank in range(count):
        trace = Trace(rank, host_name="a")
        trace.step(1, 0, 10 * count + 100)
        if rank:  # begins with the rank before, which is late
            trace.nccl("allreduce", 1, 10 * rank, f"pair_{rank}", f"[{rank - 1}, {rank}]")
        if rank + 1 < count:
            trace.nccl("allreduce", 10 * rank + 2, 5, f"pair_{rank + 1}", f"[{rank}, {rank + 1}]")
        trace.write(tmp_path / f"rank{rank}.json")
    assert len(read_breakdown(tmp_path).ranks) == count
