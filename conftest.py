"""What holds for the tests of every package."""

from __future__ import annotations

import signal

# A job that a shell starts in the background ignores Ctrl-C, and all that it starts would do so too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
