"""``python -m dataloader_dispatch`` is the console script ``dataloader-dispatch``."""

import sys

from dataloader_dispatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
