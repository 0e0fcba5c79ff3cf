"""What the page on security says of sockets and files, seen on real ones."""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous, static_tcp_rendezvous

from trainer_core import ConfigurationError, load_config_file

LISTENING = '''
import os
import re
from pathlib import Path


def listening() -> list[str]:
    """The addresses, in the hexadecimal digits of the kernel, that this process listens on."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    own = {found[1] for link in links if (found := re.fullmatch(r"socket:\\[(\\d+)\\]", link))}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").open()]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own]
'''
RANK = f"""{LISTENING}
import dist_env.tree_sums
from dataloader_dispatch import DataloaderDispatcher
from dist_env import DistributedEnvironment, HostSums, barrier
from torch.distributed.device_mesh import init_device_mesh

seen = []
accept = dist_env.tree_sums.accept
def look(listener, *others):
    seen.append(listener.getsockname()[0])
    return accept(listener, *others)
dist_env.tree_sums.accept = look
with DistributedEnvironment() as env:
    sums = HostSums(env)
    loader = DataloaderDispatcher([1, 2] if env.rank == 0 else None, init_device_mesh("cpu", (2,)), "cpu")
    if env.rank == 0:
        print(*listening(), *seen)
    barrier(env)
    loader.close()
    sums.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the tables of Linux's kernel")
def test_a_job_on_one_host_listens_where_the_page_says(
    run: Callable[..., list[subprocess.CompletedProcess[str]]], tmp_path: Path
) -> None:
    """The store and `HostSums` on the loopback address, gloo where the name of the host leads."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    first, second = run(str(script), ranks=2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    *listening, sums = first.stdout.split()
    host = {
        socket.inet_aton(info[4][0])[::-1].hex().upper()
        for info in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET)
    }
    loopback = "0100007F"
    assert sums == "127.0.0.1"
    assert loopback in listening, "the store"
    assert set(listening) <= {loopback, *host}
    assert len(listening) >= 2, "gloo listens too"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the tables of Linux's kernel")
def test_a_store_that_torch_opens_by_itself_listens_on_all_interfaces() -> None:
    namespace: dict[str, object] = {}
    exec(LISTENING, namespace)
    before = namespace["listening"]()  # type: ignore[operator]
    store = dist.TCPStore("localhost", 0, 1, True)
    after = namespace["listening"]()  # type: ignore[operator]
    assert store.port
    new = [address for address in after if address not in before]
    assert all(set(address) == {"0"} for address in new)
    assert len(after) == len(before) + 1


def test_c10d_unpickles_what_is_in_its_store_and_the_static_rendezvous_does_not() -> None:
    assert "pickle.loads" in inspect.getsource(dynamic_rendezvous)
    assert "pickle" not in inspect.getsource(static_tcp_rendezvous)


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    config, ran = tmp_path / "config.yaml", tmp_path / "ran"
    config.write_text(f"a: !!python/object/apply:os.system ['touch {ran}']\n")
    with pytest.raises(ConfigurationError, match="malformed"):
        load_config_file(config)
    assert not ran.exists()


def test_the_exporter_listens_on_this_host_by_default() -> None:
    pytest.importorskip("prometheus_client")
    from perf_metrics import PrometheusExporter

    assert inspect.signature(PrometheusExporter).parameters["host"].default == "127.0.0.1"
