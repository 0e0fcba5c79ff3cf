"""Local updates of a single process, and checkpoints of two ranks that it loads."""

import logging
from copy import deepcopy

import pytest
import torch

from checkpoint_core import CheckpointError
from trainer_core import ConfigurationError
from trainer_ddp import PostLocalSGDArguments
from trainer_ddp.optimizer_state import tensors_of

pytestmark = pytest.mark.xdist_group("worlds")


def test_diloco_steps_the_anchor_with_nesterov_momentum(jobs):
    job = jobs.Job(jobs.diloco(2, 3, rate=0.5, momentum=0.8))
    plain = jobs.Job(jobs.post_local(2, 3))
    for each in (job, plain):
        each.local.begin(0)
        each.train(2)
    anchor = [torch.nn.Parameter(value) for value in job.parameters().values()]
    outer = torch.optim.SGD(anchor, lr=0.5, momentum=0.8, nesterov=True)
    for _ in range(3):
        plain.train(3)
        for value, moved in zip(anchor, plain.parameters().values(), strict=True):
            value.grad = value.detach() - moved
        outer.step()
        job.train(3)
        assert all(map(torch.equal, job.parameters().values(), anchor))
        # The inner optimizer continues from the new anchor, with its own moments.
        with torch.no_grad():
            for parameter, value in zip(jobs.trained(plain.model).values(), anchor, strict=True):
                parameter.copy_(value)
    assert job.local.gradient_scope == "none"
    assert not job.local.replicas_differ
    assert not job.local.optimizer_state_differs
    assert job.traffic.bytes == 0


def test_averaging_alone_changes_nothing(jobs):
    job, plain = jobs.Job(jobs.post_local(2, 3)), jobs.Job(jobs.post_local(1000, 1))
    for each in (job, plain):
        each.local.begin(0)
        each.train(9)
    assert jobs.same(job.weights(), plain.weights())
    with job.local.synced_weights(optimizer=True):
        assert jobs.same(job.weights(), plain.weights())
    assert [component.stateful.state_dict() for component in job.local.state_components()] == [{}]


def test_the_anchor_remembers_what_bf16_weights_cannot_hold(jobs):
    # Ten outer steps of a thousandth each move the weights by far less than bf16 shows in one of them.
    job = jobs.Job(jobs.diloco(0, 1, rate=1e-3, momentum=0.0), "sgd", dtype=torch.bfloat16)
    job.local.begin(0)
    before = job.parameters()
    outer = job.local.state_components()[1].stateful
    first = {name: value.clone() for name, value in outer.state_dict()["anchor"].items()}
    job.train(10)
    last = outer.state_dict()["anchor"]
    assert all(value.dtype == torch.float32 for value in last.values())
    assert not torch.equal(last["inner.weight"], first["inner.weight"])
    assert torch.equal(last["inner.weight"].bfloat16(), job.parameters()["inner.weight"])
    assert jobs.distance(job.parameters(), before) < 0.01


@pytest.mark.parametrize("mode", ["post_local", "diloco"])
def test_one_rank_goes_on_from_the_mean_of_two(jobs, two, mode, caplog):
    settings = jobs.post_local(2, 3) if mode == "post_local" else jobs.diloco(2, 3)
    job = jobs.Job(settings, seed=5)
    with caplog.at_level(logging.INFO):
        job.load(two.directory / f"for-one-{mode}")
    mean = torch.load(two.directory / f"for-one-{mode}.pt")
    assert jobs.same({**job.weights(), **job.moments()}, mean)
    assert caplog.text.count("saved by 2 ranks that trained by themselves, loaded by 1") == 1
    before = job.parameters()
    job.train(1)
    assert job.step == 8  # the second outer step is due after it
    assert jobs.distance(job.parameters(), before) > 0


def test_one_rank_takes_over_anchor_and_momentum(jobs, two):
    job = jobs.Job(jobs.diloco(2, 3), seed=5)
    job.load(two.directory / "for-one-diloco")
    outer = job.local.state_components()[1].stateful
    saved = {part: {n: v.clone() for n, v in values.items()} for part, values in outer.state_dict().items()}
    # The last inner step, which the outer one follows, on a second copy.
    inner = jobs.Job(jobs.post_local(2, 3), seed=5)
    inner.load(two.directory / "for-one-post_local")
    with torch.no_grad():
        for name, parameter in jobs.trained(inner.model).items():
            parameter.copy_(jobs.trained(job.model)[name])
    inner.optimizer.load_state_dict(deepcopy(job.optimizer.state_dict()))
    job.train(1)
    inner.train(1)
    moved, reached = inner.parameters(), job.parameters()
    for name, anchor in saved["anchor"].items():
        gradient = anchor - moved[name]
        velocity = 0.9 * saved["momentum"][name] + gradient
        assert torch.allclose(reached[name], anchor - 0.7 * (gradient + 0.9 * velocity), atol=1e-6)


def test_state_of_another_model_is_refused_by_name(jobs):
    job = jobs.Job(jobs.diloco(0, 3))
    job.local.begin(0)
    replica, outer = [component.stateful for component in job.local.state_components()]
    anchor = dict(outer.state_dict()["anchor"])
    with pytest.raises(
        CheckpointError, match=r"inner.weight is of shape \[2, 4\] in the checkpoint and of shape"
    ):
        outer.load_state_dict({"anchor": {**anchor, "inner.weight": torch.zeros(2, 4)}, "momentum": {}})
    del anchor["head.weight"]
    with pytest.raises(CheckpointError, match=r"head.weight is absent in the checkpoint"):
        outer.load_state_dict({"anchor": anchor, "momentum": {}})
    weights = {**job.weights(), "more": torch.zeros(1)}
    with pytest.raises(
        CheckpointError, match=r"more is of shape \[1\] in the checkpoint and absent in the model"
    ):
        replica.load_state_dict(
            {"weights": {n: v for n, v in weights.items() if n[:6] not in ("frozen", "tied.w")}}
        )


@pytest.mark.parametrize(("name", "given"), [("start_step", {"period": 3}), ("period", {"start_step": 3})])
def test_a_missing_setting_is_named(jobs, name, given):
    with pytest.raises(ConfigurationError, match=rf"post_local_sgd\.{name}"):
        jobs.Job(PostLocalSGDArguments(enabled=True, **given))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([1], "anchors in the checkpoint must be a table by name, got list. Resume from another checkpoint."),
        ({"head": 3}, "head of anchors in the checkpoint must be a tensor, got int."),
    ],
)
def test_saved_tensors_of_another_kind_are_refused(saved, message):
    with pytest.raises(CheckpointError) as refused:
        tensors_of("anchors", saved)
    assert message in str(refused.value)
