"""`LightningCheckpointIO` under Lightning's trainer: what is resumed, replaced, removed and refused."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ports import free_port
from torch.utils.data import DataLoader, TensorDataset
from warm_start import WarmStart

from checkpoint_core import CheckpointError, CheckpointManager, LightningCheckpointIO, load_model_weights


def made() -> LightningCheckpointIO:
    """For one of the two frameworks that this file imports."""
    return LightningCheckpointIO(framework="lightning.pytorch")


ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


class Batches:
    """Batches of 8 rows, and a place in them that Lightning saves with its loops."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.place = rows, 0

    def __len__(self) -> int:
        return len(self.rows) // 8

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while self.place < len(self):
            self.place += 1
            yield [self.rows[8 * self.place - 8 : 8 * self.place]]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Module(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 4)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[0])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(folder: Path, steps: int, *plugins: object, every: int = 3, **settings: Any) -> pl.Trainer:
    saving = ModelCheckpoint(folder, every_n_train_steps=every, **settings)
    return pl.Trainer(
        default_root_dir=folder,
        max_steps=steps,
        callbacks=[saving],
        plugins=list(plugins),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(folder: Path, steps: int, *plugins: object, resume: str | None = None, **settings: Any) -> Module:
    pl.seed_everything(3 if resume else 0)
    module = Module()
    trainer(folder, steps, *plugins, **settings).fit(module, Batches(ROWS), ckpt_path=resume)
    return module


def test_a_resumed_run_has_the_curve_and_weights_of_one_that_never_stopped(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 20, made(), save_last=True)
    fit(tmp_path / "cut", 12, made(), save_last=True)  # in the second epoch of 8 steps
    resumed = fit(tmp_path / "cut", 20, made(), save_last=True, resume="last")
    assert resumed.losses == whole.losses[12:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_what_comes_back_is_what_lightning_saved(tmp_path: Path) -> None:
    """Against Lightning's own file of the same moment, key by key, bit by bit."""
    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    running = trainer(tmp_path / "run", 5)
    running.fit(Module(), DataLoader(TensorDataset(ROWS), batch_size=8))
    running.save_checkpoint(theirs)
    expected = torch.load(theirs, weights_only=False)
    made().save_checkpoint(expected, ours)
    loaded = made().load_checkpoint(ours)
    assert list(loaded["state_dict"]._metadata) == list(expected["state_dict"]._metadata)
    same(loaded, expected)


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(other, dict):
        assert set(one) == set(other)
        for key, value in other.items():
            same(one[key], value)
    elif isinstance(other, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    elif isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


def test_the_weights_are_a_hugging_face_directory(tmp_path: Path) -> None:
    module = fit(tmp_path, 6, made())
    (checkpoint,) = tmp_path.glob("*.ckpt")
    plain = Module()
    load_model_weights(plain, checkpoint)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in plain.state_dict().items())


def test_model_checkpoint_rotates_and_replaces(tmp_path: Path) -> None:
    fit(tmp_path, 12, made(), monitor="loss", save_top_k=2, save_last=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert "last.ckpt" in names
    assert json.loads((tmp_path / "last.ckpt" / "manifest.json").read_text())["step"] == 12


def test_a_link_to_the_last_one_resumes_and_goes(tmp_path: Path) -> None:
    fit(tmp_path, 6, made(), save_last="link")
    assert (tmp_path / "last.ckpt").is_symlink()
    assert fit(tmp_path, 8, made(), save_last="link", resume="last").losses
    made().remove_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").is_symlink()


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_while_last_is_replaced_leaves_a_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    fit(tmp_path, 6, made(), save_last=True)
    rename, done = Path.rename, []

    def until_killed(path: Path, target: Path) -> Path:
        if "last" in path.name and path.suffix != ".tmp" and not path.name.startswith(".tmp"):
            done.append(path.name)
            if len(done) == renames:
                raise KeyboardInterrupt
        return rename(path, target)

    state = made().load_checkpoint(tmp_path / "last.ckpt")
    monkeypatch.setattr(Path, "rename", until_killed)
    with pytest.raises(KeyboardInterrupt):
        made().save_checkpoint({**state, "global_step": 7}, tmp_path / "last.ckpt")
    monkeypatch.undo()
    assert made().load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 6
    assert len(fit(tmp_path, 9, made(), save_last=True, resume="last").losses) == 3
    assert not list(tmp_path.glob("*replaced*"))


def test_what_is_no_checkpoint_of_it_is_refused_by_name(tmp_path: Path) -> None:
    io, theirs = made(), tmp_path / "theirs.ckpt"
    torch.save({"state_dict": {}}, theirs)
    with pytest.raises(CheckpointError, match="is a file, a pickle of Lightning's own format"):
        io.load_checkpoint(theirs)
    with pytest.raises(CheckpointError, match="exists already"):
        io.save_checkpoint({"state_dict": {}, "global_step": 1}, theirs)
    mine = CheckpointManager(tmp_path / "runs", {"model": torch.nn.Linear(1, 1)}).save(1)
    with pytest.raises(CheckpointError, match="was not saved by LightningCheckpointIO: it has model"):
        io.load_checkpoint(mine)
    with pytest.raises(CheckpointError, match=r"hyper_parameters.*pathlib"):
        io.save_checkpoint({"state_dict": {}, "hyper_parameters": {"data": Path()}}, tmp_path / "new.ckpt")
    assert not (tmp_path / "new.ckpt").exists()
    with pytest.raises(CheckpointError, match=r"'s3://bucket/a\.ckpt' is not on a file system"):
        io.load_checkpoint("s3://bucket/a.ckpt")
    with pytest.raises(TypeError, match="storage_options="):
        io.save_checkpoint({}, tmp_path / "new.ckpt", storage_options={})
    with pytest.raises(TypeError, match="map_location='cuda' has no meaning"):
        io.load_checkpoint(tmp_path, map_location="cuda")


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    fit(tmp_path, 3, made())
    (checkpoint,) = tmp_path.glob("*.ckpt")
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fit(tmp_path, 6, made(), resume=str(checkpoint))


def test_each_framework_has_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"both lightning\.pytorch and pytorch_lightning are imported"):
        LightningCheckpointIO()
    other = LightningCheckpointIO(framework="pytorch_lightning")
    pytorch_lightning.Trainer(plugins=[other], accelerator="cpu", logger=False, default_root_dir=tmp_path)
    assert type(pickle.loads(pickle.dumps(other))).__mro__[2] is type(other).__mro__[2]


RANKS = """
import sys
import lightning.pytorch as pl
import torch
from checkpoint_core import LightningCheckpointIO

folder, steps, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume"


class Batches:
    def __init__(self, rows):
        self.rows, self.place = rows, 0

    def __len__(self):
        return len(self.rows) // 8

    def __iter__(self):
        while self.place < len(self):
            self.place += 1
            yield [self.rows[8 * self.place - 8 : 8 * self.place]]
        self.place = 0

    def state_dict(self):  # the same on both ranks, of which one writes
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = torch.nn.Linear(4, 4), []

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(5 if resume else 0)
module = Module()
rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
saving = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_last=True)
trainer = pl.Trainer(
    max_steps=steps, callbacks=[saving], plugins=[LightningCheckpointIO()], accelerator="cpu", devices=2,
    strategy="ddp", logger=False, enable_progress_bar=False, enable_model_summary=False,
)
batches = Batches(rows[trainer.global_rank :: 2])
trainer.fit(module, batches, ckpt_path="last" if resume else None)
with open(f"{folder}/rank{trainer.global_rank}.txt", "w") as file:
    print(module.losses, file=file)
torch.distributed.destroy_process_group()
"""


def test_two_ranks_with_ddp_resume_to_the_same_curve(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    # Ranks are forked from a process that has imported what all of them use.
    warm = WarmStart(["lightning.pytorch", "torch._dynamo", "checkpoint_core.manager"], environ)

    def launched(name: str, steps: int, how: str = "begin") -> list[list[float]]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        words = [str(script), str(folder), str(steps), how]
        job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        said = [folder / f"said{rank}" for rank in range(2)]
        ranks = [
            warm.start(
                words,
                {**environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                folder / f"out{rank}",
                err,
            )
            for rank, err in enumerate(said)
        ]
        assert [rank.wait(300) for rank in ranks] == [0, 0], [err.read_text() for err in said]
        return [json.loads((folder / f"rank{rank}.txt").read_text()) for rank in range(2)]

    try:
        whole = launched("whole", 9)
        launched("cut", 6)
        assert launched("cut", 9, "resume") == [losses[6:] for losses in whole]
    finally:
        warm.close()
