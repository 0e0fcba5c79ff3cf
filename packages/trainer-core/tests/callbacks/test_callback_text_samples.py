from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainer_core import ConfigurationError, Trainer, TrainerControl, TrainerState, TrainingArguments
from trainer_core.callbacks import TextSamples

Arguments = Callable[..., TrainingArguments]
State = Callable[..., TrainerState]


class Untimed:
    """All that the callback asks of a trainer: a context whose time does not count."""

    def generating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


UNTIMED = Untimed()


def sample_letters(model: nn.Module, prompt: str) -> str:
    """Continues from a prompt by sampling letters, with every generator and in evaluation mode."""
    assert not any(module.training for module in model.modules())
    assert not torch.is_grad_enabled()
    ids = [ord(letter) % 23 for letter in prompt]
    for _ in range(5):
        logits = model(torch.tensor([ids]))[0, -1]
        ids.append(int(torch.multinomial(logits.softmax(-1), 1)))
    random.random()
    return "".join(chr(97 + number) for number in ids[len(prompt) :])


class LettersTokenizer:
    """Encodes letters and decodes numbers, as Hugging Face tokenizers are called."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, Tensor]:
        assert return_tensors == "pt"
        return {"input_ids": torch.tensor([[ord(letter) - 97 for letter in text]])}

    def decode(self, ids: Tensor, skip_special_tokens: bool) -> str:
        return "".join(chr(97 + number) for number in ids.tolist())


class Alphabet(nn.Module):
    """Its `generate` continues with the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def generate(self, input_ids: Tensor, max_new_tokens: int, step: int = 1) -> Tensor:
        new = input_ids[:, -1:] + step * torch.arange(1, max_new_tokens + 1)
        return torch.cat([input_ids, new], dim=1)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_are_written_and_the_curve_is_untouched(
    make_trainer: Callable[..., Trainer],
    ragged_loader: Callable[..., object],
    curve: Callable[[Trainer], list[tuple[float, float]]],
    tmp_path: Path,
) -> None:
    settings = {"dropout": 0.5, "num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 2}
    plain = make_trainer(eval_loader=ragged_loader(rows=4), **settings)
    plain.train()
    printed = io.StringIO()
    samples = TextSamples(["ab", "xyz"], generate=sample_letters, stream=printed)
    sampled = make_trainer(eval_loader=ragged_loader(rows=4), callbacks=[samples], **settings)
    sampled.train()
    assert curve(sampled) == curve(plain)
    written = lines(tmp_path / "run" / "samples.jsonl")
    assert [(entry["step"], entry["prompt"]) for entry in written] == [
        (step, prompt) for step in (2, 4, 6) for prompt in ("ab", "xyz")
    ]
    assert all(len(str(entry["text"])) == 5 for entry in written)
    text = (tmp_path / "run" / "samples.txt").read_text()
    assert text == printed.getvalue()
    assert f"--- step 4 ---\nxyz|{written[3]['text']}\n" in text


def test_rounds_differ_by_the_model_alone(arguments: Arguments, state: State, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(23, 23))
    samples = TextSamples(["ab"], every=1, generate=sample_letters, stream=io.StringIO())
    samples.on_train_begin(arguments(), state(), TrainerControl(), model=model)
    for step in (1, 2):
        samples.on_step_end(arguments(), state(step), TrainerControl(), model=model, trainer=UNTIMED)
    first, second = lines(tmp_path / "run" / "samples.jsonl")
    assert first["text"] == second["text"]


def test_every_n_steps(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    samples = TextSamples(["ab"], every=3, generate=sample_letters, stream=io.StringIO())
    make_trainer(max_steps=7, num_train_epochs=-1, callbacks=[samples]).train()
    assert [entry["step"] for entry in lines(tmp_path / "run" / "samples.jsonl")] == [3, 6]


def test_a_frozen_module_stays_in_evaluation_mode_even_after_an_error(
    arguments: Arguments, state: State
) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[0].eval()

    def fail(model: nn.Module, prompt: str) -> str:
        torch.rand(3)
        raise RuntimeError("no words")

    samples = TextSamples(["ab"], generate=fail)
    samples.on_train_begin(arguments(), state(), TrainerControl(), model=model)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no words"):
        samples.on_evaluate(arguments(), state(1), TrainerControl(), model=model, trainer=UNTIMED)
    assert [model.training, model[0].training, model[1].training] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_models_own_generate(arguments: Arguments, state: State, tmp_path: Path) -> None:
    model = Alphabet()
    samples = TextSamples(["ab"], max_new_tokens=4, options={"step": 2}, stream=io.StringIO())
    samples.on_train_begin(
        arguments(), state(), TrainerControl(), model=model, processing_class=LettersTokenizer()
    )
    samples.on_evaluate(arguments(), state(1), TrainerControl(), model=model, trainer=UNTIMED)
    (entry,) = lines(tmp_path / "run" / "samples.jsonl")
    assert (entry["prompt"], entry["text"]) == ("ab", "dfhj")


def test_a_resumed_run_drops_what_came_after_its_checkpoint(
    arguments: Arguments, state: State, tmp_path: Path
) -> None:
    model = Alphabet()

    def session(begin: int, end: int) -> None:
        samples = TextSamples(["é"], every=1, generate=lambda *_: f"from {begin}", stream=io.StringIO())
        samples.on_train_begin(arguments(), state(begin), TrainerControl(), model=model)
        for step in range(begin + 1, end + 1):
            samples.on_step_end(arguments(), state(step), TrainerControl(), model=model, trainer=UNTIMED)

    session(0, 4)
    path = tmp_path / "run" / "samples.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "pro')
    session(2, 5)
    entries = lines(path)
    assert [(entry["step"], entry["text"]) for entry in entries] == [
        (1, "from 0"),
        (2, "from 0"),
        (3, "from 2"),
        (4, "from 2"),
        (5, "from 2"),
    ]
    text = (tmp_path / "run" / "samples.txt").read_text()
    assert text == "".join(f"--- step {e['step']} ---\né|{e['text']}\n\n" for e in entries)


def test_other_ranks_generate_and_write_nothing(arguments: Arguments, state: State, tmp_path: Path) -> None:
    called: list[str] = []
    samples = TextSamples(["ab"], generate=lambda _, prompt: called.append(prompt) or "")  # type: ignore[func-returns-value]
    for_rank_1 = state(1, is_world_process_zero=False)
    samples.on_train_begin(arguments(), for_rank_1, TrainerControl(), model=Alphabet())
    samples.on_evaluate(arguments(), for_rank_1, TrainerControl(), model=Alphabet(), trainer=UNTIMED)
    assert called == ["ab"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": "ab"}, "prompts='ab' must be a list"),
        ({"prompts": []}, r"prompts=\[\] must be a list with at least one prompt"),
        ({"prompts": ["a"], "every": 0}, "every=0 must be 'eval', or a number of steps"),
        ({"prompts": ["a"], "every": "epoch"}, "every='epoch'"),
        ({"prompts": ["a"], "max_new_tokens": 0}, "max_new_tokens=0 must be 1 or more"),
        (
            {"prompts": ["a"], "generate": sample_letters, "options": {"top_k": 1}},
            "has no effect with a generate function",
        ),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TextSamples(**settings)  # type: ignore[arg-type]


def test_a_model_or_tokenizer_that_cannot_is_named(arguments: Arguments, state: State) -> None:
    with pytest.raises(ConfigurationError, match=r"Linear has no generate\(\)"):
        TextSamples(["a"]).on_train_begin(arguments(), state(), TrainerControl(), model=nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match="processing_class=None cannot encode prompts"):
        TextSamples(["a"]).on_train_begin(arguments(), state(), TrainerControl(), model=Alphabet())
