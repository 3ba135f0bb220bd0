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
from urllib.parse import unquote

from hivlp.index.errors import CorpusError

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
HOST = re.compile(r"[^:@]*(:[0-9]*)?|\[[^@]*\](:[0-9]*)?")
WEB_QUERY, QUERY = re.compile(r"\?."), re.compile(r"\?[^/?]*=")
"""Where a query begins: elsewhere than on the web `?` is a wildcard, unless a `=` follows."""
SHORT = 4
"""Parts of secrets from this length on are looked for in what clients say."""
WEB = ("http://", "https://")
ODD = re.compile(r"[?#\\\x00-\x1f\x7f]")
"""What a client for the web cuts a path at, turns into a slash, or drops."""
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


def redacted(url: str) -> str:
    """A URL without what it may hold of secrets, its user and its query, for errors and manifests.

    A path is returned as it is.
    """
    user, rest, query = _parts(url)
    scheme = url[: len(url) - len(user) - len(rest) - len(query)]
    return scheme + ("...@" if user else "") + rest + ("?..." if query else "")


def scrubbed(text: object, url: str) -> str:
    """What a client says of a URL, without the URL's secrets."""
    found = str(text)
    user, _, query = _parts(url)
    for secret in (user.removesuffix("@"), query.removeprefix("?")):
        for part in (secret, *(part for part in re.split("[:&=]", secret) if len(part) >= SHORT)):
            found = found.replace(part, "...").replace(unquote(part), "...") if part else found
    return found


def _parts(url: str) -> tuple[str, str, str]:
    """What follows a URL's scheme: the user with its @, host and path, the query with its ?.

    A password may hold what should have been quoted, as a slash.
    """
    scheme = URL.match(url)
    if scheme is None:
        return "", url, ""
    rest = url[scheme.end() :]
    authority = re.split("[/?#]", rest)[0]
    end = authority.rfind("@") + 1
    if not end and not HOST.fullmatch(authority):  # no port: a password that goes on
        end = rest.rfind("@") + 1
    user, rest = rest[:end], rest[end:]
    query = (WEB_QUERY if scheme[0].lower() in WEB else QUERY).search(rest)
    cut = len(rest) if query is None else query.start()
    return user, rest[:cut], rest[cut:]


def below(root: str, given: str) -> str:
    """The path of `given` below the URL `root`, in normal form. Raises ValueError if it leads out.

    `given` is a path relative to the root, or a URL that begins with it. What it means is told
    with every %XX decoded, as a client or a server may do it: what then has `..` leads out. Below
    http and https, where `?` and `#` end a path, names with these are refused too.
    """
    home = root.rstrip("/") + "/"
    rest = given.removeprefix(home)
    if is_url(rest) or "\0" in rest:
        raise ValueError("is not a path of this corpus; nothing is fetched")
    normal = posixpath.normpath(rest)
    decoded = _decoded(normal)
    if normal.startswith("/") or normal == "." or ".." in re.split(r"[/\\]", decoded):
        raise ValueError("leaves the corpus")
    if root.lower().startswith(WEB) and (odd := ODD.search(decoded)):
        raise ValueError(f"holds {odd[0]!r}, which a web address reads as something else")
    return normal


def _decoded(text: str) -> str:
    """Without %XX, however often it was quoted."""
    while (once := unquote(text)) != text:
        text = once
    return text


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
        raise CorpusError(redacted(url), "chained URLs are not read")
    user, _, query = _parts(url)
    if user or query:
        raise CorpusError(redacted(url), "holds a user, a password or a query, which the manifest "
                          "would show; use the settings of the file system instead")  # fmt: skip


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
