"""What is loaded equals what was saved, whatever the memory looks like that holds it.

Seeded random tensors; with ``PROPERTY_EXAMPLES=50`` in the environment 50 times as many.
"""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    ModelState,
    SharingPattern,
    StateComponent,
    load_model_weights,
)
from checkpoint_core.encoding import EncodedState, LocalPart, same_bits
from checkpoint_core.files import checksum_file, combine
from checkpoint_core.replication import Replica, _fingerprint
from checkpoint_core.tensor_files import (
    DTYPE_CODES,
    TensorFileReader,
    create_tensor_file,
    plan_file,
    spec_of,
    write_parts,
)

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))
ONE_COPY = [SharingPattern.GLOBAL, SharingPattern.REPLICATED, SharingPattern.SHARDED]
NEGATED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Holder:
    """State that is what it was given."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.state: dict[str, object] = {"list": [{"at": tensor} for tensor in tensors]}

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state

    def tensors(self) -> list[torch.Tensor]:
        return [entry["at"] for entry in self.state["list"]]  # type: ignore[attr-defined]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: random.Random) -> torch.Tensor:
    """A contiguous tensor of any bits, so of infinities and NaNs too."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    content = torch.frombuffer(bytearray(generator.randbytes(size)), dtype=torch.uint8)
    return (content % 2 if dtype is torch.bool else content).view(dtype).reshape(shape)


def random_view(generator: random.Random) -> torch.Tensor:
    """A tensor, in any of the ways in which tensors show memory."""
    dtype = generator.choice(list(DTYPE_CODES))
    shape = tuple(generator.choice([0, 1, 2, 3, 5, 8]) for _ in range(generator.randint(0, 3)))
    view = random_bits(shape, dtype, generator)
    for _ in range(generator.randint(0, 3)):
        kinds = ["expand"]
        kinds += ["slice", "slice", "transpose", "select"] * (view.dim() > 0 and view.numel() > 0)
        kinds += ["window"] * (view.dim() > 0 and view.numel() > 0 and view.shape[-1] > 2)
        kinds += ["negated"] * (dtype in NEGATED) + ["conjugated", "part"] * dtype.is_complex
        match generator.choice(kinds):
            case "expand":
                view = view.unsqueeze(generator.randint(0, view.dim()))
                view = view.expand([generator.randint(1, 4) if size == 1 else size for size in view.shape])
            case "slice":
                step = slice(generator.randint(0, 1), None, generator.randint(1, 3))
                view = view.movedim(generator.randrange(view.dim()), 0)[step]
            case "transpose":
                view = view.transpose(generator.randrange(view.dim()), generator.randrange(view.dim()))
            case "select":
                view = view.select(generator.randrange(view.dim()), -1)
            case "window":
                view = view.unfold(-1, 2, 1)
            case "negated":
                view = torch._neg_view(view)  # What x.conj().imag returns, for any real dtype.
            case "conjugated":
                view = view.conj()
            case "part":
                view, dtype = view.conj().imag, torch.float32
    return view


def random_views(seed: int, count: int = 40) -> list[torch.Tensor]:
    generator = random.Random(seed)
    return [random_view(generator) for _ in range(count)]


def module_of(parameters: list[torch.Tensor], buffers: list[torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for number, (parameter, buffer) in enumerate(zip(parameters, buffers, strict=True)):
        differentiable = parameter.is_floating_point() or parameter.is_complex()
        module.register_parameter(f"p{number}", nn.Parameter(parameter, requires_grad=differentiable))
        module.register_buffer(f"b{number}", buffer)
    return module


def scramble(tensor: torch.Tensor) -> None:
    """Change every value in place, of tensors of any strides."""
    storage = tensor.detach().untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_xor_(torch.tensor(1, dtype=torch.uint8))


def check_all(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for number, (tensor, wanted) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(tensor.detach(), wanted), f"{what} {number}: {wanted.dtype} {list(wanted.shape)}"


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("pattern", ONE_COPY, ids=[pattern.value for pattern in ONE_COPY])
def test_any_view_comes_back_as_it_was(tmp_path: Path, pattern: SharingPattern, async_save: bool) -> None:
    for example in range(EXAMPLES):
        seed = 10 * example + ONE_COPY.index(pattern)
        # Three times the same values and strides, each in memory of its own.
        parameters, buffers, nested = (random_views(seed) for _ in range(3))
        expected = [torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in parameters]
        holder = Holder(nested)
        config = CheckpointConfig(output_dir=tmp_path / str(example), async_save=async_save)

        def components(module: nn.Module, holder: Holder = holder) -> list[StateComponent]:
            return [
                StateComponent(key="model", stateful=ModelState(module), sharing_pattern=pattern),
                StateComponent(key="nested", stateful=holder, sharing_pattern=pattern),
            ]

        model = module_of(parameters, buffers)
        with CheckpointManager(config, stateful_provider=components(model)) as manager:
            checkpoint = manager.save_checkpoint(1)
            manager.wait()
            for tensor in (*parameters, *buffers, *nested):
                scramble(tensor)
            manager.load_checkpoint()
        check_all(parameters, expected, "parameter")
        check_all(buffers, expected, "buffer")
        check_all(holder.tensors(), expected, "nested state")

        # Other readers find the same, and so does a model whose tensors are not views.
        stored = load_file(checkpoint / "model.safetensors")
        names = [f"{kind}{number}" for kind in "pb" for number in range(len(expected))]
        check_all([stored[name] for name in names], expected * 2, "file")
        plain = module_of([t.clone().zero_() for t in expected], [t.clone().zero_() for t in expected])
        load_model_weights(plain, checkpoint)
        check_all(list(plain.parameters()), expected, "plain parameter")
        for tensor in (*parameters, *buffers):
            scramble(tensor)
        # Ranks that are handed the state copy it in.
        ModelState(model).load_state_dict(plain.state_dict())
        check_all([*parameters, *buffers], expected * 2, "handed")


def boxes(shape: tuple[int, ...], generator: random.Random) -> list[tuple[slice, ...]]:
    """A tensor cut into boxes, as sharding cuts it."""
    found: list[tuple[slice, ...]] = [()]
    for size in shape:
        cuts = sorted(generator.randint(0, size) for _ in range(generator.randint(0, 2)))
        bounds = list(zip([0, *cuts], [*cuts, size], strict=True))
        found = [(*box, slice(*bound)) for box in found for bound in bounds]
    return found


def strided_copy(values: torch.Tensor, generator: random.Random) -> torch.Tensor:
    """Equal values in memory of another order."""
    order = generator.sample(range(values.dim()), values.dim())
    memory = torch.empty([2 * values.shape[dim] for dim in order], dtype=values.dtype)
    view = memory[tuple(slice(None, None, 2) for _ in order)]
    return view.permute([order.index(dim) for dim in range(values.dim())]).copy_(values)


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_any_strides_make_up_the_file(tmp_path: Path, threads: int) -> None:
    for example in range(4 * EXAMPLES):
        generator = random.Random(example)
        shapes = [tuple(generator.randint(0, 7) for _ in range(generator.randint(0, 3))) for _ in range(9)]
        dtypes = generator.choices(list(DTYPE_CODES), k=len(shapes))
        whole = {
            f"t{n}": random_bits(*pair, generator) for n, pair in enumerate(zip(shapes, dtypes, strict=True))
        }
        layout = plan_file({name: spec_of(tensor) for name, tensor in whole.items()}, {})
        # Four writers, each with some boxes of every tensor: one box for a writer and a tensor at a time.
        writes: list[dict[str, LocalPart]] = []
        for name, tensor in whole.items():
            for number, box in enumerate(boxes(tuple(tensor.shape), generator)):
                data = strided_copy(tensor[box], generator)
                offsets = tuple(side.start for side in box)
                writes += [{}] if number == len(writes) else []
                writes[number][name] = LocalPart(tuple(tensor.shape), offsets, data, None)
        path = tmp_path / f"{threads}-{example}.safetensors"
        shares = [create_tensor_file(path, layout)]
        shares += [write_parts(path, layout, parts, threads) for parts in writes]
        assert combine(shares) == checksum_file(path).checksum
        stored = load_file(path)
        check_all([stored[name] for name in whole], list(whole.values()), "tensor")
        with TensorFileReader(path) as reader:
            targets = {name: strided_copy(tensor, generator) for name, tensor in whole.items()}
            for target in targets.values():
                scramble(target)
            reader.fill(list(targets.items()), threads)
            check_all(list(targets.values()), list(whole.values()), "target")
            check_all([reader.read(name) for name in whole], list(whole.values()), "read")
            assert reader.bytes_read == len(layout.header) + 2 * (layout.size - len(layout.header))


def test_a_strided_tensor_of_several_pieces(store, tmp_path: Path) -> None:
    values = torch.arange(40_000_000, dtype=torch.int32).view(torch.uint8).view(-1, 16)[:, ::3][:3_300_000]
    directory = store(Holder([values]), "state", tmp_path / "one")
    (stored,) = load_file(directory / "state.safetensors").values()
    assert torch.equal(stored, values)


@pytest.mark.parametrize("shape", ["expanded", "window"])
def test_different_values_for_shared_memory_are_refused(tmp_path: Path, store, shape: str) -> None:
    def model(values: torch.Tensor) -> nn.Module:
        module = nn.Module()
        module.register_buffer("scale", values)
        return module

    memory = torch.arange(3.0)
    view = memory[1:2].expand(3) if shape == "expanded" else memory.unfold(0, 2, 1)
    equal, different = view.clone() + 7, torch.arange(float(view.numel())).view(view.shape)
    load_model_weights(model(view), store(ModelState(model(equal)), "model", tmp_path / "equal"))
    assert torch.equal(view, equal)
    with pytest.raises(CheckpointError, match=r"^scale is a view whose elements share memory"):
        load_model_weights(model(view), store(ModelState(model(different)), "model", tmp_path / "different"))
    with pytest.raises(CheckpointError, match=r"^scale is a view whose elements share memory"):
        ModelState(model(view)).load_state_dict({"scale": different})
    assert torch.equal(view, equal)


def test_replicas_are_compared_by_their_values_whatever_their_strides() -> None:
    views = dict(enumerate(random_views(seed=1, count=100)))
    copies = {name: torch.empty(view.shape, dtype=view.dtype).copy_(view) for name, view in views.items()}
    left, right = (
        _fingerprint(
            Replica("model", "tensor", [0, 1], EncodedState(None, {str(n): t for n, t in some.items()}))
        )
        for some in (views, copies)
    )
    assert left == right
