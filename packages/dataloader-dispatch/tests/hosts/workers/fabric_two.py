"""One rank of two under Fabric: an epoch, a checkpoint in the middle of one, and what is refused."""

import sys
from collections import Counter

import lightning.fabric
import pytest
import torch
from documents import DOCUMENTS, loader, numbers, over_ranks

from dataloader_dispatch import DataError, FabricLoader, build_loader

folder = sys.argv[1]
fabric = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
once = Counter(range(1, len(DOCUMENTS) + 1))


def made():
    own = FabricLoader(loader(rank=fabric.global_rank, world_size=2), uneven="pad")
    return own, fabric.setup_dataloaders(own)


own, data = made()
epochs = [over_ranks([number for batch in data for number in numbers(batch)]) for _ in range(2)]
assert epochs == [once, once], epochs
assert own.epoch == 2
own.close()

own, data = made()
begun, batches = [], iter(data)
for _ in range(3):
    begun += numbers(next(batches))
fabric.save(f"{folder}/state.ckpt", {"data": data})
after = [number for batch in batches for number in numbers(batch)]
own.close()

own, data = made()
fabric.load(f"{folder}/state.ckpt", {"data": data})
rest = [number for batch in data for number in numbers(batch)]
assert rest == after, (rest, after)
assert over_ranks(begun + rest) == once
own.close()


def refused(wrong, told):
    with pytest.raises(DataError, match=told):
        list(fabric.setup_dataloaders(wrong))


refused(FabricLoader(loader(rank=0, world_size=1)), "must be those of this process")
refused(FabricLoader(build_loader(torch.arange(8), batch_size=2)), "each of the 2 ranks would read the same")
fabric.barrier()
torch.distributed.destroy_process_group()
print("done")
