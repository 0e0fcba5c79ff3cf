"""Causal attention within documents, of some queries of a sequence: by masks, or by FlexAttention.

Kernels know the mask of a whole row that is one document. Any other is made here: for a few queries at a time
as values, or as the blocks that FlexAttention computes, which skips those that no query sees.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# FlexAttention is imported where it is used: it loads the compiler's front end, which takes seconds.

AttentionKernel: TypeAlias = Literal["auto", "flex", "masks"]
Pieces: TypeAlias = Sequence[tuple[int, int]]
"""Begin and end of each of some stretches of a sequence, in their order."""

_logger = logging.getLogger(__name__)
_KEPT_MASK = 2**20
"""A mask of more elements is not kept for the backward pass: attention is computed again there."""
_MASK_ELEMENTS = 2**22
"""A mask of more elements is made for some queries at a time."""
_BLOCK = 128
"""Queries, and keys, of one block of FlexAttention."""
_UNSEEN = -1e30
"""The score of a key that is not seen: finite, so that a query that sees none has no NaN in its gradient."""
_TOLERANCE = 0.03
"""How far FlexAttention may be from float64, relative to the largest value: a wrong mask is off by more than
0.3, bfloat16 and TensorFloat-32 by less than 0.01."""
_MOST_GRAPHS = 64
_setting: AttentionKernel = "auto"


def can_look_at(x: Tensor) -> bool:
    """Whether values can be read without waiting for a device, or there being none."""
    # A fake tensor, as of a dry run, has none; it and this class of it are private to torch (2.13).
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)


@contextmanager
def attention_kernel(kernel: AttentionKernel) -> Iterator[None]:
    """A context in which one kernel computes attention within documents and of parts of sequences.

    It is of this process, not of a thread. Whole rows without documents are not concerned:
    `scaled_dot_product_attention` knows their mask.

    Args:
        kernel: "masks" gives masks to `scaled_dot_product_attention`. "flex" uses FlexAttention: compiled,
            or on a CPU as plain operators, which is slow and where torch refuses gradients. "auto", the
            choice without this context, uses FlexAttention on accelerators where it computes what masks do,
            which is tried at its first use and logged, and masks elsewhere.

    Raises:
        ValueError: If it is none of these.
    """
    global _setting
    if kernel not in get_args(AttentionKernel):
        raise ValueError(f"kernel is {kernel!r}, but it must be auto, flex or masks.")
    before = _setting
    _setting = kernel
    try:
        yield
    finally:
        _setting = before


@cache
def _problem(device: torch.device, dtype: torch.dtype, head_size: int, groups: int) -> str | None:
    """Why FlexAttention cannot be used on an accelerator; None: it can. Tried once, and logged."""
    problem: str | None = None
    if find_spec("triton") is None:
        problem = "triton, with which its kernels are compiled, is not installed"
    else:
        # A thread of its own has none of the modes of this one: a checkpoint of activations would keep what
        # is computed here, and miss it when it computes the block again.
        try:
            with ThreadPoolExecutor(1) as thread:
                far = thread.submit(_far_from_masks, device, dtype, head_size, groups).result()
            problem = None if far < _TOLERANCE else f"its values are off by {far:.2g} of the largest"
        except (RuntimeError, ValueError, TypeError, AttributeError, OSError, ImportError) as error:
            # As compilers, drivers and torch raise them where something is not supported.
            problem = f"it failed with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    kind = f"{str(dtype).removeprefix('torch.')} heads of {head_size}"
    if problem is None:
        _logger.info("masked attention of %s on %s is computed by FlexAttention", kind, device)
    else:
        _logger.warning("masked attention of %s on %s is computed by masks: %s", kind, device, problem)
    return problem


def _far_from_masks(device: torch.device, dtype: torch.dtype, head_size: int, groups: int) -> float:
    """How far outputs and gradients of FlexAttention are from those of masks in float64.

    For two pieces of a row of three documents, whose lengths are no multiples of a block.
    """
    generator = torch.Generator().manual_seed(0)
    pieces, length = [(70, 200), (310, 440)], 440
    shapes = ((1, groups, 260, head_size), (1, 1, length, head_size), (1, 1, length, head_size))
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator).to(dtype)
    documents = torch.tensor([0] * 90 + [1] * 250 + [2] * 100)[None]

    def outputs(by: Callable[..., Tensor], kind: torch.dtype, place: torch.device) -> list[Tensor]:
        own = [each.to(place, kind).requires_grad_() for each in given]
        out = by(*own, pieces, documents.to(place), None)
        gradients = torch.autograd.grad(out, own, weights.to(place, kind))
        return [each.detach().cpu().double() for each in (out, *gradients)]

    found = outputs(_by_flex, dtype, device)
    right = outputs(_by_masks, torch.float64, torch.device("cpu"))
    both = zip(found, right, strict=True)
    apart = torch.stack([(one - other).abs().max() / other.abs().max() for one, other in both])
    # Of values that are none, as wrong kernels give them, the largest difference is none either.
    return float(apart.max()) if bool(apart.isfinite().all()) else math.inf


def uses_flex(query: Tensor, key: Tensor) -> bool:
    """Whether FlexAttention computes attention with a mask for these queries.

    Raises:
        RuntimeError: If it was set, and cannot be used.
    """
    if _setting == "masks" or query.is_meta:
        return False
    if query.device.type == "cpu":
        return _setting == "flex"
    if torch.compiler.is_compiling():
        return find_spec("triton") is not None  # it cannot be tried from here, and would fail by name
    if isinstance(query, FakeTensor):
        return False  # as of a dry run: nothing is computed
    groups = query.shape[1] // key.shape[1]
    problem = _problem(query.device, computed_in(query), query.shape[3], groups)
    if problem is not None and _setting == "flex":
        raise RuntimeError(
            f"The attention kernel was set to flex, but FlexAttention cannot be used on {query.device}: "
            f"{problem}. Set it to auto or masks."
        )
    return problem is None


def positions_of(pieces: Pieces, device: torch.device | str | None) -> Tensor:
    """The positions of some pieces of a sequence, int64 [positions]."""
    return torch.cat([torch.arange(start, end, device=device) for start, end in pieces])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Pieces,
    document_ids: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of the queries of some pieces of a sequence to its keys, of which it has all.

    Memory for masks does not grow with the square of the length.

    Args:
        query: [rows, heads, positions of the pieces, head size].
        key: [rows, key-value heads, all positions, head size].
        value: Likewise.
        pieces: Which positions the queries have.
        document_ids: Integers [rows, all positions]; None: each row is one document.
        scale: Of the products; None: 1 / sqrt(head size).
    """
    from_the_beginning = len(pieces) == 1 and not pieces[0][0] and document_ids is None
    by = _by_flex if not from_the_beginning and uses_flex(query, key) else _by_masks
    return by(query, key, value, pieces, document_ids, scale)


def _by_masks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Pieces,
    document_ids: Tensor | None,
    scale: float | None,
) -> Tensor:
    """By masks of a few queries at a time, which are made in the backward pass again if they are large."""
    outputs = []
    rows = 1 if document_ids is None else query.shape[0]
    first = 0
    for start, end in pieces:
        own = query[:, :, first : first + end - start]
        first += end - start
        size = max(1, min(end - start, _MASK_ELEMENTS // (rows * end)))
        if query.is_meta or (not start and document_ids is None):
            # Without values memory does not matter, and FLOPs are counted as those of one product. From the
            # beginning on kernels know the mask, and need none that is made.
            size = end - start
        for begin in range(start, end, size):
            last = min(begin + size, end)
            some = partial(_by_one_mask, start=begin, document_ids=document_ids, scale=scale)
            given = (own[:, :, begin - start : last - start], key[:, :, :last], value[:, :, :last])
            masked = begin > 0 or document_ids is not None
            if masked and rows * (last - begin) * last > _KEPT_MASK and torch.is_grad_enabled():
                outputs.append(checkpoint(some, *given, use_reentrant=False))
            else:
                outputs.append(some(*given))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _by_one_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    document_ids: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention of the last queries of a sequence, from `start` on, to all its keys."""
    count, keys = query.shape[2], key.shape[2]
    mask: Tensor | None = None
    if start or document_ids is not None:
        mask = torch.ones(count, keys, dtype=torch.bool, device=query.device).tril(start)
        if document_ids is not None:
            numbers = document_ids[:, :keys]
            mask = (mask & (numbers[:, start:, None] == numbers[:, None])).unsqueeze(1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and count > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Pieces,
    document_ids: Tensor | None,
    scale: float | None,
) -> Tensor:
    """By FlexAttention, which computes the blocks of which a query sees something."""
    last = pieces[-1][1]
    documents = None if document_ids is None else document_ids[:, :last]
    at = positions_of(pieces, query.device)
    mask = block_mask(
        at,
        positions_of([(0, last)], query.device),
        None if documents is None else (documents[:, at], documents),
    )
    attended: Tensor = _flex(query, key[:, :, :last], value[:, :, :last], mask, scale)
    return attended


def block_mask(queries: Tensor, keys: Tensor, documents: tuple[Tensor, Tensor] | None) -> BlockMask:
    """The blocks of some queries and keys that causal attention within documents computes.

    Blocks are compared by the first and last of their positions and document numbers, so that memory is that
    of the blocks, and not of all queries times all keys. A block that may have something to compute is
    computed by the mask of each pair.

    Args:
        queries: Their positions, int64 [queries].
        keys: Likewise, [keys].
        documents: The numbers of their documents, [rows, queries] and [rows, keys]; None: each row is one.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first, last = _ends_of_blocks(queries)
    key_first, key_last = _ends_of_blocks(keys)
    some = last[:, None] >= key_first
    # A block at the end that is not full of positions is computed pair by pair.
    whole = (first[:, None] >= key_last) & _is_whole(queries)[:, None] & _is_whole(keys)
    some, whole = some[None], whole[None]
    if documents is not None:
        lowest, highest = (each[:, :, None] for each in _ends_of_blocks(documents[0]))
        key_lowest, key_highest = (each[:, None] for each in _ends_of_blocks(documents[1]))
        some = some & (lowest <= key_highest) & (key_lowest <= highest)
        alike = (lowest == highest) & (key_lowest == key_highest) & (lowest == key_lowest)
        whole = whole & alike

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        causal = queries[query] >= keys[key]
        if documents is None:
            return causal
        return causal & (documents[0][row, query] == documents[1][row, key])

    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(len(queries), len(keys)),
    )


def _ends_of_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each block: [..., blocks], of [..., numbers]."""
    missing = -x.shape[-1] % _BLOCK
    filled = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)
    in_blocks = filled.reshape(*x.shape[:-1], -1, _BLOCK)
    return in_blocks.amin(-1), in_blocks.amax(-1)


def _is_whole(x: Tensor) -> Tensor:
    count = len(x)
    return torch.arange(_BLOCK, count + _BLOCK, _BLOCK, device=x.device) <= count


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which come first, as BlockMask takes them."""
    counts = blocks.sum(-1, dtype=torch.int32)[:, None]
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts, order[:, None].contiguous()


def _flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, **more: Any
) -> Any:
    """FlexAttention in the dtype of an autocast, as `scaled_dot_product_attention` does it."""
    from torch.nn.attention.flex_attention import flex_attention

    plain = query.device.type == "cpu" or torch.compiler.is_compiling()
    by: Callable[..., Any] = flex_attention
    if not plain:
        by = _compiled_flex()
    given = (each.to(computed_in(each)) for each in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    return by(*given, block_mask=mask, scale=scale, enable_gqa=grouped, **more)


@cache
def _compiled_flex(backend: str = "inductor") -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Without fullgraph torch would leave a graph that it has compiled too often, and make all scores.
    compiled = torch.compile(flex_attention, fullgraph=True, backend=backend)

    def attend(*given: Any, **more: Any) -> Any:
        # torch compiles one function 8 times at most. This one is compiled for each dtype and size of heads,
        # with and without documents, gradients and sums, and for lengths: first as they are, then for any.
        # A setting that is private to torch (2.11 to 2.13 have it); a test counts graphs.
        with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
            return compiled(*given, **more)

    return attend


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype in which autocast computes attention: its own, but for float64."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def attend_to_some(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Pieces,
    key_pieces: Pieces,
    document_ids: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys of a sequence, and by how much they count beside others.

    Args:
        query: [rows, heads, positions of `pieces`, head size].
        key: [rows, key-value heads, positions of `key_pieces`, head size].
        value: Likewise.
        pieces: Which positions the queries have.
        key_pieces: Which the keys have.
        document_ids: Integers [rows, all positions]; None: each row is one document.
        scale: Of the products; None: 1 / sqrt(head size).

    Returns:
        The values, of the shape and dtype of the queries, and the logarithm of the sum of the exponentials of
        scores, [rows, heads, positions of `pieces`] in float32: some -1e30 or less where no key is seen.
    """
    at, to = positions_of(pieces, query.device), positions_of(key_pieces, query.device)
    documents = None if document_ids is None else (document_ids[:, at], document_ids[:, to])
    if uses_flex(query, key):
        from torch.nn.attention.flex_attention import AuxRequest

        mask = block_mask(at, to, documents)
        out, aux = _flex(query, key, value, mask, scale, return_aux=AuxRequest(lse=True))
        return out, aux.lse.clamp_min(_UNSEEN)
    seen = (at[:, None] >= to)[None]
    if documents is not None:
        seen = seen & (documents[0][:, :, None] == documents[1][:, None])
    rows, heads, *rest = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], *rest)
    scores = grouped @ key[:, :, None].transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen[:, None, None], _UNSEEN)
    total = scores.logsumexp(-1)
    out = (scores - total[..., None]).exp().to(value.dtype) @ value[:, :, None]
    return out.flatten(1, 2), total.flatten(1, 2)
