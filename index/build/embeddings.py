"""The embedding cache: what was encoded once in a gallery space is never encoded again.

Pictures' token states, where they are kept for a re-ranker, are cached in the same way in
`cache/states/<states_space>.sqlite`, as float16.

One SQLite file per gallery space, `cache/embeddings/<gallery_space>.sqlite`, with the table
`vectors(key BLOB PRIMARY KEY, numbers BLOB)`: the key is the sha256 of the modality, a zero byte
and the content (a picture file's bytes, a cleaned text's UTF-8); the numbers are float32,
little-endian, the gallery levels of the item one after the other. Committed batch by batch, so an
interrupted build goes on where it stopped. What `forget` takes out is in no file afterwards:
deleted cells are overwritten (`secure_delete`), and the file is written anew, since cells that
SQLite once moved or let go may have left copies in free space.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from hivlp.index.errors import BuildError
from hivlp.models.levels import FloatArray, Modality

FOLDER, STATES_FOLDER = "embeddings", "states"
"""Below the state folder's `cache`: of vectors, and of pictures' token states."""
LOOKUP = 500
WAIT_S = 60.0


def content_key(modality: Modality, content: bytes) -> bytes:
    """32 bytes that name a content of a modality."""
    return hashlib.sha256(modality.encode() + b"\0" + content).digest()


class NumberCache:
    """`width` numbers of a `kind` by key. For one thread; several builds may share the file."""

    kind: ClassVar[str]

    def __init__(self, folder: Path, gallery_space: str, width: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{gallery_space}.sqlite"
        self._width = width
        try:
            self._base = sqlite3.connect(self.path, timeout=WAIT_S)
            self._base.execute("PRAGMA secure_delete = ON")
            self._base.execute(
                "CREATE TABLE IF NOT EXISTS vectors(key BLOB PRIMARY KEY, numbers BLOB NOT NULL)"
                " WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise BuildError(f"{self.path}: the embedding cache can't be used: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._base.close()

    @property
    def row_bytes(self) -> int:
        """Of one entry's numbers."""
        return np.dtype(self.kind).itemsize * self._width

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those keys that are not there, in order, each once."""
        there: set[bytes] = set()
        for part in _parts(keys):
            there.update(key for key, _ in self._select("key, 1", part))
        return [key for key in dict.fromkeys(keys) if key not in there]

    def _rows(self, keys: Sequence[bytes]) -> npt.NDArray[Any]:
        """(n, width) in the order of `keys`. Raises BuildError for one that is absent."""
        found = {}
        for part in _parts(keys):
            found.update(dict(self._select("key, numbers", part)))
        try:
            blob = b"".join(found[key] for key in keys)
        except KeyError as error:
            raise BuildError(f"{self.path}: an embedding is gone; run the build again") from error
        if len(blob) != self.row_bytes * len(keys):
            raise BuildError(f"{self.path}: vectors of another width; remove this file")
        return np.frombuffer(blob, dtype=self.kind).reshape(len(keys), self._width)

    def put(self, keys: Iterable[bytes], vectors: npt.NDArray[Any]) -> None:
        """Keep (n, width) numbers, durably, before returning."""
        assert vectors.shape[1] == self._width, vectors.shape
        rows = np.ascontiguousarray(vectors, dtype=self.kind)
        pairs = [(key, row.tobytes()) for key, row in zip(keys, rows, strict=True)]
        try:
            with self._base:
                self._base.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", pairs)
        except sqlite3.Error as error:
            raise BuildError(f"{self.path}: can't be written: {error}") from error

    def keys_of(self, digests: Collection[str]) -> list[bytes]:
        """The keys of vectors by the sha256 of their numbers, as they are or as float16.

        Reads the whole file.
        """
        if not digests:
            return []
        found = []
        for key, numbers in self._base.execute("SELECT key, numbers FROM vectors"):
            half = np.frombuffer(numbers, self.kind).astype("<f2").tobytes()
            if any(hashlib.sha256(n).hexdigest() in digests for n in (numbers, half)):
                found.append(key)
        return found

    def forget(self, keys: Iterable[bytes]) -> int:
        """Remove vectors so that their bytes are in no file; returns how many there were.

        Writes the whole file anew, through a second one of its size and a journal, all beside it or
        in SQLite's folder for temporary files, and both gone afterwards. Raises BuildError where
        that can't be done, as while a build reads or writes the file for longer than WAIT_S;
        nothing is sure to be gone then: call it again.
        """
        removed = 0
        try:
            # A write-ahead log, or a journal that is kept, would hold what was there before.
            self._base.execute("PRAGMA journal_mode = DELETE")
            with self._base:
                for key in keys:
                    found = self._base.execute("DELETE FROM vectors WHERE key = ?", (key,))
                    removed += found.rowcount
            self._base.execute("VACUUM")
        except sqlite3.Error as error:
            raise BuildError(f"{self.path}: vectors can't be removed: {error}") from error
        return removed

    def _select(self, columns: str, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        marks = ",".join("?" * len(keys))
        query = f"SELECT {columns} FROM vectors WHERE key IN ({marks})"
        try:
            return self._base.execute(query, list(keys)).fetchall()
        except sqlite3.Error as error:
            raise BuildError(f"{self.path}: can't be read: {error}") from error


class EmbeddingCache(NumberCache):
    """Gallery vectors of `width` numbers by key, float32."""

    kind = "<f4"

    def get(self, keys: Sequence[bytes]) -> FloatArray:
        """(n, width) float32 in the order of `keys`. Raises BuildError for one that is absent."""
        return self._rows(keys)


class StatesCache(NumberCache):
    """Pictures' token states by key, float16: `width` is tokens x width of a token."""

    kind = "<f2"

    def get(self, keys: Sequence[bytes]) -> npt.NDArray[np.float16]:
        """(n, width) float16 in the order of `keys`; zeros for one that is absent."""
        there = set(keys) - set(self.missing(keys))
        found = np.zeros((len(keys), self._width), self.kind)
        known = [key in there for key in keys]
        found[known] = self._rows([key for key in keys if key in there])
        return found


def _parts(keys: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    return (keys[start : start + LOOKUP] for start in range(0, len(keys), LOOKUP))
