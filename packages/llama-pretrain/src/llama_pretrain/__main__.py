"""`python -m llama_pretrain` is the command `llama-pretrain`."""

import sys

from .cli import main

sys.exit(main())
