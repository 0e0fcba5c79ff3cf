"""Whether the data given and the settings about data fit together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields

from dataloader_dispatch import DocumentStream

from .arguments import MinimalTrainingArguments
from .errors import ConfigurationError
from .loaders import Collator, is_loader

# What the loader of a DocumentStream takes from the settings.
_OF_STREAMS = ("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory")


def check_data(
    args: MinimalTrainingArguments, train_data: object, eval_data: object, collator: Collator | None
) -> None:
    """Refuse settings that contradict the data, or that no loader would see.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if args.eval_strategy != "no" and eval_data is None:
        raise ConfigurationError(
            "eval_strategy",
            args.eval_strategy,
            "needs an eval_dataset",
            "give one, or set eval_strategy='no'",
        )
    size = getattr(train_data, "batch_size", None) if is_loader(train_data) else None
    if size is not None and size != args.per_device_train_batch_size:
        raise ConfigurationError(
            "per_device_train_batch_size",
            args.per_device_train_batch_size,
            f"differs from the batch size of the loader given, {size}",
            "set both to the same number",
        )
    sets = eval_data.values() if isinstance(eval_data, Mapping) else [eval_data]
    given = [data for data in (train_data, *sets) if data is not None]
    if given and all(is_loader(data) or isinstance(data, DocumentStream) for data in given):
        streamed = any(isinstance(data, DocumentStream) for data in given)
        _refuse_loader_settings(args, collator, _OF_STREAMS if streamed else ())


def _refuse_loader_settings(
    args: MinimalTrainingArguments, collator: Collator | None, used: Collection[str]
) -> None:
    rule, fix = "has no effect on data that is loaded ready-made", "leave it out, or give a plain dataset"
    if collator is not None:
        raise ConfigurationError("data_collator", collator, rule, fix)
    for field in fields(MinimalTrainingArguments):
        value = getattr(args, field.name)
        if field.name.startswith("dataloader_") and field.name not in used and value != field.default:
            raise ConfigurationError(field.name, value, rule, fix)
