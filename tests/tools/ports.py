"""Ports that the processes of a test listen on."""

from __future__ import annotations

import random
import socket

# Below where Linux (32768) and macOS (49152) take the ends of connections, and beside the ports that dist-env
# takes by itself.
_PORTS = range(10_000, 29_000)


def free_port() -> int:
    """A port that nothing listens on, and that the system gives to no connection by itself.

    A number that `bind` to port 0 has found may become the end of somebody's connection before the process
    that is told of it listens there.
    """
    # Tests seed the generator of `random`, and those that run side by side would find the same ports.
    for port in random.SystemRandom().sample(_PORTS, 100):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("no port is free")
