from pathlib import Path

import pytest
from browser import chromium_or_skip, screenshot, visit

from perf_metrics import Application, FleetReport, FleetSamples, fleet_report, report_as_html
from perf_metrics.ofu.samples import Device

HOSTILE = "</script><img src=http://127.0.0.1:9/x.png onerror=alert(1)>&<b>$x$"
LEVELS = {"sound": 0.40, "recomputing": 0.40, HOSTILE: 0.10}
MFU = {"sound": 0.39, "recomputing": 0.30, HOSTILE: 0.45}


@pytest.fixture(scope="module")
def chromium() -> str:
    return chromium_or_skip()


@pytest.fixture(scope="module")
def report() -> FleetReport:
    fleet = FleetSamples(start=0, end=7200, step_s=30, tensor_mhz=1000)
    for job, level in LEVELS.items():
        for step in range(100):
            for gpu in "0123":
                slow = job == "sound" and gpu == "3"
                fall = 0.5 if job == "recomputing" and step > 60 else 1.0
                mhz, activity = (500, 2 * level) if slow else (1000, level * fall)
                fleet.add(job, Device(job, gpu), 600 + 30 * step, activity, mhz)
    return fleet_report(fleet, {job: Application(mfu) for job, mfu in MFU.items()})


@pytest.fixture(scope="module")
def page(report: FleetReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report_as_html(report))
    return path


def test_the_page_says_nothing_on_the_console_and_asks_nobody(
    chromium: str, page: Path, tmp_path: Path
) -> None:
    seen = visit(chromium, page, tmp_path)
    assert (seen.console, seen.requests) == ([], [])
    # Its script has named each point.
    assert seen.html.count("<title>sound\n4 GPUs\nMFU 39.0%, OFU 40.0%") == 1
    assert seen.html.count("</title></path>") == len(LEVELS)
    assert "slow clock: sound, GPU 3" in seen.html
    assert "fell within the job" in seen.html


def test_the_check_would_see_an_error_and_a_request(chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png'><script>no_such_name()</script>")
    seen = visit(chromium, page, tmp_path)
    assert seen.requests == ["http://127.0.0.1:9/x.png"]
    assert "no_such_name is not defined" in seen.console[0]


def test_rows_are_sorted_and_filtered(chromium: str, page: Path, tmp_path: Path) -> None:
    copy = tmp_path / "used.html"
    use = """<script>
const button = [...document.querySelectorAll("#jobs button")].find((one) => one.textContent === "OFU %");
button.click();
button.click();
const rows = [...document.querySelectorAll("#jobs tbody tr")];
console.log(rows.map((row) => row.cells[6].textContent).join(" "));
const filter = document.getElementById("filter");
filter.value = "RECOMP";
filter.dispatchEvent(new Event("input"));
console.log(rows.filter((row) => !row.hidden).map((row) => row.cells[0].textContent).join(" "));
</script>"""
    copy.write_text(page.read_text().replace("</body>", f"{use}</body>"))
    assert visit(chromium, copy, tmp_path).console == ["10.0 (± 0.0) 32.2 40.0 (± 0.0)", "recomputing"]


def test_a_picture_of_it_can_be_taken(chromium: str, page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    screenshot(chromium, page, tmp_path, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_report_of_nothing_is_a_page(chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "empty.html"
    page.write_text(report_as_html(fleet_report(FleetSamples(start=0, end=60, step_s=30))))
    seen = visit(chromium, page, tmp_path)
    assert (seen.console, seen.requests) == ([], [])
    assert "OFU of 0 jobs" in seen.html
