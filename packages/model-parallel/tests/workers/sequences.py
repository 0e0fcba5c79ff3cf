"""Divides the sequences of each case over all ranks, and notes how far that is from one process.

One process attends by masks and a softmax written out, so that nothing of what is tested is in it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from dist_env import DistributedEnvInterface, DistributedEnvironment, Meshes, ParallelLayout, broadcast_object
from model_parallel import (
    CausalAttention,
    SequencePart,
    attention,
    attention_kernel,
    divide_sequences,
    ring,
    undivided,
)

VOCABULARY, WIDTH, HEADS, KV_HEADS, STEPS = 61, 32, 4, 2, 3


class ByHand(nn.Module):
    """The softmax of the products, of which a mask leaves those before a position, in its document."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        length = query.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if document_ids is not None:
            seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None])
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ value


class Block(nn.Module):
    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * size)
        self.attend = attend

    def forward(self, x: Tensor, positions: Tensor, document_ids: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        normed = self.norm(x)
        query = self.q(normed).view(rows, length, HEADS, -1).transpose(1, 2)
        key, value = self.kv(normed).view(rows, length, 2, KV_HEADS, -1).permute(2, 0, 3, 1, 4)
        out = self.attend(turned(query, positions), turned(key, positions), value, document_ids)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        return x + torch.tanh(x)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Packed(nn.Module):
    """A decoder whose data says where documents begin."""

    def __init__(self, attend: type[nn.Module] = CausalAttention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(attend()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, document_ids)
        return self.head(x)


def batches(case: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The same on each rank; labels are targets."""
    generator = torch.Generator().manual_seed(1)
    length, made = case["length"], []
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        targets[:, : case.get("uncounted", 0)] = -100
        batch = {"input_ids": ids, "labels": targets}
        if "documents" in case:
            batch |= boundaries(case["documents"], 2)
        if "padded" in case:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, case["padded"] :] = 0
            targets[0, case["padded"] - 1 :] = -100
        made.append(batch)
    return made


def boundaries(lengths: list[int], rows: int) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(each) for each in lengths])
    documents = torch.cat([torch.full((each,), number) for number, each in enumerate(lengths)])
    return {"position_ids": positions.expand(rows, -1), "document_ids": documents.expand(rows, -1)}


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    given: dict[str, Any] = {name: each for name, each in batch.items() if name != "labels"}
    if not isinstance(model, Packed):
        given["use_cache"] = False  # with a cache transformers does not look for documents
    found = model(**given)
    return found if isinstance(found, Tensor) else found.logits


def train(model: nn.Module, given: list[dict[str, Tensor]], part: SequencePart | None) -> list[list[float]]:
    """Loss and gradient norm of each step, over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    points = []
    for batch in given:
        count = (batch["labels"] != -100).sum()
        mine = batch if part is None else part.cut(batch)
        loss = F.cross_entropy(
            logits_of(model, mine).flatten(0, 1), mine["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        (loss / count).backward()
        total = loss.detach().clone()
        if part is not None:
            for each in (total, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(each)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        points.append([float(total / count), float(norm)])
    return points


def make(case: dict[str, Any], attend: type[nn.Module]) -> nn.Module:
    if "family" not in case:
        return Packed(attend)
    import hf_models

    return hf_models.make(case["family"], "sdpa", VOCABULARY)


_KNOWN: dict[str, list[list[float]]] = {}


def expected_of(
    case: dict[str, Any], given: list[dict[str, Tensor]], env: DistributedEnvInterface
) -> list[list[float]]:
    """The curve of one process, which rank 0 trains once for all cases with the same data."""
    names = ("family", "length", "documents", "uncounted", "padded")
    key = str([case.get(name) for name in names])
    if key not in _KNOWN:
        mine = train(make(case, ByHand), given, None) if env.rank == 0 else []
        _KNOWN[key] = broadcast_object(mine, env)
    return _KNOWN[key]


def run(case: dict[str, Any], meshes: Meshes, env: DistributedEnvInterface) -> dict[str, Any]:
    given = batches(case)
    alone = [dict(batch) for batch in given]
    for batch in alone:
        if "family" in case:
            batch.pop("document_ids", None)  # transformers finds documents by positions
        else:
            batch.pop("attention_mask", None)
    if "family" in case:
        given = alone
    expected = expected_of(case, alone, env)
    model = make(case, CausalAttention)
    settings = {name: case[name] for name in ("balanced", "exchange") if name in case}
    part = divide_sequences(model, meshes.context, **settings)
    # torch has gradients of FlexAttention on a CPU, as plain operators, but refuses to use them (2.13).
    flex_attention._validate_device = lambda *tensors: None
    if "mask" in case:
        attention._MASK_ELEMENTS = attention._KEPT_MASK = ring._SCORES = case["mask"]
    found = train(model, given, part)
    notes = {
        name: max(abs(mine[place] / other[place] - 1) for mine, other in zip(found, expected, strict=True))
        for place, name in enumerate(("loss", "norm"))
    }
    if case.get("kernel") != "flex":
        notes["kept"] = kept(part)
    with torch.no_grad():
        whole = part.gather(logits_of(model, part.cut(given[0])), 1)[:, : case["length"]]
        with undivided(part):
            notes["whole"] = far(logits_of(model, alone[0]), whole)
        if "documents" in case:
            notes["alone"] = documents_alone(model, part, given[0]["input_ids"], whole, case["documents"])
    return notes


def documents_alone(
    model: nn.Module, part: SequencePart, ids: Tensor, whole: Tensor, lengths: list[int]
) -> float:
    """How far the logits of a row are from those of each of its documents, given alone to one process."""
    start, worst = 0, 0.0
    with undivided(part):
        for length in lengths:
            own = model(ids[:, start : start + length])
            own = own if isinstance(own, Tensor) else own.logits
            worst = max(worst, far(own, whole[:, start : start + length]))
            start += length
    return worst


def kept(part: SequencePart) -> int:
    """Elements that attention of 512 positions of each rank keeps for its backward pass."""
    attend = CausalAttention()
    attend.part = part
    given = [torch.randn(1, 2, 512, 8, requires_grad=True) for _ in range(3)]
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attend(*given)
    out.sum().backward()
    return sum(sizes.values())


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


def main(cases: list[dict[str, Any]]) -> None:
    with DistributedEnvironment(no_accelerator=True) as env:
        meshes = Meshes(ParallelLayout(context=env.world_size))
        limits = attention._MASK_ELEMENTS, attention._KEPT_MASK, ring._SCORES
        notes = []
        for case in cases:
            with attention_kernel(case.get("kernel", "auto")):
                notes.append(run(case, meshes, env))
            attention._MASK_ELEMENTS, attention._KEPT_MASK, ring._SCORES = limits
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
