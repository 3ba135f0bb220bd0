"""When each stage of a request began and how long it took, so that overlap shows.

Times are seconds of `time.perf_counter`, counted from `origin`, the arrival of the request. Spans
are added from several threads; appending to a list is atomic.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Span:
    """One stage: `name` is cache, queue, decode, encode, filter, search, rerank, or metadata."""

    name: str
    level: int | None
    start_s: float
    end_s: float = 0.0
    candidates_in: int | None = None
    candidates_out: int | None = None

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


class Timeline:
    """The spans of one request."""

    def __init__(self, origin: float | None = None) -> None:
        self.origin = time.perf_counter() if origin is None else origin
        self.spans: list[Span] = []
        self.degraded: list[str] = []
        """Why the answer is less than what was asked for: deadline, rerank."""

    @contextmanager
    def measure(
        self, name: str, level: int | None = None, candidates_in: int | None = None
    ) -> Iterator[Span]:
        """Measure a block; a block that raises leaves no span."""
        span = Span(name, level, time.perf_counter(), candidates_in=candidates_in)
        yield span
        span.end_s = time.perf_counter()
        self.spans.append(span)

    def add(self, name: str, start_s: float, end_s: float, level: int | None = None) -> None:
        """A span measured elsewhere."""
        self.spans.append(Span(name, level, start_s, end_s))

    def has(self, name: str) -> bool:
        """Whether there is a span of this name."""
        return any(span.name == name for span in self.spans)

    def elapsed_ms(self) -> float:
        """Milliseconds since the request arrived."""
        return _ms(time.perf_counter() - self.origin)

    def as_stages(self) -> list[dict[str, Any]]:
        """The `stages` of an answer, by start."""
        return [
            {
                "name": span.name,
                "level": span.level,
                "start_ms": _ms(span.start_s - self.origin),
                "duration_ms": _ms(span.duration_s),
                "candidates_in": span.candidates_in,
                "candidates_out": span.candidates_out,
            }
            for span in sorted(self.spans, key=lambda span: span.start_s)
        ]


def overlap_saved_s(spans: Sequence[Span]) -> float:
    """Seconds during which encoding and searching went on at once: what running in turn adds."""
    encoding = [span for span in spans if span.name == "encode"]
    searching = [span for span in spans if span.name == "search"]
    return sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
        for a in encoding
        for b in searching
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
