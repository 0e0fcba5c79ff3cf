"""The command `perf-metrics`."""
