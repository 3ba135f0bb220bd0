"""`hivlp build` as another program runs it: progress by line, and an orderly end when told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hivlp.index.snapshot.store import SnapshotStore
from tests.integration.many_texts import many_texts
from tests.tiny_artifact import make_tiny_artifact

ITEMS = 1_500
ENDS_S = 30


def building(home: Path, corpus: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hivlp.service.main", "build", str(corpus)]
    command += ["--home", str(home), "--artifact", str(home / "artifacts" / "tiny")]
    command += ["--progress-json", "/dev/stdout", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=home
    )


def told(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Its lines as they come; what is printed for people besides is left out."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def test_a_build_that_is_told_to_end_lets_go_and_the_next_one_goes_on(tmp_path: Path) -> None:
    make_tiny_artifact(tmp_path / "artifacts" / "tiny")
    corpus = many_texts(tmp_path / "corpus", ITEMS)
    with building(tmp_path, corpus, "--batch-size", "1") as process:  # slow enough to be told
        for line in told(process):
            if line["done"]:
                process.send_signal(signal.SIGTERM)
                break
        rest = list(told(process))
        assert process.wait(ENDS_S) == 143
        assert process.stderr is not None
        assert "run it again to go on" in process.stderr.read()
    assert rest[-1] == {"result": "interrupted"}
    index = tmp_path / "indexes" / "default"
    assert [path.name for path in index.iterdir() if path.is_dir()] == []
    with building(tmp_path, corpus) as process:
        lines = list(told(process))
        assert process.wait(ENDS_S) == 0
    result, steps = lines[-1], [line["step"] for line in lines[:-1]]
    assert list(dict.fromkeys(steps)) == [
        *("load the model", "encode default", "write rows", "encode sample queries"),
        *("choose codes", "check", "measure widths", "publish"),
    ]
    assert result["result"] == "done"
    assert result["snapshot"] == SnapshotStore(tmp_path).current("default")
    assert (result["active"], result["items"], result["left_out"]) == (True, ITEMS, 0)
    assert 0 < result["encoded"] < ITEMS
