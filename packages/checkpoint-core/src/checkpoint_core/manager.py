"""The checkpoint manager: saves and restores declared state for a group of ranks."""

import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from checkpoint_core.agreement import RankAgreement, default_environment
from checkpoint_core.background import BackgroundWorker, StagingBuffer
from checkpoint_core.components import (
    Plan,
    StateComponent,
    StatefulProvider,
    StaticStatefulProvider,
    make_plan,
    wrap_state,
)
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.directory import checkpoint_path
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.lease import DirectoryLease
from checkpoint_core.loading import LoadedCheckpoint, load
from checkpoint_core.manifest import Manifest
from checkpoint_core.memory_tier import MemoryTier
from checkpoint_core.model_directory import ModelExport
from checkpoint_core.peers import Peers
from checkpoint_core.retention import BestCheckpoint, Retention, best_summary, manifests_of_run
from checkpoint_core.saving import CheckpointSave, Preprocessor
from checkpoint_core.selection import whole_saves
from checkpoint_core.store_directory import OtherRuns
from checkpoint_core.store_path import StorePath, locate
from checkpoint_core.store_saving import StoreSave, check_supported
from checkpoint_core.tensor_files import MODEL_STEM
from checkpoint_core.tiers import RemoteTier
from dist_env import DistributedEnvInterface

_OPENING = "opening the checkpoint manager"


class CheckpointManager:
    """Saves and restores the components that a provider declares.

    All methods are collective: every rank calls them, in the same order. So is the constructor. While an
    asynchronous save is under way, any other call waits for it first.

    Args:
        config: Where and how; or only the output directory, or an address in a store.
        state: What to save, by component key: models, optimizers, schedulers, stateful loaders, `RNGState`.
            Each gets its wrapper, and its way of being shared by ranks, by its type. `StateComponent` says
            both otherwise.
        stateful_provider: Declares the components, in place of ``state``; or the components themselves.
        dist: Rank and world size; None for those of the default process group, or a single process. With
            more than one rank the process group must be open.
        preprocessor: A tokenizer or processor with ``save_pretrained(directory)``, saved with the weights.
        lease: The lease of ``output_dir``, which rank 0 holds (with ``save_on_each_node``, the first rank of
            each node): a save without it, or after it was lost, is refused.

    Raises:
        CheckpointError: More than one rank, but no matching process group; both or neither of ``state`` and
            ``stateful_provider``; or an object in ``state`` that needs a `StateComponent`.
        TypeError: An object in ``state`` has no state that can be saved.
    """

    def __init__(
        self,
        config: CheckpointConfig | str | Path,
        state: Mapping[str, object] | None = None,
        *,
        stateful_provider: StatefulProvider | Sequence[StateComponent] | None = None,
        dist: DistributedEnvInterface | None = None,
        preprocessor: Preprocessor | None = None,
        lease: DirectoryLease | None = None,
    ) -> None:
        if isinstance(config, (str, Path)):
            config = CheckpointConfig(output_dir=config)
        # Absolute: the program may change its directory, also while a save is in the background.
        self._output_dir = locate(config.output_dir, config.timeout_seconds).absolute()
        config = replace(config, output_dir=self._output_dir)
        self._config = config
        self._closed = self._leaves_early = False
        self.loaded: LoadedCheckpoint | None = None
        """What was loaded last."""
        env = default_environment() if dist is None else dist
        self._provider = _provider(state, stateful_provider, env.world_size)
        self._preprocessor = preprocessor
        self._lease = lease
        self._local_world_size = env.local_world_size
        self._ranks = RankAgreement(
            env,
            config.timeout_seconds,
            each_node=config.save_on_each_node,
            spread=config.remote_dir is not None,
        )

        def settings() -> tuple[str, dict[str, object]]:
            check_supported(self._output_dir, config, lease)
            return "" if env.rank else uuid.uuid4().hex, _shared_settings(config)

        opened = self._ranks.run(_OPENING, settings)
        _check_settings([settings for _, settings in opened])
        self._retention = Retention(config, opened[0][0])
        self._tier: RemoteTier | None = None
        self._peers: Peers | None = None
        if config.remote_dir is not None:
            self._ranks.run(_OPENING, lambda: self._open_tier(config, lease))
        if self._tier is not None and self._ranks.is_spread:
            self._peers = self._tier.connect(self._ranks, _OPENING)
        self._memory: MemoryTier | None = None
        if config.memory_dir is not None:
            self._memory = MemoryTier(config, env, self._ranks, opened[0][0])
        self._staging = StagingBuffer() if config.async_save else None
        self._worker = BackgroundWorker()
        self._others = OtherRuns()

    def __enter__(self) -> Self:
        """The manager itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the manager."""
        self._leaves_early = kind is not None
        self.close()

    def close(self) -> None:
        """Finish a save that is under way, and give back memory and the process group of the manager.

        With ``remote_dir``, rank 0 then waits for the upload, for ``timeout_seconds`` at most; and where each
        node keeps a part of it, the others until rank 0 needs them no more.

        Raises:
            CheckpointError: The save failed; or on rank 0, that ``remote_dir`` does not have the newest
                checkpoints. They are in ``output_dir``.
        """
        self._closed = True
        try:
            self._worker.close()
        finally:
            # Ctrl-C may end the waiting, not the save, which still needs both.
            if not self._worker.pending:
                self._staging = None
                if self._memory is not None:
                    self._memory.close()
                self._ranks.close()
                if self._tier is not None:
                    # Not as a collective: other ranks may have gone.
                    try:
                        if self._ranks.is_leader and self._ranks.rank and not self._leaves_early:
                            self._tier.wait_for_main()
                    finally:
                        try:
                            self._tier.close()
                        finally:
                            if self._peers is not None:
                                self._peers.close()

    def owns(self, checkpoint: Path) -> bool:
        """Whether a checkpoint lies where this manager saves.

        Args:
            checkpoint: Its directory, or its place in a store, as `LoadedCheckpoint.path` has it.
        """
        parent = checkpoint.parent.resolve()
        if self.is_in_memory(checkpoint) or parent == self._output_dir.resolve():
            return True
        return self._tier is not None and parent == self._tier.place

    def is_in_memory(self, checkpoint: Path) -> bool:
        """Whether a checkpoint lies in ``memory_dir``, which is gone when the job ends.

        Args:
            checkpoint: Its directory.
        """
        return self._memory is not None and checkpoint.parent == self._memory.directory

    def wait(self) -> None:
        """Block until no asynchronous save is under way.

        Raises:
            CheckpointError: On every rank: the save failed. Raised once, by the first call after it.
        """
        if self._config.async_save:
            self._worker.wait()

    def wait_for_upload(self) -> None:
        """Block until ``remote_dir`` has what it should keep, for half of ``timeout_seconds``. Collective.

        Raises:
            CheckpointError: On every rank: it does not, and why. The checkpoints are in ``output_dir``.
        """
        self.wait()
        tier = self._tier
        if tier is not None:
            # Half, because the other ranks wait for this one no longer than the whole.
            limit = self._config.timeout_seconds / 2
            self._ranks.run(f"uploading to {tier.place}", lambda: tier.wait(limit))

    def give_up_upload(self) -> None:
        """End an upload to ``remote_dir`` soon, and begin no other, as the process was told to end.

        The checkpoints are in ``output_dir``, and get to the store when the run is resumed.
        """
        if self._tier is not None:
            self._tier.give_up()

    def save_checkpoint(
        self, step: int, *, metrics: Mapping[str, float] | None = None, path: str | Path | None = None
    ) -> Path:
        """Save every component as ``<output_dir>/checkpoint-<step>``, then rotate. Collective.

        The checkpoint appears by one rename after all of it is on the disk, or in a store by one conditional
        put of its manifest. A checkpoint of the same step
        that this run wrote or resumed from is replaced. With ``async_save`` the state is copied, and all the
        rest happens in the background; the preprocessor is written there too.

        Args:
            step: The training step, 0 or more, equal on all ranks.
            metrics: Evaluation results to keep with it; those of rank 0 are stored.
            path: A new directory to save to instead. It is never rotated away, and never taken for the
                newest or best one: load it by its path.

        Returns:
            The committed checkpoint; with ``async_save`` where it will be, see :meth:`wait`. In a store it is
            an object with those methods of ``Path`` that look and read, whose text is the address.

        Raises:
            CheckpointError: On every rank, when any failed. Nothing is left behind, and earlier checkpoints
                are as they were; also if ``path`` exists, or has the name of another checkpoint. Or when the
                asynchronous save before failed: this one is made or begun all
                the same, before the error is raised.
        """
        with self._earlier_failure_last():
            phase, target = "saving a checkpoint", None if path is None else self._locate(path)
            if self._closed:
                raise CheckpointError(f"{phase}: the manager was closed. Make a new CheckpointManager.")
            save = self._new_save(
                target,
                config=self._config,
                ranks=self._ranks,
                plan=make_plan(phase, self._ranks, self._provider, lambda: _describe_save(step, target)),
                step=step,
                path=target,
                run_id=self._retention.run_id,
                metrics=metrics,
                preprocessor=self._preprocessor,
                lease=self._lease,
                local_world_size=self._local_world_size,
            )
            if self._tier is not None and target is None:
                tier = self._tier
                self._ranks.run_on_main(phase, lambda: tier.check_first_save(step))
            save.capture(self._staging)
            if self._config.async_save:
                self._worker.start(f"saving {save.final.name}", lambda: self._finish(save))
            else:
                self._finish(save)
        return save.final

    save = save_checkpoint
    """Short for :meth:`save_checkpoint`."""

    def save_to_memory(self, step: int) -> Path | None:
        """Save every component as ``<memory_dir>/checkpoint-<step>``, keeping the two newest. Collective.

        It is written as any other is, and appears by one rename, without files of the preprocessor.

        Args:
            step: The training step, 0 or more, equal on all ranks.

        Returns:
            The committed checkpoint; None, and a warning, if memory has become too short for it since an
            earlier one of the run was saved there.

        Raises:
            CheckpointError: On every rank, when any failed: ``memory_dir`` is not set, or lacks room for two
                such checkpoints and one in the making at the first save. Earlier ones are as they were.
        """
        memory, phase = self._memory, "saving a checkpoint to memory"
        if memory is None or self._closed:
            raise CheckpointError(f"{phase}: this needs an open CheckpointManager with memory_dir.")
        self.wait()
        plan = make_plan(phase, memory.ranks, self._provider, lambda: _describe_save(step, None))
        return memory.save(step, plan, self._local_world_size)

    def trial_save(self, first_step: int = 0) -> None:
        """Deprecated: does nothing but warn. The first checkpoint of a run tells what a trial would."""
        warnings.warn(
            "trial_save() does nothing any more; save a checkpoint", DeprecationWarning, stacklevel=2
        )

    def reserve_staging(self) -> None:
        """Deprecated: does nothing but warn. The first asynchronous save allocates its memory."""
        warnings.warn("reserve_staging() does nothing any more", DeprecationWarning, stacklevel=2)

    def load_checkpoint(
        self, path: str | Path | None = None, *, only_memory: bool = False
    ) -> LoadedCheckpoint | None:
        """Verify a checkpoint and restore every component from it. Collective.

        Sizes and checksums of all files are compared first, each rank reading its share. Then all components
        are matched with their objects, and only when all fit does any of them change. A component whose file
        was deleted keeps its fresh state, with a warning, unless it is required.

        Args:
            path: The checkpoint. None takes the newest good one of all tiers, of one step that in memory;
                damaged ones are passed over with a warning.
            only_memory: Look for it in memory alone, where the other tiers may hold those of another run.

        Returns:
            What was loaded, or None when ``path`` is None and there is no checkpoint.

        Raises:
            CheckpointError: On every rank: the named checkpoint is missing or damaged, there are checkpoints
                but none is good, a required component is missing, or state does not fit its object.
                Components restored before an error in an object's own ``load_state_dict`` keep the restored
                state.
        """
        self.wait()
        wanted = None if path is None else self._locate(path)
        # Nodes that save for themselves may know the same checkpoint under different paths.
        what = f"load of {wanted.name if wanted else 'the newest checkpoint'}"
        plan = make_plan("loading a checkpoint", self._ranks, self._provider, lambda: what)
        tier, memory, held = self._tier, self._memory, None
        if memory is not None and wanted is None:
            theirs = make_plan("loading a checkpoint", memory.ranks, self._provider, lambda: what)
            held = (memory.ranks, theirs, memory.directory)
        remote = None if tier is None else tier.place
        result = load(
            self._ranks,
            plan,
            self._output_dir,
            wanted,
            remote,
            self._peers,
            memory=held,
            only_memory=only_memory,
        )
        if result is None:
            return None
        loaded, manifest = result
        self.loaded = loaded
        if self.is_in_memory(loaded.path):
            self._continue_run(manifest.run_id)
            return loaded
        self._retention.resumed_from = loaded.path
        if self.owns(loaded.path):
            # Going on from it makes this the same run.
            self._continue_run(manifest.run_id)
            if tier is not None:
                # Whichever tier it was read from, each keeps its own copy.
                self._retention.resumed_from = checkpoint_path(self._output_dir, loaded.step)
                tier.retention.resumed_from = checkpoint_path(tier.place, loaded.step)
                if wanted is None:
                    # The process that saved it may have ended before it was uploaded; and where nodes keep it
                    # together, rank 0 may be on one that has nothing of it.
                    known = manifest if manifest.nodes > 1 else None
                    self._request_upload(what, tier, loaded.step, saved=False, manifest=known)
        return loaded

    def _continue_run(self, run_id: str) -> None:
        """Let rotation and replacement include what this run has saved before, in every tier."""
        for part in (self._memory, self._tier):
            if part is not None:
                part.retention.run_id = run_id
        self._retention.run_id = run_id

    load = load_checkpoint
    """Short for :meth:`load_checkpoint`."""

    def load_model(self, path: str | Path) -> None:
        """Verify a checkpoint and take the component ``model`` from it, and nothing else. Collective.

        Args:
            path: The checkpoint, such as one of :meth:`best_checkpoints`. Where nodes keep checkpoints
                together, each may have a part of it.

        Raises:
            CheckpointError: On every rank: the checkpoint is missing or damaged, holds no ``model`` or one
                that does not fit, or none is declared.
        """
        self.wait()
        wanted, tier = self._locate(path), self._tier
        phase = f"load of the model of {wanted.name}"
        plan = make_plan("loading a checkpoint", self._ranks, self._provider, lambda: phase)
        if MODEL_STEM not in plan.patterns:
            raise CheckpointError(f"{phase}: no component 'model' is declared. Declare one.")
        parts = {key: plan.assignments[key] for key in [MODEL_STEM] if key in plan.assignments}
        only = Plan({MODEL_STEM: plan.patterns[MODEL_STEM]}, parts, writers=plan.writers)
        remote = None if tier is None else tier.place
        result = load(self._ranks, only, self._output_dir, wanted, remote, self._peers, continues=False)
        if result is not None and result[0].missing:
            raise CheckpointError(f"{phase}: its files of component 'model' are not there.")

    def save_model(self, output_dir: str | Path, *, overwrite_output_dir: bool = False) -> Path:
        """Write the weights, configuration and preprocessor as a Hugging Face directory. Collective.

        Args:
            output_dir: The directory; made if needed.
            overwrite_output_dir: Replace weights that are there.

        Returns:
            The directory.

        Raises:
            CheckpointError: On every rank: weights are there already, another process writes to the
                directory, there is no component ``model``, or writing failed. Or the asynchronous save before
                failed: the model is written all the same, before the error is raised.
        """
        with self._earlier_failure_last():
            target, phase = self._locate(output_dir), "saving the model"
            if isinstance(target, StorePath):
                raise CheckpointError(
                    f"{phase}: {target} is in a store, and save_model() writes to a directory. Save a "
                    "checkpoint there, whose weights are a Hugging Face directory, or copy the directory."
                )
            plan = make_plan(phase, self._ranks, self._provider, lambda: f"export to {target.name}")
            ModelExport(
                config=self._config,
                ranks=self._ranks,
                plan=plan,
                output_dir=target,
                overwrite=overwrite_output_dir,
                preprocessor=self._preprocessor,
                lease=self._lease,
                local_world_size=self._local_world_size,
            ).run()
        return target

    def best_checkpoints(self) -> tuple[BestCheckpoint, ...]:
        """The ``preserve_n_best`` best checkpoints of this run by ``best_metric``, best first. Collective.

        Read from the disk by rank 0, so that a restart knows what there was before; where nodes keep
        checkpoints together, those count that they have all of. With ``preserve_n_best`` 0 it is the best one
        there is, which is not kept from rotation.

        Returns:
            The checkpoints, equal on all ranks, each of which names its own part where nodes keep them
            together; none without ``best_metric``.

        Raises:
            CheckpointError: On every rank: the checkpoints cannot be read.
        """
        self.wait()
        known: dict[int, Manifest] | None = None
        if self._ranks.is_spread and self._config.best_metric is not None:
            whole = whole_saves(self._ranks, self._output_dir, self._retention.run_id)
            known = {each.manifest.step: each.manifest for each in reversed(whole)}
        found = self._ranks.run_on_main("ranking the checkpoints", lambda: self._ranking(known))
        return tuple(
            BestCheckpoint(checkpoint_path(self._locate(where or self._output_dir), step), step, value)
            for where, step, value in found
        )

    def best_summary(self) -> str:
        """:meth:`best_checkpoints` as a table for the end of a run. Collective.

        Returns:
            Lines of text; one line that says why when there are none.

        Raises:
            CheckpointError: As :meth:`best_checkpoints`.
        """
        return best_summary(self.best_checkpoints(), self._config.best_metric, self._config.greater_is_better)

    @contextmanager
    def _earlier_failure_last(self) -> Iterator[None]:
        """Wait for the asynchronous save before, and raise its failure only when this call's work is done."""
        earlier: Exception | None = None
        try:
            self.wait()
            if self._tier is not None and not self._closed:
                self._ranks.run(f"uploading to {self._tier.place}", self._tier.check)
        except Exception as error:  # noqa: BLE001 - raised below
            earlier = error
        try:
            yield
        except Exception as error:
            if earlier is None:
                raise
            # Both have failed. The first may say why: a rank that is lost, for one.
            earlier.add_note(f"The next call failed as well: {describe_error(error)}")
            raise earlier from error
        if earlier is not None:
            raise earlier

    def _locate(self, where: str | Path) -> Path:
        return locate(where, self._config.timeout_seconds)

    def _new_save(self, target: Path | None, **options: Any) -> CheckpointSave:
        if isinstance(self._output_dir if target is None else target, StorePath):
            return StoreSave(**options, others=self._others)
        return CheckpointSave(**options)

    def _finish(self, save: CheckpointSave) -> None:
        save.commit()
        if save.path is None:
            phase = f"rotating after {save.final.name}"
            self._rotate(phase, save)

    def _rotate(self, phase: str, save: CheckpointSave) -> None:
        ranks, tier = self._ranks, self._tier
        if tier is None:
            ranks.run_on_leaders(phase, lambda: self._retention.apply(save.final, save.metrics))
            return
        with tier.rotating() as in_use:
            # No node may delete its part of what rank 0 has begun to upload, or of what is among the best for
            # another: each ranks what is on its own disk.
            names = ranks.run(phase, lambda: [path.name for path in [*in_use, *self._best_here()]])
            kept = [self._output_dir / name for name in set().union(*names)]
            ranks.run_on_leaders(phase, lambda: self._retention.apply(save.final, save.metrics, kept))
        self._request_upload(phase, tier, save.step, saved=True)

    def _best_here(self) -> list[Path]:
        if not self._ranks.is_spread or not self._ranks.is_leader:
            return []  # Ranks that see one directory have one ranking.
        try:
            return [best.path for best in self._retention.best(self._config.preserve_n_best)]
        except OSError:
            return []  # Rotation says so, and deletes nothing here.

    def _request_upload(
        self, phase: str, tier: RemoteTier, step: int, *, saved: bool, manifest: Manifest | None = None
    ) -> None:
        def request() -> None:
            if self._ranks.rank == 0:
                tier.request(step, saved=saved, manifest=manifest)
            else:
                tier.take_part()

        if self._ranks.is_spread:
            # Together: no node may find rank 0 without work, and close, before it has been asked for more.
            self._ranks.run(phase, request)
        elif self._ranks.rank == 0:
            request()

    def _open_tier(self, config: CheckpointConfig, lease: DirectoryLease | None) -> None:
        self._tier = RemoteTier(config, lease)
        self._tier.retention.run_id = self._retention.run_id

    def _ranking(self, known: Mapping[int, Manifest] | None) -> list[tuple[str, int, float]]:
        """Directory, step and value of the best; the directory is empty where each node has its own."""
        if known is None:
            known = manifests_of_run(self._output_dir, self._retention.run_id, parts=False)
        best, tier = self._retention.rank(known), self._tier
        if tier is not None:
            best = tier.best(best)
        own = self._output_dir if self._ranks.is_spread else None
        return [
            ("" if item.path.parent == own else str(item.path.parent), item.step, item.value)
            for item in best[: max(1, self._config.preserve_n_best)]
        ]


def _provider(
    state: Mapping[str, object] | None,
    provider: StatefulProvider | Sequence[StateComponent] | None,
    world_size: int,
) -> StatefulProvider:
    if state is not None and provider is None:
        return StaticStatefulProvider(wrap_state(state, world_size))
    if provider is None or state is not None:
        raise CheckpointError(
            f"CheckpointManager got {'neither' if state is None else 'both'} of state and "
            "stateful_provider, and needs one of them, such as "
            f'{{"model": model, "optimizer": optimizer}}.'
        )
    if isinstance(provider, Sequence):
        return StaticStatefulProvider(provider)
    return provider


def _shared_settings(config: CheckpointConfig) -> dict[str, object]:
    """What must be equal on all ranks: all but the directories, which nodes may name differently."""
    settings = asdict(config)
    del settings["output_dir"]
    settings["memory_dir"] = "set" if config.memory_dir is not None else None
    return settings


def _check_settings(by_rank: Sequence[Mapping[str, object]]) -> None:
    for rank, settings in enumerate(by_rank):
        for name, value in settings.items():
            if value != by_rank[0][name]:
                raise CheckpointError(
                    f"{_OPENING}: {name} is {by_rank[0][name]!r} on rank 0 and {value!r} on rank {rank}. "
                    "Give all ranks the same CheckpointConfig."
                )


def _describe_save(step: int, path: Path | None) -> str:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"step={step!r} must be an integer of 0 or more.")
    # Nodes that save for themselves may name a directory differently.
    return f"save of step {step}" if path is None else f"save of step {step} to {path.name}"
