"""The balance of routers: of each row alone, in the gradient once, and what it does to biases and logs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dist_env import Meshes, ParallelLayout, StaticDistributedEnvironment, fake_job
from trainer_core import CausalLMLoss, ConfigurationError, OutputMeanLoss, Trainer, TrainingArguments
from trainer_core.distributed.ranks import Ranks
from trainer_core.distributed.routers import with_routers
from trainer_core.distributed.transforms import BuiltModel
from trainer_core.loss import (
    OnTargets,
    RoutedTargets,
    RouterLosses,
    RowParts,
    is_router,
    router_shape,
    row_balance,
    with_router_loss,
)

EXPERTS, USED, WIDTH, VOCABULARY = 5, 2, 12, 17


class Router(nn.Module):
    def __init__(self, scores: str) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.scores = EXPERTS, USED, scores
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        if scores == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.flatten(0, -2) @ self.weight.T
        ranked = logits if self.scores == "softmax" else logits.sigmoid() + self.e_score_correction_bias
        chosen = ranked.topk(USED, dim=-1).indices
        return logits, logits.softmax(dim=-1).gather(-1, chosen), chosen


class Routed(nn.Module):
    """Tokens weighted by what their router says; enough for the router to have a gradient of the loss."""

    def __init__(self, scores: str = "softmax", *, balance: float = 0.3, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.config = SimpleNamespace(
            output_router_logits=balance > 0, router_aux_loss_coef=balance, router_bias_update_rate=rate
        )
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gates = nn.ModuleList(Router(scores) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for gate in self.gates:
            x = x * gate(x)[1].sum(dim=-1).view(*input_ids.shape, 1)
        return self.head(x)


def batch(rows: int = 4, length: int = 9) -> dict[str, Tensor]:
    """Rows that count unequal numbers of tokens, the last one none."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = tokens.clone()
    for row in range(rows):
        labels[row, length - 2 * row :] = -100
        labels[row, : row % 2 + 1] = -100
    labels[-1] = -100
    return {"input_ids": tokens, "labels": labels}


def balance_by_loops(logits: Tensor, chosen: Tensor, counted: Tensor, *, sigmoid: bool) -> list[Tensor]:
    losses = []
    for row, mask in enumerate(counted):
        places = [place for place, counts in enumerate(mask.tolist()) if counts]
        total = torch.zeros(())
        for expert in range(EXPERTS):
            often, share = 0, torch.zeros(())
            for place in places:
                token = row * counted.shape[1] + place
                raw = logits[token].sigmoid() if sigmoid else logits[token].exp()
                share = share + raw[expert] / raw.sum() / len(places)
                often += chosen[token].tolist().count(expert)
            if places:
                total = total + EXPERTS / USED / len(places) * often * share
        losses.append(total)
    return losses


@pytest.mark.parametrize("sigmoid", [False, True])
def test_each_row_has_the_balance_of_its_own_tokens(sigmoid: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4 * 9, EXPERTS, requires_grad=True)
    chosen = logits.topk(USED, dim=-1).indices
    counted = batch()["labels"] != -100
    found = row_balance(logits, chosen, counted, sigmoid=sigmoid)
    expected = torch.stack(balance_by_loops(logits, chosen, counted, sigmoid=sigmoid))
    assert torch.allclose(found.loss, expected, atol=1e-6)
    assert torch.allclose(
        torch.autograd.grad(found.loss.sum(), logits)[0],
        torch.autograd.grad(expected.sum(), logits)[0],
        atol=1e-6,
    )
    assert found.load.sum() == USED * counted.sum()
    alone = [
        row_balance(logits[9 * row :][:9], chosen[9 * row :][:9], counted[row][None], sigmoid=sigmoid).loss[0]
        for row in range(4)
    ]
    assert torch.allclose(torch.stack(alone), found.loss, atol=1e-6)


def test_bounds_and_entropy() -> None:
    counted = torch.ones(1, EXPERTS, dtype=torch.bool)
    turns = torch.stack([torch.arange(EXPERTS), torch.arange(EXPERTS).roll(1)], dim=1)
    even = row_balance(torch.zeros(EXPERTS, EXPERTS), turns, counted, sigmoid=False)
    assert even.loss.item() == pytest.approx(1.0)
    assert even.entropy.item() == pytest.approx(EXPERTS * math.log(EXPERTS))
    certain = torch.tensor([[40.0, 40.0, 0.0, 0.0, 0.0]]).expand(EXPERTS, -1)
    full = row_balance(certain, torch.tensor([[0, 1]]).expand(EXPERTS, -1), counted, sigmoid=False)
    assert full.loss.item() == pytest.approx(EXPERTS / USED)
    assert full.entropy.item() == pytest.approx(EXPERTS * math.log(2), rel=1e-5)


def routed(model: Routed, coefficient: float) -> RoutedTargets:
    gates = dict(enumerate(model.gates))
    shapes = [router_shape(gate) for gate in gates.values()]
    return RoutedTargets(OnTargets(CausalLMLoss()), RouterLosses(gates, shapes, coefficient))


def expected_gradients(
    model: Routed, data: dict[str, Tensor], coefficient: float, over: float
) -> list[Tensor]:
    """Of the sum of token losses and of the weighted balance of rows, over something."""
    loss = CausalLMLoss()
    x, total = model.embed(data["input_ids"]), 0.0
    counted = loss.make_targets(data["labels"]) != -100
    for gate in model.gates:
        logits, weights, chosen = gate(x)
        x = x * weights.sum(dim=-1).view(*counted.shape, 1)
        sigmoid = gate.scores == "sigmoid"
        scale = 1.0 if sigmoid else USED / 2
        rows = balance_by_loops(logits, chosen, counted, sigmoid=sigmoid)
        total = total + sum(row * mask.sum() * scale for row, mask in zip(rows, counted, strict=True))
    value = loss(model.head(x), data["labels"]) + coefficient * total
    return list(torch.autograd.grad(value / over, list(model.parameters())))


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_gradient_has_the_balance_and_the_value_does_not(scores: str, coefficient: float) -> None:
    model, data = Routed(scores), batch()
    loss, plain = routed(model, coefficient), CausalLMLoss()
    targets = plain.make_targets(data["labels"])
    value = loss(loss.predict(model, {"input_ids": data["input_ids"]}, targets), targets)
    assert value.item() == plain(model(data["input_ids"]), data["labels"]).item()
    found = torch.autograd.grad(value / 7, list(model.parameters()))
    for ours, theirs in zip(found, expected_gradients(model, data, coefficient, 7), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_part_without_a_loss_adds_the_same_gradient() -> None:
    """What is handed on is weighted by what comes back for it, the balance by the divisor alone."""
    model, data = Routed(), batch()
    loss = routed(model, 0.3)
    targets = CausalLMLoss().make_targets(data["labels"])
    hidden = with_router_loss(loss, lambda: model(data["input_ids"]), targets, 7.0)
    assert torch.equal(hidden, model(data["input_ids"]))
    back = torch.randn_like(hidden)
    gate = model.gates[0].weight
    (found,) = torch.autograd.grad(hidden, gate, back)
    (without,) = torch.autograd.grad(model(data["input_ids"]), gate, back)
    both = expected_gradients(model, data, 0.3, 7.0)
    alone = expected_gradients(model, data, 0.0, 7.0)
    place = [id(parameter) for parameter in model.parameters()].index(id(gate))
    assert torch.allclose(found - without, both[place] - alone[place], atol=1e-5)
    assert (both[place] - alone[place]).abs().max() > 1e-3
    assert with_router_loss(CausalLMLoss(), lambda: hidden, targets, 7.0) is hidden


def test_recomputation_that_hides_a_router_is_refused() -> None:
    model, data = Routed(), batch()
    loss = routed(model, 0.3)
    targets = CausalLMLoss().make_targets(data["labels"])
    x = model.embed(data["input_ids"])
    with loss.routers.watching():
        checkpoint(lambda x: model.gates[0](x)[1], x, use_reentrant=True)
    with pytest.raises(ConfigurationError, match="would have no gradient"):
        loss.added(targets)
    with loss.routers.watching():
        checkpoint(lambda x: model.gates[0](x)[1], x, use_reentrant=False)
    assert loss.added(targets) is not None


def test_passes_without_gradients_before_the_one_that_counts_are_left_out() -> None:
    model, data = Routed(), batch()
    loss = routed(model, 0.3)
    targets = CausalLMLoss().make_targets(data["labels"])
    with loss.routers.watching():
        model(data["input_ids"])
    once = loss.added(targets)
    with loss.routers.watching():
        with torch.no_grad():
            model(data["input_ids"])
        model(data["input_ids"])
    assert once is not None
    assert torch.equal(loss.added(targets), once)


def test_labels_that_do_not_tell_what_counts_are_refused_where_they_matter() -> None:
    model, tokens = Routed(), batch()["input_ids"]
    for coefficient in (0.3, 0.0):
        loss = routed(model, coefficient)
        with loss.routers.watching():
            model(tokens)
        if coefficient:
            with pytest.raises(ConfigurationError, match="needs a label for each of the 36 tokens"):
                loss.added(torch.zeros(4, 3, dtype=torch.int64))
        else:
            assert loss.added(torch.zeros(4, 3, dtype=torch.int64)) is None
    one_each = routed(model, 0.3)
    with one_each.routers.watching():
        model(tokens)
    assert one_each.added(torch.tensor([1, -100, 2, 3])) is not None
    (figures,) = {tuple(each[1:4:2].tolist()) for each in one_each.routers.take_sums().values()}
    assert figures == (3.0, 27.0)


def test_what_is_a_router() -> None:
    model = Routed()
    assert [name for name, module in model.named_modules() if is_router(module)] == ["gates.0", "gates.1"]
    block = nn.Linear(3, 3)
    block.top_k = 2  # type: ignore[assignment]
    assert not is_router(block)


def test_a_router_without_its_numbers_is_told_which_to_set() -> None:
    router = nn.Linear(3, 3)
    router.num_experts = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"Linear has num_experts=3, top_k=None, and both .* Set both in"):
        router_shape(router)


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.rows = [batch(8, 11)["input_ids"][row] for row in range(8)]
        self.labels = [batch(8, 11)["labels"][row] for row in range(8)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[place], "labels": self.labels[place]}


def trained(model: nn.Module, directory: Path, **options: object) -> Trainer:
    arguments = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        **options.pop("args", {}),
    }  # type: ignore[dict-item]
    trainer = Trainer(
        TrainingArguments(
            output_dir=str(directory), max_steps=3, logging_steps=1, learning_rate=0.05, use_cpu=True, seed=1,
            save_strategy="no", **arguments,
        ),  # type: ignore[arg-type]
        model=model,
        train_dataset=Data(),
        callbacks=[],
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.train()
    return trainer


def entries(trainer: Trainer, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_entries_of_the_log(scores: str, tmp_path: Path) -> None:
    model, data = Routed(scores, balance=0.3), batch(8, 11)
    counted = CausalLMLoss().make_targets(data["labels"]) != -100
    x, expected, entropies = model.embed(data["input_ids"]), 0.0, []
    loads: dict[str, list[float]] = {}
    for gate in model.gates:
        logits, weights, chosen = gate(x)
        x = x * weights.sum(dim=-1).view(*counted.shape, 1)
        found = row_balance(logits, chosen, counted, sigmoid=scores == "sigmoid")
        scale = 1.0 if scores == "sigmoid" else USED / 2
        expected += scale * ((found.loss * counted.sum(dim=1)).sum() / counted.sum()).item()
        entropies.append(float(found.entropy / counted.sum()))
        loads[f"gates.{len(loads)}"] = (found.load / found.load.mean()).tolist()
    trainer = trained(model, tmp_path)
    assert entries(trainer, "aux_loss")[0] == pytest.approx(expected, rel=1e-5)
    assert entries(trainer, "aux_loss_weighted")[0] == pytest.approx(0.3 * expected, rel=1e-5)
    assert entries(trainer, "router_entropy")[0] == pytest.approx(sum(entropies) / 2, rel=1e-5)
    assert entries(trainer, "expert_load_max")[0] == pytest.approx(max(map(max, loads.values())), rel=1e-6)
    assert entries(trainer, "expert_load_min")[0] == pytest.approx(min(map(min, loads.values())), rel=1e-6)
    listed = trainer.state.log_history[0]["expert_load"]
    assert list(listed) == list(loads)
    for name, load in loads.items():
        assert listed[name] == pytest.approx(load, abs=1e-3)
    assert len(entries(trainer, "aux_loss")) == 3


def test_of_many_experts_the_log_has_only_the_extremes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_core.distributed.routers.MOST_LISTED", 3)
    trainer = trained(Routed(balance=0.3), tmp_path)
    assert len(entries(trainer, "expert_load_min")) == 3
    assert not any("expert_load" in entry for entry in trainer.state.log_history)


def test_without_a_balance_loss_figures_are_logged_all_the_same(tmp_path: Path) -> None:
    trainer = trained(Routed(balance=0.0), tmp_path)
    assert len(entries(trainer, "expert_load_max")) == 3
    assert entries(trainer, "aux_loss_weighted") == []


def test_biases_move_against_the_load_of_the_whole_step(tmp_path: Path) -> None:
    model, data = Routed("sigmoid", balance=0.0, rate=0.25), batch(8, 11)
    counted = CausalLMLoss().make_targets(data["labels"]) != -100
    chosen = model.gates[0](model.embed(data["input_ids"]))[2][counted.flatten()]
    load = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}

    trainer = trained(model, tmp_path, args=arguments)
    assert trainer.state.global_step == 3
    steps = model.gates[0].e_score_correction_bias / 0.25
    assert torch.equal(steps, steps.round())
    assert steps.abs().max() <= 3
    again = Routed("sigmoid", balance=0.0, rate=0.25)
    arguments["max_steps"] = 1
    one = Trainer(
        TrainingArguments(
            output_dir=str(tmp_path / "one"), use_cpu=True, seed=1, save_strategy="no", **arguments
        ),  # type: ignore[arg-type]
        model=again,
        train_dataset=Data(),
        callbacks=[],
    )
    one.train()
    assert torch.equal(again.gates[0].e_score_correction_bias, 0.25 * torch.sign(load.mean() - load))
    assert "gates.0.e_score_correction_bias" in again.state_dict()


def test_a_loss_that_sees_the_outputs_adds_what_it_wants(tmp_path: Path) -> None:
    function = OutputMeanLoss(
        lambda outputs, labels: outputs.sum() * 0.0, lambda labels: (labels != -100).sum()
    )
    trainer = trained(Routed(balance=0.3), tmp_path, compute_loss_func=function)
    assert entries(trainer, "grad_norm") == [0.0, 0.0, 0.0]
    assert entries(trainer, "aux_loss_weighted") == []


def built(model: nn.Module, layout: ParallelLayout) -> BuiltModel:
    env = StaticDistributedEnvironment(world_size=layout.world_size)
    return BuiltModel(TrainingArguments(use_cpu=True), Ranks(env, layout), model, model)


def test_positions_of_a_rank_where_layers_divide_sequences() -> None:
    with fake_job(2, rank=1):
        group = Meshes(ParallelLayout(tensor=2)).tensor.get_group()
        whole = torch.arange(12).view(2, 6) % 4 > 0
        counted, groups = RowParts(tensor=group).find(whole, 6)
        assert torch.equal(counted, whole[:, 3:])
        assert groups == [group]
        # Labels of rows: each rank has a part of each row, and is not the only one.
        rows, groups = RowParts(tensor=group).find(torch.tensor([True, False]), 6)
        assert torch.equal(rows, torch.tensor([[True] * 3, [False] * 3]))
        assert groups == [group]
        assert RowParts(tensor=group).find(torch.ones(2, 5, dtype=torch.bool), 5)[0] is None
    assert torch.equal(RowParts().find(whole, 12)[0], whole)


def test_biases_that_no_label_moves_are_refused() -> None:
    model = Routed(balance=0.0)
    losses = RouterLosses(
        dict(enumerate(model.gates)), [router_shape(each) for each in model.gates], 0.0, moves_biases=True
    )
    with losses.watching():
        model(batch(8, 11)["input_ids"])
    with pytest.raises(
        ConfigurationError, match=r"router_bias_update_rate.* needs a label for each of the 88"
    ):
        losses.take(torch.ones(3, 5, dtype=torch.bool))


def test_a_rate_without_biases_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"router_bias_update_rate=0\.1 moves the biases of routers, but"
    ):
        with_routers(built(Routed(rate=0.1), ParallelLayout()), OnTargets(CausalLMLoss()), sees_outputs=False)


def test_a_router_that_an_adapter_replaces_counts_once() -> None:
    model = Routed()
    for place, gate in enumerate(model.gates):
        # As PEFT names the module of `modules_to_save` and the one that it stands for.
        model.gates[place] = nn.ModuleDict({"original_module": Router("softmax"), "modules_to_save": gate})
    loss = with_routers(built(model, ParallelLayout()), OnTargets(CausalLMLoss()), sees_outputs=False)
    assert len(loss.routers.shapes) == 2  # type: ignore[attr-defined]


def test_a_model_without_routers_keeps_its_loss() -> None:
    plain, loss = built(nn.Linear(2, 2), ParallelLayout()), OnTargets(CausalLMLoss())
    assert with_routers(plain, loss, sees_outputs=False) is loss
    assert plain.hooks == []
