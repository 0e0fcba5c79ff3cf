"""One rank of a run, alone on a node with the disk DIRECTORY/<rank>: `node_of_train.py DIRECTORY WORDS`."""

import os
import sys
from pathlib import Path

from llama_pretrain.cli import main

os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
disk = Path(sys.argv[1], os.environ["RANK"])
disk.mkdir(parents=True, exist_ok=True)
os.chdir(disk)
sys.exit(main(["train", *sys.argv[2:]]))
