"""Tile overhead of a torch.profiler trace: which kernels compute how much more than was asked."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ..traces.trace_file import Event, TraceFile, TraceFileError, event_arguments
from .kernels import PLAIN_CORES, EffectiveSizes, GemmKernel, effective_sizes, explain, parse_kernel

_FACTORS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2),
    "aten::linear": (0, 1),
    "aten::_scaled_mm": (0, 1),
    "aten::_scaled_mm_v2": (0, 1),
}
"""Where the two factors are among the inputs of an operator, read from the schemas of torch 2.13."""

MATMUL_OPERATORS = frozenset(_FACTORS)
"""Operators whose sizes are read."""


@dataclass(frozen=True, slots=True)
class MatmulSizes:
    """A batch of products of [tokens, k] and [k, features], in torch's row-major terms.

    Attributes:
        batch: Products of this size.
        tokens: Rows of the result, which is cuBLAS's n.
        features: Columns of the result, which is cuBLAS's m.
        k: Depth.
    """

    batch: int
    tokens: int
    features: int
    k: int

    def __str__(self) -> str:
        product = f"[{self.tokens}, {self.k}] x [{self.k}, {self.features}]"
        return product if self.batch == 1 else f"{self.batch} of {product}"

    @property
    def flops(self) -> int:
        """FLOPs that were asked for: 2 m n k, times the batch."""
        return 2 * self.batch * self.tokens * self.features * self.k


def matmul_sizes(operator: str, shapes: object) -> MatmulSizes | None:
    """Read the sizes of an operator.

    Args:
        operator: One of `MATMUL_OPERATORS`.
        shapes: The trace's "Input Dims": a list of shapes.

    Returns:
        The sizes, or None where the shapes are not there, do not fit one another or hold nothing.
    """
    left, right = (_shape(shapes, place) for place in _FACTORS[operator])
    if left is None or right is None:
        return None
    if operator == "aten::linear":
        return _sizes(1, prod(left[:-1]), left[-1], right[::-1])
    if len(left) == 3 and len(right) == 3 and left[0] == right[0]:
        return _sizes(left[0], left[1], left[2], right[1:])
    if len(left) == 2:
        return _sizes(1, left[0], left[1], right)
    return None


def _sizes(batch: int, tokens: int, k: int, right: Sequence[int]) -> MatmulSizes | None:
    if len(right) != 2 or right[0] != k or min(batch, tokens, k, right[1]) < 1:
        return None
    return MatmulSizes(batch, tokens, right[1], k)


def _shape(shapes: object, place: int) -> Sequence[int] | None:
    if not isinstance(shapes, list) or len(shapes) <= place:
        return None
    shape = shapes[place]
    if not isinstance(shape, list) or not shape or any(type(size) is not int for size in shape):
        return None
    return shape


def check_grid(
    kernel: GemmKernel, blocks: int, grid: Sequence[int] | None, multiprocessors: int | None
) -> Literal["agree", "differ", "unchecked"]:
    """Compare a launched grid with the formula.

    A persistent kernel starts at most one block for each multiprocessor, so a grid can only be held against
    the formula if the formula gives no more blocks than that. cutlass_80 pads its grid for the order of the
    tiles, and how XMMA lays out its grid was not seen: neither is checked.

    Args:
        kernel: What the name tells.
        blocks: Thread blocks by the formula, over the whole batch, before any split of k.
        grid: As launched, or None if it is not known.
        multiprocessors: Of the device, or None if it is not known.
    """
    has_cluster = kernel.tile.cluster_m is not None and kernel.tile.cluster_n is not None
    if grid is None or kernel.family not in ("nvjet", "cutlass3x") or not has_cluster:
        return "unchecked"
    # Only the product: which side of the grid is which, and where the clusters are, differs by kernel.
    launched = prod(grid)
    if launched == blocks or (kernel.split_k and launched % blocks == 0):
        return "agree"
    if launched > blocks and not kernel.split_k:
        return "differ"
    # Into how many parts k is split is not told, so they may be more than there are multiprocessors.
    wanted = math.inf if kernel.split_k and launched > blocks else blocks
    persistent = multiprocessors is None or wanted > multiprocessors >= launched
    return "unchecked" if persistent else "differ"


@dataclass(frozen=True, slots=True)
class GridChecks:
    """Launches of one kernel by what their grids say.

    Attributes:
        agree: The grid is what the formula gives.
        differ: It is not: the name was misread, the axes are others, or the operator's shapes are not those
            of the kernel.
        unchecked: The kernel is persistent, or the trace does not tell.
        example: The first that differs, in words.
    """

    agree: int = 0
    differ: int = 0
    unchecked: int = 0
    example: str | None = None


_MATRIX_WORK = re.compile(
    r"gemm|nvjet|cutlass|xmma|mma_|matmul|flash|fmha|attention|attn|sdpa|conv(?!ert)|triton_tem_",
    re.IGNORECASE,
)
"""Words in the names of kernels that may use the tensor cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOverhead:
    """All launches of one kernel whose sizes are known.

    Attributes:
        kernel: What its name tells.
        calls: Launches.
        seconds: Their summed time on the device.
        flops: FLOPs that were asked for.
        effective_flops: FLOPs in whole tiles and clusters.
        inexact: Why the latter is a lower bound, or None if it is exact.
        grids: How the launched grids compare with the formula.
    """

    kernel: GemmKernel
    calls: int
    seconds: float
    flops: int
    effective_flops: int
    inexact: str | None
    grids: GridChecks

    @property
    def overhead(self) -> float:
        """Work on top of what was asked for, as a share of it."""
        return self.effective_flops / self.flops - 1


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A kernel that is not in the overhead, and why."""

    name: str
    reason: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOverhead:
    """What a trace tells of tile quantization.

    Attributes:
        kernels: Those counted, the longest first.
        unreadable: Kernels that may use the tensor cores and whose name is not read: no tile is known.
        without_sizes: Kernels with a known tile for which the trace gives no sizes.
        plain_cores: Matrix multiplications, and their helpers, that do not run on tensor cores: OFU does not
            see them.
        device_seconds: Summed time of all kernels of the trace, those that overlap counted each.
    """

    kernels: tuple[KernelOverhead, ...]
    unreadable: tuple[LeftOut, ...]
    without_sizes: tuple[LeftOut, ...]
    plain_cores: tuple[LeftOut, ...]
    device_seconds: float

    @property
    def flops(self) -> int:
        """FLOPs asked for by the kernels counted."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def effective_flops(self) -> int:
        """FLOPs of the same kernels in whole tiles and clusters."""
        return sum(kernel.effective_flops for kernel in self.kernels)

    @property
    def overhead(self) -> float | None:
        """Sum of effective over sum of asked FLOPs, less 1; None if no kernel could be counted."""
        return self.effective_flops / self.flops - 1 if self.kernels else None

    @property
    def exact(self) -> bool:
        """Whether every kernel counted is exact."""
        return all(kernel.inexact is None for kernel in self.kernels)

    @property
    def other_seconds(self) -> float:
        """Time of the kernels that are no matrix work: element-wise ones, communication, and all others."""
        counted = sum(kernel.seconds for kernel in self.kernels)
        left_out = (*self.unreadable, *self.without_sizes, *self.plain_cores)
        return max(0.0, self.device_seconds - counted - sum(kernel.seconds for kernel in left_out))

    def share(self, seconds: float) -> float:
        """A time as a share of that of all kernels."""
        return seconds / self.device_seconds if self.device_seconds else 0.0


class _Launch(NamedTuple):
    name: str
    operator: int | None
    microseconds: float
    grid: tuple[int, ...] | None
    device: int | None


_Operators: TypeAlias = dict[int, tuple[str, MatmulSizes | None]]
"""Name and sizes of the operators for matrix multiplication, by external id."""


def trace_overhead(path: str | Path) -> TraceOverhead:
    """Read a trace and compute the overhead of its matrix multiplications.

    A kernel is joined to the operator that launched it by "External id". Sizes come from the operator's
    "Input Dims", so the trace must be recorded with `record_shapes=True`. A kernel is counted if its name
    tells the tile and its operator, with known shapes, launched no other kernel that may use tensor cores.

    Args:
        path: What `prof.export_chrome_trace` wrote, packed by gzip or not.

    Raises:
        TraceFileError: It is no such file, or has no kernels.
        OSError: It cannot be read.
    """
    file = TraceFile(path)
    reader = TileOverheadReader()
    for event in file.events():
        reader.add(event)
    overhead = reader.overhead(file.header)
    if overhead is None:
        raise TraceFileError(
            f"{file.path} has no kernels of a GPU. Profile with activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA]."
        )
    return overhead


class TileOverheadReader:
    """Takes the events of a trace one by one, so that one pass over a file can feed several readers."""

    def __init__(self) -> None:
        self._launches: list[_Launch] = []
        self._operators: _Operators = {}

    def add(self, event: Event) -> None:
        """Take the next event."""
        category = event.get("cat")
        if category == "kernel":
            self._launches.append(_launch(event))
        elif category == "cpu_op" and event.get("name") in MATMUL_OPERATORS:
            _add_operator(event, self._operators)

    def overhead(self, header: Event) -> TraceOverhead | None:
        """The overhead of all events taken, or None if no kernel was among them.

        Args:
            header: `TraceFile.header`, after its last event.
        """
        if not self._launches:
            return None
        return _Sums(self._operators, _multiprocessors(header)).of(self._launches)


def _add_operator(event: Event, operators: _Operators) -> None:
    name, arguments = str(event["name"]), event_arguments(event)
    identity = _identity(arguments)
    if identity is None:
        return
    found = (name, matmul_sizes(name, arguments.get("Input Dims")))
    # An id that is used twice for different things tells nothing.
    if operators.setdefault(identity, found) != found:
        operators[identity] = (name, None)


def _launch(event: Event) -> _Launch:
    arguments = event_arguments(event)
    grid = arguments.get("grid")
    microseconds = event.get("dur")
    sizes = tuple(grid) if isinstance(grid, list) and all(type(size) is int for size in grid) else None
    return _Launch(
        name=str(event.get("name", "")),
        operator=_identity(arguments),
        microseconds=float(microseconds) if isinstance(microseconds, int | float) else 0.0,
        grid=sizes,
        device=device if isinstance(device := arguments.get("device"), int) else None,
    )


def _identity(arguments: Event) -> int | None:
    identity = arguments.get("External id")
    return identity if type(identity) is int else None


def _multiprocessors(header: Event) -> dict[int, int]:
    devices = header.get("deviceProperties")
    return {
        device["id"]: device["numSms"]
        for device in (devices if isinstance(devices, list) else [])
        if isinstance(device, dict) and type(device.get("numSms")) is type(device.get("id")) is int
    }


_Times: TypeAlias = defaultdict[tuple[str, str], list[float]]
"""Microseconds of launches, by name and reason."""


class _Sums:
    """Sums over the launches of a trace."""

    def __init__(self, operators: _Operators, multiprocessors: dict[int, int]) -> None:
        self._operators = operators
        self._multiprocessors = multiprocessors

    def of(self, launches: list[_Launch]) -> TraceOverhead:
        """Sort the launches into what is counted and what is left out."""
        products = Counter(launch.operator for launch in launches if _may_use_tensor_cores(launch.name))
        counted: defaultdict[GemmKernel, list[tuple[_Launch, MatmulSizes]]] = defaultdict(list)
        unreadable: _Times = defaultdict(list)
        plain: _Times = defaultdict(list)
        without: _Times = defaultdict(list)
        for launch in launches:
            kernel = parse_kernel(launch.name)
            if kernel is None:
                if launch.operator in self._operators or _MATRIX_WORK.search(launch.name):
                    reason = explain(launch.name) or ""
                    kind = plain if reason == PLAIN_CORES else unreadable
                    kind[launch.name, reason].append(launch.microseconds)
                continue
            sizes = self._sizes(launch, kernel, products[launch.operator])
            if isinstance(sizes, str):
                without[launch.name, sizes].append(launch.microseconds)
            else:
                counted[kernel].append((launch, sizes))
        kernels = [self._kernel(kernel, uses) for kernel, uses in counted.items()]
        return TraceOverhead(
            kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
            unreadable=_left_out(unreadable),
            without_sizes=_left_out(without),
            plain_cores=_left_out(plain),
            device_seconds=sum(launch.microseconds for launch in launches) / 1e6,
        )

    def _sizes(self, launch: _Launch, kernel: GemmKernel, products: int) -> MatmulSizes | str:
        """The sizes, or why they are not known."""
        if launch.operator is None or launch.operator not in self._operators:
            return "not launched by an operator for matrix multiplication that is known here"
        name, sizes = self._operators[launch.operator]
        if sizes is None:
            return f"{name} has no usable shapes; profile with record_shapes=True"
        if products > 1:
            return f"{name} launched {products} such kernels, and which computed what is not told"
        if kernel.a == "fp4":
            # torch has two FP4 values in one element of the depth.
            return MatmulSizes(sizes.batch, sizes.tokens, sizes.features, sizes.k * 2)
        return sizes

    def _kernel(self, kernel: GemmKernel, uses: list[tuple[_Launch, MatmulSizes]]) -> KernelOverhead:
        grids: Counter[str] = Counter()
        effective_flops = 0
        inexact = example = None
        for launch, sizes in uses:
            effective = _effective(kernel, sizes)
            effective_flops += effective.flops * sizes.batch
            inexact = effective.inexact
            blocks = effective.blocks * sizes.batch
            limit = None if launch.device is None else self._multiprocessors.get(launch.device)
            check = check_grid(kernel, blocks, launch.grid, limit)
            grids[check] += 1
            if check == "differ" and example is None:
                example = f"grid {launch.grid} where the formula gives {blocks} blocks for {sizes}"
        return KernelOverhead(
            kernel=kernel,
            calls=len(uses),
            seconds=sum(launch.microseconds for launch, _ in uses) / 1e6,
            flops=sum(sizes.flops for _, sizes in uses),
            effective_flops=effective_flops,
            inexact=inexact,
            grids=GridChecks(**grids, example=example),
        )


def _effective(kernel: GemmKernel, sizes: MatmulSizes) -> EffectiveSizes:
    m, n = (sizes.tokens, sizes.features) if kernel.row_major else (sizes.features, sizes.tokens)
    return effective_sizes(kernel, m, n, sizes.k)


def _may_use_tensor_cores(name: str) -> bool:
    """Whether a kernel is, or by its name may be, a matrix multiplication on tensor cores."""
    if parse_kernel(name) is not None:
        return True
    return _MATRIX_WORK.search(name) is not None and explain(name) != PLAIN_CORES


def _left_out(found: _Times) -> tuple[LeftOut, ...]:
    kernels = (LeftOut(name, reason, len(times), sum(times) / 1e6) for (name, reason), times in found.items())
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))
