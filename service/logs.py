"""Logs: one record is one line, whatever is in it, for programs (JSON) or for a terminal (text).

The request that a record belongs to travels in a context variable. Lines are formatted where they
are logged and written by a thread of their own: a pipe that nobody empties must not stop the event
loop, so lines that don't fit into the queue are dropped, and counted in the next that does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import sys
import threading
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Any, BinaryIO

import orjson

from hivlp.service.watch_settings import LogSettings

REQUEST_ID: ContextVar[str | None] = ContextVar("hivlp_request_id", default=None)
"""The request that is being answered here, if any is."""

OWN = "hivlp"
# Heard from these levels on, whatever ours is. The multipart parser warns of every broken form,
# which anyone can send (the sender is told), and at DEBUG it and others log what was sent.
OTHERS = {"": logging.WARNING, "faiss": logging.WARNING, "python_multipart": logging.ERROR}
MAX_WAITING = 10_000
CLOSE_S = 2.0
# What could end a line, start another, or steer a terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


def with_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The `extra` of a record that says more than its message, each thing under its own name."""
    return {"fields": fields}


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, process, message, request_id, and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; it never holds a line end."""
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line["request_id"] = request_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        try:
            return orjson.dumps(line, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()
        except TypeError:  # half a surrogate pair, from a file's name for one
            return json.dumps(line, default=str, ensure_ascii=True)


class TextLines(logging.Formatter):
    """`LEVEL logger: message key=value ...`; the lines of a traceback are indented below."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text: one line, or further ones that can't be taken for records."""
        fields = dict(getattr(record, "fields", {}))
        request_id = REQUEST_ID.get()
        if request_id is not None:
            fields.setdefault("request_id", request_id)
        parts = [f"{record.levelname} {record.name}: {_escaped(record.getMessage())}"]
        parts += [f"{name}={_value(value)}" for name, value in fields.items()]
        lines = [" ".join(parts)]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if record.stack_info:
            lines += record.stack_info.splitlines()
        return "\n  ".join([lines[0], *map(_escaped, lines[1:])])


class LineHandler(logging.Handler):
    """Hands lines to a thread that writes them; never waits."""

    def __init__(self, stream: BinaryIO, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(max_waiting)
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Format the record and queue it. Called under the handler's lock."""
        try:
            if self.dropped:
                record = _with_dropped(record, self.dropped)
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="hivlp-log", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.dropped += 1
        else:
            self.dropped = 0

    def flush(self) -> None:
        """Wait until what was queued is written, for a few seconds at most."""
        waiting = self._waiting
        with waiting.all_tasks_done:
            waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, CLOSE_S)

    def close(self) -> None:
        """Write what waits, for a few seconds at most. The logging module calls this at exit."""
        with self.lock or contextlib.nullcontext():
            thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
                thread.join(CLOSE_S)
        super().close()

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            # Where nobody reads any more, there is nobody to tell. A line is one write: processes
            # that share a pipe don't mix theirs, up to what a pipe takes whole (4 kB).
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(line.encode("utf-8", "backslashreplace") + b"\n")
                self._stream.flush()
            self._waiting.task_done()


def set_up(settings: LogSettings) -> logging.Handler:
    """Send all logs, warnings and threads' last words to standard error. Once a process."""
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    handler = LineHandler(sys.stderr.buffer)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    for name, level in OTHERS.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger(OWN).setLevel(settings.level.upper())
    logging.captureWarnings(True)
    threading.excepthook = _log_thread
    return handler


def _log_thread(told: threading.ExceptHookArgs) -> None:
    """A thread that ends by an exception is a record like all others."""
    if told.exc_value is None or isinstance(told.exc_value, SystemExit):
        return
    what: tuple[type[BaseException], BaseException, TracebackType | None] = (
        told.exc_type,
        told.exc_value,
        told.exc_traceback,
    )
    name = "a thread" if told.thread is None else f"thread {told.thread.name}"
    logging.getLogger("hivlp.service").critical("%s ended", name, exc_info=what)


def _with_dropped(record: logging.LogRecord, dropped: int) -> logging.LogRecord:
    told = logging.makeLogRecord(record.__dict__)
    told.__dict__["fields"] = {**getattr(record, "fields", {}), "log_lines_dropped": dropped}
    return told


def _utc(seconds: float) -> str:
    millis = int(seconds * 1e3) % 1000
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{millis:03d}Z"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=True)
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:
        return json.dumps(value, default=str, ensure_ascii=True)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
