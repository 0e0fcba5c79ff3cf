"""The synthetic fleet and the server of perf-metrics' tests, as `_fleet_tests.synthetic_fleet` and so on."""

from __future__ import annotations

from pathlib import Path

# With a path a module is a package.
__path__ = [str(Path(__file__).parents[2] / "packages" / "perf-metrics" / "tests" / "fleet")]
