"""What a run will need of memory, as numbers and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_core import MARGIN_STANDS_FOR, margin_of

from .mesh import Mesh

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of one rank, the fullest one, in bytes.

    Parameters, gradients and optimizer state are exact. Gathered weights and travelling gradients follow from
    how `fully_shard` works; activations are an estimate.
    """

    mesh: Mesh
    """The ranks."""
    parameter_count: int
    """Parameters of the whole model, tied ones once."""
    batch_size: int
    """Examples of one rank at a time."""
    sequence_length: int
    """Tokens of one example."""
    parameters: int
    """The shard of the parameters that the optimizer steps."""
    gradients: int
    """The gradients of that shard."""
    optimizer: int
    """The state of the optimizer for that shard."""
    optimizer_name: str
    """Class of the optimizer."""
    gathered: int
    """Whole weights: of the layers that compute or come next, and of the root."""
    reduced: int
    """Gradients on their way to the ranks they belong to."""
    accumulated: int
    """Whole gradients of earlier microbatches of a step."""
    saved_activations: int
    """What one microbatch keeps from forward for backward."""
    activations: int
    """Most activations at a time on the device: what is kept there, and what comes and goes."""
    on_host: int
    """Memory of the host that this rank takes: state with cpu_offload, activations that are offloaded."""
    state_on_host: bool
    """Whether parameters, gradients and optimizer state rest in the memory of the host."""
    per_rank: tuple[int, ...]
    """Parameters, gradients and optimizer state of each rank of one copy."""
    notes: tuple[str, ...] = ()
    """What one should know about the estimate."""

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state together, wherever they rest."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def margin(self) -> int:
        """5 % of the rest and 1 GiB, for what is left out (see `MARGIN_STANDS_FOR`)."""
        return margin_of(self._without_margin)

    @property
    def total(self) -> int:
        """Memory of the device: everything at once, and the margin."""
        return self._without_margin + self.margin

    @property
    def _without_margin(self) -> int:
        state = 0 if self.state_on_host else self.state
        return state + self.gathered + self.reduced + self.accumulated + self.activations

    def to_json(self) -> dict[str, object]:
        """All figures as plain values, bytes as whole numbers."""
        own = {name: value for name, value in vars(self).items() if name != "mesh"}
        mesh = {"shards": self.mesh.shards, "replicas": self.mesh.replicas}
        listed = {"per_rank": list(self.per_rank), "notes": list(self.notes)}
        return {"mesh": mesh, **own, **listed, "margin": self.margin, "total": self.total}

    def __str__(self) -> str:
        notes = (f"left out: {MARGIN_STANDS_FOR}", *self.notes)
        return "\n".join([self._head(), *_aligned(self._rows()), *(f"  {note}" for note in notes)])

    def _head(self) -> str:
        return (
            f"{self.parameter_count:,} parameters; {self.mesh}; "
            f"{self.batch_size} x {self.sequence_length} tokens on each; GiB per GPU:"
        )

    def _rows(self) -> list[tuple[str, int, str]]:
        host = "on the host" if self.state_on_host else ""
        spread = host or ("the fullest rank" if len(set(self.per_rank)) > 1 else "")
        saved = f"an estimate; {_gib(self.saved_activations)} saved by the forward pass"
        rows = [
            ("parameters", self.parameters, spread),
            ("gradients", self.gradients, host),
            ("optimizer state", self.optimizer, ", ".join(filter(None, (self.optimizer_name, host)))),
            ("gathered weights", self.gathered, "layers that compute or come next, and the root"),
            ("gradients under way", self.reduced, "to the ranks they belong to"),
            ("gradients that wait", self.accumulated, "of earlier microbatches, whole"),
            ("activations", self.activations, saved),
            ("margin", self.margin, "5 % and 1 GiB for what the estimate leaves out"),
            ("total", self.total, ""),
            ("on the host", self.on_host, "per GPU"),
        ]
        always = ("parameters", "gradients", "optimizer state", "activations", "margin", "total")
        return [row for row in rows if row[1] or row[0] in always]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _aligned(rows: list[tuple[str, int, str]]) -> list[str]:
    width = max(len(name) for name, _, _ in rows)
    return [f"  {name:<{width}}  {_gib(size):>9}  {text}".rstrip() for name, size, text in rows]
