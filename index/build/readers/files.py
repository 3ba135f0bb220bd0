"""Where the files of a corpus lie: a local folder or a URL, read in the same few ways."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import BinaryIO, Protocol

from hivlp.index.errors import CorpusError
from hivlp.index.pictures import Root
from hivlp.index.remote import RemoteFolder


class Files(Protocol):
    """Files by their path below `root`, in POSIX form."""

    @property
    def root(self) -> Root:
        """The folder, or its URL."""

    def open(self, name: str) -> BinaryIO:
        """A file to read, seekable. Raises OSError."""

    def is_file(self, name: str) -> bool:
        """Whether there is such a file. Raises OSError where that can't be known."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises OSError for what is none."""

    def listing(self, folder: str = "") -> list[tuple[str, bool]]:
        """Name and whether it is a folder, of everything in one; no order. Raises CorpusError."""

    def glob(self, pattern: str) -> list[str]:
        """Files that match, sorted. Raises CorpusError."""


def files_at(root: Root) -> Files:
    """The files below a folder or a URL. Raises CorpusError for a URL that nothing opens."""
    return RemoteFiles(root) if isinstance(root, str) else LocalFiles(root)


def files_below(files: Files, folder: str = "") -> Iterator[tuple[str, AbstractSet[str]]]:
    """Every file at any depth, in the order of whole paths, and the names beside it in its folder.

    Hidden files and folders are passed over. In memory are the listings of one folder and of those
    above it. Raises CorpusError.
    """
    listing = [entry for entry in files.listing(folder) if not entry[0].startswith(".")]
    names = {name for name, is_folder in listing if not is_folder}
    for name in sorted(f"{name}/" if is_folder else name for name, is_folder in listing):
        if name.endswith("/"):
            yield from files_below(files, folder + name)
        else:
            yield folder + name, names


class LocalFiles:
    """Files below a local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, name: str) -> BinaryIO:
        """A file to read."""
        return (self.root / name).open("rb")

    def is_file(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.root / name).is_file()

    def size(self, name: str) -> int:
        """Bytes of a file."""
        found = (self.root / name).stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{self.root / name}: not a file")
        return found.st_size

    def listing(self, folder: str = "") -> list[tuple[str, bool]]:
        """Entries of a folder; a link to one is no folder, so that links can't run in circles."""
        path = self.root / folder if folder else self.root
        try:
            with os.scandir(path) as entries:
                return [(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
        except OSError as error:
            raise CorpusError(str(path), f"unreadable: {error.strerror}") from error

    def glob(self, pattern: str) -> list[str]:
        """Files that match."""
        found = glob.iglob(pattern, root_dir=self.root, recursive=True)  # noqa: PTH207  no hidden ones
        return sorted(name for name in found if (self.root / name).is_file())


class RemoteFiles:
    """Files below a URL."""

    def __init__(self, url: str) -> None:
        self._folder = RemoteFolder(url)
        self.root: Root = self._folder.url

    def open(self, name: str) -> BinaryIO:
        """A file to read."""
        return self._folder.open(name)

    def is_file(self, name: str) -> bool:
        """Whether there is such a file."""
        try:
            return bool(self._folder.info(name)["type"] == "file")
        except FileNotFoundError:
            return False

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self._folder.stamp(name)[0]

    def listing(self, folder: str = "") -> list[tuple[str, bool]]:
        """Entries of a folder."""
        try:
            return self._folder.listing(folder.rstrip("/"))
        except OSError as error:
            raise CorpusError(f"{self.root}/{folder}", f"unreadable: {error}") from error

    def glob(self, pattern: str) -> list[str]:
        """Files that match."""
        try:
            return self._folder.glob(pattern)
        except OSError as error:
            raise CorpusError(f"{self.root}/{pattern}", f"unreadable: {error}") from error
