"""Text files of a corpus, line by line: UTF-8, plain or gzip, no line longer than a limit."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, TextIO, cast

from hivlp.index.build.readers.files import Files
from hivlp.index.errors import CorpusError

MAX_LINE_CHARS = 64 * 2**20
# What `surrogateescape` makes of bytes that are not UTF-8; JSON's own escapes are still escaped.
NOT_UTF8 = re.compile("[\udc80-\udcff]")
UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file may raise, compressed or not."""


class LongLine(Exception):
    """A line over the limit; what follows it can still be read."""


@contextmanager
def open_text(files: Files, name: str, newline: str | None = None) -> Iterator[TextIO]:
    """UTF-8, with or without a byte order mark; bytes that are not become half characters.

    Raises CorpusError for a file that can't be opened.
    """
    try:
        stream = files.open(name)
    except OSError as error:
        raise CorpusError(str(name), f"unreadable: {error}") from error
    with stream:
        packed = name.lower().endswith(".gz")
        opened = cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if packed else stream
        yield io.TextIOWrapper(opened, "utf-8-sig", "surrogateescape", newline)


def bounded_lines(stream: TextIO) -> Iterator[str | LongLine]:
    """The lines of a text; in place of one over MAX_LINE_CHARS, a LongLine."""
    while line := stream.readline(MAX_LINE_CHARS):
        if len(line) < MAX_LINE_CHARS or line.endswith("\n"):
            yield line
            continue
        while (rest := stream.readline(MAX_LINE_CHARS)) and not rest.endswith("\n"):
            pass
        yield LongLine(f"a line of more than {MAX_LINE_CHARS} characters")
