"""What a run has been trained on, over all of its starts: a restart takes back what no checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping

from .documents import Word, words_of
from .job import Job


class History:
    """The steps of a run that have lasted."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[Word, ...]] = {}
        """The words of each step that all ranks have done, sorted."""

    def add(self, job: Job) -> None:
        """Add what one start has done, which continued from a checkpoint; what lies behind that is taken
        back.

        Raises:
            ValueError: If the start left a step out, did one twice, or continued from one that was not done.
        """
        base = job.resumed_at()
        ranks = [job.steps(rank) for rank in range(job.ranks)]
        if base is None:
            if any(ranks):
                raise ValueError(f"{job.folder.name}: steps were done before the start was told")
            return
        if base > len(self.steps):
            raise ValueError(f"{job.folder.name}: continues from step {base}, of {len(self.steps)} done")
        self.steps = {step: words for step, words in self.steps.items() if step <= base}
        for numbers in ([step for step, _ in done] for done in ranks):
            if numbers != list(range(base + 1, base + 1 + len(numbers))):
                raise ValueError(f"{job.folder.name}: continued from step {base} with the steps {numbers}")
        self.steps |= _done_by_all([dict(done) for done in ranks])


def _done_by_all(ranks: list[dict[int, list[int]]]) -> Mapping[int, tuple[Word, ...]]:
    """The words of the steps that every rank has done; a rank without the end of the model sees none."""
    common = sorted(set[int].intersection(*map(set, ranks)))
    return {step: tuple(sorted(word for each in ranks for word in words_of(each[step]))) for step in common}
