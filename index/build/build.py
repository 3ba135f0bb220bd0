"""From a corpus to a published version: encode, assemble, gate, measure widths, publish.

    report = build_index(open_corpus(path), Model.load(artifact), SnapshotStore(home), "default")

Interrupted and run again, it goes on: what was encoded is in the embedding cache. Nothing is
published unless the gate lets it through, and the pointer moves last. Items are on disk while the
version is made: a corpus of any size takes about 100 bytes of memory an item (docs/operations.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hivlp.index.backends.choose import faiss_version, open_level
from hivlp.index.build import gate
from hivlp.index.build.answers import item_groups
from hivlp.index.build.assemble import (
    BuiltSide,
    graph_levels,
    write_catalogue,
    write_faiss,
    write_graphs,
    write_side,
)
from hivlp.index.build.choice import Means, choose
from hivlp.index.build.embeddings import FOLDER as EMBEDDINGS
from hivlp.index.build.embeddings import EmbeddingCache
from hivlp.index.build.encode import (
    LIMITS,
    Encoded,
    EncodeMeans,
    FailureLog,
    encode_corpus,
)
from hivlp.index.build.fold import ByModel, Folding, Made, publish_folded
from hivlp.index.build.measure import StagedSide, measure
from hivlp.index.build.model import Model
from hivlp.index.build.needs import BuildNeeds
from hivlp.index.build.overlay import Overlay
from hivlp.index.build.readers.base import Corpus
from hivlp.index.build.record import DEFAULTS, Draft, faiss_levels, manifest_of
from hivlp.index.build.record import BuildSettings as BuildSettings
from hivlp.index.build.sample import sample_queries
from hivlp.index.build.served import useless_graph, without_graph
from hivlp.index.build.spool import ItemSpool
from hivlp.index.build.states import keeping_states
from hivlp.index.build.upserts import Workshop
from hivlp.index.candidates import RowArray
from hivlp.index.errors import BuildError
from hivlp.index.level_index import LevelIndex
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.changes import Shape
from hivlp.index.snapshot.manifest import (
    SnapshotManifest,
)
from hivlp.index.snapshot.store import SnapshotStore, check_index_name
from hivlp.index.snapshot.uploads import FOLDER as UPLOADS
from hivlp.index.snapshot.uploads import PictureRoots
from hivlp.models.levels import Modality
from hivlp.models.runtime.progress import Progress, begin
from hivlp.models.runtime.texts import MAX_TEXT_CHARS

SEED = 20_240_229
SAMPLED_ROWS = 5e8
LEAST_SAMPLE = 100


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What was published, and what it took."""

    manifest: SnapshotManifest
    path: Path
    fresh: int
    failures: int
    failures_file: Path
    notes: tuple[str, ...] = ()


def build_index(
    corpus: Corpus,
    model: Model,
    store: SnapshotStore,
    name: str,
    settings: BuildSettings = DEFAULTS,
    overlay: Overlay | None = None,
) -> BuildReport:
    """Build, publish and (unless told otherwise) activate a version of index `name`.

    `overlay` says what of the corpus to leave out and which items to add (None: as the index's
    changes say). Raises CorpusError, BuildError (NoRoom where the disk has too little for it),
    SpaceMismatch, MissingExtra; the store is left as it was.
    """
    check_index_name(name)
    try:
        return _build_index(corpus, model, store, name, settings, overlay)
    except OSError as error:  # a full disk, a folder that is read-only
        raise BuildError(f"index {name!r} can't be written: {error}") from error


def _build_index(
    corpus: Corpus,
    model: Model,
    store: SnapshotStore,
    name: str,
    settings: BuildSettings,
    overlay: Overlay | None,
) -> BuildReport:
    version_of_faiss = faiss_version()  # before hours of encoding, not after
    cache_folder = store.home / "cache"
    builds = cache_folder / "builds"
    failures_file = builds / f"{name}.failures.jsonl"
    width = sum(model.gallery_dims)
    needs = BuildNeeds(name, store.folder(name), model, settings)
    expected = corpus.count()
    folding = Folding.begin(store, name, forget=settings.forget_changes)
    if folding is not None and overlay is None:
        overlay = folding.overlay(model.gallery_space, texts=corpus.is_untyped())
    with (
        EmbeddingCache(cache_folder / EMBEDDINGS, model.gallery_space, width) as cache,
        keeping_states(cache_folder, model, wanted=settings.store_states) as kept,
        ItemSpool(builds) as spool,
        store.stage(name),  # nothing is written there: whoever erases must see this build
    ):
        needs.check_before_encoding(_at_least(expected, overlay))
        with (
            FailureLog(failures_file) as failures,
            Progress(f"encode {name}", expected, quiet=settings.quiet) as progress,
        ):
            size, workers = settings.batch_size, settings.workers
            means = EncodeMeans(cache, spool, failures, size, workers, kept)
            encoded = encode_corpus(corpus, model, means, progress, overlay)
        encoded.check_share(settings.max_failures, failures_file)
        _check_group(settings, encoded)
        needs.check_before_writing(spool, kept)
        with store.stage(name) as staging:
            draft = Draft(staging, encoded)
            begin("write rows")
            _assemble(draft, model, cache, settings)
            if kept is not None and (side := draft.sides.get("image")) is not None:
                draft.states = kept.write(staging.path, encoded.items, side.size)
            _find_how_to_search(draft, corpus, model, settings)
            manifest = manifest_of(draft, corpus, model, settings, version_of_faiss)
            begin("publish")
            made = Made(staging, manifest, ByModel(_workshop(store, name, model)))
            path, notes = publish_folded(store, made, folding, activate=settings.activate)
            draft.notes += notes
    return BuildReport(
        store.manifest(name, staging.version),
        path,
        encoded.fresh,
        encoded.failures,
        failures_file,
        tuple(draft.notes),
    )


def _at_least(count: int | None, overlay: Overlay | None) -> int | None:
    """How many items there are to encode at least; None where the corpus doesn't say its count."""
    return count if count is None or overlay is None else overlay.at_least(count)


def _find_how_to_search(
    draft: Draft, corpus: Corpus, model: Model, settings: BuildSettings
) -> None:
    """Choose codes and write them, check all that was written, measure every direction."""
    begin("encode sample queries")
    _encode_queries(draft, corpus, model, settings)
    begin("choose codes")
    _choose(draft, model, settings)
    begin("check")
    _measure(draft, _gate(draft), model, settings)


def _workshop(store: SnapshotStore, name: str, model: Model) -> Workshop:
    """What changes made during the build are encoded again with, where that is needed."""
    shape = Shape(tuple(model.levels), model.gallery)
    cache = store.home / "cache" / EMBEDDINGS
    space, folder = model.gallery_space, store.root / name
    return Workshop(model.image, model.text, shape, space, cache, folder, LIMITS, MAX_TEXT_CHARS)


def _check_group(settings: BuildSettings, encoded: Encoded) -> None:
    group = settings.metadata_group
    if group is not None and not any(group in item.metadata for item in encoded.items):
        raise BuildError(f"no item has the metadata column {group!r}")


def _assemble(draft: Draft, model: Model, cache: EmbeddingCache, settings: BuildSettings) -> None:
    folder = draft.staging.path
    write_catalogue(folder, draft.encoded.items)
    for side in layout.SIDES:
        items = draft.encoded.items
        rows_type = settings.rows_type
        built = write_side(folder, side, items, cache, model.levels, model.gallery, rows_type)
        if built is not None:
            gate.check_side(built, items)
            draft.sides[side] = built


def _choose(draft: Draft, model: Model, settings: BuildSettings) -> None:
    """Family and codes of each side, by the captions where there are any; then write them."""
    rows = sum(built.size for built in draft.sides.values())
    means = Means(settings.build_threads, settings.materialise)
    for side, built in draft.sides.items():
        queries = draft.queries.get("text") or draft.queries.get(side)
        wishes = settings.wishes.share(built.size / rows)
        options = choose(
            built, queries, model.levels, model.gallery, wishes, settings.target, means
        )
        draft.options[side] = options
        taken = next(option for option in options if option.chosen)
        draft.notes += [
            f"{side}: the {taken.family} family over {taken.level1} codes is {missed}"
            for missed in wishes.over(taken)
        ]
        levels = faiss_levels(model, settings)
        write_faiss(draft.staging.path, built, levels, taken.level1, taken.maskable)
        if taken.family == "graph":
            draft.graphs[side] = _write_graphs(draft, built, settings)


def _write_graphs(draft: Draft, built: BuiltSide, settings: BuildSettings) -> tuple[int, ...]:
    total = built.size * len(graph_levels(built))
    task = f"build {built.modality} graphs"
    with Progress(task, total, "row", quiet=settings.quiet) as progress:
        threads = settings.build_threads
        return write_graphs(draft.staging.path, built, threads, progress.step)


def _measure(
    draft: Draft, sides: dict[Modality, StagedSide], model: Model, settings: BuildSettings
) -> None:
    """Measure every direction; once more by scans where a side's graphs turned out useless."""
    while True:
        draft.measured = measure(
            sides,
            draft.queries,
            model.levels,
            model.gallery,
            settings.target,
            groups=_groups(draft, settings),
            quiet=settings.quiet,
        )
        useless = _drop_useless_graphs(draft, settings)
        if not useless:
            break
        for side in useless:
            sides[side].graphs = {}
    draft.notes += draft.measured.notes


def _drop_useless_graphs(draft: Draft, settings: BuildSettings) -> list[Modality]:
    """The sides whose graphs gain nothing: the scan is to serve them, and no graph is kept."""
    dropped: list[Modality] = []
    for side, built in draft.sides.items():
        levels = draft.graphs.get(side, ())
        reason = useless_graph(draft.measured.widths, side, built.size) if levels else None
        if reason is None:
            continue
        if settings.wishes.family == "graph":
            draft.notes.append(f"{side}: {reason}; it is kept, as asked for")
            continue
        draft.notes.append(f"{side}: {reason}; the scan serves this side instead")
        for level in levels:
            (draft.staging.path / layout.graph_file(side, level)).unlink()
        del draft.graphs[side]
        draft.options[side] = without_graph(draft.options[side], reason)
        dropped.append(side)
    return dropped


def _gate(draft: Draft) -> dict[Modality, StagedSide]:
    """Check what was written; returns the sides, opened."""
    items = draft.encoded.items
    gate.check_items(items)
    ids = gate.ItemIds(items)
    rng = np.random.default_rng(SEED)
    sides = {}
    for side, built in draft.sides.items():
        try:
            opened = sides[side] = StagedSide(draft.staging.path, built)
            beside = _maskable(draft, side, built)
        except ValueError as error:  # cut short by a disk that filled up as it was closed
            raise BuildError(f"a FAISS file of the {side} side came out broken: {error}") from error
        codes = {n: opened.levels[n] for n in built.rows if opened.has_codes(n)}
        # Not the level that borrows the finest's links: how well it is walked, the beams measure.
        own = {n: opened.graphs[n] for n in draft.graphs.get(side, ())}
        for indexes in (codes, own, beside):
            tried = gate.check_self_retrieval(built, indexes, ids, rng)
        draft.gate[f"{side}_rows"] = float(built.size)
        draft.gate[f"{side}_self_retrieval_rows"] = tried
    return sides


def _groups(draft: Draft, settings: BuildSettings) -> RowArray:
    """(items,): items of one number answer each other."""
    group, items = settings.metadata_group, draft.encoded.items
    values = None if group is None else (item.metadata.get(group) for item in items)
    return item_groups(values, len(items))


def _maskable(draft: Draft, side: Modality, built: BuiltSide) -> dict[int, LevelIndex]:
    """Level 1's second codes, opened, where it has any."""
    file = draft.staging.path / layout.maskable_file(side)
    return {1: open_level(1, built.rows[1], file, "faiss-cpu")} if file.is_file() else {}


def _encode_queries(draft: Draft, corpus: Corpus, model: Model, settings: BuildSettings) -> None:
    """A sample of the corpus's own captions and pictures, encoded through every exit."""
    largest = max(side.size for side in draft.sides.values())
    limit = min(settings.sample, max(LEAST_SAMPLE, int(SAMPLED_ROWS / largest)))
    rng = np.random.default_rng(SEED)
    folder = draft.staging.path
    roots = PictureRoots(corpus.root, folder.parent / UPLOADS)
    draft.queries = sample_queries(folder, draft.sides, roots, model, limit, rng)
