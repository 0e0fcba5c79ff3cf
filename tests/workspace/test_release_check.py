"""What a release is refused for is noticed; `nox -s release-check` looks at the real distributions."""

from __future__ import annotations

import http.server
import io
import json
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import project_metadata
import pytest
import release_check

REPOSITORY = "https://git.example.com/you/training"
OURS, OTHERS, FREE, BROKEN, UNTOLD = (
    "dist-env",
    "hardware-table",
    "perf-metrics",
    "trainer-core",
    "trainer-ddp",
)


class Index(http.server.BaseHTTPRequestHandler):
    """An index that has some projects, of which one is ours."""

    def do_GET(self) -> None:
        code, told = 404, {}
        if self.path in [f"/simple/{name}/" for name in (OURS, OTHERS, UNTOLD)]:
            code = 200
        elif self.path == f"/simple/{BROKEN}/":
            code = 503
        elif self.path == f"/pypi/{OURS}/json":
            code, told = 200, {"info": {"project_urls": {"Source": f"{REPOSITORY}/"}}}
        elif self.path == f"/pypi/{OTHERS}/json":
            code, told = 200, {"info": {"project_urls": None}}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


@pytest.fixture
def index() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """The files that are read, with nothing left open."""
    names = [f"packages/{name}/pyproject.toml" for name in project_metadata.packages(root)]
    for name in ("pyproject.toml", "LICENSE", "docs/changelog.md", project_metadata.START, *names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    text = (tmp_path / "pyproject.toml").read_text()
    for name in (*project_metadata.ADDRESSES, *project_metadata.CONTACT):
        text = text.replace(f'\n{name} = ""\n', f'\n{name} = "{REPOSITORY}"\n')
    (tmp_path / "pyproject.toml").write_text(text)
    project_metadata.write(tmp_path, "0.0.9")
    return tmp_path


def test_names_of_others_and_names_that_cannot_be_asked_about_are_refused(copied: Path, index: str) -> None:
    said: list[str] = []
    refused = list(release_check.refused_names(copied, index, said.append))
    assert f"{OURS}: ours on the index" in said
    assert f"{FREE}: the index has nothing under this name, which the first upload takes" in said
    assert [
        text for text in refused if f"a project {OTHERS} whose addresses do not name this repository" in text
    ]
    assert [text for text in refused if f"could not be asked about {BROKEN}: HTTPError" in text]
    assert [text for text in refused if f"could not be asked about {UNTOLD}: ValueError" in text]
    assert len(refused) == 3


def test_an_index_that_does_not_answer_is_a_refusal(copied: Path) -> None:
    refused = list(release_check.refused_names(copied, "http://127.0.0.1:9/simple", lambda _: None))
    assert len(refused) == len(project_metadata.packages(copied))
    assert "could not be asked about" in refused[0]


def test_the_index_is_the_one_that_uv_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple/")
    assert release_check.index_address() == "http://127.0.0.1:9/simple"
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    assert release_check.index_address().startswith("http")


def test_settings_are_refused_until_they_are_complete(copied: Path) -> None:
    assert not list(release_check.refused_settings(copied))
    path = copied / "pyproject.toml"
    path.write_text(path.read_text().replace(f'email = "{REPOSITORY}"', 'email = ""'))
    first, *others = release_check.refused_settings(copied)
    assert "[tool.release] of pyproject.toml leaves email empty" in first
    assert len(others) == len(project_metadata.packages(copied))
    (copied / "docs/changelog.md").write_text("# Changelog\n\n## Unreleased\n")
    assert [text for text in release_check.refused_settings(copied) if "no section `## 0.0.9 - DATE`" in text]


def test_a_start_page_that_installs_from_elsewhere_is_refused(copied: Path) -> None:
    page = copied / project_metadata.START
    page.write_text(page.read_text().replace(f"REPOSITORY={REPOSITORY}\n", "REPOSITORY=https://elsewhere\n"))
    (refused,) = release_check.refused_settings(copied)
    assert f"installs from https://elsewhere, and the repository is {REPOSITORY}." in refused
    project_metadata.write(copied)
    assert not list(release_check.refused_settings(copied))


def write_archives(dist: Path, name: str, files: dict[str, bytes]) -> None:
    """Write a wheel and an sdist with these files."""
    wheel, sdist = release_check.archives(dist, name, "0.0.9")
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    with tarfile.open(sdist, "w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{name}-0.0.9/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))


def test_archives_with_tests_or_without_a_licence_are_refused(copied: Path, tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    licence = (copied / "LICENSE").read_bytes()
    write_archives(dist, "dist-env", {"dist_env/LICENSE": licence, "tests/data.bin": b""})
    write_archives(dist, "perf-metrics", {"LICENSE": b"another", "perf_metrics/test_it.py": b""})
    refused = "\n".join(release_check.refused_archives(copied, dist))
    for kind in ("-py3-none-any.whl", ".tar.gz"):
        assert f"dist_env-0.0.9{kind} contains files of tests, which must stay out: " in refused
        assert f"dist_env-0.0.9{kind} does not contain the text of LICENSE" not in refused
        assert f"perf_metrics-0.0.9{kind} does not contain the text of LICENSE" in refused
        assert f"perf_metrics-0.0.9{kind} contains files of tests" in refused
        assert f"perf_metrics-0.0.9{kind} must have one file of metadata, and has []" in refused
        assert f"trainer_core-0.0.9{kind} was not built" in refused


def test_a_tag_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["release_check.py", str(tmp_path), "--tag", "v0.0.8", "--offline", "--pythons", ""]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="refusals: do not release this"):
        release_check.main()
    told = capsys.readouterr().out
    assert "refused: the tag v0.0.8 is not v" in told
    assert "was not checked, because of --offline" in told
    assert "refused: not installed alone, as asked: checkpoint-core, " in told
