"""Ask for known vulnerabilities of what is installed: `python audit.py REQUIREMENTS`.

Fails for a vulnerability, and where it could not be told whether there is one: pip-audit itself exits with 0
for packages that it skips, and where the service answers without knowing any advisory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# A version with several advisories since 2019. A service that knows none of them knows none of others either.
VULNERABLE = "urllib3==1.24.1"


class UnauditedError(Exception):
    """It could not be told whether there are vulnerabilities."""


def ask(requirements: Path) -> list[dict[str, Any]]:
    """Return what pip-audit says of each package."""
    options = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json")
    command = [sys.executable, "-m", "pip_audit", *options, "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        told: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise UnauditedError(f"pip-audit ended with {done.returncode}: {done.stderr.strip()}") from None
    return told


def judge(known: list[dict[str, Any]], told: list[dict[str, Any]]) -> list[str]:
    """Return the vulnerabilities; `known` is the answer about `VULNERABLE`.

    Raises:
        UnauditedError: The answers do not tell.
    """
    if not any(each.get("vulns") for each in known):
        raise UnauditedError(f"the service knows no advisory of {VULNERABLE}, which has several")
    skipped = [f"{each['name']}: {each['skip_reason']}" for each in told if "skip_reason" in each]
    if skipped:
        raise UnauditedError(f"packages were skipped: {'; '.join(skipped)}")
    if not told:
        raise UnauditedError("the list of requirements is empty")
    return [
        f"{each['name']} {each['version']}: {vulnerability['id']}, "
        f"mended in {', '.join(vulnerability['fix_versions']) or 'no version'}"
        for each in told
        for vulnerability in each["vulns"]
    ]


def main(requirements: Path) -> None:
    """Ask, and say what was found."""
    try:
        with tempfile.TemporaryDirectory() as place:
            vulnerable = Path(place) / "vulnerable.txt"
            vulnerable.write_text(f"{VULNERABLE}\n")
            known = ask(vulnerable)
        told = ask(requirements)
        found = judge(known, told)
    except UnauditedError as error:
        raise SystemExit(f"could not be audited, and nothing is said of vulnerabilities: {error}") from None
    for line in found:
        print(line)
    if found:
        raise SystemExit(f"{len(found)} known vulnerabilities")
    print(f"{len(told)} packages have no known vulnerability")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
