"""docs/field-reports.md: every report has a row, and every test that a row names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "field-reports.md"
ROW = re.compile(r"^\| ([BN]\d\d) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
REPORTS = [f"B{number:02}" for number in range(1, 65)]
KEPT = [f"N{number:02}" for number in range(1, 7)]
ROWS: list[tuple[str, str, str, str]] = ROW.findall(PAGE.read_text(encoding="utf-8"))


@cache
def defined_in(file: Path) -> frozenset[str]:
    """The tests that a file defines, read and not imported."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def test_every_report_has_a_row_and_in_order() -> None:
    assert [number for number, *_ in ROWS] == [*REPORTS, *KEPT]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_test_that_a_row_names_exists(row: tuple[str, str, str, str]) -> None:
    number, *_, cell = row
    named = NAMED.findall(cell)
    assert named, f"{number} names no test"
    assert cell == ", ".join(f"`{file}::{name}`" for file, name in named)
    for file, name in named:
        assert name.startswith("test_")
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert name in defined_in(path), f"{file} has no {name}"
