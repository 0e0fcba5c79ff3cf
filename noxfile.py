"""Every check of the workspace. `uv run nox` runs them, `uv run nox --list` names them.

Tests marked `full` are left out: they take long, and another case of their kind stays. `uv run nox -s full`
runs everything, and `FULL_TESTS=1 uv run nox -s NAME` all of one session.

Each session has an environment of its own. A `tests-<package>` session holds that package and what it
declares, and nothing else, so an import of something undeclared fails there.

Five sessions run at a time, on two cores, as they install things and wait for lost ranks; what one of them
says comes when it has ended. Within a session tests run one after another, for a second process would import
and collect everything once more. A session alone is faster with two (`-- -n 2`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.parallel = 5
nox.options.allow_parallel = True

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

# The package tests run on this Python; on others with NOX_PYTHONS=3.11,3.12,3.13 uv run nox
# One version is given as text, so that session names stay without a version.
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_versions = os.environ.get("NOX_PYTHONS", THIS_PYTHON).split(",")
PYTHONS = _versions if len(_versions) > 1 else _versions[0]

# One thread a process: tests start several ranks on few cores, and sums do not depend on the machine.
# Safe path: nothing is imported by accident from the folder a test happens to run in.
ENV = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

# Tests start hundreds of processes that import torch, in some thirty environments: its bytecode is compiled
# once for all of these, see `share_bytecode`.
BYTECODE = ROOT / ".nox" / ".bytecode"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPYCACHEPREFIX"] = str(BYTECODE)

# The fake device, compiled once for each torch and each state of its sources.
FAKECUDA = ROOT / ".nox" / ".fakecuda"

FULL = bool(os.environ.get("FULL_TESTS"))

# `-m ""` beats the pyproject.toml's `-m "not full"`.
PYTEST = ("pytest", "--durations=5", "--durations-min=5", *(("-m", "") if FULL else ()))
# For sessions that run alone.
PYTEST_OF_TWO = (*PYTEST, "-n", "2")

# Packages that must work where torch is not installed.
TORCH_FREE = {"hardware-table"}
# Packages whose README's example is also run by torchrun.
EXAMPLE_OF_RANKS = {
    *("dataloader-dispatch", "model-parallel"),
    *("trainer-ddp", "trainer-fsdp2", "trainer-pipeline"),
}
# Packages whose tests take longest on the clock, also those that mostly wait.
LONGEST = (
    *("llama-pretrain", "trainer-core", "dist-env", "perf-metrics", "checkpoint-core"),
    *("dataloader-dispatch", "trainer-fsdp2", "trainer-pipeline"),
)
# Not in the sessions `extras` and `stores`: what these hold our programs against changes only with the pins.
LEFT_TO_FULL = {
    *("tests-llama-pretrain-bench", "tests-llama-pretrain-lm_eval"),
    *("tests-trainer-core-mlflow", "tests-trainer-core-wandb", "tests-trainer-pipeline-quant"),
}
# Not in it either, and among the defaults: below `uv run`, Ray installs copies of the packages for its
# workers, into the environment that it is started from.
BY_ITSELF = {"tests-dataloader-dispatch-ray"}
# Packages that handle SIGTERM themselves, in which the handler of coverage would end the process.
HANDLE_SIGTERM = {"checkpoint-core", "trainer-core", "llama-pretrain"}
# Packages whose wheels are always installed alone: without torch, and on top of most others, with ranks.
ALONE = ["hardware-table", "trainer-pipeline"]
NO_TORCH = "import importlib.util; assert importlib.util.find_spec('torch') is None, 'torch is installed'"


def project_table(package: str) -> dict[str, Any]:
    """Return the [project] table of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def extras_of(package: str) -> list[str]:
    """Return the optional dependency sets that a package declares."""
    return sorted(project_table(package).get("optional-dependencies", {}))


def test_groups(package: str) -> list[str]:
    """Return the dependency groups of a package that only a part of its tests needs."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    return sorted(set(tomllib.loads(text).get("dependency-groups", {})) - {"test"})


def extra_tests(package: str) -> dict[str, str]:
    """Return {name: folder} for each extra or group whose tests have their own folder, `tests/<name>`."""
    names = [*extras_of(package), *test_groups(package)]
    folders = {name: f"packages/{package}/tests/{name}" for name in names}
    return {name: folder for name, folder in folders.items() if (ROOT / folder).is_dir()}


def share_bytecode(home: str | Path) -> None:
    """Let an environment use the bytecode of all others.

    Python looks for it under the path of the source. A link leads from there to one place; what was compiled
    of another release of a module has another time or size, and counts for nothing.
    """
    (BYTECODE / "shared").mkdir(parents=True, exist_ok=True)
    place = BYTECODE / Path(home).resolve().relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink():
        place.symlink_to(BYTECODE / "shared")


def install_package(session: nox.Session, package: str, extra: str = "") -> None:
    """Install one package of the workspace with its test tools; siblings come in only if it declares them."""
    here = f"packages/{package}"
    target = f"./{here}[{extra}]" if extra in extras_of(package) else f"./{here}"
    groups = ["test", *({extra} & set(test_groups(package)))]
    chosen = [part for group in groups for part in ("--group", f"{here}/pyproject.toml:{group}")]
    share_bytecode(session.virtualenv.location)
    # Reinstall: with a reused environment (nox -r) uv would keep yesterday's copy of the package.
    session.install("--reinstall-package", package, target, *chosen)


def install_everything(session: nox.Session, *groups: str) -> None:
    """Install all packages of the workspace with all their extras, and dependency groups."""
    names = {package: ",".join(extras_of(package)) for package in PACKAGES}
    targets = [f"./packages/{package}" + (f"[{extra}]" if extra else "") for package, extra in names.items()]
    share_bytecode(session.virtualenv.location)
    editable = [part for target in targets for part in ("-e", target)]
    session.install(*editable, *(part for group in groups for part in ("--group", group)))


def install_alone(session: nox.Session, package: str, dist: Path) -> object:
    """Install one package's wheel, with nothing but what it declares, and run the example of its README.

    Returns:
        What it weighs; see `footprint.py`.
    """
    home = Path(session.create_tmp()) / "alone"
    # Files, not names: a registry might know something else under the name of a sibling.
    wheels = [str(next(dist.glob(f"{name.replace('-', '_')}-*.whl"))) for name in sorted(siblings(package))]
    if "torch" in extras_of(package):
        # The example counts a model, for which the extra is needed.
        own = f"{package.replace('-', '_')}-"
        wheels = [f"{each}[torch]" if Path(each).name.startswith(own) else each for each in wheels]
    session.run_install("uv", "venv", "-q", "--clear", str(home), external=True)
    share_bytecode(home)
    python = str(home / "bin" / "python")
    session.run_install(
        "uv", "pip", "install", "-q", "--no-sources", "--python", python, *wheels, external=True
    )
    readme = ("tests/wheels/run_readme.py", package)
    # Isolated, Python does not listen to the variable.
    alone = (python, "-I", "-X", f"pycache_prefix={BYTECODE}")
    session.run(*alone, *readme, external=True)
    if package in EXAMPLE_OF_RANKS:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        session.run(python, *torchrun, *readme, external=True, env=ENV)
    footprint = ("tests/wheels/footprint.py", package)
    # Warnings are not part of the figures.
    told = session.run(*alone, *footprint, external=True, silent=True, stderr=None, env=ENV)
    return json.loads(str(told))


def siblings(package: str) -> set[str]:
    """Return a package and the packages of this workspace that it needs, directly or not."""
    names = {requirement.split("==")[0] for requirement in project_table(package).get("dependencies", [])}
    found = {package}
    for name in names & set(PACKAGES):
        found |= siblings(name)
    return found


# Sessions start in this order, the longest first: one that is long and starts last leaves a core idle.


@nox.session
def equivalence(session: nox.Session) -> None:
    """Hold every way to train, and a transform from outside, against one process, and print the table."""
    install_everything(session, "test", "stores")
    session.run(*PYTEST, "tests/equivalence", "tests/embedding", *session.posargs, env=ENV)


@nox.session
def guides(session: nox.Session) -> None:
    """Run the code of the documentation's pages, and hold what they say of commands, messages and scripts."""
    share_bytecode(session.virtualenv.location)
    session.install("--reinstall-package", "llama-pretrain", "./packages/llama-pretrain", "--group", "guides")
    # This spelling of a block's options, `{.python continuation}`, is the one that MkDocs shows as code.
    blocks = ("--markdown-docs", "--markdown-docs-syntax=superfences", "docs", "--ignore=docs/api_pages.py")
    session.run(*PYTEST, *blocks, "tests/docs", *session.posargs, env=ENV)


@nox.session(python=PYTHONS, default=not FULL)
def extras(session: nox.Session) -> None:
    """Run the tests of extras in one environment with all of them; `full` gives each one of its own."""
    run_extras(session, {each: folder for each, folder in chosen_extras().items() if each[1] != "remote"})


@nox.session(python=PYTHONS, default=not FULL)
def stores(session: nox.Session) -> None:
    """Run the tests of extras with servers of object stores; much of their time they wait."""
    run_extras(session, {each: folder for each, folder in chosen_extras().items() if each[1] == "remote"})


def chosen_extras() -> dict[tuple[str, str], str]:
    """Return {(package, extra): folder} of what the two sessions above run."""
    return {
        (package, extra): folder
        for package in PACKAGES
        for extra, folder in extra_tests(package).items()
        if f"tests-{package}-{extra}" not in LEFT_TO_FULL | BY_ITSELF
    }


def run_extras(session: nox.Session, chosen: dict[tuple[str, str], str]) -> None:
    """Run tests of extras in an environment with all of them."""
    groups = [f"packages/{package}/pyproject.toml:test" for package in PACKAGES]
    groups += [
        f"packages/{package}/pyproject.toml:{extra}"
        for package, extra in chosen
        if extra in test_groups(package)
    ]
    install_everything(session, *groups)
    session.run(*PYTEST, *chosen.values(), *session.posargs, env=ENV)


def add_package_session(package: str) -> None:
    """Define `tests-<package>`."""

    def tests(session: nox.Session) -> None:
        install_package(session, package)
        if package in TORCH_FREE:
            session.run("python", "-c", NO_TORCH)
        ignored = [f"--ignore={folder}" for folder in extra_tests(package).values()]
        session.run(*PYTEST, f"packages/{package}/tests", *ignored, *session.posargs, env=ENV)

    tests.__doc__ = f"Test {package} with nothing but what it declares."
    nox.session(name=f"tests-{package}", python=PYTHONS)(tests)


for _package in sorted(PACKAGES, key=lambda name: (*LONGEST, name).index(name)):
    add_package_session(_package)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all packages, strictly, and the READMEs' and pages' programs as their users do.

    `full` asks a second checker about these programs.
    """
    install_everything(session, "types")
    examples = Path(session.create_tmp()) / "examples"
    shutil.rmtree(examples, ignore_errors=True)
    session.run("python", "tests/types/example_programs.py", str(examples))
    session.run("mypy", "--strict", *(f"packages/{package}/src" for package in PACKAGES), str(examples))
    if FULL:
        # It would ask whether there is a newer one.
        session.run("pyright", "-p", str(examples), env={"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})


@nox.session
def resilience(session: nox.Session) -> None:
    """Kill, stop, starve and damage one run again and again, and show that nothing of it is lost."""
    install_everything(session, "test")
    session.run(*PYTEST, "tests/resilience", *session.posargs, env=ENV)


@nox.session(default=False)
def device(session: nox.Session) -> None:
    """Run the branches for accelerators on a fake device, in host memory; needs g++.

    Not among the defaults for now: it compiles against torch for half a minute, and its tests of two ranks
    take longer than a minute. Without arguments it holds the lines that name a device against the list of
    those without a test; `-- --mutations` then also takes out waits, events and pinned copies one at a time.
    """
    install_everything(session, "test")
    folder = ROOT / "tests" / "device" / "fakecuda"
    # Without a compiler this fails and says what to install; tests that did not run must not look green.
    session.run("python", str(folder / "fakecuda_build.py"), env={"FAKECUDA_CACHE": str(FAKECUDA)})
    fake = {"FAKECUDA": "1", "FAKECUDA_CACHE": str(FAKECUDA), "PYTHONPATH": str(folder)}
    mutations = "--mutations" in session.posargs
    if session.posargs and not mutations:
        # Of chosen tests, which leave out lines that others execute.
        session.run(*PYTEST_OF_TWO, "tests/device", *session.posargs, env={**ENV, **fake})
    else:
        lines = Path(session.create_tmp()) / "lines"
        shutil.rmtree(lines, ignore_errors=True)
        session.run(*PYTEST_OF_TWO, "tests/device", env={**ENV, **fake, "FAKECUDA_LINES": str(lines)})
        session.run("python", str(folder / "device_lines.py"), "--check", str(lines), env=ENV)
        if mutations:
            options = [option for option in session.posargs if option != "--mutations"]
            session.run("python", "tests/device/mutations.py", str(lines), *options, env={**ENV, **fake})
    session.log("passed on the fake device, in host memory; nothing of this ran on an accelerator")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all packages, install the wheels, and use them as a stranger would."""
    dist = Path(session.create_tmp()) / "dist"
    session.run_install(
        "uv", "build", "-q", "--all-packages", "--no-sources", "--clear", "-o", str(dist), external=True
    )
    built = sorted(map(str, dist.glob("*.whl")))
    if len(built) != len(PACKAGES):
        session.error(f"{len(PACKAGES)} packages gave {len(built)} wheels: {built}")
    share_bytecode(session.virtualenv.location)
    session.install("--no-sources", *built)
    session.run("python", "-I", "tests/wheels/check_installed.py", *PACKAGES)
    alone = PACKAGES if FULL else ALONE
    together = [package for package in PACKAGES if package not in alone]
    if together:
        session.run("python", "-I", "tests/wheels/run_readme.py", *together)
    footprints = [install_alone(session, package, dist) for package in alone]
    session.run("python", "tests/wheels/footprint_table.py", json.dumps(footprints), log=False)


def add_extra_session(package: str, extra: str, folder: str) -> None:
    """Define `tests-<package>-<extra>`."""

    def tests(session: nox.Session) -> None:
        install_package(session, package, extra)
        session.run(*PYTEST, folder, *session.posargs, env=ENV)

    tests.__doc__ = f"Test {package} together with `{extra}`."
    name = f"tests-{package}-{extra}"
    nox.session(name=name, python=PYTHONS, default=FULL or name in BY_ITSELF)(tests)


for _package in PACKAGES:
    for _extra, _folder in extra_tests(_package).items():
        add_extra_session(_package, _extra, _folder)


@nox.session(name="tests-perf-metrics-without-torch", python=PYTHONS)
def without_torch(session: nox.Session) -> None:
    """Run the commands of perf-metrics as a monitoring host has them: with every extra but torch."""
    here = "packages/perf-metrics"
    chosen = ",".join(extra for extra in extras_of("perf-metrics") if extra != "torch")
    share_bytecode(session.virtualenv.location)
    session.install("--reinstall-package", "perf-metrics", f"./{here}[{chosen}]", "--group", "test")
    session.run("python", "-c", NO_TORCH)
    session.run(*PYTEST, f"{here}/tests/without_torch", *session.posargs, env=ENV)


@nox.session
def workspace(session: nox.Session) -> None:
    """Test what holds for the repository as a whole."""
    # nox, as the tests of the matrix run cells.
    session.install("--group", "test", f"nox{nox.needs_version}")
    session.run(*PYTEST, "tests/workspace", *session.posargs, env=ENV)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/ and look at it, in a browser too; see `guides` for its code."""
    session.install("--group", "docs")
    session.run("mkdocs", "build", "--strict", "--clean", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run(*PYTEST, "tests/site", *session.posargs, env=ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install("--group", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def contracts(session: nox.Session) -> None:
    """Check that imports point downwards and that only a package itself imports its submodules."""
    session.install("--group", "guards")
    sources = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in PACKAGES)
    session.run("lint-imports", env={"PYTHONPATH": sources})


@nox.session
def dependencies(session: nox.Session) -> None:
    """Check that each package declares what it imports, and imports what it declares."""
    install_everything(session, "guards")
    for package in PACKAGES:
        with session.chdir(ROOT / "packages" / package):
            session.run("deptry", "src")


@nox.session(default=False, venv_backend="none", allow_parallel=False)
def full(session: nox.Session) -> None:
    """Run every session with all of its tests; weekly and at release."""
    session.run(sys.executable, "-m", "nox", *session.posargs, env={"FULL_TESTS": "1"})


@nox.session(default=False, venv_backend="none", allow_parallel=False)
def matrix(session: nox.Session) -> None:
    """Test packages on each Python with the oldest and the pinned torch, and print the table.

    `-- --packages dist-env,trainer-core --python 3.12 --torch 2.11.0` runs less, `--torch nightly` takes the
    newest build of all indexes, `--out DIRECTORY` writes elsewhere than .nox/matrix. pytest gets what
    follows a second `--`.
    """
    session.run(sys.executable, "tests/release/version_matrix.py", *session.posargs)


@nox.session(name="first-hour", default=False)
def first_hour(session: nox.Session) -> None:
    """Type what a newcomer types in the first hour, here and with other trainers, and show what was seen."""
    install_everything(session, "benchmarks")
    session.run("python", "tests/first_hour/first_hour.py", *session.posargs, env={"PYTHONSAFEPATH": ""})


@nox.session(default=False)
def benchmarks(session: nox.Session) -> None:
    """Measure one benchmark; name it, with its options: `nox -s benchmarks -- checkpoint --scale 0.1`."""
    scripts = (path.stem for path in ROOT.glob("tests/benchmarks/*.py"))
    names = sorted(name for name in scripts if not name.startswith(("_", "test_")))
    if not session.posargs or session.posargs[0] not in names:
        session.error(f"name a benchmark after `--`: {', '.join(names)}")
    install_everything(session, "benchmarks", "stores")
    name, *options = session.posargs
    session.run("python", f"tests/benchmarks/{name}.py", *options, env=ENV)


@nox.session(default=False, venv_backend="none", allow_parallel=False)
def metadata(session: nox.Session) -> None:
    """Write what all packages say alike into them; `-- 0.2.0` moves their version, too."""
    session.run(sys.executable, "tests/release/project_metadata.py", *session.posargs)


@nox.session(name="release-check", default=False)
def release_check(session: nox.Session) -> None:
    """Build every distribution, install each alone from a local index, and say what forbids a release.

    `-- --offline` does not ask the index whether the names are ours, `--pythons 3.11` and `--packages
    dist-env` install less; what was not checked is refused too.
    """
    dist = Path(session.create_tmp()) / "dist"
    session.run_install(
        "uv", "build", "-q", "--all-packages", "--no-sources", "--clear", "-o", str(dist), external=True
    )
    # In a group pypiserver would divide uv's resolution by Pythons, and one of them finds no torch.
    session.install("--group", "release", "pypiserver>=2.4")
    session.run("python", "tests/release/release_check.py", str(dist), *session.posargs)


@nox.session(default=False)
def audit(session: nox.Session) -> None:
    """Ask for known vulnerabilities of what the packages and extras need; fails where it cannot ask."""
    requirements = Path(session.create_tmp()) / "requirements.txt"
    chosen = ("--all-packages", "--all-extras", "--no-default-groups", "--no-emit-workspace", "--no-hashes")
    session.run_install("uv", "export", "-q", *chosen, "-o", str(requirements), external=True)
    session.install("--group", "audit")
    session.run("python", "tests/release/audit.py", str(requirements))


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Hold the lines that the tests of packages execute against their floors; `-- dist-env --raise`.

    Without names it takes all packages. `--raise` writes floors that are higher now; none is ever lowered.
    """
    options = [word for word in session.posargs if word.startswith("-")]
    chosen = [word for word in session.posargs if word not in options] or PACKAGES
    place = Path(session.create_tmp()) / "coverage"
    for package in chosen:
        install_package(session, package)
        session.install("coverage>=7.10")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        settings = place / "settings.toml"
        # Ranks and loader workers are processes of their own, which are often ended by a signal.
        told = {
            "source_pkgs": [package.replace("-", "_")],
            "parallel": True,
            "patch": ["subprocess", "_exit"],
            "sigterm": package not in HANDLE_SIGTERM,
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in told.items()]
        settings.write_text("\n".join(["[tool.coverage.run]", *lines, ""]))
        env = {**ENV, "COVERAGE_FILE": str(place / "data"), "COVERAGE_RCFILE": str(settings)}
        ignored = [f"--ignore={folder}" for folder in extra_tests(package).values()]
        measured = ("coverage", "run", "-m", *PYTEST_OF_TWO, f"packages/{package}/tests", *ignored)
        session.run(*measured, env=env)
        session.run("coverage", "combine", "-q", env=env)
        report = str(place / "report.json")
        session.run("coverage", "json", "-q", "-o", report, env=env)
        session.run("python", "tests/release/coverage_floor.py", package, report, *options)
