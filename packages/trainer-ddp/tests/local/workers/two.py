"""What two ranks do together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import Job, Settings, diloco, distance, gathered, mean_of, post_local, same
from torch import Tensor

from trainer_core import CommBytes
from trainer_ddp.combining import RankCombiner

MODES: dict[str, Callable[[int, int], Settings]] = {"post_local": post_local, "diloco": diloco}


SCENARIOS = (
    "period_one_is_data_parallel",
    "phases",
    "synced_weights",
    "unit_outer_step",
    "outer_steps",
    "traffic",
    "messages",
    "resume",
    "saved_for_one",
    "expert_of_one_rank",
    "other_settings",
    "one_host",
)


class Two:
    """The scenarios, in the order in which both ranks run them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rank = dist.get_rank()
        self.group: dist.ProcessGroup = dist.group.WORLD

    def job(self, settings: Settings, optimizer: str = "adamw", **options: object) -> Job:
        job = Job(settings, optimizer, group=self.group, **options)  # type: ignore[arg-type]
        job.local.begin(0)
        return job

    def all_ranks(self, values: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return gathered(values, self.group)

    def period_one_is_data_parallel(self) -> object:
        """Parameters after ten steps of SGD, averaged after each, and with averaged gradients."""
        averaged, reference = self.job(post_local(0, 1), "sgd"), self.job(post_local(100, 1), "sgd")
        averaged.train(10)
        reference.train(10)
        return distance(averaged.parameters(), reference.parameters())

    def phases(self) -> object:
        """For each step: which gradients are averaged, what is claimed to differ, and whether it does."""
        job = self.job(post_local(3, 4))
        seen = []
        for _ in range(12):
            scope = job.local.gradient_scope
            job.train(1)
            first, second = self.all_ranks(job.parameters())
            seen.append(
                [scope, job.local.replicas_differ, job.local.optimizer_state_differs, not same(first, second)]
            )
        return seen

    def synced_weights(self) -> object:
        """What holds inside and after the context, for kinds of optimizers and of weights."""
        cases = {
            "adamw": self.job(post_local(1, 10)),
            "mixed": self.job(post_local(1, 10), "mixed"),
            "bf16": self.job(post_local(1, 10), dtype=torch.bfloat16),
            "diloco": self.job(diloco(1, 10)),
        }
        return {name: self._synced_weights(job) for name, job in cases.items()}

    def _synced_weights(self, job: Job) -> object:
        job.train(4)
        job.model.cache.fill_(self.rank)
        weights, moments = job.weights(), job.moments()
        all_weights, all_moments = self.all_ranks(weights), self.all_ranks(moments)
        everything = [w | m for w, m in zip(all_weights, all_moments, strict=True)]
        with job.local.synced_weights(optimizer=False):
            untouched = same(job.moments(), moments)
        with job.local.synced_weights(optimizer=True), job.local.synced_weights(optimizer=True):
            first, second = self.all_ranks({**job.weights(), **job.moments()})
            claims = [job.local.replicas_differ, job.local.optimizer_state_differs]
            cache = float(job.model.cache)
        try:
            with job.local.synced_weights(optimizer=True):
                raise InterruptedError
        except InterruptedError:
            interrupted = same(job.weights(), weights) and same(job.moments(), moments)
        return {
            "differed": not same(*all_weights) and not same(*all_moments),
            "equal inside": same(first, second),
            "error of the mean": distance(first, mean_of(everything)),
            "restored": same(job.weights(), weights) and same(job.moments(), moments),
            "restored after an error": interrupted,
            "optimizer untouched when not asked for": untouched,
            "claims inside": claims,
            "cache inside": cache == self.rank,
        }

    def unit_outer_step(self) -> object:
        """DiLoCo with unit steps beside PostLocalSGD: |difference| / (|anchor| + |mean|)."""
        outer, mean = self.job(diloco(2, 3, rate=1.0, momentum=0.0)), self.job(post_local(2, 3))
        outer.train(2)
        mean.train(2)
        anchor = mean.parameters()
        outer.train(3)
        mean.train(3)
        moved, averaged = outer.parameters(), mean.parameters()
        scales = {name: anchor[name].abs() + averaged[name].abs() for name in anchor}
        return max(float(((moved[n] - averaged[n]).abs() / scales[n]).max()) for n in anchor)

    def outer_steps(self) -> object:
        """Four outer steps with Nesterov momentum, beside the formula."""
        job = self.job(diloco(2, 3, rate=0.7, momentum=0.9))
        job.train(2)
        anchor = {name: value.double() for name, value in job.parameters().items()}
        velocity = {name: torch.zeros_like(value) for name, value in anchor.items()}
        errors = []
        for _ in range(4):
            job.train(2)
            # The last inner step by hand, to see the weights that the outer step starts from.
            settled, job.local.after_step = job.local.after_step, lambda step: None  # type: ignore[method-assign]
            job.train(1)
            mean = mean_of([{n: v.double() for n, v in w.items()} for w in self.all_ranks(job.parameters())])
            job.local.after_step = settled  # type: ignore[method-assign]
            job.local.after_step(job.step)
            for name, value in anchor.items():
                gradient = value - mean[name]
                velocity[name] = 0.9 * velocity[name] + gradient
                anchor[name] = value - 0.7 * (gradient + 0.9 * velocity[name])
            errors.append(distance(job.parameters(), anchor))
        return errors

    def traffic(self) -> object:
        """Bytes that are sent for an averaging, and inside and outside of a consolidation."""
        job = self.job(post_local(1, 3))
        job.train(3)
        local = job.traffic.bytes
        with job.local.synced_weights(optimizer=True):
            synced_weights = job.traffic.bytes
        job.train(1)
        return {
            "local": local,
            "synced_weights": synced_weights - local,
            "averaging": job.traffic.bytes - synced_weights,
        }

    def messages(self) -> object:
        """Means of awkward tensors in messages of at most 64 bytes, and how many bytes are counted."""
        traffic = LargestMessage()
        ranks = RankCombiner(self.group, torch.device("cpu"), traffic, bucket_bytes=64)
        torch.manual_seed(self.rank)
        tensors = {
            "long": torch.randn(50),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(float(self.rank)),
            "turned": torch.randn(3, 4).t(),
            "bf16": torch.randn(9).bfloat16(),
            "double": torch.randn(3, dtype=torch.float64),
            "complex": torch.randn(3, dtype=torch.complex64),
            "flags": torch.tensor([self.rank == 0, True, False]),
            "count": torch.tensor(7 + self.rank),
        }
        combined = {name: value for part in ranks.combine(tensors) for name, value in part.items()}
        everybody = self.all_ranks(tensors)
        return {
            "errors": {
                name: float((combined[name] - _mean([other[name] for other in everybody])).abs().sum())
                for name in tensors
                if name not in ("flags", "count")
            },
            "first rank's": [combined["flags"].tolist(), int(combined["count"])],
            "bytes": [traffic.bytes, traffic.largest],
            "agree": ranks.same_on_all_ranks([3, self.rank, -5, 2**61]),
        }

    def resume(self) -> object:
        """Whether a run that is started again gives the same bits, by mode and by the step of the save."""
        seen = {}
        cases = {"adamw": (1, 2, 4, 5, 6), "mixed": (4, 5), "sgd": (4,)}
        for mode, settings in MODES.items():
            for optimizer, steps in cases.items():
                for at in steps:
                    seen[f"{mode} {optimizer} {at}"] = self._resume(mode, settings(2, 3), optimizer, at)
        return seen

    def _resume(self, mode: str, settings: Settings, optimizer: str, at: int) -> bool:
        directory = self.directory / f"{mode}-{optimizer}-{at}"
        job = self.job(settings, optimizer)
        job.train(at)
        job.save(directory)
        job.train(12 - at)
        again = Job(settings, optimizer, group=self.group, seed=5)
        again.load(directory)
        again.train(12 - at)
        return same(again.weights(), job.weights()) and same(again.moments(), job.moments())

    def saved_for_one(self) -> object:
        """Checkpoints between two averagings, for other tests to load, with the means by hand."""
        for mode, settings in MODES.items():
            job = self.job(settings(2, 3))
            job.train(7)
            everybody = self.all_ranks({**job.weights(), **job.moments()})
            job.save(self.directory / f"for-one-{mode}")
            torch.save(mean_of(everybody), self.directory / f"for-one-{mode}.pt")
        return None

    def expert_of_one_rank(self) -> object:
        """State that only rank 1 has: what the others see of it, and whether a run continues exactly."""
        directory = self.directory / "expert"
        job = self.job(post_local(0, 4))
        job.train(3, expert_on=1)
        before = job.moments()
        with job.local.synced_weights(optimizer=True):
            inside = sorted(name for name in job.moments() if name.startswith("expert"))
        job.save(directory)
        restored = same(job.moments(), before)
        job.train(4, expert_on=1)
        again = Job(post_local(0, 4), group=self.group, seed=5)
        again.load(directory)
        again.train(4, expert_on=1)
        return {
            "own": sorted(name for name in before if name.startswith("expert")),
            "inside": inside,
            "restored": restored,
            "resumed": same(again.weights(), job.weights()) and same(again.moments(), job.moments()),
        }

    def other_settings(self) -> object:
        """A run that continues in another way, of which all ranks begin from the mean."""
        mean = torch.load(self.directory / "for-one-post_local.pt")
        later = self._going_on(post_local(50, 3))
        claims = [
            later.local.replicas_differ,
            later.local.optimizer_state_differs,
            later.local.gradient_scope,
        ]
        host = self._going_on(post_local(2, 3, node=True), node=self.group)
        other = self._going_on(diloco(2, 3))
        seen = {
            "claims": claims,
            "errors": [
                distance({**later.weights(), **later.moments()}, mean),
                distance({**host.weights(), **host.moments()}, mean),
                distance(other.weights(), {name: mean[name] for name in other.weights()}),
            ],
            "anchor of diloco": sorted(other.local.state_components()[1].stateful.state_dict()),
        }
        later.train(2)
        return {**seen, "together": same(*self.all_ranks({**later.parameters(), **later.moments()}))}

    def _going_on(self, settings: Settings, **options: object) -> Job:
        job = Job(settings, group=self.group, seed=5, **options)  # type: ignore[arg-type]
        with job.manager(self.directory / "for-one-post_local") as manager:
            loaded = manager.load_checkpoint()
        assert loaded is not None
        job.local.begin(loaded.step)
        job.step = loaded.step
        return job

    def one_host(self) -> object:
        """PostLocalSGD with averaged gradients inside of the only host: replicas stay equal."""
        job = self.job(post_local(1, 3, node=True), node=self.group)
        seen = []
        for _ in range(4):
            seen.append(job.local.gradient_scope)
            job.train(1)
        first, second = self.all_ranks({**job.parameters(), **job.moments()})
        return {
            "scopes": seen,
            "equal": same(first, second),
            "claims": [job.local.replicas_differ, job.local.optimizer_state_differs],
            "bytes": job.traffic.bytes,
        }


def _mean(values: list[Tensor]) -> Tensor:
    wide = torch.promote_types(values[0].dtype, torch.float32)
    return torch.stack([value.to(wide) for value in values]).mean(0)


class LargestMessage(CommBytes):
    """Remembers the size of the largest message, too."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def add(self, *tensors: Tensor) -> None:
        super().add(*tensors)
        self.largest = max(self.largest, *(tensor.nbytes for tensor in tensors))
