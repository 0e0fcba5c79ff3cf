"""The share of waiting that the papers give for a schedule."""

from __future__ import annotations

_PLAIN = ("gpipe", "1f1b")
_LOOPED = ("interleaved_1f1b", "looped_bfs")
_WEIGHTS_LATER = ("interleaved_zero_bubble",)


def textbook_bubble(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> float | None:
    """Return the bubble that the literature gives for a schedule: the share of the ranks' time spent waiting.

    All stages cost the same, a backward pass costs two forward passes (each of its halves one), and nothing
    is lost to transfers. With p ranks, m microbatches and v stages on a rank:

    - gpipe: (p-1) / (m+p-1), Huang et al. 2019, "GPipe", arXiv:1811.06965, section 2.3.
    - 1f1b: the same, Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1. They give the time of waiting as
      a share (p-1) / m of the time of computing; here it is the share of both together.
    - interleaved_1f1b: (p-1) / (v*m + p-1), the same paper, section 2.2.2.
    - looped_bfs: the same, Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", arXiv:2211.05953.
    - interleaved_zero_bubble: (p-1) / (3*v*m + p-1). With one stage on a rank this is ZB-H1 of Qi et al.
      2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, whose ranks wait (p-1) (F + I - W); with v
      stages, F, I and W each take 1/v of the time.
    - zbv and dualpipe_v: None. For zbv the same paper claims no bubble at all where F = I = W, counted
      between the first and the last action of each rank; `Timeline.bubble_between` is that figure, and it
      is 0 from 2p-1 microbatches on.

    The formulas with several stages on a rank, and that of interleaved_zero_bubble, take m to be at least p:
    with fewer microbatches a rank waits for its own earlier stage too, and the answer is None. Torch's
    schedules reach all formulas exactly where they are given, also where p does not divide m.

    Args:
        name: Name of the schedule.
        ranks: Ranks of the pipeline, p.
        microbatches: Microbatches of one step, m.
        stages_per_rank: Stages on a rank, v. By default 1 for gpipe and 1f1b, 2 for others.

    Returns:
        A share from 0 to 1; None where there is no simple formula, or the name is not one of these.
    """
    waiting = ranks - 1
    if name in _PLAIN:
        return waiting / (microbatches + waiting)
    if microbatches < ranks:
        return None
    passes = (2 if stages_per_rank is None else stages_per_rank) * microbatches
    if name in _LOOPED:
        return waiting / (passes + waiting)
    if name in _WEIGHTS_LATER:
        return waiting / (3 * passes + waiting)
    return None
