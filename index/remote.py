"""Files behind a URL, by fsspec: s3://, gs://, memory:// and whatever else it opens.

A remote corpus has a URL for a root. Everything below it is named by a path in normal form, and a
name that leads out is refused by its letters alone: there are no links to follow. Whatever a file
system raises becomes an OSError or a CorpusError that names the URL.
"""

from __future__ import annotations

import errno
import io
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from hivlp.index.errors import CorpusError

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
LOCAL = frozenset({"file", "local"})
BUFFER = 2**20
STAMPS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "updated", "mtime", "created")
"""Where file systems keep what changes with a file; the first that there is."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def is_url(text: str) -> bool:
    """Whether a text names something behind a URL rather than a path."""
    return URL.match(text) is not None


def local_path(url: str) -> str | None:
    """The path of a URL that names a local file, or None."""
    found = URL.match(url)
    return url[found.end() :] if found and found[1].lower() in LOCAL else None


def below(root: str, given: str) -> str:
    """The path of `given` below the URL `root`, in normal form. Raises ValueError if it leads out.

    `given` is a path relative to the root, or a URL that begins with it.
    """
    home = root.rstrip("/") + "/"
    rest = given.removeprefix(home)
    if is_url(rest) or "\0" in rest:
        raise ValueError("is not a path of this corpus; nothing is fetched")
    normal = posixpath.normpath(rest)
    if normal.startswith(("/", "../")) or normal in ("..", "."):
        raise ValueError("leaves the corpus")
    return normal


class RemoteFolder:
    """What lies below one URL. Each call may raise OSError; the making, CorpusError.

    File systems are kept by fsspec, one a thread, so an object is cheap and may be shared.
    """

    def __init__(self, url: str) -> None:
        _check(url)
        self.url = url.rstrip("/")
        self._files()

    def _files(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs  # a tenth of a second, and mostly not needed

        scheme = self.url.partition("://")[0].lower()
        try:
            with _translated(self.url):
                files, path = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            extra = EXTRAS.get(scheme)
            how = f"; pip install 'hivlp[{extra}]'" if extra else ""
            raise CorpusError(self.url, f"can't be opened: {error}{how}") from error
        except OSError as error:
            raise CorpusError(self.url, f"can't be opened: {error}") from error
        return files, str(path).rstrip("/")

    def _place(self, name: str) -> tuple[Any, str]:
        files, path = self._files()
        return files, f"{path}/{name}" if name else path or "/"

    def info(self, name: str = "") -> dict[str, Any]:
        """fsspec's info: `type` (file or directory), `size`, and what else the system knows."""
        files, path = self._place(name)
        with _translated(f"{self.url}/{name}"):
            return cast("dict[str, Any]", files.info(path))

    def stamp(self, name: str) -> tuple[int, str]:
        """Bytes of a file, and a text that changes when the file does, where the system has one."""
        info = self.info(name)
        if info.get("type") != "file" or info.get("size") is None:
            raise OSError(f"{self.url}/{name}: not a file of a known size")
        marks = (str(info[key]) for key in STAMPS if info.get(key))
        return int(info["size"]), next(marks, "")

    def listing(self, name: str = "") -> list[tuple[str, bool]]:
        """Name and whether it is a folder, of everything directly in a folder; asked for anew."""
        files, path = self._place(name)
        with _translated(f"{self.url}/{name}"):
            files.invalidate_cache(path)
            entries = files.ls(path, detail=True)
        own = path.strip("/")
        found = ((str(e["name"]).strip("/"), e["type"] == "directory") for e in entries)
        return [(posixpath.basename(n), folder) for n, folder in found if n and n != own]

    def glob(self, pattern: str) -> list[str]:
        """Files that match a pattern, as paths below the URL, sorted."""
        files, path = self._place(pattern)
        home = self._place("")[1].strip("/") + "/"
        with _translated(f"{self.url}/{pattern}"):
            files.invalidate_cache()
            return sorted(str(name).strip("/").removeprefix(home) for name in files.glob(path))

    def open(self, name: str) -> BinaryIO:
        """A file to read, seekable, buffered."""
        files, path = self._place(name)
        where = f"{self.url}/{name}"
        with _translated(where):
            opened = files.open(path, "rb")
        return cast(BinaryIO, io.BufferedReader(_Raw(opened, where), BUFFER))

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer where the file ends."""
        files, path = self._place(name)
        with _translated(f"{self.url}/{name}"):
            return bytes(files.cat_file(path, start=offset, end=offset + size))


class _Raw(io.RawIOBase):
    """A file of fsspec whose errors are all OSErrors: drivers raise what their clients do."""

    def __init__(self, opened: Any, where: str) -> None:
        self._opened = opened
        self._where = where

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._opened.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        with _translated(self._where):
            return int(self._opened.seek(offset, whence))

    def tell(self) -> int:
        return int(self._opened.tell())

    def readinto(self, buffer: Any) -> int:
        with _translated(self._where):
            data = self._opened.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._opened.close()
        super().close()


def _check(url: str) -> None:
    """Raises CorpusError for a URL that can't be a root."""
    if "::" in url:
        raise CorpusError(url, "chained URLs are not read")
    user = urlsplit(url).netloc.rpartition("@")[0]
    if ":" in user:
        hidden = url.replace(f"{user}@", "...@")
        raise CorpusError(hidden, "holds a password, which the manifest would show; use the "
                                  "settings of the file system instead")  # fmt: skip


@contextmanager
def _translated(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:  # of some systems, its text is the path and no more
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", where) from error
    except (OSError, ImportError, ValueError):
        raise
    except Exception as error:  # clients of object stores have errors of their own
        raise OSError(f"{where}: {type(error).__name__}: {error}") from error
