"""A fleet of thousands of GPUs as OpenMetrics, two hours a file, and what is true of its very samples."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from uuid import UUID, uuid5

import numpy as np
import numpy.typing as npt

from .dcgm_series import CLOCK_NAME, IDLE_MHZ, MODEL, NEW_NAME, OLD_NAME
from .planted import OddKind
from .synthetic_counters import LEAST_MHZ, MHZ_SD, MOST_MHZ, SLOW_MHZ, TENSOR_MHZ, USUAL_MHZ
from .synthetic_large_plan import GPUS, SCRAPE_S, START_S, Allocation, LargeJob, LargeSize, Style, plan_jobs

PIECE_SCRAPES = 2 * 3600 // SCRAPE_S
"""Scrapes in a file: as long as the blocks that a server makes itself."""
_POD_LABELS_EVERY = 10
"""Scrapes between those of kube-state-metrics."""
_MILLION = 1_000_000
_BLANK = _MILLION + 1
"""Stands for a blank where activity is in millionths."""
_BLANK_TEXT = "9223372036854775794"
_ERROR_EVERY, _LOST_HOST, _REMAPPED_HOST, _LOST_GPU = 97, 11, 20, 6
"""Of so many hosts one has a GPU that was lost, and one a GPU with a memory row remapped."""
_FALLS_TO = 0.7
_LESS = 0.3
_HEALTH_NAMES = (
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
)
"""Which dcgm-exporter has without being asked; the last stands still here."""
_NAMESPACE = UUID("0f9a8ffb-65cf-4fd0-9a53-5a3a2ee0c0de")

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LargeJobTruth:
    """What is true of one job, by its samples with a figure.

    Attributes:
        plan: What was planned.
        samples: Their number, each of 30 s.
        ofu: Their mean OFU as a share.
        falls_s: Unix time of the first scrape after the fall in seconds; None for one without.
        odd_devices: Kind by name of the device, as it is called last.
    """

    plan: LargeJob
    samples: int
    ofu: float
    falls_s: float | None
    odd_devices: Mapping[str, OddKind]

    @property
    def gpu_hours(self) -> float:
        """GPU time in hours."""
        return self.samples * SCRAPE_S / 3600


@dataclass(frozen=True)
class _Naming:
    """What a host, its exporter and its pod are called for a while."""

    host: str
    host_label: str
    names: tuple[str, ...]
    instance: str
    job_labels: str

    def labels(self, number: int, index: int) -> str:
        return (
            f'gpu="{index}",UUID="{_uuid(number, index)}",modelName="{MODEL}",'
            f'{self.host_label}="{self.host}",instance="{self.instance}",job="dcgm-exporter"{self.job_labels}'
        )


class LargeFleet:
    """A fleet of large jobs, the same for the same arguments.

    Args:
        size: How large it is.
        seed: Of its jobs and samples.
    """

    def __init__(self, size: LargeSize, seed: int = 0) -> None:
        self.size = size
        self.start_s, self.end_s = START_S, START_S + size.scrapes * SCRAPE_S
        self.jobs = plan_jobs(size, seed)
        self.samples = 0
        """Lines written so far."""
        self._random = np.random.default_rng(seed)
        shape = size.gpus, size.scrapes
        self._millionths = np.zeros(shape, np.uint32)
        self._mhz = np.full(shape, IDLE_MHZ, np.uint16)
        self._scraped = np.ones((size.gpus // GPUS, size.scrapes), bool)
        for job in self.jobs:
            self._work(job)
        self._spoil()

    @cached_property
    def truth(self) -> dict[str, LargeJobTruth]:
        """What is true of each job, by its name."""
        return {job.name: self._truth_of(job) for job in self.jobs}

    @cached_property
    def errors(self) -> dict[str, str]:
        """UUIDs of the GPUs that have an error at some time, with what it is."""
        hosts = range(len(self._scraped))
        lost = {_uuid(host, _LOST_GPU): "XID 79" for host in hosts if host % _ERROR_EVERY == _LOST_HOST}
        kind = "memory rows remapped after uncorrectable errors"
        return lost | {_uuid(host, 2): kind for host in hosts if host % _ERROR_EVERY == _REMAPPED_HOST}

    def of_style(self, style: Style) -> dict[str, LargeJobTruth]:
        """Return what is true of the jobs of one style."""
        return {name: job for name, job in self.truth.items() if job.plan.style == style}

    def write_sacct(self, path: Path) -> None:
        """Write what `sacct --json` would tell of the jobs of Slurm."""
        jobs = [
            {"job_id": int(job.name), "user": job.user, "account": job.account, "name": job.workload}
            for job in self.jobs
            if job.style == "slurm"
        ]
        path.write_text(json.dumps({"jobs": jobs}))

    def pieces(self, folder: Path) -> Iterator[Path]:
        """Write one file after another and yield its path; each has all series for two hours.

        Args:
            folder: Exists. The files may be moved or deleted as soon as they are yielded.
        """
        texts = [f"{value / _MILLION:.6f}" for value in range(_MILLION + 1)] + [_BLANK_TEXT]
        for low in range(0, self.size.scrapes, PIECE_SCRAPES):
            high = min(low + PIECE_SCRAPES, self.size.scrapes)
            path = folder / f"large-{low // PIECE_SCRAPES}.om"
            with path.open("w", encoding="ascii", buffering=1 << 20) as file:
                for text in self._lines(low, high, texts):
                    file.write(text)
                file.write("# EOF\n")
            yield path

    def _work(self, job: LargeJob) -> None:
        """Fill in what the GPUs of a job do, all at one pace; see `synthetic_counters`."""
        for place in job.allocations:
            gpus, scrapes = _gpus(place), place.last - place.first
            shape = len(gpus), scrapes
            usual, share = np.full(len(gpus), float(USUAL_MHZ)), np.ones(len(gpus))
            for host, index, kind in job.odd:
                if host in place.hosts:
                    row = place.hosts.index(host) * GPUS + index
                    usual[row], share[row] = (SLOW_MHZ, 1) if kind == "slow clock" else (USUAL_MHZ, _LESS)
            mhz = np.rint(usual[:, None] + MHZ_SD * self._random.standard_normal(shape))
            healthy = usual == USUAL_MHZ
            mhz[healthy] = mhz[healthy].clip(LEAST_MHZ, MOST_MHZ)
            work = job.ofu * self._pace(job, place) * share[:, None]
            activity = work * TENSOR_MHZ / np.sqrt(mhz * usual[:, None])
            activity *= 1 + 0.01 * self._random.standard_normal(shape)
            low = gpus[0]  # those of an allocation follow one another
            cells = slice(low, low + len(gpus)), slice(place.first, place.last)
            self._millionths[cells] = np.rint(_MILLION * activity).clip(0, _MILLION)
            self._mhz[cells] = mhz

    def _pace(self, job: LargeJob, place: Allocation) -> _Floats:
        """Return the pace at each scrape: noise, a slow drift, a start of minutes, and stalls each hour."""
        count = place.last - place.first
        drift, level = np.zeros(count), 0.0
        for number, change in enumerate(self._random.normal(0, 0.005, count)):
            drift[number] = level = 0.97 * level + change
        pace = 1 + drift + self._random.normal(0, 0.02, count)
        falls = count if job.falls_at is None else job.falls_at - place.first
        for stall in range(60, count - 50, 3600 // SCRAPE_S):
            if abs(stall - falls) > 30:
                pace[stall : stall + int(self._random.integers(2, 8))] *= 0.02
        pace[: int(self._random.integers(2, 6))] = 0
        pace[max(0, falls) :] *= _FALLS_TO
        return pace

    def _spoil(self) -> None:
        """Leave out what real fleets lack: blanks on some hosts, and minutes without a scrape on others."""
        for host in range(7, len(self._scraped), 50):
            rows = self._millionths[GPUS * host : GPUS * (host + 1)]
            rows[self._random.random(rows.shape) < 0.01] = _BLANK
        for host in range(3, len(self._scraped), 40):
            first = int(self._random.integers(self.size.scrapes // 8, self.size.scrapes // 2))
            self._scraped[host, first : first + 12] = False

    def _truth_of(self, job: LargeJob) -> LargeJobTruth:
        total, samples = 0.0, 0
        for place in job.allocations:
            rows = slice(GPUS * place.hosts[0], GPUS * (place.hosts[-1] + 1))
            cells = rows, slice(place.first, place.last)
            activity = self._millionths[cells]
            there = self._scraped[place.hosts[0] : place.hosts[-1] + 1, place.first : place.last]
            used = (activity != _BLANK) & np.repeat(there, GPUS, axis=0)
            total += float(np.sum((activity / _MILLION * self._mhz[cells] / TENSOR_MHZ)[used]))
            samples += int(np.count_nonzero(used))
        falls_s = None
        if job.falls_at is not None:
            offsets = [_offset_ms(host) for host in job.allocations[-1].hosts]
            falls_s = START_S + job.falls_at * SCRAPE_S + min(offsets) / 1000
        lasts = {host: place.last - 1 for place in job.allocations for host in place.hosts}
        odd = {
            f"{self._naming(host, job, lasts[host]).host}, GPU {index}": kind for host, index, kind in job.odd
        }
        return LargeJobTruth(job, samples, total / samples, falls_s, odd)

    def _lines(self, low: int, high: int, texts: list[str]) -> Iterator[str]:
        stamps = {
            offset: [f" {START_S + scrape * SCRAPE_S + offset / 1000:.3f}\n" for scrape in range(low, high)]
            for offset in {_offset_ms(host) for host in range(len(self._scraped))}
        }
        for host, stretches in enumerate(self._stretches):
            for begin, end, naming in stretches:
                first, last = max(low, begin), min(high, end)
                scraped = [scrape for scrape in range(first, last) if self._scraped[host, scrape]]
                if not scraped:
                    continue
                times = [stamps[_offset_ms(host)][scrape - low] for scrape in scraped]
                for index in range(GPUS):
                    labels = naming.labels(host, index)
                    row = GPUS * host + index
                    shown = [texts[value] for value in self._millionths[row, scraped].tolist()]
                    for name in naming.names:
                        yield self._series(f"{name}{{{labels}}} ", shown, times)
                    shown = [str(value) for value in self._mhz[row, scraped].tolist()]
                    yield self._series(f"{CLOCK_NAME}{{{labels}}} ", shown, times)
                    for name, shown in self._health(host, index, scraped):
                        yield self._series(f"{name}{{{labels}}} ", shown, times)
        yield from self._pod_labels(low, high)

    def _health(self, host: int, index: int, scraped: list[int]) -> Iterator[tuple[str, list[str]]]:
        """Yield its counters; an error is there from some scrape on, in any job or none."""
        since = self.size.scrapes * (1 + host % 7) // 9
        error = self.errors.get(_uuid(host, index), "")
        values = ("79" if error.startswith("XID") else "0", "1" if error.startswith("memory") else "0", "0")
        for name, value in zip(_HEALTH_NAMES, values, strict=True):
            yield name, [value if scrape >= since else "0" for scrape in scraped]

    def _series(self, start: str, values: list[str], times: list[str]) -> str:
        self.samples += len(values)
        return start + start.join([value + time for value, time in zip(values, times, strict=True)])

    def _pod_labels(self, low: int, high: int) -> Iterator[str]:
        """Yield what kube-state-metrics tells of the pods."""
        for job in self.jobs:
            for place in job.allocations if job.style == "jobsets" else ():
                for host in place.hosts:
                    edges = sorted({place.first, place.last, *_renamed_within(job, place)})
                    for begin, end in pairwise(edges):
                        first, last = max(low, begin), min(high, end)
                        namespace, jobset = job.name.split("/")
                        labels = (
                            f'namespace="{namespace}",pod="{_pod(job, host, begin)}",'
                            f'label_jobset_sigs_k8s_io_jobset_name="{jobset}",'
                            f'label_kueue_x_k8s_io_queue_name="{job.account}"'
                        )
                        times = [
                            f" {START_S + scrape * SCRAPE_S + 0.5:.3f}\n"
                            for scrape in range(first, last, _POD_LABELS_EVERY)
                        ]
                        if times:
                            yield self._series(f"kube_pod_labels{{{labels}}} ", ["1"] * len(times), times)

    @cached_property
    def _stretches(self) -> list[list[tuple[int, int, _Naming]]]:
        """Of each host, first and last scrape of what it is called for a while, the last not included."""
        with_jobs: defaultdict[int, list[tuple[int, int, LargeJob]]] = defaultdict(list)
        for job in self.jobs:
            for place in job.allocations:
                edges = sorted({place.first, place.last, *_renamed_within(job, place)})
                for host in place.hosts:
                    with_jobs[host] += [(begin, end, job) for begin, end in pairwise(edges)]
        found = []
        for host in range(len(self._scraped)):
            stretches, passed = list[tuple[int, int, _Naming]](), 0
            for begin, end, job in sorted(with_jobs[host], key=lambda one: one[0]):
                if passed < begin:
                    stretches.append((passed, begin, self._naming(host, None, passed)))
                stretches.append((begin, end, self._naming(host, job, begin)))
                passed = end
            if passed < self.size.scrapes:
                stretches.append((passed, self.size.scrapes, self._naming(host, None, passed)))
            found.append(stretches)
        return found

    def _naming(self, host: int, job: LargeJob | None, scrape: int) -> _Naming:
        """Return what a host is called; from its first rename on it keeps the new names."""
        times = self._renames.get(host, self.size.scrapes + 1)
        is_new = scrape >= times
        name = f"node-{host:04d}" + (".example" if is_new and host % 4 == 1 else "")
        labelled_new = host % 2 == 1 or (is_new and host % 4 == 2)
        names = (NEW_NAME,) if labelled_new else (OLD_NAME,)
        if host % 40 == 4 and not is_new:
            names = (OLD_NAME, NEW_NAME)
        port = 9401 if is_new and host % 4 == 3 else 9400
        labels = ""
        if job is not None and job.style == "slurm":
            labels = f',hpc_job="{job.name}"'
        elif job is not None:
            namespace = job.name.split("/")[0]
            labels = f',namespace="{namespace}",pod="{_pod(job, host, scrape)}",container="trainer"'
        return _Naming(name, "hostname" if labelled_new else "Hostname", names, f"{name}:{port}", labels)

    @cached_property
    def _renames(self) -> dict[int, int]:
        """Scrape from which on a host is called otherwise."""
        return {
            host: job.renamed_at
            for job in self.jobs
            if job.renamed_at is not None
            for place in job.allocations
            for host in place.hosts
        }


def _uuid(host: int, index: int) -> str:
    return f"GPU-{uuid5(_NAMESPACE, f'{host}/{index}')}"


def _gpus(place: Allocation) -> range:
    return range(GPUS * place.hosts[0], GPUS * (place.hosts[-1] + 1))


def _offset_ms(host: int) -> int:
    """When a host is scraped after each multiple of 30 s: each sample is in a step of its own."""
    return 1000 * (host % 29) + 500


def _renamed_within(job: LargeJob, place: Allocation) -> Iterator[int]:
    if job.renamed_at is not None and place.first < job.renamed_at < place.last:
        yield job.renamed_at


def _pod(job: LargeJob, host: int, scrape: int) -> str:
    """Name of a pod: another one each time that the job starts, and for one host in three when renamed."""
    start = max(place.first for place in job.allocations if place.first <= scrape)
    place = next(one for one in job.allocations if one.first == start)
    if job.renamed_at is not None and scrape >= job.renamed_at and host % 3 == 0:
        start = job.renamed_at
    return f"{job.name.split('/')[1]}-workers-0-{place.hosts.index(host)}-{start:05x}"
