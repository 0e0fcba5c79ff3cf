"""``python -m checkpoint_core`` is the console script ``checkpoint-core``."""

import sys

from checkpoint_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
