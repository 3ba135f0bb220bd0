"""What the wheel holds: every subpackage, and the page's files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("models", "index", "service")


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        return tomllib.load(stream)


def test_every_subpackage_is_listed(project: dict[str, dict[str, dict[str, list[str]]]]) -> None:
    found = {
        "hivlp." + path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for portion in PORTIONS
        for path in (ROOT / portion).rglob("*.py")
    }
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found)
    assert all(
        (ROOT / n.removeprefix("hivlp.").replace(".", "/") / "__init__.py").exists() for n in found
    )


def test_every_file_of_the_page_is_package_data(
    project: dict[str, dict[str, dict[str, dict[str, list[str]]]]],
) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]["hivlp.service.web"]
    shipped = {path for pattern in patterns for path in (ROOT / "service/web").glob(pattern)}
    files = {p for p in (ROOT / "service/web").iterdir() if p.is_file() and p.suffix != ".py"}
    assert files
    assert files == shipped


def test_the_wheel_installs_every_module_and_data_file(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="needs the extra [dev]")
    source = tmp_path / "source"
    for portion in PORTIONS:
        shutil.copytree(ROOT / portion, source / portion, ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=100)
    with zipfile.ZipFile(next(tmp_path.glob("hivlp-*.whl"))) as wheel:
        shipped = set(wheel.namelist())
    kinds = {".py", ".typed", ".html", ".css", ".js", ".svg", ".toml"}
    expected = {
        f"hivlp/{path.relative_to(ROOT).as_posix()}"
        for portion in PORTIONS
        for path in (ROOT / portion).rglob("*")
        if path.suffix in kinds
    }
    assert expected <= shipped
