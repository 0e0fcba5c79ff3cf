"""One rank that measures its state after a step: `state_of_ranks.py RANK RANKS FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import VOCABULARY, Tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import profile

from trainer_core import BuiltModel, CausalLMLoss, Trainer
from trainer_fsdp2 import FSDP2Arguments, FSDP2TrainingArguments, FullyShard, plan

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of what this rank holds."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def measured(ranks: int, make: Make, param_dtype: torch.dtype | None) -> list[int]:
    """Bytes of parameters, gradients, optimizer state and saved activations of this rank after one step."""
    model = Tiny()
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(VOCABULARY, (2, 6))
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in {local(p).untyped_storage().data_ptr() for p in model.parameters()}:
            kept[place] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = CausalLMLoss()(model(ids), ids)
    saved = sum(size for size, _ in kept.values())
    loss.backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimized = size_of(value for value in state if isinstance(value, Tensor))
    return [size_of(parameters), size_of(gradients), optimized, saved]


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """One value per weight."""
    return SGD(parameters, lr=0.1, momentum=0.9)


def planned(ranks: int, make: Make | None, param_dtype: str | None) -> dict[str, object]:
    """What the plan says."""
    args = FSDP2TrainingArguments(
        per_device_train_batch_size=2, fsdp2=FSDP2Arguments(param_dtype=param_dtype)
    )
    factory = None if make is None else lambda named: make([p for _, p in named if p.requires_grad])
    found = plan(Tiny, args, world_size=ranks, sequence_length=6, optimizer_factory=factory)
    return found.to_json()


PEAKS: dict[str, dict[str, object]] = {
    "plain": {},
    "bf16": {"fsdp2": FSDP2Arguments(param_dtype="bfloat16")},
    "accumulated": {"gradient_accumulation_steps": 4},
    "stays gathered": {"fsdp2": FSDP2Arguments(reshard_after_forward=False)},
    "one unit": {"fsdp2": FSDP2Arguments(shard_transformer_layers=False)},
    "recomputed": {"activation_checkpointing": "full"},
}
"""Settings of which the most memory at a time is measured."""
LENGTH = 64


def wide() -> nn.Module:
    """Weights of about the size of the activations."""
    return Tiny(width=64)


def peak_settings(folder: Path, case: str) -> FSDP2TrainingArguments:
    """The run."""
    return FSDP2TrainingArguments(
        output_dir=str(folder / f"run {case}"),
        max_steps=1,
        per_device_train_batch_size=2,
        save_strategy="no",
        check_flops=False,
        use_cpu=True,
        **PEAKS[case],  # type: ignore[arg-type]
    )


class Measured(FullyShard):
    """Notes the most that torch's allocator has given out at a time in the passes of a step."""

    peak = 0

    def apply(self, built: BuiltModel) -> None:
        """Shard the model, and measure what runs it."""
        super().apply(built)
        run = built.executor.forward_backward

        def forward_backward(*args: Any, **kwargs: Any) -> Tensor:
            # Its bf16 kernels allocate more inside themselves than they return.
            plain_kernels = torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-untyped-call]
            with plain_kernels, profile(profile_memory=True) as seen:
                total = run(*args, **kwargs)
            now = 0
            for size in allocations(seen):
                now += size
                self.peak = max(self.peak, now)
            return total

        built.executor.forward_backward = forward_backward  # type: ignore[method-assign]


def allocations(seen: profile) -> Iterator[int]:
    """Sizes as they were allocated and, below 0, freed."""
    waiting = list(seen.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    found = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return iter(size for _, size in sorted(found))


def measured_peak(folder: Path, case: str) -> int:
    """Bytes in the passes of a step, gradients among them."""
    ids = torch.arange(64 * LENGTH).view(64, LENGTH) % VOCABULARY
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args, sharded = peak_settings(folder, case), Measured()
    Trainer(args, model_init=wide, train_dataset=rows, callbacks=[], parallel=[sharded]).train()
    return sharded.peak


def least_peak(folder: Path, case: str, enough: int) -> int:
    """The least of up to four measurements.

    How long gloo, in threads of its own, holds on to what it has sent differs.

    Args:
        folder: For the runs.
        case: Which settings.
        enough: Bytes at which rank 0 needs no further measurement.
    """
    least = 1 << 62
    for number in range(4):
        least = min(least, measured_peak(folder / str(number), case))
        is_enough = torch.tensor([int(least <= enough)])
        dist.broadcast(is_enough, 0)
        if is_enough.item():
            break
    return least


def main(rank: int, ranks: int, folder: Path) -> None:
    """Measure and plan each case, and write both down."""
    cases = {
        "AdamW": (AdamW, None),
        "bf16": (AdamW, "bfloat16"),
        "SGD": (momentum, None),
    }
    notes: dict[str, dict[str, Any]] = {name: {} for name in cases}
    peaks: dict[str, dict[str, int]] = {case: {"planned": 0} for case in PEAKS}
    if rank == 0:  # before there is a process group, for a plan imagines one of its own
        for name, (make, dtype) in cases.items():
            notes[name]["planned"] = planned(ranks, None if make is AdamW else make, dtype)
        for case in PEAKS:
            args = peak_settings(folder, case)
            peaks[case]["planned"] = plan(wide, args, world_size=ranks, sequence_length=LENGTH).peak
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=180),
    )
    for name, (make, dtype) in cases.items():
        notes[name]["measured"] = measured(ranks, make, getattr(torch, str(dtype), None))
    for case, found in peaks.items():
        found["measured"] = least_peak(folder, case, found["planned"])
    dist.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps({**notes, "peaks": peaks}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
