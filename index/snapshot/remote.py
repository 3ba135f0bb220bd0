"""A folder or an object store's prefix laid out as a store is: NAME/VERSION/ and NAME/CURRENT.

    remote = Remote.at("s3://bucket/indexes")
    remote.history("default")

Anything fsspec opens will do. What a client library raises, and each has exceptions of its own,
becomes a SnapshotError that names what was read or written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from hivlp.index.errors import SnapshotError, SnapshotMissing
from hivlp.index.remote import redacted, scrubbed
from hivlp.index.snapshot.durable import sync
from hivlp.index.snapshot.names import NAME_PATTERN, POINTER
from hivlp.index.snapshot.pointer import history_text, parse_history
from hivlp.models.artifact import FileRecord
from hivlp.models.errors import InputError, MissingExtra

BLOCK = 4 << 20
MOST_BYTES = 64 << 20
"""Of a pointer or a manifest from elsewhere."""
EXTRAS = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
}


class Remote:
    """Versions of indexes somewhere else. `url` is how it is named in errors, without secrets."""

    def __init__(self, files: Any, root: str, url: str) -> None:
        self._files, self._root = files, root.rstrip("/")
        self._given, self.url = url, redacted(url)

    @staticmethod
    def at(url: str) -> Remote:
        """What lies at a folder or URL. Raises InputError, MissingExtra."""
        protocol = url.partition("://")[0] if "://" in url else ""
        try:
            files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            if protocol in EXTRAS:
                raise MissingExtra(*EXTRAS[protocol]) from error
            raise _invalid(url, error) from None  # its own text may hold the URL's secrets
        except ValueError as error:
            raise _invalid(url, error) from None
        files.invalidate_cache()
        return Remote(files, root, url)

    def history(self, name: str) -> list[str]:
        """Activations of an index there, oldest first; empty where it has no pointer.

        Raises SnapshotError.
        """
        try:
            data = self.small(name, POINTER)
        except SnapshotMissing:
            return []
        try:
            return parse_history(data.decode())
        except ValueError as error:
            where = f"unreadable pointer in {self.url}: {error}"
            raise SnapshotError(name, POINTER, where) from error

    def names(self) -> list[str]:
        """Names of the indexes there, as far as that can be listed."""
        try:
            found = self._files.ls(self._root, detail=False)
        except Exception:
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return sorted(name for name in names if NAME_PATTERN.fullmatch(name))

    def blocks(self, name: str, *parts: str) -> Iterator[bytes]:
        """A file's bytes, some at a time. Raises SnapshotMissing, SnapshotError."""
        with self._said(name, parts):
            stream = self._files.open(self._path(name, *parts), "rb")
        with stream:
            while True:
                with self._said(name, parts):
                    block = stream.read(BLOCK)
                if not block:
                    return
                yield block

    def small(self, name: str, *parts: str) -> bytes:
        """All of a small file. Raises SnapshotMissing, SnapshotError; too large is one, too."""
        data = bytearray()
        for block in self.blocks(name, *parts):
            data += block
            if len(data) > MOST_BYTES:
                what = "/".join(parts)
                raise SnapshotError(name, parts[0], f"{what} has more than {MOST_BYTES} bytes")
        return bytes(data)

    def has(self, name: str, record: FileRecord, *parts: str) -> bool:
        """Whether a file of this size and content is there. Reads it where the size is right."""
        digest = hashlib.sha256()
        try:
            with self._said(name, parts):
                if self._files.size(self._path(name, *parts)) != record.size_bytes:
                    return False
            for block in self.blocks(name, *parts):
                digest.update(block)
        except SnapshotMissing:
            return False
        return digest.hexdigest() == record.sha256

    def put(self, source: Path, name: str, *parts: str) -> None:
        """Write a file there, in one step. Raises SnapshotError."""
        path = self._path(name, *parts)
        with self._said(name, parts):
            if isinstance(self._files, LocalFileSystem):
                _put_local(source, Path(path))
            else:
                self._files.put_file(str(source), path)

    def point(self, name: str, version: str) -> None:
        """Make a version the active one there. Raises SnapshotError."""
        history = [old for old in self.history(name) if old != version]
        text = history_text([*history, version]).encode()
        path = self._path(name, POINTER)
        with self._said(name, (POINTER,)):
            if isinstance(self._files, LocalFileSystem):
                _write_local(text, Path(path))
            else:
                self._files.pipe_file(path, text)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    @contextlib.contextmanager
    def _said(self, name: str, parts: Sequence[str]) -> Iterator[None]:
        """Name what was touched in what goes wrong."""
        what = "/".join((self.url.rstrip("/"), name, *parts))
        version = parts[0] if parts else "any"
        try:
            yield
        except FileNotFoundError as error:
            raise SnapshotMissing(name, version, f"{what} is missing") from error
        except Exception as error:  # every client library has its own
            said = scrubbed(error, self._given) or type(error).__name__
            raise SnapshotError(name, version, f"{what}: {said}") from error


def _invalid(url: str, error: Exception) -> InputError:
    text = f"{redacted(url)}: {scrubbed(error, url)}"
    return InputError("invalid_source", text, param="source")


def _put_local(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(source, temporary)
        _replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _write_local(data: bytes, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(data)
        _replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _replace(temporary: Path, target: Path) -> None:
    sync(temporary)
    temporary.replace(target)
    sync(target.parent)
