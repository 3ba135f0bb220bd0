"""What was erased from an index: remembered beside its versions, so that no build brings it back.

    HOME/indexes/NAME/ERASED      {"erased": {hash of an id: nanoseconds since 1970}}
    HOME/indexes/NAME/.erasing    what an erasure that is under way still has to remove

Ids are kept as hashes, as in `item_hashes.npy`. A change of an item made later than its erasure
holds; the corpus's own copy stays left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.catalogue import HashArray, id_hash
from hivlp.index.snapshot.durable import replace_text, sync
from hivlp.index.snapshot.names import ERASED, ERASING


class _Erased(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    erased: dict[str, int]


class Traces(BaseModel):
    """Where else erased items have left something.

    `hashes` of their ids; `keys` in the embedding cache (hex); `uploads`; `vectors` are sha256 of
    rows as the versions keep them, for pictures that can't be read any more.
    """

    model_config = ConfigDict(extra="forbid")
    hashes: set[str] = set()
    keys: set[str] = set()
    uploads: set[str] = set()
    vectors: set[str] = set()

    def add(self, other: Traces) -> None:
        """Take in another's."""
        self.hashes |= other.hashes
        self.keys |= other.keys
        self.uploads |= other.uploads
        self.vectors |= other.vectors


def short_hash(item_id: str) -> str:
    """An id's hash as it is kept: 16 hex digits."""
    return f"{id_hash(item_id):016x}"


def read_erased(folder: Path) -> Mapping[str, int]:
    """When each id was erased, by its hash. Raises SnapshotError for a file that can't be read."""
    try:
        text = (folder / ERASED).read_text(encoding="utf-8")
        return _Erased.model_validate_json(text).erased
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise SnapshotError(folder.name, ERASED, f"can't be read: {error}") from error


def add_erased(folder: Path, hashes: Iterable[str], at_ns: int) -> None:
    """Remember that ids were erased, durably; by whoever has the index's turn. Raises OSError."""
    known = dict(read_erased(folder))
    known.update(dict.fromkeys(hashes, at_ns))
    replace_text(folder / ERASED, _Erased(erased=known).model_dump_json() + "\n")


def read_traces(folder: Path) -> Traces:
    """What an erasure that didn't end has left to do. Raises SnapshotError."""
    try:
        return Traces.model_validate_json((folder / ERASING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Traces()
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise SnapshotError(folder.name, ERASING, f"can't be read: {error}") from error


def write_traces(folder: Path, traces: Traces) -> None:
    """Remember what an erasure has to do, durably. Raises OSError."""
    replace_text(folder / ERASING, traces.model_dump_json() + "\n")


def forget_traces(folder: Path) -> None:
    """The erasure has ended."""
    (folder / ERASING).unlink(missing_ok=True)
    sync(folder)


def erased_since(folder: Path, before: Mapping[str, int]) -> HashArray:
    """(n,) uint64: hashes of the ids erased from the index in `folder` since `before` was read.

    Raises SnapshotError.
    """
    now = read_erased(folder)
    since = [int(short, 16) for short, at in now.items() if before.get(short) != at]
    return np.array(since, np.uint64)


def is_erased(item_id: str, number: int, erased: Mapping[str, int]) -> bool:
    """Whether a change with this sequence number was made before its item was erased."""
    return bool(erased) and number <= erased.get(short_hash(item_id), -1)
