"""What a command tells the program that started it, and a SIGTERM as an orderly way out."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from hivlp.index.errors import BuildError
from hivlp.index.journal import journal
from hivlp.models.runtime.progress import Progress, begin
from hivlp.models.runtime.stopping import Terminated, ending_on_sigterm


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_and_the_result_are_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "told"
    with journal(file) as told:
        begin("check")
        told.done(snapshot="v", items=3)
    steps = [line["step"] for line in lines(file)[:-1]]
    assert steps == ["check"]
    assert lines(file)[-1] == {"result": "done", "snapshot": "v", "items": 3}


def test_a_line_is_there_as_soon_as_it_is_told(tmp_path: Path) -> None:
    file = tmp_path / "told"
    with journal(file), Progress("encode", 2, quiet=True):
        assert lines(file)[0]["step"] == "encode"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BuildError("no item is left"), "no item is left"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (MemoryError(), "out of memory: no more could be had"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_what_is_raised_is_told_and_goes_on(tmp_path: Path, error: Exception, reason: str) -> None:
    file = tmp_path / "told"
    with pytest.raises(type(error)), journal(file):
        raise error
    assert lines(file) == [{"result": "failed", "reason": reason}]


def test_a_reader_that_has_gone_ends_the_telling_and_not_the_work() -> None:
    read, write = os.pipe()
    with journal(Path(f"/dev/fd/{write}")) as told:
        os.close(read)
        for _ in range(3):
            begin("check")
        told.done()
    os.close(write)


def test_a_full_disk_ends_the_telling_and_not_the_work() -> None:
    with journal(Path("/dev/full")) as told:
        begin("check")
        told.done()


def test_no_file_is_no_telling() -> None:
    with journal(None) as told:
        begin("check")
        told.done()


def test_sigterm_lets_go_of_what_was_begun_and_a_second_one_does_not_disturb(
    tmp_path: Path,
) -> None:
    before, let_go = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with ending_on_sigterm(), journal(tmp_path / "told"):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                let_go.append(True)

    with pytest.raises(Terminated):
        work()
    assert let_go
    assert lines(tmp_path / "told") == [{"result": "interrupted"}]
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_leaves_the_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with ending_on_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
