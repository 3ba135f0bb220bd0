"""Snapshots that hold every kind of file there is, and ways to spoil one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hivlp.index.cascade import PlanRequest
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from tests.fakes import DIMS, unit_vectors, write_snapshot

ITEMS = 1_200  # PQ and RaBitQ are trained on at least 1,000 rows
COLUMNS = ("codes.npy", "items.npy", "starts.npy", "values.arrow")
CATALOGUE = [
    *(f"filters/0.{part}" for part in COLUMNS),
    *(f"filters/1.{part}" for part in COLUMNS if part != "codes.npy"),
    "item_hashes.npy",
    "item_ordinals.npy",
    "items.arrow",
    "manifest.json",
]
SIDE = ["inverse_norms.npy", "level1.faiss", "row_items.npy", "rows.npy"]
FILES = {
    "scan": [
        *CATALOGUE,
        *(f"image/{name}" for name in [*SIDE, "level1.maskable.faiss"]),
        *(f"image/level{level}.faiss" for level in (2, 3)),
        *(f"text/{name}" for name in [*SIDE, "level1.maskable.faiss", "texts.arrow"]),
        *(f"text/level{level}.faiss" for level in (2, 3)),
    ],
    "graph": [
        *CATALOGUE,
        *(f"{side}/{name}" for side in ("image", "text") for name in SIDE),
        *(f"{side}/level{level}.hnsw" for side in ("image", "text") for level in (1, 3)),
        "text/texts.arrow",
    ],
}
KINDS = [(name, file) for name, files in FILES.items() for file in files]


def publish(store: SnapshotStore, name: str, seed: int) -> str:
    """A version of index `scan` or `graph`; item i of version `seed` has a row of its own."""
    metadata = [{"size": i % 7, "tags": [f"t{i % 3}"]} for i in range(ITEMS)]
    return write_snapshot(
        store,
        name,
        images=unit_vectors(ITEMS, DIMS[-1], seed),
        texts=unit_vectors(ITEMS, DIMS[-1], seed + 1),
        text_items=range(ITEMS),
        metadata=metadata,
        materialise=name == "scan",
        family="graph" if name == "graph" else "scan",
        level1="sq8" if name == "graph" else "rabitqfs",
    )


def files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def finds_itself(snapshot: Snapshot, seed: int) -> bool:
    """Whether a search for an item of version `seed` finds it, on both sides."""
    searcher = LocalSearcher(snapshot)
    for number, side in enumerate(("image", "text")):
        row = unit_vectors(ITEMS, DIMS[-1], seed + number)[5:6]
        plan = searcher.plan(PlanRequest(side, "text", 1, "exact"))  # type: ignore[arg-type]
        (found,) = run_plan(searcher, side, plan, {len(DIMS): row})  # type: ignore[arg-type]
        if found.rows[0] != 5:
            return False
    return True


def truncate(file: Path) -> None:
    data = file.read_bytes()
    _replace(file, data[: len(data) // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    _replace(file, bytes(data))


def remove(file: Path) -> None:
    file.unlink()


def add(file: Path) -> None:
    (file.parent / f"{file.name}.extra").write_bytes(b"x")


SPOIL: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "missing": remove,
    "extra": add,
}


def _replace(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)
