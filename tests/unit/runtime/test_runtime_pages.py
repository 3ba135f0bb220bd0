"""Large pages: which memory is moved, that it stays what it was, and who may forbid it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from hivlp.models.runtime.pages import (
    COLLAPSE,
    LARGE,
    SETTING,
    SMAPS,
    Span,
    movable,
    use_large_pages,
)

MIB = 1 << 20


def mapping(begin: int, mib: int, *, mode: str = "rw-p", file: str = "", **sizes: int) -> str:
    """One entry of /proc/self/smaps; sizes in MiB, all in use unless said."""
    inode = 7 if file and not file.startswith("[") else 0
    told = {"Size": mib, "Rss": mib, "AnonHugePages": 0, **sizes}
    lines = [f"{begin:x}-{begin + mib * MIB:x} {mode} 00000000 fe:00 {inode}    {file}".rstrip()]
    lines += [f"{name}: {value * 1024:>10} kB" for name, value in told.items()]
    return "\n".join([*lines, "VmFlags: rd wr mr mw me"]) + "\n"


def found(*mappings: str) -> list[Span]:
    return list(movable("".join(mappings).splitlines()))


def test_large_private_memory_is_moved_in_whole_large_pages() -> None:
    begin = 5 * LARGE + 4096
    spans = found(mapping(begin, 64), mapping(1 << 40, 16, file="[heap]"))
    assert spans == [
        Span(6 * LARGE, (begin + 64 * MIB) // LARGE * LARGE),
        Span(1 << 40, (1 << 40) + 16 * MIB),
    ]


def test_what_would_gain_nothing_or_grow_stays() -> None:
    base = 1 << 40
    assert not found(
        mapping(base, 4),  # small
        mapping(base, 64, Rss=8),  # a thread's stack: hardly any of it in use
        mapping(base, 64, AnonHugePages=64),  # there already
        mapping(base, 64, mode="r--p"),
        mapping(base, 64, mode="rw-s"),
        mapping(base, 64, file="/srv/index/level1.faiss"),
        mapping(base, 64, file="[stack]"),
    )


def without_large_pages() -> str | None:
    """Why this system has none, or too old a kernel to put memory into them."""
    setting = "/" / SETTING
    if not setting.is_file() or "[never]" in setting.read_text():
        return f"{setting} is not there or says never"
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    return f"Linux {release} is older than 6.1" if numbers < (6, 1) else None


def refused(address: int, size: int) -> str | None:
    """Why the system, asked by ourselves, has no large pages for some memory just now."""
    libc = ctypes.CDLL(None, use_errno=True)
    begin = -(-address // LARGE) * LARGE
    span = (address + size) // LARGE * LARGE - begin
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(span), COLLAPSE) == 0:
        return None
    number = ctypes.get_errno()
    short = number in (errno.EAGAIN, errno.ENOMEM, errno.EBUSY)
    return f"no memory in large pieces: {os.strerror(number)}" if short else None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")
def test_memory_is_moved_and_stays_what_it_was() -> None:
    if (reason := without_large_pages()) is not None:
        pytest.skip(reason)
    size = 32 * MIB
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # where they are always given, it would have them already
    rows = np.frombuffer(memory, np.int64)
    rows[:] = np.arange(len(rows))
    memory.madvise(mmap.MADV_HUGEPAGE)
    done = use_large_pages()
    if not done.moved and (reason := refused(rows.ctypes.data, size)) is not None:
        pytest.skip(reason)
    assert 0 < done.moved <= done.tried
    assert np.array_equal(rows, np.arange(len(rows)))
    assert f"of {done.tried / MIB:.0f} MiB" in done.to_text()


def test_a_system_without_large_pages_or_that_forbids_them_is_left_alone(tmp_path: Path) -> None:
    smaps = tmp_path / SMAPS
    smaps.parent.mkdir(parents=True)
    smaps.write_text(mapping(1 << 40, 64))
    assert use_large_pages(root=tmp_path).tried == 0
    setting = tmp_path / SETTING
    setting.parent.mkdir(parents=True)
    setting.write_text("always madvise [never]\n")
    assert use_large_pages(root=tmp_path).tried == 0


def test_memory_that_cannot_be_moved_is_no_error(tmp_path: Path) -> None:
    for name, text in ((SMAPS, mapping(1 << 40, 64)), (SETTING, "always [madvise] never\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = use_large_pages(root=tmp_path)  # nothing is mapped at that address
    assert (done.moved, done.tried) == (0, 64 * MIB)
