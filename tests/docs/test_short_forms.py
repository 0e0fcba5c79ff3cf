"""The short forms of `pick-your-packages.md` are short, and do what the page says, on one rank and on two."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "pick-your-packages.md"
Run = Callable[..., list["subprocess.CompletedProcess[str]"]]
SECTION = PAGE.read_text().split("\n## Short forms\n")[1].split("\n## ")[0]
BEGINNING = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[0]
FORMS: dict[str, str] = dict(
    re.findall(r"\n### (.*?)\n.*?```\{\.python notest\}\n(.*?)```", SECTION, re.DOTALL)
)

RANK = """
import os
size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
printed = []
"""
PREPARED = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.print = lambda *words: printed.append(words)
"""
STREAM_LOADER = """
place = {"rank": rank, "world_size": size, "shards": 4}
stream = DocumentStream(documents, sequence_length=64, encode=str.encode, eos_token_id=0, seed=1, **place)
loader = StreamLoader(stream, batch_size=8 // size)
if size > 1:
    from dataloader_dispatch import SynchronizedDataLoader
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    loader = SynchronizedDataLoader(loader, "cpu")
"""
GROUP = """
if size > 1:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
"""

BEFORE = {
    "MFU in a torch loop": "print = lambda *words: printed.append(words)\n",
    "MFU with Accelerate": PREPARED
    + "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n",
    "Checkpoints in a torch loop": GROUP + STREAM_LOADER,
    "Checkpoints beside Accelerate": PREPARED
    + STREAM_LOADER
    + "model, optimizer = accelerator.prepare(model, optimizer)\n",
    "Data in the Hugging Face Trainer": """
args = TrainingArguments("runs/data", max_steps=8, save_steps=4, report_to="none", use_cpu=True)
trainer = Trainer(model, args)
""",
    "Data in Fabric": """
import lightning.fabric
fabric = lightning.fabric.Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
""",
}
COUNTED = """
from perf_metrics import model_flops_per_token
flops = model_flops_per_token(llama(), 64)
for _, read in printed:
    assert read["flos"] == flops * read["input_tokens"]
    assert read["mfu"] is None, "a processor has no published peak"
    assert read["tok_per_sec"] == read["input_tokens"] / read["interval_seconds"]
"""
# A second start, of which the first ended behind the checkpoint of a step: what it has is what that left.
RESUMED = (
    """
trained, model = model, llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
if size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
"""
    + STREAM_LOADER
    + """
state = {"model": model, "optimizer": optimizer, "data": loader, "rng": RNGState()}
loaded = CheckpointManager(manager._output_dir, state).load()
steps = step
assert loaded.step == steps - steps % 3 and steps > 6, (loaded, steps)
for step, batch in enumerate(loader, loaded.step + 1):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert step == steps, (step, steps)
for one, other in zip(trained.parameters(), model.parameters(), strict=True):
    assert torch.equal(one, other)
"""
)
AFTER = {
    "MFU in a torch loop": COUNTED
    + "assert [(step, read['input_tokens']) for step, read in printed][:2] == [(4, 2048), (8, 2048)]\n",
    "MFU with Accelerate": COUNTED
    + "assert not printed or printed[0][0] == 2 and printed[0][1]['input_tokens'] == 2 * 8 * 64 * size\n"
    + "assert len(printed) == len(loader) // 2\n",
    "MFU in the Hugging Face Trainer": """
from perf_metrics import load_logs
if rank == 0:
    entries = [entry for entry in load_logs("runs/hf") if "loss" in entry]
    assert len(entries) == 2
    for entry in entries:
        assert entry["input_tokens"] == entry["compute_tokens"] == 4 * 8 * 64 * size, entry
        assert entry["flos"] == model_flops_per_token(llama(), 64) * entry["input_tokens"]
        assert entry["mfu"] is None and entry["tok_per_sec"] > 0
""",
    "MFU in Lightning": """
assert trainer.global_step == 8
own = -(-len(rows) // size)  # Lightning's sampler fills the last ranks up
batches = [min(8, own - start) for _ in range(2) for start in range(0, own, 8)][:8]
assert mfu._totals.counts["input_tokens"] == sum(batches) * 64 * size
assert mfu._totals.counts["flos"] == model_flops_per_token(llama(), 64) * sum(batches) * 64 * size
""",
    "Checkpoints in a torch loop": RESUMED,
    "Checkpoints beside Accelerate": RESUMED,
    "Checkpoints in Lightning": """
from checkpoint_core import load_model_weights
first = Module()
load_model_weights(first, "runs/lightning/last.ckpt")
assert all(torch.equal(a, b) for a, b in zip(first.parameters(), module.parameters(), strict=True))
resumed = Module()
trainer = pl.Trainer(max_steps=9, plugins=[LightningCheckpointIO()], logger=False, enable_checkpointing=False)
trainer.fit(resumed, loader, ckpt_path="runs/lightning/last.ckpt")
assert trainer.global_step == 9, "nothing is left to train"
assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), module.parameters(), strict=True))
""",
    "Data in the Hugging Face Trainer": """
position = trainer.get_train_dataloader()._loader.state_dict()
again = Trainer(llama(), args)
source = StreamLoader(DocumentStream(
    documents, sequence_length=64, encode=str.encode, eos_token_id=0, seed=1, **place), 8)
set_train_loader(again, source)
again.train(resume_from_checkpoint="runs/data/checkpoint-4")
assert source.state_dict() == position
for one, other in zip(model.parameters(), again.model.parameters(), strict=True):
    assert torch.equal(one, other)
""",
    "Data in Fabric": """
assert data.epoch == 1
assert fabric.load("runs/fabric.ckpt")["data"]["positions"][rank] == data._source.state_dict()
""",
    # With the other short form: rank 0 writes one checkpoint, and each rank reads on at its own place.
    "Data in Lightning": """
from checkpoint_core import LightningCheckpointIO
def trained(place, steps, resume=None):
    pl.seed_everything(3 if resume else 1)
    saving = pl.callbacks.ModelCheckpoint(place, every_n_train_steps=3, save_last=True)
    trainer = pl.Trainer(max_steps=steps, callbacks=[saving], plugins=[LightningCheckpointIO()], logger=False,
                         accelerator="cpu", devices=size)
    module = WithDocuments()
    trainer.fit(module, ckpt_path=resume)
    return module
whole = trained("runs/whole", 9)
trained("runs/cut", 6)
resumed = trained("runs/cut", 9, "last")
assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
""",
}


RANKS_MATTER = {
    *("MFU with Accelerate", "Checkpoints beside Accelerate"),
    *("Data in the Hugging Face Trainer", "Data in Fabric", "Data in Lightning"),
}
"""Those that the tests run on two ranks, where the ranks share what is counted, written or read."""

END = """
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def lines_of(form: str) -> int:
    """Lines that a reader types."""
    return sum(bool(line.strip()) for line in form.splitlines())


def test_each_has_at_most_ten_lines() -> None:
    assert {*AFTER} == {*FORMS}, "each is run below"
    counts = {name: lines_of(form) for name, form in FORMS.items()}
    assert all(count <= 10 for count in counts.values()), counts
    linked = re.findall(r"\[(\d+)(?: lines)?\]\(#([a-z-]*)\)", SECTION)
    assert {anchor: int(count) for count, anchor in linked} == {
        name.lower().replace(" ", "-"): count for name, count in counts.items()
    }


# The plain loop has one rank; that with Accelerate stands for several.
BY_RANKS = {
    **{(name, 0): name not in RANKS_MATTER for name in AFTER},
    **{(name, 2): name in RANKS_MATTER for name in AFTER if name != "MFU in a torch loop"},
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param(*case, marks=() if usual else pytest.mark.full) for case, usual in BY_RANKS.items()],
)
def test_it_does_what_the_page_says(name: str, ranks: int, run_with_theirs: Run, tmp_path: Path) -> None:
    # Processors do not tell how many ranks there are to be, as the number of GPUs does.
    form = FORMS[name].replace("pl.Trainer(", "pl.Trainer(accelerator='cpu', devices=size, ")
    place = f"import os\nos.chdir({str(tmp_path)!r})\nos.environ['ACCELERATE_USE_CPU'] = 'true'\n"
    script = tmp_path / "train.py"
    script.write_text("\n".join((place, BEGINNING, RANK, BEFORE.get(name, ""), form, AFTER[name], END)))
    done = run_with_theirs(str(script), ranks=ranks)
    assert all(each.returncode == 0 for each in done), "".join(each.stderr[-3000:] for each in done)
    if name == "MFU in the Hugging Face Trainer":
        assert "tok_per_sec" in done[0].stdout + done[0].stderr, "the display of Trainer shows it"
