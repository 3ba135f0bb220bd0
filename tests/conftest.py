"""Programs, and the GPU, that some tests need: absent, such a test is skipped loudly and counted;
named in HIVLP_REQUIRE (comma-separated), its absence is a failure instead.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

REQUIRE = "HIVLP_REQUIRE"
# Marker -> the variable that may name the program, and the names it is looked for under.
PROGRAMS = {
    "chromium": ("CHROMIUM_PATH", ("chromium", "chromium-browser", "google-chrome")),
    "redis": ("REDIS_SERVER_PATH", ("redis-server",)),
}
GPU = "gpu"
NEEDED = (*PROGRAMS, GPU)
ABSENT = "absent here:"


def find_program(marker: str) -> str | None:
    """Where the program of a marker is, or None."""
    variable, names = PROGRAMS[marker]
    given = os.environ.get(variable)
    if given:
        return given if Path(given).exists() else None
    return next((found for name in names if (found := shutil.which(name))), None)


def find_gpu() -> bool:
    """Whether faiss can use a GPU and sees one."""
    try:
        import faiss
    except ModuleNotFoundError:
        return False
    return hasattr(faiss, "GpuIndexFlatIP") and faiss.get_num_gpus() > 0


def is_there(marker: str) -> bool:
    """Whether what a marker stands for is there."""
    return find_gpu() if marker == GPU else find_program(marker) is not None


def required() -> set[str]:
    """The markers of what must be there."""
    named = {name.strip() for name in os.environ.get(REQUIRE, "").split(",")} - {""}
    unknown = named - set(NEEDED)
    if unknown:
        raise pytest.UsageError(f"{REQUIRE}: no such program {sorted(unknown)}")
    return named


def pytest_configure() -> None:
    required()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in NEEDED:
        if item.get_closest_marker(marker) is None or is_there(marker):
            continue
        if marker in required():
            pytest.fail(f"{REQUIRE} names {marker}, but it is absent", pytrace=False)
        pytest.skip(f"{ABSENT} {marker}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for marker in NEEDED:
        reports = terminalreporter.getreports("skipped")
        count = sum(f"{ABSENT} {marker}" in str(report.longrepr) for report in reports)
        if count:
            line = (
                f"{count} tests SKIPPED: no {marker} here; {REQUIRE}={marker} makes that a failure"
            )
            terminalreporter.write_sep("!", line, yellow=True, bold=True)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The chromium program; for tests marked `chromium`."""
    found = find_program("chromium")
    assert found is not None, "mark the test with `chromium`"
    return found


@pytest.fixture(scope="session")
def redis_path() -> str:
    """The redis-server program; for tests marked `redis`."""
    found = find_program("redis")
    assert found is not None, "mark the test with `redis`"
    return found
