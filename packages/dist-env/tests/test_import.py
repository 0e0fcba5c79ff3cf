"""Names that load their module when they are first used, by whichever thread does."""

import subprocess
import sys

SCRIPT = """
import threading
import dist_env

barrier = threading.Barrier(2)


def use(name):
    barrier.wait()
    getattr(dist_env, name)


threads = [threading.Thread(target=use, args=(name,)) for name in ("Heartbeat", "barrier")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_two_threads_use_the_first_names_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
