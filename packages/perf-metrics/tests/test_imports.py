import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import perf_metrics
heavy = {"torch", "matplotlib", "numpy", "tqdm", "hardware_table", "transformers", "lightning", "pynvml"}
print(sorted(heavy & set(sys.modules)))
assert all(hasattr(perf_metrics, name) for name in perf_metrics.__all__)
perf_metrics.format_value(1.0)
perf_metrics.JsonLogger()
perf_metrics.ProgressCallback(use_tqdm=False)
perf_metrics.DefaultMetrics(1e12)
perf_metrics.PeakMemory()
perf_metrics.IntervalCounts(1e9)
perf_metrics.OFUMetrics()
perf_metrics.diagnose(0.26, 0.34)
assert perf_metrics.parse_kernel("nvjet_tst_256x160_64x4_2x1_v_bz_coopA_TNT")
print(sorted(heavy & set(sys.modules)))
from perf_metrics.commands.main import main
assert main(["summary", sys.argv[1]]) == 0
print(sorted(heavy & set(sys.modules)))
assert main(["plot", sys.argv[1], "--output", sys.argv[2]]) == 0
assert main(["flops", "--hf-config", sys.argv[3], "--seq", "64", "--json"]) == 0
print("torch" in sys.modules)
"""


def test_neither_the_import_nor_the_log_and_plot_paths_load_torch(tmp_path: Path) -> None:
    log = tmp_path / "trainer_logs.json"
    log.write_text('[{"global_step": 1, "loss": 2.0}, {"global_step": 2, "loss": 1.5}]')
    picture = tmp_path / "curve.png"
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, '
        '"num_attention_heads": 2, "intermediate_size": 16}'
    )
    command = [sys.executable, "-c", SCRIPT, str(log), str(picture), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    imported, used, _, row, summarized, path, *flops, torch = done.stdout.splitlines()
    assert imported == used == summarized == "[]"
    assert row.split()[1] == "2"
    assert (path, torch) == (str(picture), "False")
    assert picture.stat().st_size > 1000
    # By hand: attention 4 of 8 x 8, gated 3 of 8 x 16, twice; the head; attention 12 L d S.
    weights = 2 * (4 * 64 + 3 * 128) + 72
    assert json.loads("".join(flops))["flops_per_token"] == 6 * weights + 12 * 2 * 8 * 64
