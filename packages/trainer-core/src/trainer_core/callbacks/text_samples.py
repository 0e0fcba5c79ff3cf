"""The callback that lets the model write from time to time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TextIO, TypeAlias, TypeGuard

import torch
from torch import nn

from ..errors import ConfigurationError
from ..model.run_settings import inference_mode_guard
from .files import print_block, write_text

if TYPE_CHECKING:
    from ..arguments import TrainingArguments
    from ..state import TrainerControl, TrainerState

Generate: TypeAlias = Callable[[nn.Module, str], str]
"""Called with the model, in evaluation mode, and a prompt; returns the text that follows."""

INPUTS = ("input_ids", "attention_mask")
"""What is handed from the tokenizer to `model.generate`."""


class _Generating(Protocol):
    def generate(self, **inputs: object) -> torch.Tensor: ...


def _generates(model: nn.Module) -> TypeGuard[_Generating]:
    return callable(getattr(model, "generate", None))


def generate_with_model(model: nn.Module, tokenizer: object, options: Mapping[str, object]) -> Generate:
    """A function that continues a prompt with `model.generate`, as Hugging Face models have it.

    Args:
        model: A causal language model with `generate`.
        tokenizer: Called as `tokenizer(prompt, return_tensors="pt")`; has `decode`.
        options: Keywords of `model.generate`.

    Raises:
        ConfigurationError: The model has no `generate`, or the tokenizer cannot encode and decode.
    """
    if not _generates(model):
        raise ConfigurationError(
            "generate",
            None,
            f"is required, because {type(model).__name__} has no generate()",
            "give a function that is called with model and prompt and returns the text",
        )
    decode = getattr(tokenizer, "decode", None)
    if not callable(tokenizer) or not callable(decode):
        raise ConfigurationError(
            "processing_class",
            tokenizer,
            "cannot encode prompts and decode texts, as a tokenizer does",
            "give the Trainer a tokenizer, or give TextSamples a generate function",
        )

    def generate(model: nn.Module, prompt: str) -> str:
        device = next(model.parameters()).device
        encoded = tokenizer(prompt, return_tensors="pt")
        # Tokenizers may add inputs that generate() refuses, such as token_type_ids.
        inputs = {name: encoded[name].to(device) for name in INPUTS if name in encoded}
        if not _generates(model):
            raise TypeError(
                f"{type(model).__name__} has no generate(). Give TextSamples a generate function."
            )
        written = model.generate(**inputs, **options)
        return str(decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return generate


SAMPLES_FILE = "samples.jsonl"
TEXT_FILE = "samples.txt"


class GeneratingTrainer(Protocol):
    """What this callback uses of the trainer."""

    def generating(self) -> AbstractContextManager[None]:
        """A context in which all ranks call the model alike, and write the same."""
        ...


class TextSamples:
    """Generates text from fixed prompts during training, and leaves the training curve untouched.

    Acts at on_evaluate (`every="eval"`) or at on_step_end of each n-th step, on every rank, since a sharded
    model needs all of them. Rank 0 prints the texts and writes them into the log directory: `samples.jsonl`,
    one object a line with `step`, `epoch`, `prompt` and `text`, and `samples.txt`, to read. Lines beyond the
    step at which a run is resumed are dropped. Random number generators and the training mode of every module
    are put back afterwards.

    Args:
        prompts: What the model is to continue from, at least one.
        every: "eval", or a number of steps.
        max_new_tokens: Tokens to generate for each prompt, 1 or more.
        generate: Called as `generate(model, prompt)` in evaluation mode without gradients; returns the text.
            Not given: `model.generate` with the run's processing class as tokenizer.
        options: Further keywords of `model.generate`, such as `do_sample` or `temperature`.
        seed: Seed before each round, so that rounds differ by the model alone.
        stream: Where to print; standard output when not given.

    Raises:
        ConfigurationError: An argument is out of range, or contradicts another.
    """

    name = "text_samples"

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        every: int | Literal["eval"] = "eval",
        max_new_tokens: int = 64,
        generate: Generate | None = None,
        options: Mapping[str, object] | None = None,
        seed: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise ConfigurationError(
                "prompts",
                prompts,
                "must be a list with at least one prompt",
                "give prompts=['Once upon a time'], for example",
            )
        if every != "eval" and (isinstance(every, str) or every < 1):
            raise ConfigurationError(
                "every",
                every,
                "must be 'eval', or a number of steps of 1 or more",
                "set every='eval' or every=100, for example",
            )
        if max_new_tokens < 1:
            raise ConfigurationError(
                "max_new_tokens", max_new_tokens, "must be 1 or more", "set it to 1 or more"
            )
        if generate is not None and options:
            raise ConfigurationError(
                "options",
                options,
                "has no effect with a generate function, because it is for model.generate",
                "leave options out",
            )
        self._prompts = tuple(prompts)
        self._every = every
        self._options = {"max_new_tokens": max_new_tokens, **(options or {})}
        self._generate = generate
        self._seed = seed
        self._stream = stream

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        processing_class: object = None,
        **_: object,
    ) -> None:
        """Check that there is a way to generate, and drop samples beyond the current step.

        Raises:
            ConfigurationError: `generate` was not given, and model or processing class cannot do without.
        """
        if self._generate is None:
            self._generate = generate_with_model(model, processing_class, self._options)
        if state.is_world_process_zero:
            _drop_after(state.global_step, args.log_path)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        trainer: GeneratingTrainer,
        **_: object,
    ) -> None:
        """Write samples after an evaluation."""
        if self._every == "eval" and self._generate is not None:
            self._sample(self._generate, args, state, model, trainer)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        trainer: GeneratingTrainer,
        **_: object,
    ) -> None:
        """Write samples after each n-th step."""
        if (
            isinstance(self._every, int)
            and state.global_step % self._every == 0
            and self._generate is not None
        ):
            self._sample(self._generate, args, state, model, trainer)

    def _sample(
        self,
        generate: Generate,
        args: TrainingArguments,
        state: TrainerState,
        model: nn.Module,
        trainer: GeneratingTrainer,
    ) -> None:
        with trainer.generating(), inference_mode_guard(model):
            torch.manual_seed(self._seed)
            texts = [generate(model, prompt) for prompt in self._prompts]
        if not state.is_world_process_zero:
            return
        samples = [
            {"step": state.global_step, "epoch": state.epoch, "prompt": prompt, "text": text}
            for prompt, text in zip(self._prompts, texts, strict=True)
        ]
        _append(args.log_path, samples)
        print_block("\n".join(_readable(sample) for sample in samples), self._stream, default="stdout")


def _append(directory: Path, samples: Sequence[Mapping[str, object]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / SAMPLES_FILE).open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    with (directory / TEXT_FILE).open("a", encoding="utf-8") as text:
        text.writelines(_readable(sample) + "\n" for sample in samples)


def _drop_after(step: int, directory: Path) -> None:
    """Keep the samples up to a step, and write the text anew from them; a torn last line goes too."""
    path = directory / SAMPLES_FILE
    if not path.exists():
        return
    samples = [sample for line in path.read_text(encoding="utf-8").splitlines() if (sample := _parsed(line))]
    kept = [sample for sample in samples if _step_of(sample) <= step]
    write_text(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in kept))
    write_text(directory / TEXT_FILE, "".join(_readable(sample) + "\n" for sample in kept))


def _parsed(line: str) -> dict[str, object] | None:
    try:
        sample = json.loads(line)
    except ValueError:
        return None
    return sample if isinstance(sample, dict) else None


def _step_of(sample: Mapping[str, object]) -> int:
    step = sample.get("step")
    return step if isinstance(step, int) else 0


def _readable(sample: Mapping[str, object]) -> str:
    return f"--- step {sample.get('step')} ---\n{sample.get('prompt')}|{sample.get('text')}\n"
