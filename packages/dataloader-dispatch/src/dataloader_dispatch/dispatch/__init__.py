"""One rank loads, all ranks receive."""
