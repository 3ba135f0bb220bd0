"""The folder that a collection is downloaded to: what it is of, how far it came, and its parts.

Whatever a process that died left there is known by what `state.json` doesn't speak of.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from hivlp.index.build.vectors.payloads import Kinds
from hivlp.index.errors import CorpusError
from hivlp.index.snapshot.durable import replace_text, sync
from hivlp.index.snapshot.manifest import Metric
from hivlp.models.levels import FloatArray

STATE, LOCK = "state.json", "lock"
WORDS = {
    "dim": "vectors' numbers",
    "metric": "metric",
    "vector": "vector's name",
    "points": "number of points",
    "config": "vectors' configuration",
}


@dataclass(frozen=True, slots=True)
class Collection:
    """What a download is of, as far as the server tells: two that differ in it are not mixed."""

    dim: int
    metric: Metric
    vector: str
    """The name of the vector, empty for the one without."""
    points: int
    config: str
    """A hash of how its vectors are kept."""

    def compare(self, before: Collection, folder: Path, place: str) -> None:
        """Raises CorpusError for a collection that is not what it was when the download began."""
        for name, now in asdict(self).items():
            was = getattr(before, name)
            if now != was:
                told = "" if name == "config" else f": {was!r} then, {now!r} now"
                raise CorpusError(
                    place,
                    f"its {WORDS[name]} changed since its download began{told}; remove {folder} "
                    "to begin anew",
                )


@dataclass(slots=True)
class State:
    """What a download has done."""

    of: Collection
    points: int = 0
    parts: int = 0
    next: int | str | None = None
    done: bool = False
    kinds: Kinds = field(default_factory=Kinds)

    def write(self, folder: Path) -> None:
        """Say how far it came, durably."""
        fields = {"points": self.points, "parts": self.parts, "next": self.next, "done": self.done}
        record = {"of": asdict(self.of), **fields, "kinds": self.kinds.to_json()}
        replace_text(folder / STATE, json.dumps(record) + "\n")

    @staticmethod
    def read(folder: Path, of: Collection) -> State:
        """What there is, or a beginning."""
        try:
            found = json.loads((folder / STATE).read_text(encoding="utf-8"))
            kinds = Kinds.of_json(found["kinds"])
            before = Collection(**found["of"])
            return State(
                before, found["points"], found["parts"], found["next"], found["done"], kinds
            )
        except FileNotFoundError:
            return State(of)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"unreadable: {error}; remove the folder to begin anew"
            raise CorpusError(str(folder / STATE), reason) from error


def locked(folder: Path, place: str) -> int:
    """A descriptor that holds a download's folder until it is closed.

    Raises CorpusError where another process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError as error:  # removed by its holder in between
        raise CorpusError(place, f"another process removed {folder}; run it again") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        reason = f"another process imports it, in {folder}: {error.strerror}"
        raise CorpusError(place, reason) from error
    if not _is_same(lock, folder / LOCK):  # its holder removed the folder in between
        os.close(lock)
        raise CorpusError(place, f"another process removed {folder}; run it again")
    return lock


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def tidy(folder: Path, state: State) -> None:
    """Remove what the state doesn't speak of: parts of another download, or of one that died.

    Raises CorpusError for a part that is gone.
    """
    parts = {f"{part_name(n)}{end}" for n in range(state.parts) for end in (".npy", ".parquet")}
    for path in folder.iterdir():
        if path.name not in {*parts, STATE, LOCK} and not path.is_dir():
            path.unlink()
    for name in sorted(parts):
        if not (folder / name).is_file():
            raise CorpusError(str(folder / name), "missing; remove the folder to begin anew")


def ends(folder: Path, state: State) -> list[tuple[str, FloatArray]]:
    """Id and vector of the first and the last point that was downloaded. Raises CorpusError."""
    found = []
    for number, row in ((0, 0), (state.parts - 1, -1)) if state.parts else ():
        path = folder / part_name(number)
        try:
            ids = pq.read_table(path.with_suffix(".parquet"), columns=["id"]).column(0)
            vectors = np.load(path.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
            found.append((str(ids[row].as_py()), np.array(vectors[row])))
        except (OSError, ValueError, IndexError, pa.ArrowException) as error:
            reason = f"unreadable: {error}; remove the folder to begin anew"
            raise CorpusError(str(path), reason) from error
    return found


def part_name(number: int) -> str:
    """The name of a part's files, without its ending."""
    return f"part_{number:06d}"


def vector_of(point: Any, name: str) -> Any:
    """The vector of that name, or None; among several a point has each by its name."""
    own = point.vector
    return own.get(name) if isinstance(own, Mapping) else own


class Part:
    """Points that are written together. `size` is of their payloads, in bytes."""

    def __init__(self, of: Collection, kinds: Kinds) -> None:
        self._of, self._kinds = of, kinds
        self.ids: list[str] = []
        self.size = 0
        self._vectors: list[npt.NDArray[np.float32]] = []
        self._there: list[bool] = []
        self._payloads: list[bytes] = []

    def add(self, points: Sequence[Any]) -> None:
        """Points as the client has them; one without the vector is kept, with NaN."""
        vectors = np.full((len(points), self._of.dim), np.nan, np.float32)
        for row, point in enumerate(points):
            own = vector_of(point, self._of.vector)
            self._there.append(own is not None)
            if own is not None:
                vectors[row] = own
            payload = point.payload or {}
            self._kinds.add(payload)
            self._payloads.append(orjson.dumps(payload, default=str))
            self.size += len(self._payloads[-1])
            self.ids.append(str(point.id))
        self._vectors.append(vectors)

    def write(self, path: Path) -> None:
        """The part's two files; they are on the disk when this returns."""
        table, array = path.with_suffix(".parquet"), path.with_suffix(".npy")
        payloads = pa.array(self._payloads, pa.binary()).cast(pa.string())
        columns = {"id": pa.array(self.ids), "payload": payloads, "there": pa.array(self._there)}
        pq.write_table(pa.table(columns), table)
        np.save(array, np.concatenate(self._vectors), allow_pickle=False)
        for file in (table, array, path.parent):
            sync(file)
