"""One rank of a run: `rank_of_train.py CODES MORE_FOR_RANK_1 WORDS...`; writes its exit code to a file."""

import os
import sys
from pathlib import Path

from llama_pretrain.cli import main

codes, more, *words = sys.argv[1:]
rank = os.environ["RANK"]
code = main(["train", *words, *(more.split() if rank == "1" else [])])
(Path(codes) / rank).write_text(str(code))
sys.exit(code)
