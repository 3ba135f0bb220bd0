"""How to build, a version while it is made, and what its manifest says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.encode import WORKERS, Encoded
from hivlp.index.build.measure import Measured
from hivlp.index.build.model import Model
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.readers.base import Corpus
from hivlp.index.build.wishes import Wishes
from hivlp.index.level_index import RowsType
from hivlp.index.pictures import root_text
from hivlp.index.snapshot.manifest import (
    BuildRecord,
    CorpusRecord,
    LevelRecord,
    OptionRecord,
    SideRecord,
    SnapshotManifest,
    StatesRecord,
)
from hivlp.index.snapshot.store import Staging
from hivlp.models.artifact import file_record
from hivlp.models.levels import Modality


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """How to build. `max_failures` is a share; `sample` the most queries widths are measured on.

    `wishes` say which family and codes are wanted, or the limits to choose them within.
    `build_threads` build graphs: with more than one, the same rows give another graph each time.
    `workers` threads read and decode pictures. `store_states` keeps pictures' token states for the
    model's re-ranker. `forget_changes`: the version holds the corpus alone, without what was put or
    deleted since.
    """

    batch_size: int = 32
    workers: int = WORKERS
    max_failures: float = 0.05
    materialise: bool = False
    metadata_group: str | None = None
    sample: int = 500
    target: float = 0.99
    rows_type: RowsType = "fp32"
    wishes: Wishes = field(default_factory=Wishes)
    build_threads: int = 1
    store_states: bool = False
    forget_changes: bool = False
    activate: bool = True
    quiet: bool = False


DEFAULTS = BuildSettings()


@dataclass(slots=True)
class Draft:
    """A version while it is made."""

    staging: Staging
    encoded: Encoded
    sides: dict[Modality, BuiltSide] = field(default_factory=dict)
    queries: Mapping[Modality, QuerySet] = field(default_factory=dict)
    options: dict[Modality, tuple[OptionRecord, ...]] = field(default_factory=dict)
    graphs: dict[Modality, tuple[int, ...]] = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)
    gate: dict[str, float] = field(default_factory=dict)
    states: StatesRecord | None = None
    notes: list[str] = field(default_factory=list)


def faiss_levels(model: Model, settings: BuildSettings) -> tuple[int, ...]:
    """Level 1 always; every level when asked, and when each level has rows of its own."""
    every = tuple(spec.level for spec in model.levels)
    return every if settings.materialise or model.gallery == "per_exit" else every[:1]


def manifest_of(
    draft: Draft, corpus: Corpus, model: Model, settings: BuildSettings, version_of_faiss: str
) -> SnapshotManifest:
    """The manifest of a version whose every other file is written."""
    folder = draft.staging.path
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return SnapshotManifest(
        index=draft.staging.index,
        version=draft.staging.version,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        items=len(draft.encoded.items),
        sides={side: _side_record(draft, side, model, settings) for side in draft.sides},
        levels=tuple(
            LevelRecord(level=s.level, exit_layer=s.exit_layer, dim=s.dim) for s in model.levels
        ),
        gallery=model.gallery,
        gallery_space=model.gallery_space,
        query_encoder=model.query_encoder,
        model=model.name,
        artifact=str(model.path),
        faiss_version=version_of_faiss,
        corpus=CorpusRecord(
            kind=corpus.kind,
            root=root_text(corpus.root),
            source=root_text(corpus.source),
            failures=draft.encoded.failures,
        ),
        build=BuildRecord(
            batch_size=settings.batch_size,
            max_failures=settings.max_failures,
            materialise=settings.materialise,
            metadata_group=settings.metadata_group,
            sample=settings.sample,
            target=settings.target,
            must=settings.wishes.must,
            build_threads=settings.build_threads,
        ),
        options=draft.options,
        widths=tuple(draft.measured.widths),
        exits=tuple(draft.measured.exits),
        retrieval=tuple(draft.measured.retrieval),
        paces=tuple(draft.measured.paces),
        gate=draft.gate,
        states=draft.states,
        files={path.relative_to(folder).as_posix(): file_record(path) for path in files},
    )


def _side_record(draft: Draft, side: Modality, model: Model, settings: BuildSettings) -> SideRecord:
    built = draft.sides[side]
    taken = next(option for option in draft.options[side] if option.chosen)
    return SideRecord(
        rows=built.size,
        max_rows_per_item=int(np.bincount(built.row_items).max()),
        faiss_levels=faiss_levels(model, settings),
        family=taken.family,
        level1=taken.level1,
        rows_type=settings.rows_type,
        graph_levels=draft.graphs.get(side, ()),
        maskable=taken.maskable,
    )
