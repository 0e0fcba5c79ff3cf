"""One rank of a gloo job: trains small models in several ways, each with one delay, and writes traces.

Arguments: the rank, the number of ranks, the folder, and scenarios such as "ddp-rank".
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import profile, record_function, schedule, supported_activities

SIZE, BATCH, LAYERS = 128, 16, 4
DELAY = 0.4
"""Seconds; on a busy machine each step takes long by itself."""
STEPS = 4
SLOW_LINK = 40
"""How many times a slow link carries what is sent once."""


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Random rows; the last of each batch takes long where the loader is slow."""

    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow and index % BATCH == BATCH - 1:
            time.sleep(DELAY)
        return torch.full((SIZE,), index / 100)


def layers(count: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(count)))


def sleep_in_forward(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda *_: time.sleep(DELAY))


def replicated(delay: str, rank: int) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    plain = layers()
    model = nn.parallel.DistributedDataParallel(plain)

    def slow_reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size() ** SLOW_LINK)
        for _ in range(SLOW_LINK - 1):
            dist.all_reduce(buffer, async_op=True)
        future = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    if delay == "link":
        model.register_comm_hook(None, slow_reduce)
    if delay == "rank" and rank == dist.get_world_size() // 2:
        sleep_in_forward(plain[1])
    return model, lambda rows: model(rows).square().mean().backward()


class SlowGather:
    """What FSDP2 calls to gather weights: here each time as often as `SLOW_LINK` says."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        for _ in range(SLOW_LINK - 1):
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def sharded(delay: str, rank: int) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    size = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
        if size == 2
        else init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    )
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if delay == "rank" and rank == size // 2:
        sleep_in_forward(model[1])

    for layer in model if delay == "link" else ():
        layer.set_custom_all_gather(SlowGather())
    return model, lambda rows: model(rows).square().mean().backward()


def pipelined(delay: str, rank: int) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    model = layers(2)
    size = dist.get_world_size()
    if delay == "rank" and rank == size // 2:
        # Once for each of the four microbatches.
        model[1].register_forward_pre_hook(lambda *_: time.sleep(DELAY / 4))
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    runs = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())

    def step(rows: torch.Tensor) -> None:
        last = {"target": torch.zeros_like(rows)} if rank == size - 1 else {}
        runs.step(*([rows] if rank == 0 else []), **last)

    return model, step


WAYS = {"ddp": replicated, "fsdp2": sharded, "pipeline": pipelined}


def batches(delay: str, rank: int, way: str) -> Iterator[torch.Tensor]:
    # Of a pipeline only the first stage reads.
    slow = delay == "loader" and (way != "pipeline" or rank == 0)
    return iter(torch.utils.data.DataLoader(Rows(slow), batch_size=BATCH))


def run(scenario: str, rank: int, folder: Path) -> None:
    way, delay = scenario.split("-")
    model, step = WAYS[way](delay, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trace = folder / f"{scenario}-rank{rank}.json.gz"
    rows = batches(delay, rank, way)
    with profile(
        activities=supported_activities(),
        schedule=schedule(wait=0, warmup=1, active=STEPS - 1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    ) as profiler:
        for _ in range(STEPS):
            step(next(rows))
            optimizer.step()
            optimizer.zero_grad()
            if delay == "save":
                with record_function("checkpoint"):
                    if rank == 0:
                        time.sleep(DELAY)
                    dist.barrier()
            profiler.step()
    dist.barrier()


rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
for scenario in sys.argv[4:]:
    run(scenario, rank, folder)
dist.destroy_process_group()
