"""What the names in a trace stand for: kernels, operators, collectives and the spans of a training loop."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from .trace_file import Event, event_arguments

Category: TypeAlias = Literal[
    "matmul",
    "attention",
    "other_kernels",
    "exposed_communication",
    "memory_copies",
    "checkpoint",
    "data_wait",
    "host_gap",
]
"""What an instant of a step is spent on; each instant belongs to exactly one."""

CATEGORIES: tuple[Category, ...] = (
    "matmul",
    "attention",
    "other_kernels",
    "exposed_communication",
    "memory_copies",
    "checkpoint",
    "data_wait",
    "host_gap",
)
"""In the order in which tables and pictures show them."""

LABELS: Mapping[Category, str] = {
    "matmul": "matmul",
    "attention": "attention",
    "other_kernels": "other kernels",
    "exposed_communication": "exposed communication",
    "memory_copies": "memory copies",
    "checkpoint": "checkpoint",
    "data_wait": "data wait",
    "host_gap": "host gap",
}

# Kernels of a GPU. Communication is asked for first, then attention: flash attention is built of CUTLASS too.
_COMMUNICATION_KERNEL = re.compile(
    r"nccl|rccl|nvshmem|deep_?ep|multimem|symm_mem|(?:one|two)_shot_all|cross_device_reduce", re.IGNORECASE
)
_ATTENTION = re.compile(r"flash|fmha|attention|attn|sdpa|scaled_dot_product", re.IGNORECASE)
_MATMUL_KERNEL = re.compile(
    # Cijk is how rocBLAS names its kernels. A convolution is matrix work on the same units.
    r"gemm|gemv|nvjet|cutlass|xmma|matmul|splitk|cublas|triton_tem_|triton_mm|Cijk_|conv(?!ert)",
    re.IGNORECASE,
)

# Operators of a CPU.
_MATMUL_OPERATORS = re.compile(
    r"aten::(?:_?(?:scaled_)?mm|addmm_?|bmm|baddbmm_?|matmul|linear|addmv_?|mv|dot|_addmm_activation"
    r"|_?grouped_mm|_scaled_grouped_mm|\w*convolution\w*|conv[123]d)(?:_v2)?$"
    r"|aten::mkldnn_\w*linear|mkldnn::|onednn::"
)
_TRANSPARENT_OPERATORS = re.compile(
    # They launch communication, wait for it, or call the operators that do the work. What time they spend
    # beside those is that of the host.
    r"c10d|_c10d|record_param_comms|autograd::engine|torch::autograd|c10d_functional|fsdp::.*wait"
)
_COMPILED = re.compile(r"cpp_fused|triton_|CompiledF|graph_\d+_|inductor", re.IGNORECASE)

# Spans of the main thread: those of trainer-core, of torch's DataLoader, and of Lightning's profiler.
_DATA_WAIT = re.compile(
    r"data[ _-]?(?:wait|loading|load|fetch)|next[ _-]?batch"
    r"|enumerate\(DataLoader\)#.*__next__|.*_dataloader_next$",
    re.IGNORECASE,
)
_CHECKPOINT = re.compile(
    r"(?:save[ _-]?)?checkpoint(?:$|[ _:#.])|torch\.save|.*\[Callback\]ModelCheckpoint", re.IGNORECASE
)

_STEP = re.compile(r"ProfilerStep#?\s*(\d+)$")


def step_number(name: str) -> int | None:
    """The number of a step's annotation, which `torch.profiler.profile.step` makes; None for others."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


@lru_cache(maxsize=8192)
def kernel_category(name: str) -> Category:
    """What a kernel of a GPU computes; "exposed_communication" stands for communication of any kind."""
    if _COMMUNICATION_KERNEL.search(name):
        return "exposed_communication"
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL_KERNEL.search(name) else "other_kernels"


@lru_cache(maxsize=8192)
def operator_category(name: str) -> Category | None:
    """What an operator computes on a CPU, or None if it computes nothing by itself."""
    if _TRANSPARENT_OPERATORS.match(name):
        return None
    if _COMPILED.search(name):
        return "other_kernels"
    if "::" not in name:
        return None  # a node of autograd, or a Python frame, which calls the operators that do the work
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL_OPERATORS.match(name) else "other_kernels"


@lru_cache(maxsize=4096)
def span_category(name: str) -> Category | None:
    """ "data_wait" or "checkpoint" for an annotation of that meaning, or None."""
    if _DATA_WAIT.match(name):
        return "data_wait"
    return "checkpoint" if _CHECKPOINT.match(name) else None


class Collective(NamedTuple):
    """What a communication is.

    Attributes:
        kind: Such as "all_reduce"; "communication" where the trace does not tell.
        group: The mesh dimension, or else the description or the number of the process group; None where the
            trace does not tell, which is so with gloo.
        ranks: Who takes part, or None where the trace does not tell.
    """

    kind: str
    group: str | None = None
    ranks: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        """Such as "all_gather (shard)"."""
        return self.kind if self.group is None else f"{self.kind} ({self.group})"


POINT_TO_POINT = frozenset({"send", "recv", "send_recv", "coalesced"})
"""Kinds between two ranks. NCCL names a batch of sends and receives "coalesced"."""
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Kinds that no rank can end before every rank has begun: their ends show the offset between clocks."""

_BACKEND_SPAN = re.compile(r"(gloo|mpi|ucc|xccl|hccl|host):(\w+)$")
# dist-env's sums over hosts, which go through no backend of torch.
_HOSTS = "host"
_KINDS = (
    ("reduce_scatter", re.compile(r"reduce_?scatter")),
    ("all_gather", re.compile(r"all_?gather")),
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce")),
    ("all_to_all", re.compile(r"all_?to_?all")),
    ("send_recv", re.compile(r"send_?recv")),
    ("coalesced", re.compile(r"coalesced")),
    ("barrier", re.compile(r"barrier")),
    ("broadcast", re.compile(r"broadcast")),
    ("send", re.compile(r"send")),
    ("recv", re.compile(r"recv")),
    ("scatter", re.compile(r"scatter")),
    ("gather", re.compile(r"gather")),
    ("reduce", re.compile(r"reduce")),
)


@lru_cache(maxsize=1024)
def collective_kind(name: str) -> str:
    """One word for the many spellings: "_allgather_base", "ncclDevKernel_AllGather_RING_LL"."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if pattern.search(lower)), "communication")


def collective_of_span(name: str) -> Collective | None:
    """The collective that a backend on the CPU annotates, such as "gloo:all_reduce"; None for others."""
    match = _BACKEND_SPAN.match(name)
    if match is None:
        return None
    return Collective(collective_kind(match[2]), "hosts" if match[1] == _HOSTS else None)


def collective_of_kernel(event: Event) -> Collective:
    """The collective that a kernel carries out, from what NCCL's launch told the profiler."""
    arguments = event_arguments(event)
    told = arguments.get("Collective name")
    kind = collective_kind(told) if isinstance(told, str) and told else "communication"
    if kind == "communication":
        kind = collective_kind(str(event.get("name", "")))
    return Collective(kind, _group(arguments), _ranks(arguments.get("Process Group Ranks")))


def _group(arguments: Event) -> str | None:
    """`init_device_mesh` describes the group of a dimension as "mesh_<its name>"."""
    description = arguments.get("Process Group Description")
    if isinstance(description, str) and description and description != "undefined":
        return "world" if description == "default_pg" else description.removeprefix("mesh_")
    name = arguments.get("Process Group Name")
    return f"group {name}" if isinstance(name, str | int) and str(name) else None


def _ranks(told: object) -> tuple[int, ...] | None:
    """Ranks of a text such as "[0, 1]"; Kineto cuts long ones off, as "[0, 1, ...]"."""
    if not isinstance(told, str) or "..." in told:
        return None
    numbers = re.findall(r"\d+", told)
    return tuple(map(int, numbers)) or None
