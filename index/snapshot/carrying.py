"""Carrying changes over to the last good version, when the one they were made upon is damaged.

    count = carry_over(store, "default", damaged, whole)

The whole version with those changes becomes the active one, so that nothing that was put or deleted
is lost, and items can be changed again at once: nobody may publish upon a damaged version.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.errors import BuildError, SnapshotCorrupt
from hivlp.index.snapshot.amend import hold, publish_table, turn
from hivlp.index.snapshot.change_tables import all_joined
from hivlp.index.snapshot.changes import Segment, read_segment
from hivlp.index.snapshot.coded_files import Kind
from hivlp.index.snapshot.manifest import ChangesRecord, SnapshotManifest
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import file_record


def carry_over(store: SnapshotStore, name: str, source: str, target: str) -> int:
    """Make a whole version active again with the changes of a later one that turned out damaged.

    Returns how many changes came along; where there are none, the whole version itself is activated
    again. What the later version's levels had taken in comes along only as deletions: its vectors
    lie in those levels. Does nothing where neither `source` nor a change of it is active any more:
    somebody has chosen another version. Raises SnapshotError, BuildError.
    """
    try:
        with turn(store, name):
            return _carry_over(store, name, source, target)
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise BuildError(f"changes of {source} can't be carried over: {error}") from error


def _carry_over(store: SnapshotStore, name: str, source: str, target: str) -> int:
    active = store.manifest(name)
    if active.version != source and not _same_levels(store, active, source):
        return 0
    held = hold(store, name, target)
    table = _changes(store, active, held.manifest, held.changes)
    if not table.num_rows:
        store.activate(name, target)
        return 0
    columns = {} if active.changes is None else active.changes.columns
    new = {n: kind for n, kind in columns.items() if n not in held.types}
    kinds = cast(dict[str, Kind], {**new, **held.changes.columns})
    publish_table(
        store, name, held, table, kinds, supersede=False, expected=active.version, amended_from=None
    )
    return int(table.num_rows)


def _same_levels(store: SnapshotStore, active: SnapshotManifest, source: str) -> bool:
    """Whether the active version is the damaged one with other changes."""
    if source not in store.versions(active.index):
        return False
    return active.built_files == store.manifest(active.index, source).built_files


def _changes(
    store: SnapshotStore, later: SnapshotManifest, whole: SnapshotManifest, known: ChangesRecord
) -> Any:
    """The later version's changes that the whole one does not know, as far as it can hold them."""
    if later.changes is None:
        return all_joined([])
    segments = _segments(store.path(later.index, later.version), later)
    table = all_joined(segments, after=known.last)
    able = table.column("deleted")
    if later.gallery_space == whole.gallery_space:
        for column in ("image_vector", "text_vectors"):
            lengths = pc.list_value_length(table.column(column)).fill_null(0)
            able = pc.or_(able, pc.greater(lengths, 0))
    return table.filter(able)


def _segments(folder: Path, manifest: SnapshotManifest) -> Sequence[Segment]:
    """The segments of a version of which some file is damaged: not these, or SnapshotCorrupt."""
    assert manifest.changes is not None
    names = [record.file for record in manifest.changes.segments]
    for name in names:
        if file_record(folder / name) != manifest.files[name]:
            reason = "differs from what was written: its changes can't be carried over"
            raise SnapshotCorrupt(manifest.index, manifest.version, name, reason)
    return [read_segment(folder, name) for name in names]
