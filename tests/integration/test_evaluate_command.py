"""`hivlp evaluate` as a user types it: what it refuses before it measures anything."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.main import main
from tests.integration.served_home import make_corpus, make_home
from tests.tiny_artifact import COLOURS, png, solid

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_home(tmp_path_factory.mktemp("home"), corpus)


@pytest.fixture
def home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIVLP_HOME", str(made))
    return made


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--json", ".", "is a folder"),
        ("--json", "taken/report.json", "no folder for report.json: "),
        ("--json", "closed/report.json", "nothing can be written in"),
        ("--report", "folder.html", "is a folder"),
        ("--report", "taken", "no folder for index.html: "),
        ("--ranks", "folder.parquet", "is a folder"),
        ("--ranks", "taken/ranks.jsonl", "no folder for ranks.jsonl: "),
    ],
)
def test_evaluate_refuses_files_that_cant_be_written_before_it_measures(
    home: Path, tmp_path: Path, capsys: Capture, option: str, name: str, words: str
) -> None:
    (tmp_path / "taken").write_text("a file")
    for folder in ("folder.html", "folder.parquet", "closed"):
        (tmp_path / folder).mkdir()
    (tmp_path / "closed").chmod(0o555)
    if name.startswith("closed") and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write anywhere")
    assert main(["evaluate", option, str(tmp_path / name)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"hivlp evaluate: {option}: " in captured.err
    assert words in captured.err


def test_evaluate_measures_what_is_served_or_nothing(
    home: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Refused while items were deleted or put beside what was built; right after the next build."""
    shutil.copytree(home, tmp_path / "home")
    monkeypatch.setenv("HIVLP_HOME", str(tmp_path / "home"))
    (built,) = SnapshotStore(tmp_path / "home").versions("default")
    more = tmp_path / "more"
    more.mkdir()
    (more / "new.png").write_bytes(png(solid((250, 10, 10))))
    row = {"file_name": "new.png", "id": "new", "captions": ["a red one"], "name": "red square"}
    (more / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["items", "delete", "red/24"]) == 0
    assert main(["items", "upsert", str(more)]) == 0
    report, ranks = tmp_path / "report.json", tmp_path / "ranks.parquet"
    written = ["evaluate", "--group", "name", "--json", str(report), "--ranks", str(ranks)]
    for against in ([], ["--against", f"default@{built}"], ["--against", "not opened before"]):
        capsys.readouterr()
        assert main([*written, *against]) == 1
        captured = capsys.readouterr()
        assert "`hivlp build` takes them in" in captured.err
        assert captured.out == ""
        assert not report.exists()
        assert not ranks.exists()
    assert main(["evaluate", "--version", built, "--against", "default"]) == 1
    assert main(["evaluate", "--version", built]) == 0
    assert main(["build", str(corpus)]) == 0
    capsys.readouterr()
    assert main(written) == 0
    assert f"{2 * len(COLOURS)} items" in capsys.readouterr().out
    found = set(pq.read_table(ranks).column("item").to_pylist())
    assert {"new", "red/300"} < found
    assert "red/24" not in found
