"""Pretrain a Llama end to end: train, resume, evaluate, generate, export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_env import lazy_names

if TYPE_CHECKING:
    from .arguments import PretrainArguments
    from .model.config import LlamaConfig, preset, preset_names
    from .model.llama import KVCache, Llama, generate, load_pretrained, save_pretrained
    from .model.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
    from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "KVCache",
    "LinearScaling",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "PretrainArguments",
    "RopeScaling",
    "Tokenizer",
    "YarnScaling",
    "generate",
    "load_pretrained",
    "load_tokenizer",
    "preset",
    "preset_names",
    "save_pretrained",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)
