"""`python -m trainer_pipeline diagram`: draw what each rank of a schedule does, and when it waits."""

from __future__ import annotations

import sys

from .diagram.command import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["diagram"]:
        sys.exit("usage: python -m trainer_pipeline diagram --schedule NAME --ranks N --microbatches N")
    sys.exit(main(sys.argv[2:]))
