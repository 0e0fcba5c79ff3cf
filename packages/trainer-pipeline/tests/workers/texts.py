"""Texts that the ranks write together, beside those of one process and of a loop without any of this."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import Batches, Tiny, Writing, once, seeded, trainer_of
from torch import nn

from dist_env import DistributedEnvInterface, StaticDistributedEnvironment
from trainer_pipeline import PipelineTrainer

LAYERS, NEW = 8, 12
PROMPT = [[1, 2, 3, 4], [9, 8, 7, 6], [30, 20, 10, 40]]
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "top k": {"top_k": 3, "temperature": 3.0},
    "top p": {"top_p": 0.6},
    "penalty": {"repetition_penalty": 2.0},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3},
    "greedy penalty": {"do_sample": False, "repetition_penalty": 3.0},
}


def expected(env: DistributedEnvInterface) -> list[list[int]]:
    """What one process writes."""
    return once(env, "written", lambda: written(seeded(partial(Tiny, LAYERS))))


@torch.no_grad()
def written(model: nn.Module) -> list[list[int]]:
    """The most probable tokens, from the whole text each time."""
    text = torch.tensor(PROMPT)
    for _ in range(NEW):
        text = torch.cat([text, model(text)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return text.tolist()


def greedy(env: DistributedEnvInterface, folder: Path, schedule: str) -> object:
    """The most probable tokens, with and without a cache; and where keys and values are."""
    prompt = torch.tensor(PROMPT)
    plain = trainer_of(env, folder / "plain", partial(Tiny, LAYERS), schedule=schedule)
    cached = trainer_of(env, folder / "cached", partial(Writing, LAYERS), schedule=schedule)
    model = cached.unwrapped_model()
    found = {
        "without": plain.pipeline_generate(prompt, max_new_tokens=NEW, do_sample=False).tolist(),
        "with": cached.pipeline_generate(prompt, max_new_tokens=NEW, do_sample=False).tolist(),
        "caches": [[len(cache.layers), cache.seen] for cache in model.made],  # type: ignore[union-attr]
        "switched off": cached.pipeline_generate(
            prompt, max_new_tokens=NEW, do_sample=False, use_cache=False
        ).tolist(),
        "made": len(model.made),  # type: ignore[arg-type]
        "nothing": plain.pipeline_generate(prompt, max_new_tokens=0).tolist(),
    }
    return {**found, "alone": expected(env)}


def endings(env: DistributedEnvInterface, folder: Path) -> object:
    """Texts that end early."""
    trainer = trainer_of(env, folder, partial(Writing, LAYERS))
    whole = expected(env)
    start = len(PROMPT[0])
    # A token of the first row that other rows do not have as early, and one that ends a single row.
    end = whole[0][start + 3]

    def until(rows: list[list[int]], **settings: object) -> list[list[int]]:
        return trainer.pipeline_generate(
            torch.tensor(rows),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=end,
            **settings,  # type: ignore[arg-type]
        ).tolist()

    return {
        "whole": whole,
        "end": end,
        "padded": until(PROMPT, pad_token_id=0),
        "no pad": until(PROMPT),
        "one row": until(PROMPT[:1]),
    }


def sampled(trainer: PipelineTrainer, seed: int) -> dict[str, object]:
    """Texts that are drawn."""
    found = {}
    for name, settings in WAYS.items():
        torch.manual_seed(seed)
        found[name] = trainer.pipeline_generate(
            torch.tensor(PROMPT),
            max_new_tokens=NEW,
            **settings,  # type: ignore[arg-type]
        ).tolist()
    return found


def sampling(env: DistributedEnvInterface, folder: Path) -> object:
    """Draw on ranks whose generators differ, and in one process that has those of rank 0."""
    make = partial(Writing, LAYERS)
    together = sampled(trainer_of(env, folder, make), 5 + env.rank)

    def of_one() -> dict[str, object]:
        return sampled(trainer_of(StaticDistributedEnvironment(), folder / "alone", make), 5)

    return {"together": together, "alone": once(env, "sampled", of_one)}


def state_of(model: nn.Module) -> tuple[list[bool], list[str]]:
    """The mode of every module, and the modules by name."""
    return [module.training for module in model.modules()], [name for name, _ in model.named_modules()]


def undisturbed(env: DistributedEnvInterface, folder: Path) -> object:
    """Modes, generators and the curve, where texts are written in between and where they are not."""
    make = partial(Writing, 4, dropout=0.2)
    trainer = trainer_of(env, folder / "modes", make)
    model = trainer.unwrapped_model()
    model.train()
    model.layers[1].eval()  # type: ignore[index, union-attr]
    torch.manual_seed(50 + env.rank)
    before, random = state_of(model), torch.get_rng_state()
    texts = [
        trainer.pipeline_generate(torch.tensor(PROMPT), max_new_tokens=4, do_sample=False).tolist()
        for _ in range(2)
    ]
    after = state_of(model) == before, torch.equal(torch.get_rng_state(), random)
    plain = trainer_of(env, folder / "plain", make, train=Batches())
    plain.train()
    disturbed = trainer_of(env, folder / "disturbed", make, train=Batches(), callbacks=[Writes()])
    disturbed.train()
    return {
        "modes": after[0],
        "generators": after[1],
        "texts": texts,
        "alone": written(seeded(make).eval())[0][: len(PROMPT[0]) + 4],
        "curves": [[entry.get("loss") for entry in t.state.log_history] for t in (plain, disturbed)],
    }


class Writes:
    """Writes a text after each step."""

    def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
        """Write."""
        trainer: PipelineTrainer = kw["trainer"]  # type: ignore[assignment]
        trainer.pipeline_generate(torch.tensor(PROMPT), max_new_tokens=3)


def called_together(env: DistributedEnvInterface, folder: Path) -> object:
    """The model, called by a loop of one's own in `generating`."""
    trainer = trainer_of(env, folder, partial(Tiny, LAYERS), schedule="zbv")
    model = trainer.unwrapped_model()
    with trainer.generating():
        text = written(model)
    return {"text": text, "alone": expected(env)}


def refused(env: DistributedEnvInterface, folder: Path, **settings: object) -> object:
    """What cannot be written."""
    trainer = trainer_of(env, folder, partial(Tiny, LAYERS))
    given: dict[str, object] = {"input_ids": torch.tensor(PROMPT), "max_new_tokens": 1, **settings}
    trainer.pipeline_generate(**given)  # type: ignore[arg-type]
    return {}


SCENARIOS: dict[str, Scenario] = {
    "greedy, 1f1b": partial(greedy, schedule="1f1b"),
    "greedy, zbv": partial(greedy, schedule="zbv"),
    "greedy, interleaved_1f1b": partial(greedy, schedule="interleaved_1f1b"),
    "endings": endings,
    "sampling": sampling,
    "undisturbed": undisturbed,
    "called together": called_together,
    "refused, temperature": partial(refused, temperature=-1.0),
    "refused, tokens": partial(refused, max_new_tokens=-1),
    "refused, prompt": partial(refused, input_ids=torch.zeros(2, 0, dtype=torch.int64)),
}
