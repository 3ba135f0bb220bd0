"""Every captioned picture of a run's corpora, in one file on disk: what batches are drawn from.

Corpora are read once, picture bytes are passed over, and what is needed to find a picture again
goes into an Arrow file that all processes and workers map: memory doesn't grow with the corpus, and
any picture can be drawn at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hivlp.models.corpus import Unusable
from hivlp.models.errors import TrainingError
from hivlp.models.runtime.progress import Progress, say
from hivlp.models.training.data.failures import FailureLog
from hivlp.models.training.data.sources import DataSource, Uncaptioned, UsablePicture

ROWS_A_BATCH = 4096
SOURCE_KEY = b"hivlp.source"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("corpus", pa.int32()),
        ("picture", pa.string()),
        ("captions", pa.list_(pa.string())),
        ("item", pa.int64()),
    ]
)


class Listing:
    """Captioned pictures by number, 0..len-1, mapped from a file."""

    def __init__(self, path: Path) -> None:
        """Map a listing. Raises TrainingError for a file that is none."""
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = range(self._reader.num_record_batches)
            counts = [self._reader.get_batch(i).num_rows for i in batches]
        except (OSError, pa.ArrowException) as error:
            raise TrainingError(f"{path}: not a readable listing of pictures: {error}") from error
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.source = (self._reader.schema.metadata or {}).get(SOURCE_KEY, b"").decode()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> UsablePicture:
        """One picture, without its bytes."""
        batch = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[batch - 1]) if batch else 0
        row = self._reader.get_batch(batch).slice(number - first, 1).to_pylist()[0]
        return UsablePicture(
            row["id"], row["corpus"], row["picture"], tuple(row["captions"]), row["item"]
        )

    def captions(self) -> Iterator[str]:
        """Every caption of every picture, in order."""
        for index in range(self._reader.num_record_batches):
            for captions in self._reader.get_batch(index).column("captions").to_pylist():
                yield from captions


def make_listing(
    path: Path, source: DataSource, failures: FailureLog, max_failures: float
) -> Listing:
    """Read the corpora and list what can be used; a listing of the same source is taken as it is.

    Raises HivlpError for a corpus that can't be read, TrainingError for too many bad entries or
    none that is any good.
    """
    asked = json.dumps(source.as_dict(), sort_keys=True)
    if path.is_file() and (found := Listing(path)).source == asked:
        return found
    failures.begin_anew()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    schema = SCHEMA.with_metadata({SOURCE_KEY: asked.encode()})
    counts = _Counts()
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        _write(writer, schema, source, failures, counts)
    failures.check_share(counts.unusable, counts.tried, max_failures)
    if counts.uncaptioned:
        say(f"{counts.uncaptioned} items have no picture or no caption and are passed over")
    named = ", ".join(source.paths)
    if not counts.usable:
        raise TrainingError(f"{named}: no picture with a caption")
    if not counts.several:
        raise TrainingError(f"{named}: one item only, and no other for it to be told from")
    part.replace(path)
    return Listing(path)


@dataclass(slots=True)
class _Counts:
    usable: int = 0
    uncaptioned: int = 0
    unusable: int = 0
    first: int = -1
    several: bool = False

    def add(self, item: int) -> None:
        """One usable picture."""
        self.first = item if not self.usable else self.first
        self.several |= item != self.first
        self.usable += 1

    @property
    def tried(self) -> int:
        return self.usable + self.unusable


@dataclass(slots=True)
class _Rows:
    columns: dict[str, list[Any]] = field(default_factory=lambda: {n: [] for n in SCHEMA.names})

    def add(self, found: UsablePicture) -> None:
        for name, values in self.columns.items():
            values.append(getattr(found, name))

    def __len__(self) -> int:
        return len(self.columns["id"])


def _write(
    writer: Any, schema: Any, source: DataSource, failures: FailureLog, counts: _Counts
) -> None:
    rows = _Rows()
    with Progress("listing pictures", None, "picture") as progress:
        for found in source.open().read():
            progress.step()
            if isinstance(found, Unusable):
                counts.unusable += 1
                failures.add(found)
            elif isinstance(found, Uncaptioned):
                counts.uncaptioned += 1
            else:
                counts.add(found.item)
                rows.add(found)
            if len(rows) >= ROWS_A_BATCH:
                writer.write_batch(pa.record_batch(rows.columns, schema=schema))
                rows = _Rows()
    if len(rows):
        writer.write_batch(pa.record_batch(rows.columns, schema=schema))
