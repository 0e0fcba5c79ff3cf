"""The counterparts of the first hour with other trainers: the same small model and rows, in their own words.

A peer manages a task if its script ends as expected and shows the pattern. What is not in `TASKS` was not
tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A script of a peer.

    Attributes:
        code: What comes after the common part.
        shows: What must be in the output, a pattern.
        succeeds: Whether it must end with exit code 0, or must not.
        words: What Python is given; SCRIPT stands for the script.
    """

    code: str
    shows: str
    succeeds: bool = True
    words: Sequence[str] = ("SCRIPT",)


_MODEL = """
import os, signal, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
rows = (torch.arange(64)[:, None] + 3 * torch.arange(16)) % 64
data = [{"input_ids": row, "labels": row} for row in rows]
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
"""
COMMON: Mapping[str, str] = {
    "transformers": _MODEL
    + """
from transformers import Trainer, TrainerCallback, TrainingArguments
class Interrupt(TrainerCallback):
    def __init__(self, step):
        self.step = step
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)
def trainer(max_steps, *callbacks, **settings):
    defaults = dict(output_dir="out", max_steps=max_steps, per_device_train_batch_size=8, logging_steps=2,
                    save_steps=4, learning_rate=2e-3, use_cpu=True, report_to="none")
    args = TrainingArguments(**(defaults | settings))
    return Trainer(llama(), args, train_dataset=data, callbacks=list(callbacks))
""",
    "lightning": _MODEL
    + """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = llama()
    def training_step(self, batch, _):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 2e-3)
class Interrupt(L.Callback):
    def __init__(self, step):
        self.step = step
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)
loader = torch.utils.data.DataLoader(data, batch_size=8)
def trainer(max_steps, *callbacks, **settings):
    saving = ModelCheckpoint("out", every_n_train_steps=4, save_last=True)
    defaults = dict(max_steps=max_steps, accelerator="cpu", devices=1, logger=False, log_every_n_steps=2,
                    enable_progress_bar=False)
    return L.Trainer(callbacks=[saving, *callbacks], **(defaults | settings))
""",
    "accelerate": _MODEL
    + """
from accelerate import Accelerator
""",
}
_RESUME = {
    "transformers": """
import glob
found = bool(glob.glob("out/checkpoint-*"))
mine = trainer(8 if found else 4)
mine.train(resume_from_checkpoint=found)
""",
    "lightning": """
import glob
found = bool(glob.glob("out/*.ckpt"))
mine = trainer(8 if found else 4)
mine.fit(Module(), loader, ckpt_path="last")
""",
}

TASKS: Mapping[tuple[str, str], Task] = {
    ("help", "accelerate"): Task("", r"launch", words=("-m", "accelerate.commands.accelerate_cli", "-h")),
    ("the machine", "accelerate"): Task(
        "", r"PyTorch version", words=("-m", "accelerate.commands.accelerate_cli", "env")
    ),
    ("a first run", "transformers"): Task("print(trainer(4).train())", r"TrainOutput\(global_step=4"),
    ("a first run", "lightning"): Task(
        "mine = trainer(4)\nmine.fit(Module(), loader)\nprint('steps', mine.global_step)", r"steps 4"
    ),
    ("a first run", "accelerate"): Task(
        """
accelerator = Accelerator(cpu=True)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader, 1):
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
print("steps", step)
""",
        r"steps 8",
    ),
    ("the same again, at its end", "transformers"): Task(
        _RESUME["transformers"].replace("8 if found else 4", "4")
        + "print('steps of this session', mine.state.global_step - 4 if found else 4)\n",
        r"nothing (?:is )?left|already|reached",
    ),
    ("the same again, at its end", "lightning"): Task(
        _RESUME["lightning"].replace("8 if found else 4", "4"), r"nothing (?:is )?left|already|reached"
    ),
    ("train longer", "transformers"): Task(
        _RESUME["transformers"] + "print('from', 4 * found, 'to', mine.state.global_step)", r"from 4 to 8"
    ),
    ("train longer", "lightning"): Task(
        _RESUME["lightning"] + "print('from', 4 * found, 'to', mine.global_step)", r"from 4 to 8"
    ),
    ("Ctrl-C", "transformers"): Task(
        """
try:
    trainer(50, Interrupt(6), output_dir="stopped").train()
except KeyboardInterrupt:
    pass
print("checkpoints", sorted(os.listdir("stopped")))
""",
        r"checkpoints \[.*checkpoint-6",
    ),
    ("Ctrl-C", "lightning"): Task(
        """
import glob
saving = ModelCheckpoint("stopped", every_n_train_steps=4, save_on_exception=True)
mine = L.Trainer(max_steps=50, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                 callbacks=[saving, Interrupt(6)])
try:
    mine.fit(Module(), loader)
except (KeyboardInterrupt, SystemExit):
    pass
print("checkpoints", sorted(glob.glob("stopped/*")))
""",
        r"checkpoints \[.*step=6",
    ),
    ("another rate in the middle", "transformers"): Task(
        """
trainer(4, output_dir="rate").train()
trainer(8, output_dir="rate", learning_rate=5e-4).train(resume_from_checkpoint=True)
""",
        r"learning_rate.*(?:0\.0005|5e-04).*(?:differ|changed|was)",
    ),
    ("a slip in a script", "transformers"): Task(
        "TrainingArguments(output_dir='out', learning_rat=1e-3)",
        r"Did you mean.*learning_rate",
        succeeds=False,
    ),
    ("a slip in a script", "lightning"): Task(
        "L.Trainer(max_step=4)", r"Did you mean.*max_steps", succeeds=False
    ),
    ("a slip in a script", "accelerate"): Task(
        "Accelerator(mixed_precison='bf16')", r"Did you mean.*mixed_precision", succeeds=False
    ),
    ("a value out of range", "transformers"): Task(
        "trainer(4, learning_rate=-1.0).train()", r"learning.rate.*-1", succeeds=False
    ),
    ("inputs of another trainer", "transformers"): Task(
        "Trainer(llama(), TrainingArguments(output_dir='out', report_to='none'), eval_metrics=len)",
        r"Did you mean.*compute_metrics",
        succeeds=False,
    ),
    ("inputs of another trainer", "lightning"): Task(
        "L.Trainer(num_train_epochs=3)", r"Did you mean.*max_epochs", succeeds=False
    ),
    ("score it", "transformers"): Task("print(trainer(4).evaluate(data))", r"'eval_loss': "),
    ("score it", "lightning"): Task(
        """
class Scored(Module):
    def validation_step(self, batch, _):
        self.log("eval_loss", self.model(**batch).loss)
print(trainer(4).validate(Scored(), loader))
""",
        r"'eval_loss': ",
    ),
    ("let it write", "transformers"): Task(
        "print(llama().generate(rows[:1, :2], max_new_tokens=8, do_sample=True).shape)", r"\[1, 10\]"
    ),
    ("load it in transformers", "transformers"): Task(
        """
trainer(4).save_model("exported")
print(tuple(LlamaForCausalLM.from_pretrained("exported")(rows[:1]).logits.shape))
""",
        r"\(1, 16, 64\)",
    ),
    ("load it in transformers", "lightning"): Task(
        """
module = Module()
trainer(4).fit(module, loader)
module.model.save_pretrained("exported")
print(tuple(LlamaForCausalLM.from_pretrained("exported")(rows[:1]).logits.shape))
""",
        r"\(1, 16, 64\)",
    ),
    ("TensorBoard", "transformers"): Task(
        """
import glob
trainer(4, report_to="tensorboard").train()
print(glob.glob("**/events.out.tfevents*", recursive=True))
""",
        r"events\.out",
    ),
    ("TensorBoard", "lightning"): Task(
        """
import glob
from lightning.pytorch.loggers import TensorBoardLogger
trainer(4, logger=TensorBoardLogger("board")).fit(Module(), loader)
print(glob.glob("**/events.out.tfevents*", recursive=True))
""",
        r"events\.out",
    ),
    ("TensorBoard", "accelerate"): Task(
        """
import glob
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="board")
accelerator.init_trackers("run")
accelerator.log({"loss": 1.0}, step=1)
accelerator.end_training()
print(glob.glob("**/events.out.tfevents*", recursive=True))
""",
        r"events\.out",
    ),
    ("two processes", "transformers"): Task(
        "print(trainer(4, output_dir='two').train().global_step, 'steps of', os.environ['WORLD_SIZE'])",
        r"4 steps of 2",
        words=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "SCRIPT"),
    ),
    ("two processes", "lightning"): Task(
        "if __name__ == '__main__':\n"
        "    mine = trainer(4, devices=2, strategy='ddp')\n"
        "    mine.fit(Module(), loader)\n"
        "    print(mine.global_step, 'steps of', mine.world_size)\n",
        r"4 steps of 2",
    ),
    ("two processes", "accelerate"): Task(
        "print('process of', Accelerator(cpu=True).num_processes)",
        r"process of 2",
        words=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "SCRIPT"),
    ),
    ("a model of one's own", "transformers"): Task(
        """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)
    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}
args = TrainingArguments(output_dir="own", max_steps=4, use_cpu=True, report_to="none")
print(Trainer(Net(), args, train_dataset=data).train())
""",
        r"TrainOutput\(global_step=4",
    ),
    ("a checkpoint in a loop of one's own", "accelerate"): Task(
        """
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
begin = 3 if os.path.isdir("state") else 0
if begin:
    accelerator.load_state("state")
accelerator.save_state("state")
print("steps from", begin)
""",
        r"steps from 0",
    ),
}
