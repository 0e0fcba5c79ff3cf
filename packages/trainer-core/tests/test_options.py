"""The options that subclasses hand on are those of the trainer."""

from __future__ import annotations

import inspect
import typing

from trainer_core import Trainer, TrainerOptions


def test_options_are_the_keywords_of_the_trainer() -> None:
    taken = inspect.signature(Trainer.__init__).parameters
    keywords = [name for name, parameter in taken.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert list(TrainerOptions.__annotations__) == keywords


def test_options_have_the_types_of_the_trainer() -> None:
    ours, theirs = typing.get_type_hints(TrainerOptions), typing.get_type_hints(Trainer.__init__)
    assert ours == {name: theirs[name] for name in ours}
