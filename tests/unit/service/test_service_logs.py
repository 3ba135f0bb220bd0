"""Logs: one record a line whatever is in it, the request it belongs to, and never a key."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hivlp.service import logs
from hivlp.service.logs import REQUEST_ID, JsonLines, LineHandler, TextLines
from hivlp.service.watch_settings import LogSettings

NASTY = 'a\nERROR root: forged\r\x1b[31m\u2028"}\x00 \ud83d {"level": "info"}'


def record(message: str, *arguments: object, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("hivlp.test", logging.INFO, __file__, 1, message, arguments, None)
    made.__dict__.update(logs.with_fields(fields))
    return made


def failed() -> logging.LogRecord:
    made = record("it failed")
    try:
        raise ValueError(NASTY)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


@contextmanager
def handling(max_waiting: int = 100) -> Iterator[tuple[LineHandler, io.BytesIO]]:
    stream = io.BytesIO()
    handler = LineHandler(stream, max_waiting)
    handler.setFormatter(JsonLines())
    yield handler, stream
    handler.close()


@pytest.mark.parametrize("made", [record("%s", NASTY), record("x", query=NASTY), failed()])
def test_whatever_is_in_a_record_it_is_one_line_of_json(made: logging.LogRecord) -> None:
    line = JsonLines().format(made)
    assert line.isascii() or line.isprintable()
    assert line.splitlines() == [line]
    assert json.loads(line)["level"] == "info"
    assert "forged" in line


@pytest.mark.parametrize("made", [record("%s", NASTY), record("x", query=NASTY), failed()])
def test_as_text_nothing_in_a_record_can_be_taken_for_another(made: logging.LogRecord) -> None:
    first, *more = TextLines().format(made).split("\n")
    assert first.startswith("INFO hivlp.test: ")
    assert all(line.startswith("  ") for line in more)
    assert all(line.isprintable() for line in (first, *more))


def test_a_record_says_when_who_and_what() -> None:
    made = record("index %s", "default", took_ms=1.5)
    made.created = 1_796_031_000.25
    line = json.loads(JsonLines().format(made))
    assert line == {
        "time": "2026-11-30T09:30:00.250Z",
        "level": "info",
        "logger": "hivlp.test",
        "process": os.getpid(),
        "message": "index default",
        "took_ms": 1.5,
    }
    assert TextLines().format(made) == "INFO hivlp.test: index default took_ms=1.5"


def test_a_traceback_is_told_in_both_forms() -> None:
    assert "ValueError" in json.loads(JsonLines().format(failed()))["exception"]
    assert "\n  Traceback (most recent call last):" in TextLines().format(failed())


def test_what_two_requests_log_at_once_carries_the_id_of_each() -> None:
    lines: list[str] = []

    async def one(request_id: str) -> None:
        REQUEST_ID.set(request_id)
        await asyncio.sleep(0)
        lines.append(JsonLines().format(record(f"from {request_id}")))

    async def both() -> None:
        await asyncio.gather(asyncio.create_task(one("a")), asyncio.create_task(one("b")))

    asyncio.run(both())
    for line in map(json.loads, lines):
        assert line["message"] == f"from {line['request_id']}"
    assert "request_id" not in json.loads(JsonLines().format(record("outside")))


def test_lines_are_written_in_order_by_a_thread_of_their_own() -> None:
    with handling() as (handler, stream):
        for number in range(20):
            handler.handle(record("%d", number))
        handler.close()
        said = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert said == [str(number) for number in range(20)]


class Stuck(io.BytesIO):
    """A pipe that nobody empties, until told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def write(self, data: Any) -> int:
        self.entered.set()
        assert self.go_on.wait(30)
        return super().write(data)


def test_a_pipe_that_nobody_empties_stops_nothing_and_what_was_dropped_is_counted() -> None:
    stream = Stuck()
    handler = LineHandler(stream, max_waiting=2)
    handler.setFormatter(JsonLines())
    handler.handle(record("first"))
    assert stream.entered.wait(30)
    for number in range(5):  # returns, though nothing is written
        handler.handle(record("%d", number))
    assert handler.dropped == 3
    stream.go_on.set()
    handler.flush()
    handler.handle(record("last"))
    handler.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["first", "0", "1", "last"]
    assert lines[-1]["log_lines_dropped"] == 3


def test_a_stream_that_is_closed_ends_no_request() -> None:
    with handling() as (handler, stream):
        stream.close()
        handler.handle(record("to nobody"))
        handler.handle(record("nor this"))


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The logging of this process as it was, afterwards."""
    root = logging.getLogger()
    names = [*logs.OTHERS, logs.OWN]
    levels = {name: logging.getLogger(name).level for name in names}
    handlers, hook = root.handlers[:], threading.excepthook
    uvicorn = logging.getLogger("uvicorn")  # other tests let it configure itself
    propagated, uvicorn.propagate = uvicorn.propagate, True
    yield root
    uvicorn.propagate = propagated
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        if handler not in handlers:
            handler.close()
    for handler in handlers:
        root.addHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(False)
    threading.excepthook = hook


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def said_by(settings: LogSettings, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", (Terminal if terminal else io.TextIOWrapper)(raw))
    handler = logs.set_up(settings)
    logging.getLogger("hivlp.service").info("ours")
    logging.getLogger("uvicorn.error").warning("the server's")
    logging.getLogger("uvicorn.error").info("the server's chatter")
    logging.getLogger("python_multipart.multipart").debug("what someone sent")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("beware\nof this", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0, name="worker-7")
    thread.start()
    thread.join()
    handler.close()
    return raw.getvalue().decode()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_that_is_said_goes_one_way_as_json_where_no_terminal_is(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_by(LogSettings(level="debug"), monkeypatch, terminal=False)
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["logger"] for line in lines] == [
        "hivlp.service",
        "uvicorn.error",
        "py.warnings",
        "hivlp.service",
    ]
    assert "beware\nof this" in lines[2]["message"]
    assert lines[3]["message"] == "thread worker-7 ended"
    assert "ZeroDivisionError" in lines[3]["exception"]
    assert "what someone sent" not in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_terminal_gets_text_and_a_setting_goes_before_both(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_by(LogSettings(), monkeypatch, terminal=True)
    assert said.startswith("INFO hivlp.service: ours\n")
    said = said_by(LogSettings(format="json", level="error"), monkeypatch, terminal=True)
    assert json.loads(said.splitlines()[0])["logger"] == "uvicorn.error"


def test_nothing_of_the_package_logs_without_a_name_of_its_own() -> None:
    """Its level is set by name: a logger outside `hivlp` would not hear of it."""
    folder = Path(logs.__file__).parent
    for path in folder.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "getLogger(__name__)" not in source, path
        assert "logging.info(" not in source, path


class Counting(io.RawIOBase):
    """A pipe that notes each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.writes.append(bytes(data))
        return len(data)


def test_each_line_is_a_write_of_its_own_so_that_processes_do_not_mix_theirs() -> None:
    pipe = Counting()
    handler = LineHandler(io.BufferedWriter(pipe))  # as standard error is
    handler.setFormatter(JsonLines())
    for number in range(50):
        handler.handle(record("%s", "x" * 100 * (number % 40)))
    handler.close()
    assert len(pipe.writes) == 50
    assert all(write.count(b"\n") == 1 and write.endswith(b"\n") for write in pipe.writes)
