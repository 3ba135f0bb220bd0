"""HIVLP_REQUIRE: what is absent skips its tests loudly, or fails them when required."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
NEEDY = """
import pytest

@pytest.mark.chromium
def test_browser(chromium_path): ...

@pytest.mark.redis
def test_cache(redis_path): ...

@pytest.mark.gpu
def test_device(): ...

def test_plain(): ...
"""


def run(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_needy.py").write_text(NEEDY, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  chromium\n  redis\n  gpu\n", "utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HIVLP_")}
    absent = {
        "PATH": "",
        "CHROMIUM_PATH": "/nowhere",
        "REDIS_SERVER_PATH": "/nowhere",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**kept, **absent, **more},
        check=False,
    )


def test_an_absent_program_skips_loudly_and_is_counted(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 3 skipped" in done.stdout
    assert "1 tests SKIPPED: no chromium here" in done.stdout
    assert "1 tests SKIPPED: no redis here" in done.stdout
    assert "1 tests SKIPPED: no gpu here" in done.stdout


@pytest.mark.parametrize("required", ["chromium", "redis,chromium", " redis , gpu "])
def test_a_required_program_that_is_absent_fails(tmp_path: Path, required: str) -> None:
    done = run(tmp_path, HIVLP_REQUIRE=required)
    assert done.returncode == 1
    count = required.count(",") + 1
    assert f"{count} error" in done.stdout or f"{count} failed" in done.stdout
    assert "but it is absent" in done.stdout


def test_requiring_what_nobody_knows_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, HIVLP_REQUIRE="postgres")
    assert done.returncode not in (0, 1)
    assert "no such program" in done.stdout + done.stderr
