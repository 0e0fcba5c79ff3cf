"""Unit tests of rules by the real `promtool`: series go in, and what the rules make of them is compared."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

H100 = "NVIDIA H100 80GB HBM3"
OLD, NEW = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"
CLOCK = "DCGM_FI_DEV_SM_CLOCK"

Labels = Mapping[str, str]


@dataclass
class RuleTest:
    """Series that are scraped once a minute, and the rules that are evaluated as often.

    Args:
        folder: For the files.
        rules: Text of the file with rules.
        every_clock: Whether the tensor clocks of models that no series is of are evaluated, too. They join
            nothing, and take most of the time.
    """

    folder: Path
    rules: str
    every_clock: bool = False
    series: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, labels: Labels, values: str) -> None:
        """Add a series, with its values as promtool writes them: `0.5x60` is 0.5 at 61 minutes."""
        self.series[_selector(name, labels)] = values

    def gpu(
        self,
        index: int,
        activity: str,
        mhz: str | None,
        job: str | None = "a",
        *,
        names: Sequence[str] = (OLD,),
        host: str = "node1",
        **labels: str,
    ) -> None:
        """Add what dcgm-exporter shows of a GPU. without `mhz` it shows no clock."""
        device = {"gpu": str(index), "UUID": f"GPU-{host}-{index}", "modelName": H100, "Hostname": host}
        told = {**device, **({} if job is None else {"hpc_job": job}), **labels}
        for name in names:
            self.add(name, told, activity)
        if mhz is not None:
            self.add(CLOCK, told, mhz)

    def expect(self, minute: int, expression: str, *expected: tuple[Labels, float]) -> None:
        """Fail unless the expression gives these labels and values, and no others, in this minute."""
        self._run({"promql_expr_test": [_expression_test(minute, expression, expected)]})

    def expect_firing(self, by_minute: Mapping[int, Sequence[Labels]]) -> None:
        """Fail unless these alerts and no others fire in these minutes; by alertname, job, gpu and model."""
        by = "group by (alertname, hpc_job, gpu, modelName) (ALERTS{alertstate='firing'})"
        tests = [
            _expression_test(minute, by, [(labels, 1.0) for labels in expected])
            for minute, expected in by_minute.items()
        ]
        self._run({"promql_expr_test": tests})

    def expect_alert(self, minute: int, name: str, labels: Labels, texts: Labels) -> None:
        """Fail unless this alert, and of its name no other, fires with these texts in this minute."""
        fired = {"exp_labels": labels, "exp_annotations": texts}
        self._run(
            {"alert_rule_test": [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [fired]}]}
        )

    def _run(self, test: Mapping[str, object]) -> None:
        (self.folder / "rules.yml").write_text(self.rules if self.every_clock else self._rules_in_use())
        entries = [{"series": name, "values": values} for name, values in self.series.items()]
        # JSON is YAML.
        text = json.dumps(
            {
                "rule_files": ["rules.yml"],
                "evaluation_interval": "1m",
                # Otherwise promtool takes the groups in any order, and texts would differ by a sample.
                "group_eval_order": ["ofu-tensor-clocks", "ofu", "ofu-alerts"],
                "tests": [{"interval": "1m", "input_series": entries, **test}],
            }
        )
        (self.folder / "test.yml").write_text(text)
        command = ["promtool", "test", "rules", "test.yml"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"

    def _rules_in_use(self) -> str:
        """The rules without the tensor clocks of models that no series is of."""
        used = "\n".join(self.series)
        groups = [
            {
                **group,
                "rules": [
                    rule
                    for rule in group["rules"]
                    if (model := rule.get("labels", {}).get("modelName")) is None
                    or f"modelName={json.dumps(model)}" in used
                ],
            }
            for group in _groups(self.rules)
        ]
        return json.dumps({"groups": groups})


@cache
def _groups(rules: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(rules)["groups"]
    return groups


def _selector(name: str, labels: Labels) -> str:
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"


def _expression_test(
    minute: int, expression: str, expected: Sequence[tuple[Labels, float]]
) -> dict[str, object]:
    samples = [{"labels": _selector("", labels), "value": value} for labels, value in expected]
    return {"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples}
