"""Install each package alone from an index of its own that runs on this machine.

What others publish is installed first, from the usual index: just what the packages declare. Then the local
index is the only one, and it knows our packages and nothing else. So nothing can come in that a wheel does
not declare, or that another index has under a name of ours.
"""

from __future__ import annotations

import contextlib
import email
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from project_metadata import packages, read_toml

# Seconds for the local index to answer.
TIMEOUT = 60
WHEELS = Path(__file__).parents[1] / "wheels"


def pythons_of(root: Path) -> tuple[str, str]:
    """Return the oldest and the newest Python that the packages name."""
    told = read_toml(root / "pyproject.toml")["tool"]["release"]["classifiers"]
    found = [
        each[1]
        for text in told
        if (each := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text))
    ]
    return found[0], found[-1]


def needs(dist: Path, names: Sequence[str], name: str, extras: frozenset[str]) -> tuple[set[str], set[str]]:
    """Return (packages of ours, requirements of others' packages) of a wheel and what it needs."""
    from packaging.requirements import Requirement

    wheel = next(dist.glob(f"{name.replace('-', '_')}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        path = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(path))
    ours, others = {name}, set()
    for text in fields.get_all("Requires-Dist", []):
        each = Requirement(text)
        if each.marker and not any(each.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            continue
        if each.name in names:
            of_it = needs(dist, names, each.name, frozenset(each.extras))
            ours, others = ours | of_it[0], others | of_it[1]
        else:
            others.add(text.partition(";")[0].strip())
    return ours, others


@contextlib.contextmanager
def local_index(dist: Path) -> Iterator[str]:
    """Serve a folder of distributions, and nothing else; gives the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pypiserver", "run", "-i", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen([*command, "--disable-fallback", str(dist)], stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/simple/"
    try:
        wait_for(address, server)
        yield address
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError) as error:
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the local index does not answer at {address}: {error}") from None
            time.sleep(0.2)


def try_installing(root: Path, dist: Path, python: str, chosen: Sequence[str], place: Path) -> list[str]:
    """Install packages alone for a Python, those first that others need; returns what is refused."""
    names = packages(root)
    extra = {name: frozenset({"torch"}) & set(extras_of(root, name)) for name in names}
    needed = {name: needs(dist, names, name, extra[name]) for name in names}
    refused = []
    with local_index(dist) as index:
        for name in sorted(chosen, key=lambda each: (len(needed[each][0]), each)):
            began = time.monotonic()
            # Its README's example counts a model, for which the extra is needed.
            asked = f"{name}[{','.join(extra[name])}]" if extra[name] else name
            try:
                install(name, asked, needed[name][1], python, dist, index, place / "environment")
            except subprocess.CalledProcessError as error:
                refused.append(
                    f"{name} cannot be used alone on Python {python}: `{' '.join(error.cmd)}` ended with "
                    f"{error.returncode}:\n{error.stdout}{error.stderr}"
                )
            print(f"{name} alone on Python {python}: {time.monotonic() - began:.0f} s", flush=True)
    return refused


def extras_of(root: Path, name: str) -> list[str]:
    """Return the extras that a package declares."""
    return list(
        read_toml(root / "packages" / name / "pyproject.toml")["project"].get("optional-dependencies", {})
    )


def install(name: str, asked: str, others: set[str], python: str, dist: Path, index: str, home: Path) -> None:
    """Install and use one package: its wheel from the index, and then its sdist."""
    uv = os.environ.get("UV") or shutil.which("uv") or "uv"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # No other indexes, no folders of wheels, and no settings of this workspace, whose `exclude-newer` leaves
    # out what an index gives no date for.
    alone = {
        key: value
        for key, value in env.items()
        if not key.startswith("UV_") or key == "UV_PYTHON_INSTALL_DIR"
    }
    alone |= {"UV_DEFAULT_INDEX": index, "UV_NO_CONFIG": "1"}

    def run(*words: object, env: dict[str, str] = env) -> None:
        subprocess.run([*map(str, words)], env=env, check=True, capture_output=True, text=True)

    def use() -> None:
        for script in ("check_installed.py", "run_readme.py"):
            # All environments have this path, one after the other, and so they share the bytecode.
            run(executable, "-I", "-X", f"pycache_prefix={home}-bytecode", WHEELS / script, name)

    executable = home / "bin" / "python"
    run(uv, "venv", "-q", "--clear", "--python", python, home)
    run(uv, "pip", "install", "-q", "--python", executable, *sorted(others))
    run(uv, "pip", "install", "-q", "--no-cache", "--python", executable, asked, env=alone)
    use()
    sdist = next(dist.glob(f"{name.replace('-', '_')}-*.tar.gz"))
    run(uv, "pip", "install", "-q", "--no-sources", "--no-deps", "--reinstall", "--python", executable, sdist)
    use()
