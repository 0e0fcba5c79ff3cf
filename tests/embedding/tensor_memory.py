"""Measures what a divided Llama needs on each rank in a step: `tensor_memory.py FOLDER MESH`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_core import BuiltModel, DataParallelArguments, TensorParallel, Trainer

LENGTH = 64
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


def build() -> LlamaForCausalLM:
    """With attention of plain operators: a plan counts the kernel of a GPU, which keeps other tensors."""
    return LlamaForCausalLM(
        LlamaConfig(num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager", **SIZES)
    )


def arguments(folder: str, mesh: str) -> DataParallelArguments:
    return DataParallelArguments(
        output_dir=folder,
        mesh=mesh,
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=4,
        max_grad_norm=1.0,
        save_strategy="no",
    )


class Measured(TensorParallel):
    """Notes the most that torch's allocator has given out at a time in the passes of a step.

    The least of several steps counts: threads of gloo may hold what was sent a little longer.
    """

    peak = math.inf

    def apply(self, built: BuiltModel) -> None:
        super().apply(built)
        run = built.executor.forward_backward

        def forward_backward(*args: Any, **kwargs: Any) -> Tensor:
            with profile(profile_memory=True) as seen:
                total = run(*args, **kwargs)
            waiting, sizes = list(seen.profiler.kineto_results.experimental_event_tree()), []
            now, peak = 0, 0
            while waiting:
                event = waiting.pop()
                waiting.extend(event.children)
                if event.name == "[memory]":
                    sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
            for _, size in sorted(sizes):
                now += size
                peak = max(peak, now)
            self.peak = min(self.peak, peak)
            return total

        built.executor.forward_backward = forward_backward  # type: ignore[method-assign]


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of what this rank has of tensors."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)


def main(folder: str, mesh: str) -> None:
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64 * LENGTH).view(64, LENGTH) % 96]
    measured = Measured()
    trainer = Trainer(
        arguments(folder, mesh), model_init=build, train_dataset=rows, callbacks=[], parallel=[measured]
    )
    trainer.train()
    assert trainer.optimizer is not None
    state = [value for values in trainer.optimizer.state.values() for value in values.values()]
    parameters = held(trainer.unwrapped_model().parameters())
    own = [parameters, held(value for value in state if isinstance(value, Tensor)), measured.peak]
    sys.stdout.write(f"points {json.dumps(trainer.ranks.gather(own))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
