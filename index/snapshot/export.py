"""Plain FAISS files of a snapshot, one a level and side, for use without this project."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hivlp.index.backends.choose import write_level
from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.side import Side
from hivlp.index.snapshot.snapshot import Snapshot


def export_faiss(snapshot: Snapshot, folder: Path) -> list[Path]:
    """Write `<side>-level<l>.faiss` (IndexFlatIP, unit vectors) and `<side>-ids.json` (row to id);
    of imported vectors besides `rotation.npy`, by which queries must be turned.

    Returns the files written. Raises SnapshotError where the folder isn't empty, MissingExtra
    without faiss.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        manifest = snapshot.manifest
        raise SnapshotError(manifest.index, manifest.version, f"{folder} is not empty")
    written = []
    for side in snapshot.sides.values():
        for level, rows in side.rows.items():
            target = folder / f"{side.modality}-level{level}.faiss"
            write_level(target, rows)
            written.append(target)
        written.append(_write_ids(snapshot, side, folder))
    if snapshot.rotation is not None:
        written.append(folder / layout.ROTATION)
        np.save(written[-1], snapshot.rotation, allow_pickle=False)
    return written


def _write_ids(snapshot: Snapshot, side: Side, folder: Path) -> Path:
    target = folder / f"{side.modality}-ids.json"
    ids = snapshot.catalogue.ids(side.row_items)
    target.write_text(json.dumps(ids, ensure_ascii=False) + "\n", encoding="utf-8")
    return target
