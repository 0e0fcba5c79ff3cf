"""`python -m llama_pretrain` is the command `llama-pretrain`."""

from .cli import run

run()
