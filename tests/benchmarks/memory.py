"""Measure the most memory that training needs: plain, and with all that saves some, beside the peers.

    python tests/benchmarks/memory.py --json memory.json --plot docs/performance

Each way trains the same model on the same rows in a process of its own. Memory is what the system counts as
resident, above what was resident before the model was made. Memory that is freed goes back to the system at
once (`MALLOC_MMAP_THRESHOLD_` of glibc), so that the peak is that of tensors in use. Steps are few: the
second has the state of the optimizer, and every later one needs the same. Time is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

from _timing import PeakMemory, machine, print_table

if TYPE_CHECKING:
    from torch import nn

    from llama_pretrain.bench.baselines import Train, Work

STEPS, ROWS, TOKENS = 2, 4, 512
DISTRIBUTIONS = ("torch", "accelerate", "transformers", "lightning")
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "TOKENIZERS_PARALLELISM": "false"}
SIZES: Mapping[str, Mapping[str, int | str]] = {
    "160m": {"preset": "160m"},
    # Two of its 22 layers.
    "1b, 2 layers": {"preset": "1b", "num_hidden_layers": 2},
    "quick": {"preset": "tiny"},
}
OURS = "trainer-core"


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        label: What it is called.
        saves: What saves memory in it.
        baseline: That of `llama-pretrain bench` which it is; empty: of this file.
        settings: Of our trainer, beside those of the baseline.
    """

    label: str
    saves: str = "nothing"
    baseline: str = ""
    settings: Mapping[str, object] | None = None


_CHECKPOINTED = "recomputed blocks"
_FUSED: Mapping[str, object] = {"fused_loss": "chunked"}
_RECOMPUTED: Mapping[str, object] = {**_FUSED, "activation_checkpointing": "full"}
WAYS = {
    "torch": Way("plain torch loop", baseline="torch"),
    "accelerate": Way("Accelerate", baseline="accelerate"),
    "lightning": Way("Lightning", baseline="lightning"),
    "hf": Way("Hugging Face Trainer", baseline="hf"),
    "hf_model": Way("Hugging Face Trainer, its own Llama"),
    "ours": Way(OURS, settings={}),
    "torch_checkpointed": Way("plain torch loop", _CHECKPOINTED),
    "hf_checkpointed": Way("Hugging Face Trainer, its own Llama", _CHECKPOINTED),
    "ours_checkpointed": Way(OURS, _CHECKPOINTED, settings={"activation_checkpointing": "full"}),
    "ours_fused": Way(OURS, "loss in chunks", settings=_FUSED),
    "ours_both": Way(OURS, "recomputed blocks, loss in chunks", settings=_RECOMPUTED),
    "ours_all": Way(
        OURS,
        "these, and the optimizer in the backward pass (without clipping)",
        settings={**_RECOMPUTED, "fuse_optim_with_backward": True, "max_grad_norm": None},
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    if options.worker:
        way, size, place = options.worker
        print("MEASURED", json.dumps(_measure(way, size, Path(place))))
        return
    results: dict[str, Any] = {"benchmark": "memory", "machine": machine(Path.cwd(), DISTRIBUTIONS)}
    results["sizes"] = {}
    for size in ["quick"] if options.quick else options.only.split(";"):
        found = {}
        for name in WAYS:
            found[name] = _in_process(name, size)
            print(f"{size}: {name} {found[name]['peak'] / 2**30:.3f} GiB", file=sys.stderr, flush=True)
        results["sizes"][size] = found
        _print(size, found)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        _plot(results["sizes"], options.plot / "memory.png")


def _in_process(name: str, size: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="memory-benchmark-") as place:
        command = [sys.executable, __file__, "--worker", name, size, place]
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    told = [line for line in ended.stdout.splitlines() if line.startswith("MEASURED ")]
    if ended.returncode or not told:
        raise RuntimeError(f"{name} of {size} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(told[0].removeprefix("MEASURED "))
    return found


def _measure(name: str, size: str, place: Path) -> dict[str, float]:
    import torch

    from llama_pretrain import preset
    from llama_pretrain.bench.baselines import BASELINES, Work
    from llama_pretrain.commands.arguments import BenchArguments

    class Few(Work):
        steps = STEPS

    shape = dict(SIZES[size])
    config = replace(preset(str(shape.pop("preset"))), **shape)  # type: ignore[arg-type]
    args = BenchArguments(sequence_length=TOKENS, per_device_train_batch_size=ROWS)
    work = Few.of(config, args, torch.device("cpu"), place)
    del work.examples[STEPS * ROWS :]
    way = WAYS[name]
    train = BASELINES[way.baseline].load() if way.baseline else _load(name, way)
    # torch loads a part of itself in the first step.
    layer = torch.nn.Linear(8, 8)
    layer(torch.ones(8, 8)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    with PeakMemory() as memory:
        model = _transformers_llama(work) if name.startswith("hf_") else work.model()
        train(work, model)
    if memory.extra_bytes is None:
        raise RuntimeError("This system does not tell the peak of resident memory; Linux does.")
    parameters = sum(each.numel() for each in model.parameters())
    # Weights, gradients and the two moments of AdamW, in float32.
    return {"peak": memory.extra_bytes, "parameters": parameters, "state": 16 * parameters}


def _load(name: str, way: Way) -> Train:
    """What `llama-pretrain bench` does not compare with."""
    if way.settings is not None:
        return _ours(way.settings)
    if name == "torch_checkpointed":
        return _torch_checkpointed()
    return _transformers_trainer(gradient_checkpointing=name == "hf_checkpointed")


def _ours(settings: Mapping[str, object]) -> Train:
    from dist_env import StaticDistributedEnvironment
    from trainer_core import Trainer, TrainingArguments

    def train(work: Work, model: nn.Module) -> None:
        given: dict[str, Any] = {"max_grad_norm": 1.0, **settings}
        args = TrainingArguments(
            output_dir=str(work.directory),
            max_steps=work.steps,
            per_device_train_batch_size=work.batch_size,
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            save_strategy="no",
            dataloader_shuffle=False,
            **given,
        )
        environment = StaticDistributedEnvironment(device=work.device)
        Trainer(args, model=model, train_dataset=work.examples, distributed_env=environment).train()

    return train


def _torch_checkpointed() -> Train:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from llama_pretrain.bench.baselines import BASELINES

    plain = BASELINES["torch"].load()

    def train(work: Work, model: nn.Module) -> None:
        blocks = model.get_submodule("model.layers")
        for block_name, block in list(blocks.named_children()):
            setattr(blocks, block_name, checkpoint_wrapper(block))
        plain(work, model)

    return train


def _transformers_trainer(*, gradient_checkpointing: bool) -> Train:
    """Its own model with its own loss, as its users have it."""
    from transformers import Trainer, TrainingArguments

    def train(work: Work, model: nn.Module) -> None:
        args = TrainingArguments(
            output_dir=str(work.directory),
            max_steps=work.steps,
            per_device_train_batch_size=work.batch_size,
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=gradient_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False} if gradient_checkpointing else None,
            save_strategy="no",
            train_sampling_strategy="sequential",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, args, train_dataset=work.examples).train()  # type: ignore[arg-type]

    return train


def _transformers_llama(work: Work) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig.from_dict(work.config.to_dict()))


def _print(size: str, found: Mapping[str, Mapping[str, float]]) -> None:
    first = found["torch"]
    print(
        f"\n{size}: {first['parameters'] / 1e6:.0f} M parameters, {ROWS} rows of {TOKENS} tokens, float32; "
        f"weights, gradients and AdamW {first['state'] / 2**30:.2f} GiB\n"
    )
    rows = [
        [
            "trained by",
            "what saves memory",
            "peak (GiB)",
            "of the plain loop",
            "above weights, gradients, AdamW",
        ]
    ]
    for name, measured in found.items():
        rows.append(
            [
                WAYS[name].label,
                WAYS[name].saves,
                f"{measured['peak'] / 2**30:.2f}",
                f"{measured['peak'] / first['peak']:.2f}",
                f"{(measured['peak'] - measured['state']) / 2**30:.2f}",
            ]
        )
    print_table(rows)


def _plot(sizes: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Draw the peaks: a bar for each way, ours in another colour, and a line where weights and states end."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(sizes), figsize=(6 * len(sizes), 5), layout="constrained", squeeze=False
    )
    for plot, (size, found) in zip(axes[0], sizes.items(), strict=True):
        names = list(reversed(found))
        labels = [f"{WAYS[name].label}\n{WAYS[name].saves}" for name in names]
        colours = ["tab:blue" if WAYS[name].label == OURS else "tab:grey" for name in names]
        plot.barh(labels, [found[name]["peak"] / 2**30 for name in names], color=colours)
        plot.axvline(found["torch"]["state"] / 2**30, color="black", linestyle=":", linewidth=1)
        plot.set(title=f"{size}\n{ROWS} x {TOKENS} tokens, float32", xlabel="peak of memory (GiB)")
        plot.tick_params(axis="y", labelsize=7)
    figure.savefig(path, dpi=150)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = ";".join(name for name in SIZES if name != "quick")
    parser.add_argument("--only", default=sizes, help="models, separated by semicolons: %(default)r")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that everything runs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="directory for the picture, memory.png")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only.split(";") if name not in SIZES]:
        parser.error(f"--only names {unknown}; choose among {list(SIZES)}")
    return options


if __name__ == "__main__":
    main()
