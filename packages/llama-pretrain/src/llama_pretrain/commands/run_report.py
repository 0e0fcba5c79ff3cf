"""The command `report`: a run on one page of HTML that needs nothing but itself."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch

from checkpoint_core import find_latest_checkpoint
from dist_env import DistributedEnvironment
from perf_metrics import (
    format_value,
    goodput_as_text,
    load_logs,
    plot_goodput,
    plot_logs,
    read_goodput,
    summarize_log,
)
from trainer_core import ConfigurationError, run_path

from ..arguments import PretrainArguments
from ..console import check_writable
from ..model.llama import generate, load_pretrained
from ..run_directory import RunDirectory, read_sessions, settings_by_name
from ..tokenizer import load_tokenizer
from ..train import SAMPLE_TEMPERATURE
from .arguments import ReportArguments

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { margin: 0 auto; padding: 24px; max-width: 1080px; color: #1f2328;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; }
h2 { font-size: 19px; margin: 32px 0 8px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid #d9dce0; text-align: left; vertical-align: top; }
pre { padding: 10px 14px; border: 1px solid #d9dce0; border-radius: 8px; white-space: pre-wrap; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, body: str) -> str:
    """Return a document with a title; its policy lets it ask no other host for anything."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """Return content, which is HTML, under a heading, which is text."""
    return f'<h2>{escape(title)}</h2>\n<div class="wide">{content}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts; a header of empty texts is left out."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    head = f"<thead><tr>{heads}</tr></thead>" if any(header) else ""
    return f"<table>{head}<tbody>\n{body}\n</tbody></table>"


def preformatted(text: str) -> str:
    """Return text whose lines stay as they are."""
    return f"<pre>{escape(text)}</pre>"


_PANELS = ("loss", "tok_per_sec", "mfu", "ofu", "memory", "learning_rate", "grad_norm")
_ALWAYS = ("loss", "tok_per_sec", "learning_rate", "grad_norm")


def write_report(args: ReportArguments) -> Path:
    """Write the page, say where it is, and return its path.

    It has curves, speed, utilization, memory, evaluations, samples, all settings that are not at their
    defaults, and on what each start of the run was made. It asks no other host for anything.

    Raises:
        ConfigurationError: If there is no run, or it has logged nothing.
        OSError: If the page cannot be written.
    """
    if args.samples < 0:
        raise ConfigurationError("samples", args.samples, "must be 0 or more", "use 0 for none")
    if not 0 <= args.smooth < 1:
        raise ConfigurationError(
            "smooth", args.smooth, "must be at least 0 and below 1", "use 0 for no smoothing"
        )
    check_writable("page", args.page)
    directory = RunDirectory(run_path(args.output_dir))
    settings = directory.arguments()
    log = directory.log_file(settings)
    if not log.is_file() or not any("loss" in entry for entry in load_logs(log)):
        raise ConfigurationError(
            "output_dir", args.output_dir, "has no logged step", "train first, and report then"
        )
    target = directory.path / "report.html" if args.page is None else Path(args.page)
    title = f"{settings.model} on {settings.data or 'the Python standard library'}"
    target.write_text(page(title, "\n".join(_sections(args, settings, directory, log))), encoding="utf-8")
    print(f"wrote {target}", flush=True)
    return target


def _sections(
    args: ReportArguments, settings: PretrainArguments, directory: RunDirectory, log: Path
) -> Iterator[str]:
    yield section("Figures", table(("", ""), _figures(log)))
    yield section("Curves", _curves(log, args.smooth))
    with suppress(FileNotFoundError):  # of a run before it was kept
        yield section("What the time was spent on", _goodput(directory.path, log))
    losses = directory.held_out_losses(settings)
    if losses:
        rows = [(f"{step:,}", f"{loss:.4f}") for step, loss in sorted(losses.items())]
        yield section("Held-out loss", table(("step", "loss"), rows))
    newest = None if settings.saves_to_store else find_latest_checkpoint(args.output_dir)
    if newest is not None and args.samples:
        note = f"temperature {SAMPLE_TEMPERATURE}, from {newest.name}"
        texts = _samples(newest, settings, args.samples)
        yield section(f"Samples ({note})", "\n".join(map(preformatted, texts)))
    yield section("Settings that are not at their defaults", table(("setting", "value"), _changed(settings)))
    sessions = read_sessions(directory.path)
    if sessions:
        yield section("Starts", _starts(sessions))


def _figures(log: Path) -> list[tuple[str, str]]:
    run = summarize_log(log)
    told = (
        ("steps", run.steps, ",d"),
        ("tokens", run.tokens, "si"),
        ("training loss, last 10 %", run.final_loss_mean, ".4f"),
        ("best held-out loss", run.best_eval_loss, ".4f"),
        ("tokens/s, median", run.tok_per_sec_median, "si"),
        ("MFU, median", run.mfu_median, ".1%"),
        ("HFU, median", run.hfu_median, ".1%"),
        ("OFU, mean", _mean_of(log, "ofu"), ".1%"),
        ("peak memory of a rank", run.peak_memory_bytes, "gib"),
        ("waiting for data", run.data_wait_share, ".1%"),
        ("wall time in minutes", None if run.wall_seconds is None else run.wall_seconds / 60, ".1f"),
        ("pauses", run.pauses, "d"),
    )
    return [(name, "unavailable" if value is None else format_value(value, fmt)) for name, value, fmt in told]


def _mean_of(log: Path, key: str) -> float | None:
    found = [value for entry in load_logs(log) if isinstance(value := entry.get(key), float)]
    return sum(found) / len(found) if found else None


def _curves(log: Path, smooth: float) -> str:
    entries = load_logs(log)
    keys = {key for entry in entries for key, value in entry.items() if isinstance(value, float | int)}
    logged = {"memory": "peak_mem_allocated"}
    panels = [name for name in _PANELS if name in _ALWAYS or logged.get(name, name) in keys]
    with tempfile.TemporaryDirectory() as folder:
        return _element(plot_logs(log, Path(folder) / "curves.svg", panels=panels, smooth=smooth))


def _goodput(run: Path, log: Path) -> str:
    try:
        goodput = read_goodput(run)
    except ValueError as error:  # one file of it is damaged
        return preformatted(str(error))
    with tempfile.TemporaryDirectory() as folder:
        picture = _element(plot_goodput(goodput, Path(folder) / "goodput.svg"))
    return picture + preformatted(goodput_as_text(goodput, summarize_log(log).mfu_median))


def _element(picture: Path) -> str:
    """An .svg within a page: an element, without the head of a file."""
    svg = picture.read_text(encoding="utf-8")
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)


def _samples(checkpoint: Path, settings: PretrainArguments, count: int) -> list[str]:
    tokenizer, model = load_tokenizer(str(checkpoint)), load_pretrained(checkpoint)
    device = DistributedEnvironment().device
    prompt = torch.tensor([list(tokenizer.encode(settings.prompt or "\n"))], device=device)
    texts = []
    for seed in range(settings.seed, settings.seed + count):
        ids = generate(
            model.to(device),
            prompt,
            max_new_tokens=settings.sample_tokens or 120,
            temperature=SAMPLE_TEMPERATURE,
            eos_token_id=tokenizer.eos_token_id,
            generator=torch.Generator(device).manual_seed(seed),
        )
        texts.append(tokenizer.decode(ids[0].tolist()))
    return texts


def _changed(settings: PretrainArguments) -> list[tuple[str, str]]:
    own, default = settings_by_name(asdict(settings)), settings_by_name(asdict(PretrainArguments()))
    return [(name, str(value)) for name, value in own.items() if value != default.get(name)]


def _starts(sessions: Sequence[Mapping[str, object]]) -> str:
    names = list(dict.fromkeys(name for session in sessions for name in session))
    return table(names, [tuple(str(session.get(name, "")) for name in names) for session in sessions])
