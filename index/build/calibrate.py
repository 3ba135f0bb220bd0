"""Measure an index again without building it: new widths and beams, the same files.

    report = calibrate(store, "default", None, model, CalibrationSettings())

The result is a new version: its data files are hard links to the old one's, its manifest holds the
new measurements, and it is activated, rolled back and verified like any other. `check_recall`
measures what the published widths give now, on queries drawn anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np

from hivlp.index.build.answers import item_groups
from hivlp.index.build.confidence import recall_lower
from hivlp.index.build.directions import Direction
from hivlp.index.build.measure import measure, shortfalls
from hivlp.index.build.model import Model
from hivlp.index.build.queries import QuerySet, text_queries
from hivlp.index.build.tables import measured_tables
from hivlp.index.build.vectors.queries import read_queries as read_vectors
from hivlp.index.build.widths import KS, PLANS, exact_best, itself, share_found
from hivlp.index.cascade import PlanName, PlanRequest
from hivlp.index.errors import BuildError
from hivlp.index.evaluation.queries import SEED, Sampled, sample_queries
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.amend import hold, turn
from hivlp.index.snapshot.erasures import erased_since, read_erased
from hivlp.index.snapshot.manifest import (
    FORMAT_VERSION,
    DirectedRecord,
    SnapshotManifest,
    write_manifest,
)
from hivlp.index.snapshot.shared import share_files
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import Modality

Measurement = TypeVar("Measurement", bound=DirectedRecord)
LEAST_QUERIES = 20
MOST_QUERIES = 100_000


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """What to measure with: `queries` is a file of real text queries, one a line, or, where
    vectors were imported, a .npy file of such.

    Without it, a sample of the corpus's own captions and pictures. `target` is ANN recall@k.
    """

    queries: Path | None = None
    sample: int = 2_000
    target: float = 0.99
    activate: bool = True
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The version that was published, and what could not be had."""

    manifest: SnapshotManifest
    path: Path
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """Tables of all that was measured, and the notes."""
        return "\n".join([*measured_tables(self.manifest), *self.notes])


@dataclass(frozen=True, slots=True)
class RecallNow:
    """ANN recall@k of one direction and plan, measured now, beside the recorded lower bound."""

    query: Modality
    searched: Modality
    plan: PlanName
    k: int
    recall: float
    lower: float
    promised: float | None
    queries: int

    @property
    def kept(self) -> bool:
        """Whether the promise holds: refuted only where what was measured is under it."""
        return self.promised is None or self.recall >= self.promised


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A direction whose recall can't be measured now, and why."""

    query: Modality
    searched: Modality
    reason: str


def calibrate(
    store: SnapshotStore,
    name: str,
    version: str | None,
    model: Model,
    settings: CalibrationSettings = CalibrationSettings(),
) -> CalibrationReport:
    """Measure a version (None: the active one) and publish it again with what was measured.

    Raises SpaceMismatch, SnapshotError, and BuildError where there is nothing to measure with or
    the result can't be written.
    """
    try:
        return _calibrate(store, name, version, model, settings)
    except OSError as error:  # a full disk, a file system without hard links
        raise BuildError(f"index {name!r} can't be written: {error}") from error


def _calibrate(
    store: SnapshotStore,
    name: str,
    version: str | None,
    model: Model,
    settings: CalibrationSettings,
) -> CalibrationReport:
    erased = read_erased(store.folder(name))
    with contextlib.closing(store.open(name, version)) as snapshot:
        latest = snapshot.manifest.version == store.current(name)
        update, notes = _measured(snapshot, model, settings)
        path = _publish(store, snapshot, update, settings, None if latest else erased)
    return CalibrationReport(store.manifest(name, path.name), path, tuple(notes))


def _measured(
    snapshot: Snapshot, model: Model, settings: CalibrationSettings
) -> tuple[dict[str, object], list[str]]:
    """What changes in the manifest, and notes. Raises SpaceMismatch, BuildError."""
    old = snapshot.manifest
    model.check_fits(old.gallery_space)
    queries = _queries(snapshot, model, settings)
    group = old.build.metadata_group
    values = None if group is None else snapshot.catalogue.column(group)
    measured = measure(
        snapshot.sides,
        queries,
        old.specs,
        old.gallery,
        settings.target,
        groups=item_groups(values, old.items),
        quiet=settings.quiet,
    )
    if not measured.widths:
        raise BuildError(f"index {old.index!r}: no queries to calibrate with")
    notes = measured.notes
    if not model.encodes:  # vectors: every level's query is there at once, so no exit is early
        notes = shortfalls(measured.widths)
        measured.exits.clear()
    replaced = {(r.searched, r.query) for r in measured.widths}
    kept = [r for r in old.widths if (r.searched, r.query) not in replaced]
    same = model.query_encoder == old.query_encoder
    if not same:
        left = sorted({f"{r.query} to {r.searched}" for r in kept})
        notes += [f"{direction}: still as measured with the encoder before" for direction in left]
    update: dict[str, object] = {
        "query_encoder": model.query_encoder,
        "model": model.name,
        "artifact": str(model.path) if model.encodes else old.artifact,
        "build": old.build.model_copy(update={"target": settings.target}),
        "widths": (*kept, *measured.widths),
        "exits": _renewed(old.exits if same else (), measured.exits, replaced),
        "retrieval": _renewed(old.retrieval, measured.retrieval, replaced),
        "paces": _renewed(old.paces if same else (), measured.paces, replaced),
    }
    return update, list(notes)


def _publish(
    store: SnapshotStore,
    snapshot: Snapshot,
    update: dict[str, object],
    settings: CalibrationSettings,
    erased: Mapping[str, int] | None,
) -> Path:
    """Publish the version that was measured with its measurements; returns its folder.

    `erased` None: it was the active one, and what was put or deleted since is taken along. Raises
    BuildError where another version became active meanwhile, or where items of one that was not
    active were erased since `erased` was read.
    """
    old, folder = snapshot.manifest, snapshot.path
    name = old.index
    with turn(store, name):
        latest = erased is None
        if erased is not None:
            _refuse_erased(store, snapshot, erased)
        else:
            old = store.manifest(name)
            folder = store.path(name, old.version)
            if old.built_files != snapshot.manifest.built_files:
                raise BuildError(
                    f"index {name!r}: version {old.version} became active while another was "
                    "measured; calibrate again"
                )
        with store.stage(name) as staging:
            shared = share_files(folder, staging.path, old.files)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            fixed = {
                "format_version": FORMAT_VERSION,
                "version": staging.version,
                "created_at": now,
                "calibrated_from": old.version,
                "amended_from": None,
            }
            write_manifest(staging.path, old.model_copy(update={**update, **fixed}))
            expected = old.version if latest else None
            return store.publish(
                staging, activate=settings.activate, shared=shared, expected=expected
            )


def _refuse_erased(store: SnapshotStore, snapshot: Snapshot, erased: Mapping[str, int]) -> None:
    name, version = snapshot.manifest.index, snapshot.manifest.version
    since = erased_since(store.folder(name), erased)
    if len(since) and hold(store, name, version, whole=True).mentions(since):
        raise BuildError(
            f"index {name!r}: items of version {version} were erased while it was measured; it "
            "can't be published again"
        )


def _renewed(
    old: Sequence[Measurement],
    new: Sequence[Measurement],
    replaced: Collection[tuple[Modality, Modality]],
) -> tuple[Measurement, ...]:
    """New records, and the old ones of directions that were not measured again."""
    kept = [record for record in old if (record.searched, record.query) not in replaced]
    return (*kept, *new)


def check_recall(
    snapshot: Snapshot, model: Model, sample: int = 500, seed: int = SEED + 1
) -> list[RecallNow | NotMeasured]:
    """What the snapshot's own plans find now, on queries drawn anew, for every k measured."""
    model.check_fits(snapshot.manifest.gallery_space)
    sampled, _ = sample_queries(snapshot, model, sample, seed)
    return [
        now
        for searched in snapshot.sides
        for query, own in sampled.items()
        for now in _recall_now(snapshot, searched, query, own.queries)
    ]


def _recall_now(
    snapshot: Snapshot, searched: Modality, query: Modality, queries: QuerySet
) -> list[RecallNow | NotMeasured]:
    side = snapshot.sides[searched]
    held_out = np.ones(len(queries), dtype=np.bool_)
    direction = Direction(searched, query, queries.outputs, side.rows, held_out)
    finest = max(side.rows)
    best = exact_best(direction, finest, min(max(KS), side.size))
    pairs = zip(best, queries.outputs[finest], strict=True)
    own = [itself(exact, side.rows[finest], vector) for exact, vector in pairs]
    # Doubles of a query would take the places of what it should find: such queries don't count.
    fair = [i for i, rows in enumerate(own) if len(rows) <= 1]
    if not fair:
        reason = f"every one of {len(own)} queries has doubles among the rows"
        return [NotMeasured(query, searched, reason)]
    outputs = {level: vectors[fair] for level, vectors in queries.outputs.items()}
    searcher = LocalSearcher(snapshot)
    found: list[RecallNow | NotMeasured] = []
    for name in PLANS:
        for k in KS:
            plan = searcher.plan(PlanRequest(searched, query, k + 1, name))
            hits = run_plan(searcher, searched, plan, outputs)
            tried = zip(hits, fair, strict=True)
            each = [share_found(hit, best[i], own[i], k) for hit, i in tried]
            shares = np.array(each, dtype=np.float32)
            recall, lower = float(shares.mean()), recall_lower(shares)
            promised = _promised(snapshot.manifest, searched, query, name, k)
            now = RecallNow(query, searched, name, k, recall, lower, promised, len(shares))
            found.append(now)
    return found


def read_queries(path: Path) -> list[str]:
    """Text queries of a UTF-8 file, one a line, empty lines left out. Raises BuildError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: {error}") from error
    found = [line.strip() for line in lines if line.strip()]
    if len(found) < LEAST_QUERIES:
        raise BuildError(f"{path}: {len(found)} queries, at least {LEAST_QUERIES} are needed")
    return found[:MOST_QUERIES]


def _queries(
    snapshot: Snapshot, model: Model, settings: CalibrationSettings
) -> Mapping[Modality, QuerySet]:
    if settings.queries is None:
        sampled, _ = sample_queries(snapshot, model, settings.sample)
        return {query: _distinct(snapshot, query, own) for query, own in sampled.items()}
    if settings.queries.suffix.lower() == ".npy":
        return _vectors(snapshot, settings.queries, settings.sample)
    texts = read_queries(settings.queries)
    if len(texts) > settings.sample:
        rng = np.random.default_rng(SEED)
        some = np.sort(rng.choice(len(texts), settings.sample, replace=False))
        texts = [texts[i] for i in some]
    codes = {text: i for i, text in enumerate(dict.fromkeys(texts))}  # equals stay in one half
    given = text_queries(model, texts, [codes[text] for text in texts])
    if given is None:
        raise BuildError(f"the model {model.name!r} has no text tower")
    return {"text": replace(given, from_corpus=False)}


def _vectors(snapshot: Snapshot, path: Path, limit: int) -> Mapping[Modality, QuerySet]:
    """Queries of a file, for every side. Raises BuildError where no vectors were imported."""
    if snapshot.manifest.imported is None:
        raise BuildError(f"{path}: queries of an index that was not imported are texts, one a line")
    given = read_vectors(path, snapshot.rotation, snapshot.manifest.specs, limit)
    return dict.fromkeys(snapshot.sides, given)


def _distinct(snapshot: Snapshot, query: Modality, sampled: Sampled) -> QuerySet:
    """One of several equals only: the halves of the sample must not share a query."""
    rows = snapshot.sides[query].rows
    vectors = rows[max(rows)].vectors(sampled.own_rows)
    first = np.sort(np.unique(vectors, axis=0, return_index=True)[1])
    queries = sampled.queries
    outputs = {level: found[first] for level, found in queries.outputs.items()}
    return replace(queries, outputs=outputs, ordinals=queries.ordinals[first])


def _promised(
    manifest: SnapshotManifest, searched: Modality, query: Modality, plan: PlanName, k: int
) -> float | None:
    """The recorded lower bound of the family that serves, or None."""
    family = manifest.sides[searched].family
    return next(
        (
            r.recall_lower
            for r in manifest.widths
            if (r.searched, r.query, r.plan, r.k, r.family) == (searched, query, plan, k, family)
        ),
        None,
    )
