"""``tokenize``: documents to a directory of token ids."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import rich.progress
from rich.console import Console

from dataloader_dispatch.cli.output import (
    Chunk,
    FinishedPart,
    Output,
    Plan,
    Standing,
    cut_chunks,
    source_files,
)
from dataloader_dispatch.cli.parts import (
    Encoder,
    Job,
    StoppedError,
    is_remote,
    load_encoder,
    make_parts,
    part_name,
    processors,
    smallest_type,
)
from dataloader_dispatch.cli.ray_parts import make_parts_on_ray, ray_cluster
from dataloader_dispatch.cli.store_output import StoreOutput
from dataloader_dispatch.cli.tasks import Task
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.files import FileDocuments, FileRange
from dataloader_dispatch.sources.open_documents import open_documents
from dataloader_dispatch.sources.token_binary import ITEM_BYTES, TokenManifest
from dataloader_dispatch.store.addresses import Address, parse_place
from dist_env import printable, size_text

_PARTS = 32
_SMALLEST_PART, _LARGEST_PART = 10**6, 64 * 10**6
_LOG_SECONDS = 30.0
_SCREEN_SECONDS = 0.2
_console = Console(stderr=True)


def say(text: str) -> None:
    """Print a line on standard error, above a progress bar if there is one."""
    _console.print(text, markup=False, highlight=False, soft_wrap=True)


def one_line(message: object) -> str:
    """A message without line ends, and without anything that a terminal would obey."""
    return printable(" ".join(str(message).split()))


class Progress:
    """A bar on standard error: documents done, documents/s and MB/s of text.

    Where standard error is not a terminal, it is written every 30 seconds.

    Args:
        documents: Documents in all.
        done: Documents done before.
    """

    def __init__(self, documents: int, done: int) -> None:
        self._began = self._told = time.monotonic()
        self._documents = 0
        self._bytes = 0
        self._bar = rich.progress.Progress(
            rich.progress.TaskProgressColumn(),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.completed} of {task.total} documents, {task.description}"),
            rich.progress.TimeRemainingColumn(),
            console=_console,
            auto_refresh=False,  # a thread of its own would run while workers are forked
        )
        self._task = self._bar.add_task("", total=documents, completed=done)
        if _console.is_terminal:
            self._bar.start()

    def advance(self, documents: int, size: int) -> None:
        """Count work that is done.

        Args:
            documents: Documents since the last call.
            size: Bytes of their text.
        """
        self._documents += documents
        self._bytes += size
        self._bar.advance(self._task, documents)
        pause = _SCREEN_SECONDS if _console.is_terminal else _LOG_SECONDS
        if time.monotonic() - self._told >= pause:
            self._show()

    def _show(self) -> None:
        self._told = time.monotonic()
        seconds = max(self._told - self._began, 1e-3)
        speed = f"{self._documents / seconds:.0f} documents/s, {self._bytes / seconds / 10**6:.2f} MB/s"
        self._bar.update(self._task, description=speed)
        if _console.is_terminal:
            self._bar.refresh()
        else:
            task = self._bar.tasks[0]
            say(f"{task.completed:.0f} of {task.total:.0f} documents, {speed}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        self._show()
        if _console.is_terminal:
            self._bar.stop()


def tokenize(arguments: argparse.Namespace) -> None:
    """Write the token ids of documents into a directory, or continue with it, and print a summary.

    Args:
        arguments: Those of the command line.

    Raises:
        DataError: Input, tokenizer or output cannot be used.
        StoppedError: A worker died, or a part cannot be written.
        OSError: The output directory cannot be written.
    """
    task: Task | None = arguments.task
    if arguments.ray is not None:
        if task is not None:
            raise DataError("--ray and --task are two ways to divide the work. Choose one of them.")
        # Tasks of Ray have directories of their own.
        arguments.inputs, arguments.out = list(map(_absolute, arguments.inputs)), _absolute(arguments.out)
    if task is not None and arguments.overwrite:
        raise DataError(
            "--overwrite would let each --task remove what the others made. Remove OUT before they start, or "
            "name another OUT."
        )
    place = parse_place(arguments.out)
    share = "" if task is None else f"task {task}"
    output = StoreOutput(place, share) if isinstance(place, Address) else Output(Path(place).expanduser())
    output.refuse_others()
    source = _open(arguments)
    encoder = _load(arguments.tokenizer)
    ranges = source.ranges()
    part_size = arguments.part_size or _part_size(source, None if arguments.overwrite else output.part_size())
    plan = Plan(_settings(arguments, encoder, part_size), source_files(ranges))
    with output.locked(shared=task is not None):
        standing = output.standing(plan, arguments.overwrite)
        if standing is Standing.FINISHED:
            output.remove_scratch()
            again = "--overwrite would begin anew" if task is None else "all of its tasks are done"
            say(f"{output} is finished already; {again}")
        else:
            job = _job(source, output, ranges, part_size, encoder)
            if task is None:
                output.begin(plan)
                _run(job, plan, encoder, arguments.workers, arguments.ray)
            elif not _run_task(job, plan, encoder, arguments.workers, task):
                return
        _print_summary(output)


def _absolute(text: str) -> str:
    place = parse_place(text)
    return text if isinstance(place, Address) else str(Path(place).expanduser().absolute())


def _open(arguments: argparse.Namespace) -> FileDocuments:
    source = open_documents(
        arguments.inputs,
        exclude=arguments.exclude,
        undecodable=arguments.undecodable,
        text_column=arguments.text_column,
        unreadable=arguments.unreadable,
        max_document_bytes=arguments.max_document_bytes,
    )
    if not isinstance(source, FileDocuments):
        raise DataError(f"IN {arguments.inputs[0]} holds token ids already. Name files with text.")
    say(f"{source.files} files, {len(source)} documents, {size_text(source.size)}")
    return source


def _load(name: str) -> Encoder:
    if is_remote(name):
        say(f"tokenizer {name!r}: no such directory here; looking for it on the Hugging Face Hub")
    encoder = load_encoder(name)
    if encoder.added:
        say(
            f"warning: the tokenizer {name!r} puts {', '.join(encoder.added)} around texts by itself; left "
            "out here, as DocumentStream puts exactly one separator between two documents"
        )
    if encoder.eos_token_id is None:
        say(
            f"warning: the tokenizer {name!r} has no end-of-text token; choose a separator when you open the "
            "tokens (eos_token_id)"
        )
    return encoder


def _part_size(source: FileDocuments, before: int | None) -> int:
    """Bytes of input that make a part, where the user says nothing.

    Enough parts that many workers have something to do to the end, and not so many that the wait of each for
    the disk is noticed. It depends on the input alone, so that the same input gives the same parts.
    """
    return before or min(max(source.size // _PARTS, _SMALLEST_PART), _LARGEST_PART)


def _settings(arguments: argparse.Namespace, encoder: Encoder, part_size: int) -> dict[str, str | int]:
    return {
        "tokenizer": encoder.name,
        "tokenizer_fingerprint": encoder.fingerprint,
        "text_column": arguments.text_column,
        "undecodable": arguments.undecodable,
        "unreadable": arguments.unreadable,
        "max_document_bytes": arguments.max_document_bytes,
        "part_size": part_size,
    }


def _job(
    source: FileDocuments, output: Output, ranges: Sequence[FileRange], part_size: int, encoder: Encoder
) -> Job:
    return Job(
        source=source,
        output=output,
        chunks=cut_chunks(ranges, part_size),
        tokenizer=encoder.name,
        tokenizer_fingerprint=encoder.fingerprint,
        vocabulary_size=encoder.vocabulary_size,
        dtype=smallest_type(encoder.vocabulary_size),
    )


def _run(job: Job, plan: Plan, encoder: Encoder, workers: int | None, ray: str | None) -> None:
    """Make what is missing, here or on a Ray cluster, and finish the directory."""
    parts = _make(job, encoder, workers, range(len(job.chunks)), ray)
    job.output.finish(_manifest(job, plan, encoder, [parts[part_name(n)] for n in range(len(job.chunks))]))


def _run_task(job: Job, plan: Plan, encoder: Encoder, workers: int | None, task: Task) -> bool:
    """Make what is missing of a share of the parts; the task that finds all of them finishes the directory.

    Returns:
        Whether the directory is finished.
    """
    output = job.output
    numbers = range(len(job.chunks))
    names = [part_name(number) for number in numbers]
    try:
        output.begin(plan, shared=True)
        _make(job, encoder, workers, task.share(numbers))
        # Looked for once, when its own are recorded: so of two tasks that end at once, one sees all parts.
        made = output.recorded()
        parts = output.finished_parts(names, job.dtype) if made.issuperset(names) else None
        if parts is not None and len(parts) == len(names):
            output.finish(_manifest(job, plan, encoder, [parts[name] for name in names]))
            return True
    except (StoppedError, OSError):
        # The same task, run a second time, finds its files gone when the first one was the last.
        if output.standing(plan, overwrite=False) is not Standing.FINISHED:
            raise
    if output.standing(plan, overwrite=False) is Standing.FINISHED:
        output.remove_scratch()
        return True
    missing = [number for number in numbers if names[number] not in (made if parts is None else parts)]
    share = "has no part, as the input makes fewer" if task.index >= len(names) else "is done"
    say(
        f"task {task} {share}. {len(missing)} of {len(names)} parts are missing, of {task.owners(missing)}. "
        f"The last task to end finishes {output}; the same command without --task makes all that is missing"
    )
    return False


def _make(
    job: Job, encoder: Encoder, workers: int | None, numbers: Sequence[int], ray: str | None = None
) -> dict[str, FinishedPart]:
    """Make those of some parts that are not finished; all of these, by name."""
    parts = job.output.finished_parts([part_name(number) for number in numbers], job.dtype)
    missing = [number for number in numbers if part_name(number) not in parts]
    if parts:
        say(f"going on: {len(parts)} of {len(numbers)} parts are finished")
    total = sum(_count(job.chunks[number]) for number in numbers)
    done = total - sum(_count(job.chunks[number]) for number in missing)

    def warn(text: str) -> None:
        say(f"warning: {one_line(text)}")

    with ray_cluster(ray) if ray and missing else nullcontext() as cluster, Progress(total, done) as progress:
        told = progress.advance
        if cluster is not None:
            made = make_parts_on_ray(cluster, job, encoder, missing, workers, told, warn)
        else:
            made = make_parts(job, encoder, missing, processors() if workers is None else workers, told, warn)
        for finished in made:
            parts[finished.part.name] = finished
    return parts


def _count(chunk: Chunk) -> int:
    return chunk.stop - chunk.start


def _manifest(job: Job, plan: Plan, encoder: Encoder, finished: Sequence[FinishedPart]) -> TokenManifest:
    tokens = sum(one.part.tokens for one in finished)
    if not tokens:
        raise DataError(
            f"none of the {len(job.source)} documents has a token, because all of them are empty or were "
            "left out."
        )
    # Times of change are left out: the same input gives the same manifest.
    sources = [
        {key: value for key, value in asdict(file).items() if key != "modified"} for file in plan.sources
    ]
    counts = {
        name: sum(getattr(one, name) for one in finished)
        for name in ("text_bytes", "empty", "separators", "skipped", "undecodable")
    }
    skipped_files = sum(skipped.whole for skipped in job.source.skipped.values())
    return TokenManifest(
        dtype=job.dtype,
        tokenizer=encoder.name,
        vocabulary_size=encoder.vocabulary_size,
        eos_token_id=encoder.eos_token_id,
        documents=len(job.source),
        tokens=tokens,
        parts=tuple(one.part for one in finished),
        about={**counts, "skipped_files": skipped_files, "settings": dict(plan.settings), "sources": sources},
    )


def _print_summary(output: Output) -> None:
    manifest = output.manifest()
    about = manifest.about
    if about["separators"]:
        say(
            f"warning: the separator {manifest.eos_token_id} stands {about['separators']} times in "
            "documents, as their texts spell it out; each will look like the end of a document"
        )
    size = manifest.tokens * ITEM_BYTES[manifest.dtype]
    print(f"{output}: {manifest.documents} documents, {manifest.tokens} tokens")
    print(
        f"  {size_text(about['text_bytes'])} of text as {size_text(size)} of {manifest.dtype} "
        f"in {len(manifest.parts)} parts"
    )
    separator = "none" if manifest.eos_token_id is None else f"{manifest.eos_token_id}, in no file"
    print(f"  tokenizer {manifest.tokenizer}, vocabulary {manifest.vocabulary_size}, separator {separator}")
    print(
        f"  left out: {about['skipped_files']} files and {about['skipped']} documents that cannot be read; "
        f"{about['undecodable']} documents not UTF-8 ({about['settings']['undecodable']}); "
        f"{about['empty']} without tokens"
    )
