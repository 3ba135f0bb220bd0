"""From vectors of one's own to a published version: rotate, write, choose, gate, measure, publish.

    report = import_vectors(NpySource(path), SnapshotStore(home), "default", ImportSettings())

No model takes part. Every level's query is cut from the same vector, so all of them are known at
once: widths are measured with vectors, by default some of the rows, each without itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hivlp.index.backends.choose import faiss_version, open_level
from hivlp.index.build import gate
from hivlp.index.build.assemble import BuiltSide, graph_levels, write_faiss, write_graphs
from hivlp.index.build.beams import measure_beams
from hivlp.index.build.choice import Means, choose
from hivlp.index.build.directions import Direction
from hivlp.index.build.fold import ByTurning, Folding, Made, publish_folded
from hivlp.index.build.footprint import SideShape
from hivlp.index.build.measure import StagedSide, shortfalls
from hivlp.index.build.needs import check_before_importing, check_before_indexing, sure_rows
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.served import useless_graph, without_graph
from hivlp.index.build.vectors.queries import check_queries, read_queries, vector_queries
from hivlp.index.build.vectors.record import Draft, ImportSettings, manifest_of
from hivlp.index.build.vectors.rotation import SAMPLED, Rotation, fit_rotation, level_dims
from hivlp.index.build.vectors.source import VectorSource
from hivlp.index.build.vectors.stream import Lengths, Stream, Streamed
from hivlp.index.build.widths import KS, exact_best, sweep
from hivlp.index.errors import BuildError
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.catalogue import open_table
from hivlp.index.snapshot.changes import Shape
from hivlp.index.snapshot.manifest import SnapshotManifest
from hivlp.index.snapshot.store import SnapshotStore, Staging, check_index_name
from hivlp.models.levels import LevelSpec
from hivlp.models.runtime.progress import Progress

SEED = 20_240_229
SAMPLED_ROWS = 1e9
"""Rows times queries that widths are measured on, about."""
LEAST_SAMPLE = 200


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was published. `phases`: seconds on the clock and of the processor, by name."""

    manifest: SnapshotManifest
    path: Path
    failures: int
    failures_file: Path
    notes: tuple[str, ...]
    phases: dict[str, tuple[float, float]]


class Phases(dict[str, tuple[float, float]]):
    """Seconds on the clock and of this process's threads, by what was done."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add a block's seconds to a name."""
        wall, cpu = time.monotonic(), time.process_time()
        yield
        before = self.get(name, (0.0, 0.0))
        spent = (time.monotonic() - wall, time.process_time() - cpu)
        self[name] = (before[0] + spent[0], before[1] + spent[1])


class _Ids(Sequence[str]):
    """Ids of items as they were written, read when they are asked for."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, place: Any) -> Any:
        return self._column[int(place)].as_py()


def import_vectors(
    source: VectorSource,
    store: SnapshotStore,
    name: str,
    settings: ImportSettings,
) -> ImportReport:
    """Import, publish and (unless told otherwise) activate a version of index `name`.

    Raises CorpusError, BuildError (NoRoom where the disk has too little for it), MissingExtra; the
    store is left as it was.
    """
    check_index_name(name)
    try:
        return _import(source, store, name, settings)
    except OSError as error:  # a full disk, a folder that is read-only
        raise BuildError(f"index {name!r} can't be written: {error}") from error


def _import(
    source: VectorSource, store: SnapshotStore, name: str, settings: ImportSettings
) -> ImportReport:
    version_of_faiss = faiss_version()  # before anything long, not after
    failures_file = store.home / "cache" / "builds" / f"{name}.failures.jsonl"
    dims = level_dims(settings.dims, source.dim)
    _check_given(settings, source)
    folding = Folding.begin(store, name, beside=True, forget=settings.forget_changes)
    erased = frozenset(folding.erased if folding else ())
    sure = sure_rows(source.count - len(erased), settings.max_failures)
    shape = SideShape.planned(sure, dims, "nested", settings.rows_type)
    check_before_importing(name, store.folder(name), shape, settings.wishes)
    phases = Phases()
    with phases("fit rotation"):
        rotation = fit_rotation(source.sample(SAMPLED), source.dim, rotate=settings.rotate)
    specs = tuple(LevelSpec(level, level, dim) for level, dim in enumerate(dims, start=1))
    with store.stage(name) as staging:
        with phases("read, rotate, write"):
            streamed = _stream(staging, source, rotation, dims, settings, failures_file, erased)
        _check_share(streamed, settings.max_failures, failures_file)
        draft = _draft(staging, source, rotation, specs, streamed, settings)
        with phases("choose"):
            _choose(draft, settings)
        with phases("codes and graphs"):
            _write_levels(draft, settings)
        with phases("gate"):
            side = _gate(draft, settings)
        with phases("measure widths"):
            _measure(draft, side, settings)
        with phases("publish"):
            manifest = manifest_of(draft, settings, version_of_faiss)
            made = Made(staging, manifest, _turning(draft, manifest))
            del side
            path, left = publish_folded(store, made, folding, activate=settings.activate)
            draft.notes += left
    manifest = store.manifest(name, staging.version)
    notes = tuple(draft.notes)
    return ImportReport(manifest, path, streamed.failures, failures_file, notes, dict(phases))


def _turning(draft: Draft, manifest: SnapshotManifest) -> ByTurning:
    """How items that were put since get vectors of this import's space."""
    shape = Shape(draft.specs, "nested")
    return ByTurning(shape, manifest.gallery_space, draft.rotation.matrix)


def _check_given(settings: ImportSettings, source: VectorSource) -> None:
    """Raises BuildError for queries and folders that would fail the import at its end."""
    if settings.queries is not None:
        check_queries(settings.queries, source.dim)
    if settings.pictures is not None and not settings.pictures.is_dir():
        raise BuildError(f"--pictures {settings.pictures}: no such folder")


def _stream(
    staging: Staging,
    source: VectorSource,
    rotation: Rotation,
    dims: tuple[int, ...],
    settings: ImportSettings,
    failures_file: Path,
    erased: frozenset[str],
) -> Streamed:
    lengths = Lengths(settings.metric, settings.as_cosine)
    root = (settings.pictures or source.root).resolve()
    stream = Stream(source, rotation, settings.modality, lengths, failures_file, root, erased)
    task = f"import {staging.index}"
    with Progress(task, source.count, "vector", quiet=settings.quiet) as progress:
        streamed = stream.write(staging.path, dims, settings.rows_type, progress.step)
    if rotation.matrix is not None:
        np.save(staging.path / layout.ROTATION, rotation.matrix, allow_pickle=False)
    return streamed


def _check_share(streamed: Streamed, most: float, listed_in: Path) -> None:
    """Raises BuildError when too large a share of the rows was left out."""
    lost, rows = streamed.failures, streamed.failures + streamed.count
    if lost and lost / rows > most:
        raise BuildError(
            f"{lost} of {rows} vectors failed, over the allowed share of {most:g}; they are "
            f"listed in {listed_in}"
        )


def _draft(
    staging: Staging,
    source: VectorSource,
    rotation: Rotation,
    specs: tuple[LevelSpec, ...],
    streamed: Streamed,
    settings: ImportSettings,
) -> Draft:
    row_items = np.arange(streamed.count, dtype=np.int64)
    contents = np.arange(streamed.count, dtype=np.uint64)  # none are taken for equal
    built = BuiltSide(settings.modality, streamed.rows, row_items, contents)
    queries = _queries(built, rotation, specs, settings)
    draft = Draft(staging, source, rotation, specs, streamed, built, queries)
    if streamed.lost_pictures:
        root = settings.pictures or source.root
        draft.notes.append(
            f"{streamed.lost_pictures} pictures' paths lead out of {root} and were left out; "
            "--pictures names the folder they lie in"
        )
    if source.left_out:
        draft.notes.append(f"columns of bytes were left out: {', '.join(source.left_out)}")
    for name, lost in sorted(streamed.lost_values.items()):
        draft.notes.append(
            f"column {name!r}: left out {lost} of its values: times outside of the years 1 to "
            "9999, or text that is not UTF-8"
        )
    return draft


def _queries(
    built: BuiltSide, rotation: Rotation, specs: Sequence[LevelSpec], settings: ImportSettings
) -> QuerySet:
    """The queries given, or some of the rows; no two of them equal."""
    limit = min(settings.sample, max(LEAST_SAMPLE, int(SAMPLED_ROWS / built.size)))
    if settings.queries is not None:
        return read_queries(settings.queries, rotation.matrix, specs, limit)
    rng = np.random.default_rng(SEED)
    chosen = np.sort(rng.choice(built.size, min(limit, built.size), replace=False))
    finest = built.rows[len(specs)].vectors(chosen.astype(np.int64))
    first = np.sort(np.unique(finest, axis=0, return_index=True)[1])
    ordinals = chosen[first].astype(np.int64)
    return vector_queries(finest[first], specs, ordinals, from_corpus=True)


def _choose(draft: Draft, settings: ImportSettings) -> None:
    means = Means(settings.build_threads)
    draft.options = choose(
        draft.built, draft.queries, draft.specs, "nested", settings.wishes, settings.target, means
    )
    taken = draft.taken
    draft.notes += [
        f"the {taken.family} family over {taken.level1} codes is {missed}"
        for missed in settings.wishes.over(taken)
    ]


def _write_levels(draft: Draft, settings: ImportSettings) -> None:
    """Level 1's codes, and graphs where that family was chosen. Raises NoRoom."""
    folder, built, taken = draft.staging.path, draft.built, draft.taken
    check_before_indexing(draft.staging.index, folder, SideShape.of(built, "nested"), taken)
    write_faiss(folder, built, (1,), taken.level1, taken.maskable)
    if taken.family == "graph":
        total = built.size * len(graph_levels(built))
        with Progress("build graphs", total, "row", quiet=settings.quiet) as progress:
            draft.graphs = write_graphs(folder, built, settings.build_threads, progress.step)


def _gate(draft: Draft, settings: ImportSettings) -> StagedSide:
    """Check what was written; returns the side, opened. Raises BuildError."""
    folder, built, side = draft.staging.path, draft.built, settings.modality
    items = open_table(folder / layout.ITEMS)
    gate.check_metadata(items, np.random.default_rng(SEED))
    ids = _Ids(items.column(0))
    finest = built.rows[max(built.rows)].matrix
    gate.check_rows(finest, built.row_items, ids, f"{side} rows")
    maskable = folder / layout.maskable_file(side)
    try:
        opened = StagedSide(folder, built)
        beside = {}
        if maskable.is_file():
            beside = {1: open_level(1, built.rows[1], maskable, "faiss-cpu")}
    except ValueError as error:  # cut short by a disk that filled up as it was closed
        raise BuildError(f"a FAISS file came out broken: {error}") from error
    codes = {n: opened.levels[n] for n in built.rows if opened.has_codes(n)}
    own = {n: opened.graphs[n] for n in draft.graphs}
    rng = np.random.default_rng(SEED)
    for indexes in (codes, own, beside):
        draft.tried = gate.check_self_retrieval(built, indexes, ids, rng)
    return opened


def _measure(draft: Draft, side: StagedSide, settings: ImportSettings) -> None:
    """Widths of the scan, and beams; graphs that gain nothing are dropped, unless asked for."""
    modality, queries = settings.modality, draft.queries
    direction = Direction(
        modality,
        modality,
        queries.outputs,
        side.rows,
        queries.held_out,
        levels=side.levels,
        items=queries.ordinals,
    )
    if not direction.halved or len(draft.specs) < 2:
        draft.notes.append("too few vectors to measure widths with: defaults are used")
        return
    with Progress("measure widths", 1, "direction", quiet=settings.quiet) as progress:
        best = exact_best(direction, draft.specs[-1].level, min(max(KS), direction.size))
        draft.widths = sweep(direction, draft.specs, "nested", settings.target, best)
        if side.graphs:
            draft.widths += measure_beams(direction, side.graphs, best, KS, settings.target)
        progress.step()
    _drop_useless_graphs(draft, settings)
    draft.notes += shortfalls(draft.widths)


def _drop_useless_graphs(draft: Draft, settings: ImportSettings) -> None:
    reason = None
    if draft.graphs:
        reason = useless_graph(draft.widths, settings.modality, draft.built.size)
    if reason is None:
        return
    if settings.wishes.family == "graph":
        draft.notes.append(f"{reason}; it is kept, as asked for")
        return
    draft.notes.append(f"{reason}; the scan serves instead")
    for level in draft.graphs:
        (draft.staging.path / layout.graph_file(settings.modality, level)).unlink()
    draft.graphs = ()
    draft.options = without_graph(draft.options, reason)
    draft.widths = [record for record in draft.widths if record.family == "scan"]
