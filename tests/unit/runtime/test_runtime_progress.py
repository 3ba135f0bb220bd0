"""Progress lines where nobody watches a terminal, a bar where someone does."""

from __future__ import annotations

import sys

import pytest

from hivlp.models.runtime import progress as progress_module
from hivlp.models.runtime.progress import Progress

Capture = pytest.CaptureFixture[str]


def test_without_a_terminal_it_prints_plain_lines(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "EVERY_S", 0.0)
    with Progress("encode", 3) as progress:
        for _ in range(3):
            progress.step()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "encode: 1 of 3 items",
        "encode: 2 of 3 items",
        "encode: 3 of 3 items",
        "encode: 3 items in 0 s",
    ]


def test_it_says_little_when_it_is_quick(capsys: Capture) -> None:
    with Progress("encode", None, "text") as progress:
        for _ in range(50):
            progress.step(2)
    assert capsys.readouterr().err == "encode: 100 texts in 0 s\n"


def test_nothing_done_is_nothing_said(capsys: Capture) -> None:
    with Progress("encode", 0):
        pass
    assert capsys.readouterr().err == ""


def test_on_a_terminal_it_is_a_bar(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("encode", 3) as progress:
        progress.step(3)
    assert "100%" in capsys.readouterr().err


def test_quiet_says_nothing(capsys: Capture) -> None:
    with Progress("encode", 3, quiet=True) as progress:
        progress.step(3)
    assert capsys.readouterr().err == ""
