"""Models of Hugging Face in a pipeline, beside one process and their own `generate`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import transformers
from ranks import Scenario
from tiny import alone, curve, once, trainer_of
from torch import Tensor, nn

from dist_env import DistributedEnvInterface

# Once here is cheaper than in each rank.
for _family in ("gemma2", "gpt2", "llama", "mixtral", "qwen3"):
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")

VOCABULARY, LENGTH, NEW, LAYERS = 53, 12, 10, 4
PROMPT = [[1, 2, 3, 4], [9, 8, 7, 6]]
SAMPLED = {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    **TOKENS,
}


def llama(*, tied: bool = False) -> nn.Module:
    """Llama."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied))


def gpt2() -> nn.Module:
    """GPT-2: learned positions, a tied head, and blocks in `transformer.h`."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **without_dropout, **TOKENS, initializer_range=0.2)
    )


def gemma2() -> nn.Module:
    """Gemma 2: every other block attends to few positions, and the head is tied."""
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=5))


def mixtral() -> nn.Module:
    """Mixtral: experts."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))


def qwen3() -> nn.Module:
    """Qwen 3."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, tied": partial(llama, tied=True),
    "gpt2": gpt2,
    "gemma2": gemma2,
    "mixtral": mixtral,
    "qwen3": qwen3,
}


class Texts:
    """Batches of four rows; packed ones say where a document begins."""

    batch_size = 4

    def __init__(self, *, packed: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, VOCABULARY, (16, LENGTH), generator=generator)
        self.packed = packed

    def __len__(self) -> int:
        return len(self.ids) // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, ids in enumerate(self.ids.split(self.batch_size)):
            labels = ids.clone()
            labels[0, : 3 + number] = -100
            batch = {"input_ids": ids, "labels": labels}
            if self.packed:
                # Another end of the first document in each row.
                ends = torch.arange(len(ids))[:, None] + 3
                places = torch.arange(LENGTH).expand(len(ids), -1)
                batch["position_ids"] = torch.where(places < ends, places, places - ends)
            yield batch


def whole_life(env: DistributedEnvInterface, folder: Path, name: str, schedule: str) -> object:
    """Train, write, export, and load what was exported."""
    make = MODELS[name]
    data = {"train": Texts(), "evaluate": Texts()}
    trainer = trainer_of(env, folder, make, **data, schedule=schedule)  # type: ignore[arg-type]
    trainer.train()
    prompt = torch.tensor(PROMPT)

    def of_one() -> tuple[list[object], float, Tensor]:
        own = alone(env, folder, make, **data)  # type: ignore[arg-type]
        own.train()
        with torch.no_grad():
            logits: Tensor = own.unwrapped_model().eval()(input_ids=prompt).logits
        return curve(own), own.evaluate()["eval_loss"], logits

    def of_the_export() -> tuple[dict[str, object], Tensor]:
        loaded = type(make()).from_pretrained(folder / "exported").eval()
        fill = {"max_new_tokens": NEW, "pad_token_id": 0}
        with torch.no_grad():
            torch.manual_seed(11)
            texts = {
                "drawn": loaded.generate(prompt, do_sample=True, **SAMPLED, **fill).tolist(),
                "greedy": loaded.generate(prompt, do_sample=False, **fill).tolist(),
            }
            return texts, loaded(input_ids=prompt).logits

    write = partial(trainer.pipeline_generate, prompt, max_new_tokens=NEW)
    torch.manual_seed(11)
    drawn = write(**SAMPLED)  # type: ignore[arg-type]
    found = {
        "greedy": write(do_sample=False).tolist(),
        "without a cache": write(do_sample=False, use_cache=False).tolist(),
        "drawn": drawn.tolist(),
    }
    trainer.save_model(str(folder / "exported"))
    expected, there = once(env, f"exported, {name}, {schedule}", of_the_export)
    curve_of_one, score, trained = once(env, name, of_one)
    with torch.no_grad(), trainer.generating():
        here = trainer.unwrapped_model()(input_ids=prompt).logits
    names = [name.split(".") for name, _ in trainer.unwrapped_model().named_parameters()]
    blocks = {int(parts[2]) for parts in names if parts[1] in ("layers", "h")}
    return {
        "curves": [curve(trainer), curve_of_one],
        "eval": [trainer.evaluate()["eval_loss"], score],
        "texts": found,
        "texts of HF": expected,
        "logits": [float((here - there).abs().max()), float((there - trained).abs().max())],
        "blocks": sorted(blocks),
    }


def packed(env: DistributedEnvInterface, folder: Path, schedule: str) -> object:
    """Rows of two documents, which `position_ids` tell apart."""
    data = {"train": Texts(packed=True), "evaluate": Texts(packed=True)}
    trainer = trainer_of(env, folder, llama, **data, schedule=schedule)  # type: ignore[arg-type]
    trainer.train()

    def of_one() -> tuple[list[object], list[object], float]:
        own = alone(env, folder, llama, **data)  # type: ignore[arg-type]
        other = alone(env, folder / "joined", llama, train=Texts())
        own.train()
        other.train()
        return curve(own), curve(other), own.evaluate()["eval_loss"]

    expected, joined, score = once(env, "packed", of_one)
    return {
        "curves": [curve(trainer), expected],
        "joined": joined,
        "eval": [trainer.evaluate()["eval_loss"], score],
    }


SCENARIOS: dict[str, Scenario] = {
    f"{name}, {schedule}": partial(whole_life, name=name, schedule=schedule)
    for name in MODELS
    for schedule in ("1f1b", "zbv")
} | {f"packed, {schedule}": partial(packed, schedule=schedule) for schedule in ("1f1b", "zbv")}
