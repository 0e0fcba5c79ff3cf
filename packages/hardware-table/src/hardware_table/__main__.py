"""`python -m hardware_table` does what the console script `hardware-table` does."""

import sys

from hardware_table.cli import main

if __name__ == "__main__":
    sys.exit(main())
