"""Erasing items: afterwards their vectors and texts are in no file of the state folder.

    report = erase(store, "default", ["sku-1"], wait_s=60)

Deleting hides; erasing writes every file anew that holds something of the items: rows become zeros,
codes, texts, metadata and coded columns are written without them, graphs keep their links, which
hold no numbers. All older versions that have the items are removed, once nobody has them open; so
are their vectors in the embedding cache and their uploaded pictures. The corpus is the user's own:
it is not touched, but builds leave the items out from then on, by a hash of their ids.

What is to be removed is written down before anything is: an erasure that dies, or has to wait for a
reader, is finished by running it again. A build that began before it doesn't publish.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from hivlp.index.build.embeddings import (
    FOLDER,
    STATES_FOLDER,
    EmbeddingCache,
    NumberCache,
    StatesCache,
    content_key,
)
from hivlp.index.build.rewrite import rewritten, side_rows
from hivlp.index.candidates import RowArray
from hivlp.index.errors import BuildError, CorpusError, SnapshotError
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.activation import Activations
from hivlp.index.snapshot.amend import Held, hold, turn
from hivlp.index.snapshot.durable import replace_text
from hivlp.index.snapshot.erasures import (
    Traces,
    add_erased,
    forget_traces,
    read_traces,
    short_hash,
    write_traces,
)
from hivlp.index.snapshot.gc import delete, leftovers
from hivlp.index.snapshot.leases import in_use
from hivlp.index.snapshot.names import BUILDING
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import (
    PictureRoots,
    picture_roots,
    unused_uploads,
    upload_path,
)
from hivlp.models.levels import Modality

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ErasedReport:
    """What was done: `version` is active now.

    `left` are versions, and folders of builds, that hold something of the items and are in use:
    run it again. `unknown` ids were nowhere. `cached` vectors and `pictures` were removed besides.
    """

    version: str
    erased: tuple[str, ...]
    unknown: tuple[str, ...]
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    cached: int = 0
    pictures: int = 0
    notes: tuple[str, ...] = ()


def erase(
    store: SnapshotStore,
    name: str,
    ids: Sequence[str],
    *,
    wait_s: float = 60.0,
    quiet: bool = False,
) -> ErasedReport:
    """Erase items for good. Needs room for a copy of the rows of the index.

    Waits up to `wait_s` for readers of older versions to leave them. Raises SnapshotError, and
    BuildError where something can't be written: run it again then, it goes on where it stopped.
    """
    try:
        return _erase(store, name, frozenset(ids), wait_s, quiet)
    except OSError as error:
        raise BuildError(f"index {name!r} can't be changed: {error}") from error


def _erase(
    store: SnapshotStore, name: str, ids: frozenset[str], wait_s: float, quiet: bool
) -> ErasedReport:
    folder, notes = store.folder(name), list[str]()
    hashes = {short_hash(item_id): item_id for item_id in ids}
    with turn(store, name):
        begun = read_traces(folder)
        having = {v: found for v in store.versions(name) if (found := _held(store, name, v, ids))}
        version = store.current(name)
        traces = _gathered(store, having, ids, notes)
        traces.add(begun)
        known = {hashes[short] for short in traces.hashes & hashes.keys()}
        if traces.hashes:
            write_traces(folder, traces)
            add_erased(folder, traces.hashes, _now(store, name))
        if version in having:
            version = rewritten(store, name, known, quiet)
        builds = [path for path in folder.glob(f"{BUILDING}*") if in_use(path)]
    Activations(store, name).drop_erased()  # whoever has its version ready lets go of it then
    removed, left = _removed(store, name, having, wait_s)
    left += tuple(path.name for path in _gone(builds, wait_s) if traces.hashes)
    for path in leftovers(folder, pulls=True):
        delete(path)
    cached = _forget_vectors(store, traces)
    pictures = _forget_pictures(store, name, traces)
    _forget_lists(store, name, ids)
    if not left and not _mentioned(store, name, traces):
        forget_traces(folder)
    if spools := _spools(store):
        notes.append(f"downloads that did not end may hold it: remove {spools}")
    return ErasedReport(
        version,
        tuple(sorted(known)),
        tuple(sorted(ids - known)),
        removed,
        left,
        cached,
        pictures,
        tuple(notes),
    )


def _now(store: SnapshotStore, name: str) -> int:
    """A moment that is later than every change, as sequence numbers have it."""
    return max(time.time_ns(), hold(store, name).changes.last)


def _mentioned(store: SnapshotStore, name: str, traces: Traces) -> bool:
    """Whether an older version is left that holds what is being erased, by this or another one."""
    hashes = np.array([int(short, 16) for short in traces.hashes], np.uint64)
    active = store.current(name)
    for version in store.versions(name):
        if version == active:  # an item of it was put again since
            continue
        try:
            if hold(store, name, version, whole=True).mentions(hashes):
                return True
        except (SnapshotError, OSError, ValueError, pa.ArrowException):
            return True
    return False


def _held(store: SnapshotStore, name: str, version: str, ids: frozenset[str]) -> Held | str | None:
    """The version if it has anything of the items; why where it can't be read, None without."""
    try:
        held = hold(store, name, version, whole=True)
        has = any(held.catalogue.holds(item_id) for item_id in ids)
        has = has or any(ids & segment.places.keys() for segment in held.segments)
    except (SnapshotError, OSError, ValueError, IndexError, pa.ArrowException) as error:
        if version == store.current(name):
            raise
        return str(error) or type(error).__name__
    return held if has else None


def _gathered(
    store: SnapshotStore,
    having: Mapping[str, Held | str],
    ids: frozenset[str],
    notes: list[str],
) -> Traces:
    """What the items left elsewhere, as far as the versions tell; one that can't be read goes."""
    traces = Traces()
    for version, held in having.items():
        try:
            if isinstance(held, str):
                raise ValueError(held)
            _gather(held, ids, picture_roots(held.path.parent, held.manifest.corpus.root), traces)
        except (SnapshotError, OSError, ValueError, IndexError, pa.ArrowException) as error:
            if isinstance(held, Held) and held.manifest.version == store.current(
                held.manifest.index
            ):
                raise
            notes.append(f"version {version} can't be read, and is removed: {error}")
    return traces


def _gather(held: Held, ids: frozenset[str], roots: PictureRoots, traces: Traces) -> None:
    """Keys, uploads and vectors of the items in one version."""
    images: set[str] = set()
    for segment in held.segments:
        for item_id in ids & segment.places.keys():
            keys, uploads = segment.left(segment.places[item_id])
            traces.hashes.add(short_hash(item_id))
            traces.keys.update(key.hex() for key in keys)
            images.update(uploads)
    items = [item_id for item_id in ids if held.catalogue.holds(item_id)]
    traces.hashes.update(map(short_hash, items))
    images.update(ref for i in items if (ref := held.catalogue.image_ref(i)))
    for reference in images:
        traces.uploads.update([reference] if upload_path(Path(), reference) else [])
        with contextlib.suppress(CorpusError):  # gone: its vectors are looked for by themselves
            traces.keys.add(content_key("image", roots.read(reference)).hex())
    ordinals = np.sort(np.array([held.catalogue.ordinal(i) for i in items], np.int64))
    for side in held.manifest.sides:
        rows = side_rows(held.path, side, ordinals)
        if side == "text" and len(rows):
            texts = held.texts().take(pa.array(rows)).to_pylist()
            traces.keys.update(content_key("text", text.encode()).hex() for text in texts)
        traces.vectors.update(_row_hashes(held, side, rows))


def _row_hashes(held: Held, side: Modality, rows: RowArray) -> Iterator[str]:
    """sha256 of what the embedding cache holds for rows, in the precision that they are kept in."""
    manifest = held.manifest
    names = dict.fromkeys(
        layout.rows_file(side, manifest.gallery, spec.level) for spec in manifest.specs
    )
    arrays = [np.load(held.path / name, mmap_mode="r", allow_pickle=False) for name in names]
    for row in rows.tolist():
        yield hashlib.sha256(b"".join(array[row].tobytes() for array in arrays)).hexdigest()
    if side == "image" and manifest.states is not None:
        states = np.load(held.path / layout.STATES, mmap_mode="r", allow_pickle=False)
        yield from (hashlib.sha256(states[row].tobytes()).hexdigest() for row in rows.tolist())


def _removed(
    store: SnapshotStore, name: str, having: Iterable[str], wait_s: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove the versions that have the items; those that stay in use are left, and named."""
    waiting, removed = list(having), []
    until = time.monotonic() + wait_s
    while True:
        for version in list(waiting):
            try:
                store.remove(name, version)
            except SnapshotError:
                if version in store.versions(name):
                    continue
            waiting.remove(version)
            removed.append(version)
        if not waiting or time.monotonic() > until:
            return tuple(removed), tuple(waiting)
        time.sleep(POLL_S)


def _gone(builds: Sequence[Path], wait_s: float) -> list[Path]:
    """Those of some folders that are still in use after `wait_s`."""
    until = time.monotonic() + wait_s
    left = list(builds)
    while True:
        left = [path for path in left if path.is_dir() and in_use(path)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(POLL_S)


def _forget_vectors(store: SnapshotStore, traces: Traces) -> int:
    """Remove the items' vectors and states from every cache, by content and by the numbers."""
    if not traces.hashes:
        return 0
    keys = {bytes.fromhex(key) for key in traces.keys}
    caches: dict[str, type[NumberCache]] = {FOLDER: EmbeddingCache, STATES_FOLDER: StatesCache}
    removed = 0
    for name, kind in caches.items():
        folder = store.home / "cache" / name
        for file in sorted(folder.glob("*.sqlite")) if folder.is_dir() else ():
            with kind(folder, file.stem, 0) as cache:
                removed += cache.forget(keys.union(cache.keys_of(traces.vectors)))
    return removed


def _forget_pictures(store: SnapshotStore, name: str, traces: Traces) -> int:
    """Remove the items' uploaded pictures that no version names any more."""
    folder, removed = store.folder(name), 0
    with turn(store, name):
        unused = set(unused_uploads(folder, store.versions(name), older_than_s=-1.0))
        for reference in traces.uploads:
            path = upload_path(folder, reference)
            if path in unused:
                path.unlink(missing_ok=True)
                removed += 1
    return removed


def _forget_lists(store: SnapshotStore, name: str, ids: frozenset[str]) -> None:
    """Take the items out of the lists of what builds left out; a broken line goes too."""
    folder = store.home / "cache" / "builds"
    for file in sorted(folder.glob(f"{name}.*failures.jsonl")) if folder.is_dir() else ():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if not _speaks_of(line, ids)]
        if len(kept) < len(lines):
            replace_text(file, "".join(f"{line}\n" for line in kept))


def _speaks_of(line: str, ids: frozenset[str]) -> bool:
    try:
        failure = json.loads(line)
        return failure["id"] in ids or failure["place"] in ids
    except (ValueError, KeyError, TypeError):
        return True


def _spools(store: SnapshotStore) -> str:
    """The folder of downloads that did not end, where there is any."""
    folder = store.home / "cache" / "imports"
    return str(folder) if folder.is_dir() and any(folder.iterdir()) else ""
