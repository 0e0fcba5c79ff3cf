"""`python -m perf_metrics` does what the console script `perf-metrics` does."""

import sys

from .commands.main import main

if __name__ == "__main__":
    sys.exit(main())
