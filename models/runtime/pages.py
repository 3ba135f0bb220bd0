"""Weights, and what FAISS copies, in 2 MiB pages: read with fewer address look-ups.

    log.info(use_large_pages().to_text())

One query alone reads every weight once, and in pages of 4 KiB each of them costs a look-up of its
own, on a virtual machine two. Linux (6.1 on) can put the same memory into large pages afterwards,
`MADV_COLLAPSE`: nothing needs another allocator or a privilege. bench/LOG.md has what it gives.

Notable: only private memory is moved that is nearly all in use, so the process grows by next to
nothing and no thread's stack is filled up; files that are mapped stay as they are. Where the
system's own setting says `never`, or there is no such call, nothing happens.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hivlp.models.runtime.cgroups import read
from hivlp.models.stopping import go_on

LARGE = 2 << 20
LEAST = 4 * LARGE
USED = 0.9
"""Of a mapping so much is in use, or it stays as it is."""
PIECE = 32 * LARGE
COLLAPSE = 25
"""MADV_COLLAPSE; Python has no name for it."""
SETTING = Path("sys/kernel/mm/transparent_hugepage/enabled")
SMAPS = Path("proc/self/smaps")
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")


@dataclass(frozen=True, slots=True)
class Span:
    """Memory of this process: first address, address behind the last."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class LargePages:
    """How many bytes lie in large pages now, of how many that did not wholly."""

    moved: int
    tried: int
    seconds: float

    def to_text(self) -> str:
        """One line for a log."""
        moved, tried = (size / 2**20 for size in (self.moved, self.tried))
        return f"{moved:.0f} of {tried:.0f} MiB put into 2 MiB pages in {self.seconds:.1f} s"


def use_large_pages(*, root: Path = Path("/")) -> LargePages:
    """Move this process's large memory into large pages. Blocking, about 2.5 s a GiB.

    `root` is where /proc and /sys are found.
    """
    began, moved, tried = time.monotonic(), 0, 0
    if _allowed(root):
        for span in movable(read(root / SMAPS).splitlines()):
            for address in range(span.begin, span.end, PIECE):
                go_on()
                end = min(address + PIECE, span.end)
                tried += end - address
                moved += end - address if advise(address, end, COLLAPSE) else 0
    return LargePages(moved, tried, time.monotonic() - began)


def _allowed(root: Path) -> bool:
    """Whether the system has large pages and an administrator hasn't switched them off."""
    setting = read(root / SETTING)
    return bool(setting) and "[never]" not in setting


def movable(smaps: Iterable[str]) -> Iterator[Span]:
    """What of the mappings listed by /proc/self/smaps is worth moving, in whole large pages."""
    span: Span | None = None
    sizes: dict[str, int] = {}
    for line in [*smaps, "0-0 ---p 0 0 0"]:
        if (head := _HEAD.match(line)) is None:
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                sizes[name] = 1024 * int(words[0])
            continue
        if span is not None and _worth_it(span, sizes):
            yield _aligned(span)
        begin, end, mode, inode, name = head.groups()
        ours = mode == "rw-p" and inode == "0" and name in ("", "[heap]")
        span, sizes = (Span(int(begin, 16), int(end, 16)) if ours else None), {}


def _worth_it(span: Span, sizes: dict[str, int]) -> bool:
    inside = _aligned(span)
    size = inside.end - inside.begin
    if size < LEAST or sizes.get("Rss", 0) < USED * (span.end - span.begin):
        return False
    return sizes.get("AnonHugePages", 0) < size


def _aligned(span: Span) -> Span:
    return Span(-(-span.begin // LARGE) * LARGE, span.end // LARGE * LARGE)


def advise(begin: int, end: int, advice: int) -> bool:
    """`madvise` on this process's memory from `begin` to `end`; False where the system can't."""
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        return False
    span = ctypes.c_size_t(end - begin)
    return int(madvise(ctypes.c_void_p(begin), span, ctypes.c_int(advice))) == 0
