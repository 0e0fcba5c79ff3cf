"""The command `verify`: prove on the devices of this machine what the tests prove elsewhere."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from dist_env import DistributedEnvironment, barrier, die_with_parent_command, examine, split_address
from perf_metrics import load_logs
from trainer_core import (
    ConfigurationError,
    Verification,
    VerificationCheck,
    check_verify_settings,
    verify,
)

from ..console import EXIT_ABORTED, LOGS_NAME
from ..launch import is_launched, is_reporting, launch
from ..mesh import parse_mesh
from ..model.config import preset
from ..model.llama import Llama
from .arguments import VerifyArguments
from .verify_page import verification_page

PARTS = (
    *("devices", "curve", "repeat", "resume", "save", "waits"),
    *("feature", "speed", "memory", "utilization", "kill"),
)
_VOCABULARY, _LENGTH = 128, 64
_RESULTS, _PAGE, _SCRATCH = "verify.json", "verify.html", "verify-scratch"
_KILLED_AFTER, _KILL_STEPS, _SAVED_EVERY = 10, 20, 5
_KILL_TIMEOUT_SECONDS = 600.0
_MARKS = {True: "ok", False: "FAILED", None: "-"}


def verify_here(args: VerifyArguments, words: Sequence[str]) -> int:
    """Make the checks, print each as it is made, and write verify.json and verify.html.

    Args:
        args: The settings.
        words: The command line behind the name of the command, for the processes that it starts.

    Returns:
        Exit code, the same on all ranks: 0 if all that could be looked at holds, else 1.

    Raises:
        ConfigurationError: If a setting cannot be used.
    """
    processes = _processes(args)
    layouts = tuple(args.layouts.split()) or default_layouts(processes)
    _check(args, layouts, processes)
    if is_launched():
        return _verify_as_rank(args, layouts, by_other_launcher=not is_reporting())
    if split_address(args.output_dir) is not None:
        rule, fix = "is in an object store, and results need a directory", "name one, such as runs/verify"
        raise ConfigurationError("output_dir", args.output_dir, rule, fix)
    folder = Path(args.output_dir)
    _clear(folder)
    if processes == 1:
        _verify_as_rank(args, layouts, by_other_launcher=False)
        return _finish(args, layouts, processes)
    code = launch(["verify", *words], processes, args.output_dir)
    if not (folder / _RESULTS).is_file():
        return code or EXIT_ABORTED
    return _finish(args, layouts, processes) or code


def default_layouts(processes: int) -> tuple[str, ...]:
    """Every way to share the work that fits so many processes, and the products of two and three ways."""
    n = processes
    if n == 1:
        return ()
    ways = [f"dp={n}", f"shard={n}"]
    # As many as the small model has heads and layers.
    ways += [f"{way}={n}" for way in ("tp", "pp") if n <= _LIMITS[way] and _LIMITS[way] % n == 0]
    ways += [f"cp={n}"]
    if n % 2 == 0 and n > 2:
        ways += [f"dp=2,shard={n // 2}", f"shard={n // 2},tp=2", f"shard={n // 2},pp=2"]
    if n % 4 == 0 and n > 4:
        ways += [f"shard={n // 4},pp=2,tp=2"]
    return tuple(ways)


def _model() -> partial[Llama]:
    config = preset("tiny", vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return partial(Llama, config)


def _limits() -> dict[str, int]:
    config = _model().args[0]
    return {"tp": config.num_key_value_heads, "pp": config.num_hidden_layers}


_LIMITS = _limits()


def _processes(args: VerifyArguments) -> int:
    if is_launched():
        return DistributedEnvironment().world_size
    if args.processes is not None:
        if args.processes < 1:
            raise ConfigurationError("processes", args.processes, "must be at least 1", "set it to 1 or more")
        return args.processes
    on_cpu = args.use_cpu or not torch.accelerator.is_available()
    return 1 if on_cpu else torch.accelerator.device_count()


def _check(args: VerifyArguments, layouts: Sequence[str], processes: int) -> None:
    for part in args.parts:
        if part not in PARTS:
            raise ConfigurationError("parts", part, f"is none of {', '.join(PARTS)}", "choose among these")
    check_verify_settings(precisions=args.precisions, steps=args.steps)
    for layout in layouts:
        try:
            size = parse_mesh(layout).world_size
        except ConfigurationError as error:
            fix = "write meshes with spaces between, such as 'dp=2 shard=2'"
            raise ConfigurationError("layouts", layout, error.rule, fix) from error
        if size != processes:
            fix = f"choose layouts of {processes}, or set processes={size}"
            raise ConfigurationError("layouts", layout, f"needs {size} processes, not {processes}", fix)


def _clear(folder: Path) -> None:
    """Make room: what an earlier verification left would be continued, or taken for this one's result."""
    if folder.exists() and not folder.is_dir():
        rule = "is a file, and results need a directory"
        raise ConfigurationError("output_dir", str(folder), rule, "name a directory, such as runs/verify")
    for name in (_RESULTS, _PAGE):
        (folder / name).unlink(missing_ok=True)
    if (folder / _SCRATCH).exists():
        shutil.rmtree(folder / _SCRATCH)
    (folder / _SCRATCH).mkdir(parents=True)


def _verify_as_rank(args: VerifyArguments, layouts: Sequence[str], *, by_other_launcher: bool) -> int:
    """Make the checks of this rank, and let rank 0 write what was found.

    An open environment sets the variables of a launcher, so that nothing can be told by them within.
    """
    env = DistributedEnvironment(always=False, no_accelerator=args.use_cpu, log_level="WARNING")
    wanted = args.parts or PARTS
    shown: list[VerificationCheck] = []

    def show(check: VerificationCheck) -> None:
        shown.append(check)
        if env.rank == 0:
            print(_line(check), flush=True)

    with env:
        started = time.monotonic()
        if by_other_launcher:
            if env.rank == 0:
                _clear(Path(args.output_dir))
            barrier(env, tag="making room for the verification")
        if "devices" in wanted:
            show(_devices(env))
        generator = torch.Generator().manual_seed(1)
        shape = 4 * args.steps * env.world_size, _LENGTH
        tokens = torch.randint(0, _VOCABULARY, shape, generator=generator)
        found = verify(
            _model(),
            [{"input_ids": row, "labels": row.clone()} for row in tokens],
            layouts,
            directory=Path(args.output_dir) / _SCRATCH,
            env=env,
            precisions=args.precisions,
            parts=[part for part in wanted if part not in ("devices", "kill")],
            steps=args.steps,
            on_check=show,
        )
        if "kill" in wanted and by_other_launcher:
            show(_not_killed())
        found = replace(found, checks=tuple(shown), seconds=time.monotonic() - started)
        if env.rank == 0:
            path = Path(args.output_dir) / _RESULTS
            path.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
            if by_other_launcher:
                _write_page(Path(args.output_dir), found)
    # Our own launcher reads the verdict; a rank that ends with an error would have failed.
    return 0 if found.passed or is_reporting() else EXIT_ABORTED


def _not_killed() -> VerificationCheck:
    why = "not tried: the ranks are those of another launcher, which would end with them"
    return VerificationCheck(part="kill", name="a run killed behind a save", passed=None, found=why)


def _devices(env: DistributedEnvironment) -> VerificationCheck:
    """What `python -m dist_env doctor` says."""
    found = examine(env)
    rates = [rank.matmul_flops for rank in found.ranks if rank.matmul_flops]
    text = f"{len(found.ranks)} ranks right"
    if rates:
        text += f", matrix products at {min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s"
    text = "; ".join((*found.problems, *found.warnings)) or text
    rule = "right sums, equal results of equal devices, none slow"
    return VerificationCheck(
        part="devices",
        name="computing, all-reduces and links",
        passed=not found.problems,
        found=text,
        rule=rule,
        figures=json.loads(json.dumps(asdict(found))),
    )


def _finish(args: VerifyArguments, layouts: Sequence[str], processes: int) -> int:
    """Kill and resume a run, which only this process can, and write the results with that."""
    folder = Path(args.output_dir)
    told = json.loads((folder / _RESULTS).read_text(encoding="utf-8"))
    checks = [VerificationCheck(**check) for check in told["checks"]]
    seconds, started = told["seconds"], time.monotonic()
    if "kill" in (args.parts or PARTS):
        for mesh in layouts[-1:] if processes > 1 else [""]:
            checks.append(_killed(folder / _SCRATCH / "killed", mesh, use_cpu=args.use_cpu))
            print(_line(checks[-1]), flush=True)
    found = Verification(
        checks=tuple(checks),
        curves=told["curves"],
        facts=told["facts"],
        seconds=seconds + time.monotonic() - started,
    )
    (folder / _RESULTS).write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    _write_page(folder, found)
    return 0 if found.passed else EXIT_ABORTED


def _write_page(folder: Path, found: Verification) -> None:
    (folder / _PAGE).write_text(verification_page(found), encoding="utf-8")
    counts = [sum(check.passed is each for check in found.checks) for each in (True, False, None)]
    verdict = "all of that holds" if found.passed else "NOT all of that holds"
    print(
        f"\n{verdict}: {counts[0]} passed, {counts[1]} failed, {counts[2]} not looked at, in "
        f"{found.seconds:.0f} s\n  page     {folder / _PAGE}\n  figures  {folder / _RESULTS}",
        flush=True,
    )


def _killed(folder: Path, mesh: str, *, use_cpu: bool) -> VerificationCheck:
    """Kill a run of `train` behind a save, continue it, and hold it against one that was left alone."""
    name = f"a run killed behind a save{f', {mesh}' if mesh else ''}"
    rule = "continues from its newest checkpoint, and ends on the curve of a run that nobody killed"
    text = folder / "text"
    text.mkdir(parents=True)
    for number in range(64):
        words = " ".join(f"{(number * 7 + each * each) % 97}" for each in range(400))
        (text / f"{number}.txt").write_text(words, encoding="ascii")
    whole, parts = folder / "whole", folder / "parts"
    try:
        _train(whole, text, mesh, use_cpu=use_cpu)
        _train(parts, text, mesh, use_cpu=use_cpu, killed=True)
        saved = sorted(int(path.name.partition("-")[2]) for path in parts.glob("checkpoint-*"))
        _train(parts, text, mesh, use_cpu=use_cpu)
    except _TrainFailedError as error:
        return VerificationCheck(part="kill", name=name, passed=False, found=str(error), rule=rule)
    expected, found = (_losses(each) for each in (whole, parts))
    differences = [abs(found.get(step, math.inf) - loss) / loss for step, loss in expected.items()]
    apart = max(differences, default=math.inf)
    begun_anew = not saved or saved[-1] >= _KILL_STEPS
    text_found = f"killed with checkpoint {saved[-1] if saved else 'none'}, then {apart:.1e} apart"
    passed = not begun_anew and apart <= 1e-5
    return VerificationCheck(
        part="kill",
        name=name,
        passed=passed,
        found=text_found,
        rule=rule,
        figures={"largest_relative_difference": apart, "checkpoints": saved},
    )


class _TrainFailedError(Exception):
    """What a run of `train` ended with instead of a curve."""


def _train(folder: Path, data: Path, mesh: str, *, use_cpu: bool, killed: bool = False) -> None:
    words = [
        *("train", "--output-dir", str(folder), "--data", str(data), "--max-steps", str(_KILL_STEPS)),
        *("--save-steps", str(_SAVED_EVERY), "--logging-steps", "1", "--sample-tokens", "0"),
        *("--save-total-limit", "100", "--sequence-length", "64", "--per-device-train-batch-size", "4"),
        *("--eval-strategy", "no"),
        *(("--mesh", mesh) if mesh else ()),
        *(("--use-cpu",) if use_cpu else ()),
    ]
    said = folder.with_suffix(".txt")
    with said.open("ab") as output:
        process = subprocess.Popen(
            die_with_parent_command([sys.executable, "-m", "llama_pretrain", *words]),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        until = time.monotonic() + _KILL_TIMEOUT_SECONDS
        while process.poll() is None and time.monotonic() < until:
            if killed and (folder / f"checkpoint-{_KILLED_AFTER}").is_dir():
                break
            time.sleep(0.02)
        if killed or process.poll() is None:
            process.send_signal(signal.SIGKILL)
    code = process.wait()
    if code != (-signal.SIGKILL if killed else 0):
        last = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise _TrainFailedError(f"train ended with {code}: {last[0] if last else ''}")


def _losses(folder: Path) -> dict[int, float]:
    found = ((entry.get("global_step"), entry.get("loss")) for entry in load_logs(folder / LOGS_NAME))
    return {step: loss for step, loss in found if isinstance(step, int) and isinstance(loss, float)}


def _line(check: VerificationCheck) -> str:
    rule = f"  ({check.rule})" if check.passed is False and check.rule else ""
    return f"{_MARKS[check.passed]:6}  {check.part:11}  {check.name}: {check.found}{rule}"
