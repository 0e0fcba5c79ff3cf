import subprocess
import sys

SCRIPT = """
import sys
import perf_metrics
heavy = {"torch", "matplotlib", "numpy", "tqdm", "hardware_table", "transformers"}
print(sorted(heavy & set(sys.modules)))
assert all(hasattr(perf_metrics, name) for name in perf_metrics.__all__)
perf_metrics.format_value(1.0)
perf_metrics.JsonLogger()
perf_metrics.ProgressCallback(use_tqdm=False)
perf_metrics.DefaultMetrics(1e12)
print(sorted(heavy & set(sys.modules)))
perf_metrics.plot_logs(sys.argv[1], sys.argv[2])
print("torch" in sys.modules)
"""


def test_neither_the_import_nor_the_log_and_plot_paths_load_torch(tmp_path) -> None:
    log = tmp_path / "trainer_logs.json"
    log.write_text('[{"global_step": 1, "loss": 2.0}, {"global_step": 2, "loss": 1.5}]')
    command = [sys.executable, "-c", SCRIPT, str(log), str(tmp_path / "curve.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[]", "[]", "False"]
    assert (tmp_path / "curve.png").stat().st_size > 1000
