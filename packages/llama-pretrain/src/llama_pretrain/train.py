"""The command `train`: check everything, train, show the result."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from checkpoint_core import (
    CheckpointError,
    CheckpointManager,
    LeaseLostError,
    LostRankError,
    find_latest_checkpoint,
)
from dataloader_dispatch import DocumentSource
from dist_env import (
    DistributedEnvInterface,
    DistributedEnvironment,
    barrier,
    broadcast_object,
    main_process_first,
)
from perf_metrics import architecture_of_model
from trainer_core import ConfigurationError, Trainer, TrainerState, find_earlier_start, may_start_again

from .arguments import PretrainArguments, check_processes, launch_command
from .console import (
    CONFIG_NAME,
    PROG,
    WITHOUT_FRESH_START,
    BrokenRunError,
    printable,
    text_plot,
    wrapped,
)
from .experiment import Experiment, build_trainer, prepare
from .launch import refuse_if_in_use, report_begin, report_ownership, report_step
from .mesh import parse_mesh, told_trainer
from .model.llama import Llama, generate
from .run_directory import RunDirectory, describe_session, now_text
from .tokenizer import Tokenizer, unit_of

SAMPLE_TEMPERATURE = 0.8


def train(args: PretrainArguments) -> int:
    """Train, or continue training, and leave logs, figures and checkpoints in the output directory.

    In a job of several processes each one checks everything; only rank 0 prints and writes.

    Args:
        args: The settings as resolved.

    Returns:
        Exit code, the same on all ranks: 0, or 75 when Ctrl-C, a signal or the time limit ended the run early
        and it can continue.

    Raises:
        ConfigurationError: If a setting cannot be used, or the directory belongs to another run, or one that
            has not ended uses it.
        DataError: If the data cannot be used.
        CheckpointError: If a checkpoint cannot be read.
        OSError: If the output directory may not be written.
        BrokenRunError: If a file cannot be written once training has begun, as on a full disk.
        RankFailedError: If another rank failed.
        RankTimeoutError: If another rank did not come.
    """
    started = time.perf_counter()
    refuse_if_in_use(str(args.run_path))
    # A single process needs a group where it is to do as if it sharded weights.
    always = args.transform_for("shard", needed=False) is not None
    env = DistributedEnvironment(always=always, no_accelerator=args.use_cpu or args.device == "cpu")
    check_processes(args.trainer, args.mesh, env.world_size)
    with ExitStack() as connected:
        is_restart, told = False, args
        if may_start_again():
            # What an earlier start of the job has begun, all ranks know before one looks at the directory.
            connected.enter_context(env)
            is_restart, resumes = find_earlier_start(args, env)
            if resumes:
                args = replace(args, resume_from_checkpoint=True, overwrite_output_dir=False)
        experiment = prepare(args)
        directory = RunDirectory(args.run_path, is_restart=is_restart)
        changes = directory.check(args, experiment.subject)
        # Else, what is wrong with the input is said before the ranks wait for each other. Once they have
        # built the trainer, none checks the directory any more, and rank 0 may write to it.
        if not may_start_again():
            connected.enter_context(env)
        # The trainer finds out for itself, and knows what to begin with if no checkpoint of the run is good.
        trainer = build_trainer(replace(experiment, args=told), env)
        trainer.ranks.check_same(experiment.subject)
        with trainer.owns_output_dir():
            report_ownership()
            begun = _Begun(directory if env.rank == 0 else None)
            with begun.noting_the_end(trainer):
                return _train_on(env, trainer, experiment, directory, changes, begun, started)


def _train_on(
    env: DistributedEnvInterface,
    trainer: Trainer,
    experiment: Experiment,
    directory: RunDirectory,
    changes: Mapping[str, tuple[object, object]],
    begun: _Begun,
    started: float,
) -> int:
    args, speaks = experiment.args, env.rank == 0
    # Builds model, optimizer and schedule: what they refuse must come before the directory is claimed.
    model = trainer.unwrapped_model()
    if speaks:
        documents = experiment.train_documents, experiment.held_out_documents
        announce(trainer.meta_model(), *documents, args, env.world_size, changes)
    with main_process_first(env) as goes_first:
        if goes_first:
            directory.begin(args, experiment.subject, describe_session(args, env))
        elif args.save_on_each_node and env.local_rank == 0:
            # A directory of its own, which a later start on this node finds to be of this run.
            directory.begin(args, experiment.subject)
    trainer.add_callback(begun)
    try:
        output = trainer.train()
    except (CheckpointError, OSError) as error:
        if not begun.happened or isinstance(error, LostRankError):
            raise
        raise BrokenRunError(str(error)) from error
    if trainer.stop_cause is not None:
        if speaks:
            say_how_to_continue(args, output.global_step, trainer.stop_cause.name)
        return trainer.exit_code
    if speaks and output.global_step == trainer.state.session_start_step:
        say_nothing_was_left(output.global_step)
    if _lacks_evaluation(env, experiment, directory, output.global_step):
        trainer.evaluate()
    with trainer.ranks.lost_rank_errors("showing the result"), trainer.synced_weights():
        with trainer.generating():
            sample = write_sample(model, experiment.tokenizer, args, env.device)
        if speaks:
            seconds = time.perf_counter() - started
            show_result(directory, args, sample, experiment.tokenizer, seconds)
    # A rank that left earlier would report success for a job that may still fail.
    barrier(env, tag="the end of the run")
    return 0


class _Begun:
    """Knows whether the first step was begun, and notes where, and how the run ended: a callback.

    Args:
        directory: Whose history it is noted in; None on all ranks but one.
    """

    def __init__(self, directory: RunDirectory | None) -> None:
        self.happened = False
        self._directory = directory

    def on_train_begin(
        self, args: object, state: TrainerState, control: object, *, trainer: Trainer, **_: object
    ) -> None:
        self.happened = True
        if state.is_world_process_zero:
            report_begin(state.global_step, _told_origin(trainer.checkpoint_manager))
        if self._directory is not None:
            self._directory.note_session(first_step=state.global_step)

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if state.is_world_process_zero:
            report_step(state.global_step)

    @contextmanager
    def noting_the_end(self, trainer: Trainer) -> Iterator[None]:
        """A context in which the run trains; it notes nothing of a run that another one has taken over."""
        try:
            yield
        except LeaseLostError:
            raise
        except BaseException as error:
            text = " ".join(str(error).split()) or type(error).__name__
            self._note(
                trainer, "stopped at once" if isinstance(error, KeyboardInterrupt) else f"error: {text}"
            )
            raise
        cause = trainer.stop_cause
        self._note(trainer, "done" if cause is None else f"stopped by {cause.name}")

    def _note(self, trainer: Trainer, outcome: str) -> None:
        if self._directory is not None and self.happened:
            facts = {"ended": now_text(), "last_step": trainer.state.global_step, "outcome": outcome}
            try:
                self._directory.note_session(**facts)
            except (OSError, ConfigurationError) as error:
                # A full disk may be what ends the run, and must not take the place of what ended it.
                print(f"{PROG}: the end of the run could not be noted: {error}", file=sys.stderr)


def _told_origin(manager: CheckpointManager) -> str:
    """What a run continues from, for the launcher."""
    loaded = manager.loaded
    if loaded is None:
        return "the beginning"
    where = "in memory" if manager.is_in_memory(loaded.path) else f"in {loaded.path.parent}"
    return f"{loaded.path.name} {where}"


def _lacks_evaluation(
    env: DistributedEnvInterface, experiment: Experiment, directory: RunDirectory, step: int
) -> bool:
    """Whether the last step was not evaluated; by the log as rank 0 sees it, for all ranks."""
    if experiment.held_out_documents is None:
        return False
    scored = env.rank == 0 and step in directory.held_out_losses(experiment.args)
    return not broadcast_object(scored, env)


def announce(
    model: nn.Module,
    documents: DocumentSource,
    held_out: DocumentSource | None,
    args: PretrainArguments,
    processes: int,
    changes: Mapping[str, tuple[object, object]],
) -> None:
    """Say what is trained on what by how many, and which settings differ from those of the last start.

    Args:
        model: The whole model; its parameters may have no storage.
        documents: What it is trained on.
        held_out: What it is evaluated on.
        args: The settings.
        processes: How many train it.
        changes: Setting to its value at the last start, and now.
    """
    architecture = architecture_of_model(model)
    size = f"{architecture.parameters:,} parameters"
    if architecture.idle:
        size += f", of which {architecture.active_parameters:,.0f} take part for a token"
    source = "the Python standard library" if args.data is None else args.data
    kept = "none" if held_out is None else str(len(held_out))
    print(f"model      {args.model}, {size}, {args.sequence_length} tokens a row")
    print(f"data       {source}: {len(documents)} documents to train on, {kept} held out")
    if args.trainer != "single":
        way = told_trainer(args.trainer, parse_mesh(args.mesh))
        print(f"trainer    {way}, {_told_processes(args, processes)}")
    print(f"output     {args.output_dir}")
    for name, (old, new) in changes.items():
        print(f"changed    {name}: {old} at the last start, now {new}")
    print(flush=True)


def _told_processes(args: PretrainArguments, processes: int) -> str:
    if processes == 1:
        return f"one process, which is like single; for two: {launch_command(2, args.trainer)}"
    if args.trainer == "pipeline":
        pipeline = args.pipeline
        return f"{processes} processes, {pipeline.schedule} with {pipeline.n_microbatches} microbatches"
    return f"{processes} processes" + (f" ({args.mesh})" if args.mesh else "")


def say_how_to_continue(args: PretrainArguments, step: int, cause: str) -> None:
    """Say where an interrupted run stands and how it continues."""
    newest = find_latest_checkpoint(args.output_dir, one_node=args.save_on_each_node)
    print(f"\nstopped by {cause} after step {step}.")
    if newest is None:
        print("No checkpoint was saved; the same command begins again.", flush=True)
    else:
        command = f"same command{WITHOUT_FRESH_START if args.starts_fresh else ''}"
        print(f"The newest checkpoint is {newest}. The {command} continues from there.", flush=True)


def say_nothing_was_left(step: int) -> None:
    """Say that the run had reached its end before this start."""
    print(
        f"the run had reached its end, step {step}: a larger --max-steps continues, --fresh begins anew",
        flush=True,
    )


def show_result(
    directory: RunDirectory, args: PretrainArguments, sample: str, tokenizer: Tokenizer, seconds: float
) -> None:
    """Print a sample of generated text and the loss curve, and say where everything lies and what to try."""
    if sample:
        print(f"\nsample, temperature {SAMPLE_TEMPERATURE}; the prompt is {args.prompt!r}:\n")
        print(_marked(wrapped(printable(sample)), printable(args.prompt)))
    losses = directory.held_out_losses(args)
    plot = text_plot(list(directory.logged(args, "loss").items()), list(losses.items()))
    if plot:
        print(f"\nloss by step: * training{', o held out' * bool(losses)}\n")
        print("\n".join(f"    {line}" for line in plot))
    minutes, rest = divmod(round(seconds), 60)
    print(f"\ndone in {minutes} min {rest} s")
    if losses:
        added = [name for name in ("label_smoothing", "z_loss") if getattr(args, name)]
        note = f", with {' and '.join(added)}; `{PROG} eval` scores without" if added else ""
        print(f"  held-out loss   {losses[max(losses)]:.4f} nats per {unit_of(tokenizer)}{note}")
    newest = find_latest_checkpoint(args.output_dir, one_node=args.save_on_each_node)
    if newest is not None:
        print(f"  checkpoint      {newest}")
    curve = directory.draw_curve(args)
    if curve is not None:
        print(f"  loss curve      {curve}")
    print(f"  log             {directory.log_file(args)}")
    print(f"  settings        {directory.path / CONFIG_NAME}")
    where = "" if args.output_dir == "runs/default" else f" --output-dir {shlex.quote(args.output_dir)}"
    config, longer = shlex.quote(str(directory.path / CONFIG_NAME)), 2 * max(args.max_steps, 1)
    print("\nnext")
    use_it = f"{PROG} generate {shlex.quote(args.prompt)}"
    if args.saves_to_store:
        print(f"  use it          checkpoint-core export {newest} model; {use_it} --checkpoint model")
    else:
        print(f"  use it          {use_it}{where}; {PROG} export exported{where}")
    print(f"  train longer    {PROG} train --config {config} --max-steps {longer}")
    print(f"  look closer     {PROG} report{where}; {PROG} plan --config {config}", flush=True)


def write_sample(
    model: nn.Module, tokenizer: Tokenizer, args: PretrainArguments, device: torch.device
) -> str:
    """Text that the model writes at the end of a run, the same on all ranks; empty if none is wanted.

    Every rank calls it: where the model is sharded, each step of it needs all of them.

    Args:
        model: The `Llama`.
        tokenizer: Its tokenizer.
        args: prompt, sample_tokens and seed.
        device: Where it computes.
    """
    if not args.sample_tokens:
        return ""
    if not isinstance(model, Llama):
        raise TypeError(
            f"model must be a Llama to write a sample, and is a {type(model).__name__}. Set sample_tokens=0."
        )
    prompt = torch.tensor([list(tokenizer.encode(args.prompt))], device=device)
    generator = torch.Generator(device).manual_seed(args.seed)
    with _uncompiled(args):
        ids = generate(
            model,
            prompt,
            max_new_tokens=args.sample_tokens,
            temperature=SAMPLE_TEMPERATURE,
            eos_token_id=tokenizer.eos_token_id,
            generator=generator,
        )
    return tokenizer.decode(ids[0].tolist())


def _uncompiled(args: PretrainArguments) -> AbstractContextManager[object]:
    """Each new length would compile a compiled model again; its eager form gives the same sample at once."""
    if not args.torch_compile:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _marked(text: str, prompt: str) -> str:
    """The text with its prompt in bold, where it goes to a terminal."""
    if not sys.stdout.isatty() or prompt not in text:
        return text
    return text.replace(prompt, f"\x1b[1m{prompt}\x1b[0m", 1)
