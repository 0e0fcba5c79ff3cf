"""Data parallelism with model, gradients and optimizer state spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from checkpoint_core import SharingPattern
from dist_env import DistributedEnvInterface
from trainer_core import (
    Batch,
    ConfigurationError,
    DataParallel,
    ModelSource,
    TokenLoss,
    TrainingArguments,
    clip_grad_norm,
    fsdp_modules,
    generators_of_rank_0,
    logits_of_one_rank,
    prepare_model,
    share_generators,
)

from .arguments import FSDP2TrainingArguments
from .mesh import check_replicas, sharding_mesh
from .units import units_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class FSDP2Parallelism(DataParallel):
    """Every rank holds a part of each weight, and gathers a layer when it computes with it.

    With one rank nothing is sharded, unless fsdp2.param_dtype or fsdp2.cpu_offload ask for it.

    Args:
        env: Rank, world size and device of this process.
    """

    def __init__(self, env: DistributedEnvInterface) -> None:
        super().__init__(env)
        self._args = FSDP2TrainingArguments()
        self._sharded = False
        self._shards: DeviceMesh | None = None
        """What the model is sharded on."""
        self._units: list[FSDPModule] = []
        """What is gathered and dropped as one."""
        self._last = True
        """Whether the units are set for the last microbatch of a step."""

    def check(self, args: TrainingArguments) -> None:
        """Compare the arguments of the ranks; collective.

        Raises:
            ConfigurationError: If they are not for this trainer, do not fit the ranks, or differ.
        """
        if not isinstance(args, FSDP2TrainingArguments):
            raise ConfigurationError(
                "args", type(args).__name__, "is not for FSDP2Trainer", "make a FSDP2TrainingArguments"
            )
        self._args = args
        check_replicas(args.fsdp2.replicas, self.env.world_size)
        super().check(args)
        asks = args.fsdp2.param_dtype is not None or args.fsdp2.cpu_offload
        self._sharded = self.env.world_size > 1 or asks
        if self._sharded:
            self._shards = sharding_mesh(self.env, self.mesh, args.fsdp2.replicas)

    def build(self, source: ModelSource, args: TrainingArguments, *, weights_follow: bool) -> None:
        """Build this rank's part of the model, with the values that one process would have drawn."""
        if self._shards is None:
            self.model = prepare_model(source, args, self.device, weights_follow=weights_follow)
            if self._args.fsdp2.layer_classes is not None or args.transformer_layers_path is not None:
                units_of(self.model, self._args)  # what is wrong with them is wrong for one rank too
            return
        # What shards takes seconds to import, so only those who shard wait for it.
        from .build import build_sharded

        if self.mesh is not None:
            share_generators(self.env)  # without a seed each rank would draw a model of its own
        draw = not (weights_follow and args.construct_model_on == "meta")
        self.model, sums = build_sharded(
            source, self._args, self.device, self._shards, draw=draw, share=self._share
        )
        self._units = fsdp_modules(self.model)
        self.agree_on_model()
        # To six digits: processors of different kinds may add up in another order.
        self.agree(
            {
                f"sum and sum of squares of the initial {name}": f"{total:.6g}, {squares:.6g}"
                for name, (total, squares) in sums.items()
            }
        )

    def unwrapped_model(self) -> nn.Module:
        """The model itself, which is sharded in place."""
        return self.model

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, *, divisor: Tensor, last: bool
    ) -> Tensor:
        """Run one microbatch forward and backward; gradients travel with the last one of a step, or each."""
        if last != self._last:
            self._last = last
            self._prepare_backward(last)
        return super().forward_backward(batch, loss, args, divisor=divisor, last=last)

    def after_step(self, step: int) -> None:
        """Find the scales of weights that are gathered in float8 again, for all layers at once."""
        if self._sharded and self._args.fsdp2.fp8_all_gather:
            from .float8 import scale_float8

            scale_float8(self.model)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Measure the norm over the shards of all ranks, and scale the gradient down if it is longer."""
        if not self._sharded:
            return super().clip_grad_norm(max_norm)
        norm = clip_grad_norm(self.parameters, max_norm, over_ranks=self._sum_over_shards)
        return norm.to(self.device)

    @contextmanager
    def consolidated(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which all ranks have one set of buffers, and each holds no more than its shards."""
        self._drop_gathered()
        try:
            with self.buffers_of_rank_0():
                yield
        finally:
            self._drop_gathered()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context in which all ranks have the random generators of rank 0, and its logits at every call.

        Ranks that draw alike from the same logits end at the same token, so that none waits for the others.
        """
        if not self._sharded:
            yield
            return
        try:
            with generators_of_rank_0(self.env), logits_of_one_rank(self.model, self.group):
                yield
        finally:
            self._drop_gathered()

    def sharing(self) -> Mapping[str, SharingPattern]:
        """Model and optimizer lie on the ranks in parts."""
        parts = SharingPattern.SHARDED if self._sharded else SharingPattern.REPLICATED
        return {**super().sharing(), "model": parts, "optimizer": parts}

    def _prepare_backward(self, last: bool) -> None:
        """Say what the next backward pass does with gradients, and with gathered weights."""
        settings = self._args.fsdp2
        keeps_weights = settings.reshard_after_forward is False and not last
        for unit in self._units:
            unit.set_requires_gradient_sync(last or settings.reduce_each_microbatch, recurse=False)
            unit.set_reshard_after_backward(not keeps_weights, recurse=False)

    def _share(self, model: nn.Module) -> None:
        """Give a built model the weights of rank 0, once all ranks are known to have the same one."""
        self.model = model
        self.agree_on_model()
        self.copy_weights_of_rank_0(model)

    def _drop_gathered(self) -> None:
        """Let go of gathered weights, so that parameters are this rank's shards again."""
        for unit in self._units:
            unit.reshard()

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        """Add up over the ranks of one copy; all copies have the same gradients."""
        return self.sum(value) / self._args.fsdp2.replicas
