"""What doesn't fit in memory while a version is written: kept in a nameless file, read by place.

The file has no name, so nothing is left behind, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Span:
    """Where something lies in the file, in bytes."""

    offset: int
    size: int


class Scratch:
    """A nameless file in `folder`; only ever appended to. For one thread. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by __exit__
        self._size = 0
        self._flushed = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the space back. Closing twice is fine."""
        self._file.close()

    def append(self, data: Any) -> Span:
        """Keep some bytes (anything with the buffer protocol)."""
        size = memoryview(data).nbytes
        self._file.write(data)
        span = Span(self._size, size)
        self._size += size
        return span

    def read(self, span: Span) -> bytes:
        """What was kept there."""
        if span.offset + span.size > self._flushed:
            self._file.flush()
            self._flushed = self._size
        data = os.pread(self._file.fileno(), span.size, span.offset)
        if len(data) != span.size:
            raise OSError(f"{len(data)} bytes of {span.size} came back from a temporary file")
        return data

    def append_array(self, array: npt.NDArray[Any]) -> Span:
        """Keep a flat array."""
        return self.append(np.ascontiguousarray(array).data)

    def read_array(self, span: Span, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A flat array that was kept, read-only."""
        return np.frombuffer(self.read(span), dtype=dtype)
