"""One rank of two under Accelerate: our loaders are left as they are, or their second division is refused."""

import sys
from collections import Counter

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from documents import DOCUMENTS, loader, numbers, over_ranks

from dataloader_dispatch import DataError, FabricLoader

dispatch = {"dispatch": True, "shard": False}.get(sys.argv[1])
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
if sys.argv[1] == "as-it-is":
    own = loader()
    assert accelerator.prepare(own) is own
    seen = over_ranks([number for batch in own for number in numbers(batch)])
    assert seen == Counter(range(1, len(DOCUMENTS) + 1)), seen
    torch.distributed.destroy_process_group()
    sys.exit()
own = loader()
wrong = {
    "stream": lambda: torch.utils.data.DataLoader(own.dataset, batch_size=2, num_workers=1),
    "loader": lambda: FabricLoader(own),
}[sys.argv[2]]()
told = {"stream": "would divide this part once more", "loader": "FabricLoader was taken apart"}[sys.argv[2]]
reads = accelerator.is_main_process or not dispatch
if reads:
    with pytest.raises((DataError, RuntimeError), match=told):
        next(iter(accelerator.prepare(wrong)))
    print("refused")
