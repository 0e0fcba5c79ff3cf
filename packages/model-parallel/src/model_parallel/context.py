"""Divide sequences over the ranks of a mesh: each computes some positions, and attends to all before them.

Every rank gathers the keys and values of a layer, and computes attention for its own positions. The gradient
of what was gathered is summed back by a reduce-scatter. Or keys and values travel around a ring. With
`balanced` a rank has one piece from the first half of a sequence and one from the second, so that all have as
many keys to look at: rank r of n has the pieces r and 2 n - 1 - r of 2 n.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .attention import attend, can_look_at, positions_of
from .plan import PlanError

Exchange: TypeAlias = Literal["all_gather", "ring"]

HF_ATTENTION = "divided_sequence"
"""The name by which transformers finds the attention of this module."""
PADDING = -1
"""In `document_ids`, of positions that belong to no document."""
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_OF_OTHER_KERNELS = {
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "token_type_ids",
}
_WITHOUT_IGNORED = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_FILLS = {"labels": -100, "document_ids": PADDING, "attention_mask": 0}


@dataclass(eq=False)
class SequencePart:
    """Which positions of each sequence a rank computes; made by `divide_sequences`.

    Args:
        mesh: The ranks that share out each sequence: one dimension.
        balanced: Whether each has a piece of both halves. If not, each has one piece.
        multiple: What the number of positions of a rank is a multiple of.
        exchange: "all_gather": each rank has the keys and values of a whole layer while it computes and,
            unless it is recomputed, until its backward pass. "ring": they travel from rank to rank, and each
            rank keeps its own ones only; attention is computed a second time in the backward pass.
        packed_by_positions: Whether rows with `position_ids` and without `document_ids` are packed documents
            that begin where positions do not go on, as transformers takes them.
    """

    mesh: DeviceMesh
    balanced: bool = True
    multiple: int = 1
    exchange: Exchange = "all_gather"
    packed_by_positions: bool = False
    longest: int | None = None
    """The most positions that the model has, where it does not say so itself of whole rows."""
    is_whole: bool = False
    """Whether sequences are not divided for now."""
    choose: Callable[[bool], None] = field(default=lambda whole: None, repr=False)
    """Told when that changes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SequencePart:
        """Itself: the copy of a model is divided over the same ranks, and a mesh cannot be copied."""
        return self

    @property
    def divides(self) -> bool:
        """Whether each rank computes a part of a sequence for now."""
        return not self.is_whole and self.mesh.size() > 1

    def padded_length(self, length: int) -> int:
        """The least length from `length` on that can be divided."""
        step = self.mesh.size() * lcm(2 if self.balanced else 1, self.multiple)
        return -(-length // step) * step

    def pieces(self, length: int) -> list[tuple[int, int]]:
        """Begin and end of each piece of this rank, of a sequence whose length can be divided."""
        return self.pieces_of(self.mesh.get_local_rank(), length)

    def pieces_of(self, rank: int, length: int) -> list[tuple[int, int]]:
        """The same of another rank, by its place in the mesh."""
        ranks = self.mesh.size()
        if not self.balanced:
            size = length // ranks
            return [(rank * size, (rank + 1) * size)]
        size = length // (2 * ranks)
        return [(piece * size, (piece + 1) * size) for piece in (rank, 2 * ranks - 1 - rank)]

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """The positions of this rank: int64 [length / ranks]."""
        return positions_of(self.pieces(length), device)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """A tensor with all positions, in their order, from one with those of each rank."""
        from .activations import gathered  # DTensor takes a second to import, and one rank needs none

        ranks = self.mesh.size()
        length = ranks * x.shape[dim]
        whole = gathered(x, self.mesh, dim, length, partial_gradient=True)
        if not self.balanced:
            return whole
        pieces = [each for rank in range(ranks) for each in self.pieces_of(rank, length)]
        parts = torch.split(whole, [end - start for start, end in pieces], dim)
        in_order = sorted(zip(pieces, parts, strict=True), key=lambda each: each[0][0])
        return torch.cat([part for _, part in in_order], dim)

    def cut(self, batch: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
        """This rank's part of a batch.

        Rows are lengthened to what can be divided: by labels that count in no loss, and by tokens that no
        other attends to.

        Args:
            batch: Tensors [rows, positions] by name, of `input_ids`, of `labels` that were shifted already
                (targets), and what else belongs to positions. An `attention_mask` becomes part of
                `document_ids`. Tensors of one dimension and other values stay as they are.
            device: Where the parts are to be; None: where the tensors are.

        Returns:
            A new mapping of tensors [rows, positions / ranks], with `position_ids`; `document_ids` stay
            whole: each position attends to those with its own number.

        Raises:
            ValueError: If a tensor does not belong to positions, rows are padded at the left or too long, or
                labels are of rows or count padding.
        """
        for name in _OF_OTHER_KERNELS & set(batch):
            if self.packed_by_positions:
                raise ValueError(
                    f"{name} tells transformers which positions attend to which, but divided sequences "
                    "attend causally within documents. Leave it out, and give position_ids that begin anew "
                    "with each."
                )
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and (labels.ndim < 2 or labels.dtype in _WITHOUT_IGNORED):
            raise ValueError(
                f"labels have the shape {list(labels.shape)} and the dtype {labels.dtype}, but sequences can "
                "be divided only for labels of each position, of a dtype that has -100. Leave them whole."
            )
        rows = {name: each for name, each in batch.items() if isinstance(each, Tensor) and each.ndim > 1}
        first = rows.get("input_ids", rows.get("labels"))
        if first is None:
            raise ValueError(
                f"a batch has the keys {sorted(batch)}, but sequences are divided by 'input_ids' or 'labels' "
                "of shape [rows, positions]. Give one of them."
            )
        length = first.shape[1]
        if self.longest is not None and length > self.longest:
            raise ValueError(
                f"rows have {length} positions, but the model has max_position_embeddings={self.longest}. "
                "Shorten the rows."
            )
        for name, each in rows.items():
            if each.shape[:2] != first.shape[:2] or (name == "attention_mask" and each.ndim > 2):
                raise ValueError(
                    f"{name} has the shape {list(each.shape)}, but sequences of {length} positions are "
                    f"divided, and it must be [{first.shape[0]}, {length}]. Leave it out of the batch, or "
                    "give one value for each position."
                )
        place = first.device if device is None else device
        documents = self._documents(rows)  # where values may be looked at without waiting
        given = {name: each for name, each in rows.items() if name not in ("attention_mask", "document_ids")}
        if "position_ids" not in given:
            given["position_ids"] = torch.arange(length, device=place).expand(first.shape[0], length)
        padded = self.padded_length(length)
        mine = self.positions(padded, place)

        def lengthened(name: str, x: Tensor) -> Tensor:
            return _lengthened(name, x.to(place), padded)

        parts = {name: lengthened(name, each)[:, mine] for name, each in given.items()}
        if documents is not None:
            parts["document_ids"] = lengthened("document_ids", documents)
        others = {name: each for name, each in batch.items() if name not in rows}
        return {**others, **parts}

    def _documents(self, rows: Mapping[str, Tensor]) -> Tensor | None:
        documents, mask = rows.get("document_ids"), rows.get("attention_mask")
        positions = rows.get("position_ids")
        if self.packed_by_positions:
            # As transformers does for whole rows: by positions alone, and only without a mask.
            if documents is not None and positions is None:
                raise ValueError(
                    "document_ids are given without position_ids, by which models of transformers find "
                    "documents. Give position_ids that begin anew with each document."
                )
            documents = None
            if positions is not None and mask is None:
                goes_on = positions[:, 1:] == positions[:, :-1] + 1
                documents = F.pad((~goes_on).cumsum(1), (1, 0))
        if mask is None:
            return documents
        if not can_look_at(mask):
            if documents is None:
                documents = torch.zeros_like(mask, dtype=torch.int64)
            return documents.where(mask.bool(), PADDING)
        if bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise ValueError(
                "attention_mask has padding before tokens of a row, which then predicts the first of them. "
                "Sequences that are divided can be padded behind their tokens only: pad rows at the right."
            )
        labels = rows.get("labels")
        if labels is not None and can_look_at(labels) and bool((labels[mask == 0] != -100).any()):
            raise ValueError(
                "labels count where attention_mask is 0, and padding attends to other positions where "
                "sequences are divided. Set the labels of padding to -100."
            )
        return documents  # padding behind a row is attended to by nothing that counts


def _lengthened(name: str, x: Tensor, length: int) -> Tensor:
    missing = length - x.shape[1]
    if not missing:
        return x
    if name == "position_ids":
        # Within the tables of the model, which may end here.
        return torch.cat([x, x[:, -1:].expand(-1, missing)], 1)
    if name == "labels" and x.is_floating_point():
        return torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), float("nan"))], 1)
    shape = (x.shape[0], missing, *x.shape[2:])
    return torch.cat([x, x.new_full(shape, _FILLS.get(name, 0))], 1)


class CausalAttention(nn.Module):
    """Causal attention within documents, for a model whose sequences can be divided; has no parameters.

    A model that calls it in each of its layers, where it has no cache, instead of
    `scaled_dot_product_attention`, can be given to `divide_sequences`. It must take `position_ids`
    [rows, positions] for what depends on positions, such as rotary tables, hand on `document_ids`, and do
    everything else on each position by itself.
    """

    part: SequencePart | None = None
    """Set by `divide_sequences`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_ids: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend from each position to itself and those before it, in its own document.

        Args:
            query: [rows, heads, positions, head size], of the positions of this rank.
            key: [rows, key-value heads, positions, head size]; their number divides that of the heads.
            value: Likewise.
            document_ids: Integers [rows, positions], also where sequences are divided: the whole rows. None:
                each row is one document.
            scale: Of the products of queries and keys; None: 1 / sqrt(head size).

        Returns:
            [rows, heads, positions, head size], as the queries.

        Raises:
            ValueError: If there are not as many keys as queries, as with a cache, or `document_ids` has not
                as many positions as there are keys.
        """
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"there are {query.shape[2]} queries and {key.shape[2]} keys, but positions attend to those "
                "of their own rows. Attend to a cache by scaled_dot_product_attention."
            )
        part = self.part if self.part is not None and self.part.divides else None
        length = query.shape[2] * (1 if part is None else part.mesh.size())
        rows = query.shape[0]
        if document_ids is not None and document_ids.shape not in ((rows, length), (1, length)):
            raise ValueError(
                f"document_ids has the shape {list(document_ids.shape)}, but there are {rows} rows and "
                f"{length} keys. Give the numbers of whole rows."
            )
        if document_ids is not None:
            document_ids = document_ids.expand(rows, length)
        if part is None:
            return attend(query, key, value, [(0, length)], document_ids, scale)
        if part.exchange == "ring" and not query.is_meta:
            from .ring import attend_around  # which loads the compiler's front end, to keep out of graphs

            around: Tensor = attend_around(query, key, value, part, document_ids, scale)
            return around
        key, value = part.gather(key, 2), part.gather(value, 2)
        return attend(query, key, value, part.pieces(length), document_ids, scale)


def divide_sequences(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    balanced: bool = True,
    multiple: int = 1,
    exchange: Exchange = "all_gather",
) -> SequencePart:
    """Let a model compute a part of each sequence on each rank of a mesh, in place.

    Each rank of the mesh then cuts the same batch by `cut` of what this returns, and computes its part of the
    loss. Gradients are those of the parts: sum them over the ranks, as `fully_shard` does over a mesh that
    includes them, with `set_gradient_divide_factor(1.0)`.

    Args:
        model: One whose layers attend by `CausalAttention`, or a causal language model of Hugging Face.
        mesh: One dimension, such as `dist_env.Meshes(...).context`.
        balanced: Whether each rank has a piece from both halves of a sequence, so that all compute equally
            much.
        multiple: What the number of positions of a rank is a multiple of, where something divides it further.
        exchange: How keys and values come to the ranks: "all_gather", or "ring", which takes less memory and
            more time. See `SequencePart`.

    Returns:
        How batches are cut.

    Raises:
        PlanError: If the model attends in another way, or in one that cannot be divided.
        ValueError: If `exchange` is none of the two.
    """
    if exchange not in get_args(Exchange):
        raise ValueError(f"exchange is {exchange!r}, but it must be all_gather or ring.")
    part = SequencePart(mesh, balanced, multiple, exchange)
    own = [module for module in model.modules() if isinstance(module, CausalAttention)]
    _check_positions(model)
    if not own:
        _divide_hf(model, part)
        return part
    for module in own:
        module.part = part
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    part.longest = limit if isinstance(limit, int) else None
    return part


def _check_positions(model: nn.Module) -> None:
    """Refuse a model that would compute a part of a sequence with the positions of its beginning.

    Raises:
        PlanError: If it does not take `position_ids`.
    """
    base = getattr(model, "get_base_model", None)  # of an adapter of PEFT
    own = _own_forward(base() if callable(base) else model)
    taken = () if own is None else inspect.signature(own).parameters
    attends = any(isinstance(module, CausalAttention) for module in model.modules())
    if "position_ids" not in taken and (attends or hasattr(model, "set_attn_implementation")):
        raise PlanError(
            f"Sequences of {type(model).__name__} cannot be divided: its forward has no parameter "
            "position_ids, by which a rank would say which part of a sequence it computes. Add it, or divide "
            "tensors instead."
        )


@contextmanager
def undivided(part: SequencePart) -> Iterator[None]:
    """A context in which sequences are whole, to write texts."""
    before = part.is_whole
    try:
        part.is_whole = True
        part.choose(True)
        yield
    finally:
        part.is_whole = before
        part.choose(before)


def _divide_hf(model: nn.Module, part: SequencePart) -> None:
    name, config = type(model).__name__, getattr(model, "config", None)
    choose: Callable[[str], None] | None = getattr(model, "set_attn_implementation", None)
    if choose is None or config is None or not hasattr(config, "_attn_implementation"):
        raise PlanError(
            f"Sequences of {name} cannot be divided: it has no module CausalAttention, and it is not a model "
            "of Hugging Face. Let its layers attend by model_parallel.CausalAttention."
        )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(text, "sliding_window", None) if not getattr(text, "layer_types", None) else None
    for setting, value in {
        "layer_types": sorted(kinds) or None,
        "sliding_window": window,
        "attn_logit_softcapping": getattr(text, "attn_logit_softcapping", None),
        **{name: getattr(text, name, None) or None for name in _DROPOUTS},
        "rope_parameters": _rope_by_length(text),
        "is_encoder_decoder": getattr(config, "is_encoder_decoder", False) or None,
    }.items():
        if value is not None:
            raise PlanError(
                f"Sequences of {name} cannot be divided: its config has {setting}={value!r}, and only plain "
                "causal attention can be computed in parts. Change that setting, or divide tensors instead."
            )
    before = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(HF_ATTENTION, _hf_attention)
    # transformers makes no mask for an attention that has no entry among its masks.
    choose(HF_ATTENTION)
    attending = [module for module in model.modules() if _attends(module)]
    if config._attn_implementation != HF_ATTENTION or len(attending) != text.num_hidden_layers:
        choose(before)
        raise PlanError(
            f"Sequences of {name} cannot be divided: transformers lets the attention of {len(attending)} of "
            f"its {text.num_hidden_layers} layers be chosen. Use a model whose layers all find it in "
            "ALL_ATTENTION_FUNCTIONS."
        )
    for module in attending:
        own = CausalAttention()
        own.part = part
        module.add_module("divided_sequence", own)
    part.packed_by_positions = True
    # Whole sequences may come with a cache and masks for padding, which transformers' own attention knows.
    part.choose = lambda whole: choose(before if whole else HF_ATTENTION)


def _rope_by_length(config: Any) -> object:
    """The kind of rotary embedding, if its frequencies depend on the longest position that a rank sees."""
    left: list[Any] = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while left:
        given = left.pop()
        if isinstance(given, Mapping):
            kind = given.get("rope_type", given.get("type"))
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                return kind
            left += given.values()
    return None


def _attends(module: nn.Module) -> bool:
    """Whether a module is causal attention that transformers lets be chosen."""
    if not getattr(module, "is_causal", False):
        return False
    own = _own_forward(module)
    code = getattr(inspect.unwrap(own), "__code__", None) if own is not None else None
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of a module, where what divides tensors may have put a class of its own in front."""
    replaced: Callable[..., Any] | None = vars(module).get("forward")
    if replaced is not None:
        return replaced
    forwards = (vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
    return next((each for each in forwards if not each.__module__.startswith("model_parallel.")), None)


def _hf_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: heads before positions in, positions before heads out."""
    for name, value_of in {"dropout": dropout or None, **kwargs}.items():
        if (
            name in ("dropout", "sliding_window", "softcap", "position_bias", "s_aux")
            and value_of is not None
        ):
            raise PlanError(
                f"{type(module).__name__} attends with {name}={value_of!r}, which cannot be computed in "
                "parts. Leave that out, or divide tensors instead."
            )
    own = getattr(module, "divided_sequence", None)
    if own is None:
        raise PlanError(
            f"{type(module).__name__} was not there when sequences were divided. Divide them last."
        )
    out = own(query, key, value, kwargs.get("document_ids"), scaling)
    return out.transpose(1, 2).contiguous(), None
