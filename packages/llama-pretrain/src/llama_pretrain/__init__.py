"""Pretrain a Llama end to end: train, resume, evaluate, generate, export."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arguments import PretrainArguments
    from .model.config import LlamaConfig, preset, preset_names
    from .model.llama import KVCache, Llama, generate, load_pretrained, save_pretrained
    from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "PretrainArguments",
    "Tokenizer",
    "generate",
    "load_pretrained",
    "load_tokenizer",
    "preset",
    "preset_names",
    "save_pretrained",
]

_MODULES = {
    "KVCache": "model.llama",
    "LlamaConfig": "model.config",
    "generate": "model.llama",
    "load_pretrained": "model.llama",
    "save_pretrained": "model.llama",
    "Llama": "model.llama",
    "PretrainArguments": "arguments",
    "preset": "model.config",
    "preset_names": "model.config",
    "ByteTokenizer": "tokenizer",
    "HuggingFaceTokenizer": "tokenizer",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the command line sets up threads before torch is loaded."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
