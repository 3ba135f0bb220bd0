"""A version of imported vectors while it is made, and what its manifest says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from hivlp.index.build.assemble import BuiltSide
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.vectors.rotation import Rotation
from hivlp.index.build.vectors.source import VectorSource, part_rows
from hivlp.index.build.vectors.stream import Streamed
from hivlp.index.build.wishes import Wishes
from hivlp.index.level_index import RowsType
from hivlp.index.snapshot.manifest import (
    BuildRecord,
    CorpusRecord,
    ImportRecord,
    LevelRecord,
    Metric,
    OptionRecord,
    SideRecord,
    SnapshotManifest,
    WidthRecord,
)
from hivlp.index.snapshot.store import Staging
from hivlp.models.artifact import file_record, fingerprint
from hivlp.models.levels import LevelSpec, Modality

MODEL = "vectors"
"""The model's name where none is given for what made the vectors."""


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """How to import. `dims` are those of the coarse levels (None: by the vectors' own).

    `rotate` False: the vectors nest already, as Matryoshka embeddings do. `metric` is what they
    were ranked by; one that minds lengths is refused for vectors of different lengths, unless
    `as_cosine`. `queries` is a .npy file of real queries, in the vectors' own space; `model` names
    what made them. The rest is as in `BuildSettings`.
    """

    modality: Modality = "image"
    dims: tuple[int, ...] | None = None
    rotate: bool = True
    metric: Metric = "cosine"
    as_cosine: bool = False
    max_failures: float = 0.05
    queries: Path | None = None
    sample: int = 500
    target: float = 0.99
    rows_type: RowsType = "fp32"
    wishes: Wishes = field(default_factory=Wishes)
    build_threads: int = 1
    model: str | None = None
    pictures: Path | None = None
    forget_changes: bool = False
    activate: bool = True
    quiet: bool = False


@dataclass(slots=True)
class Draft:
    """A version while it is made."""

    staging: Staging
    source: VectorSource
    rotation: Rotation
    specs: tuple[LevelSpec, ...]
    streamed: Streamed
    built: BuiltSide
    queries: QuerySet
    options: tuple[OptionRecord, ...] = ()
    graphs: tuple[int, ...] = ()
    widths: list[WidthRecord] = field(default_factory=list)
    tried: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def taken(self) -> OptionRecord:
        """The family and codes that were chosen."""
        return next(option for option in self.options if option.chosen)


def gallery_space(rotation: Rotation, dims: Sequence[int], model: str | None) -> str:
    """Hash of the space that rotated vectors lie in: whoever aims at it names the same parts."""
    turned = "none" if rotation.matrix is None else sha256(rotation.matrix.tobytes()).hexdigest()
    return fingerprint(
        {
            "kind": "imported vectors",
            "rotation": turned,
            "dims": " ".join(map(str, dims)),
            "normalisation": "l2",
            "model": model or "",
        }
    )


def manifest_of(draft: Draft, settings: ImportSettings, version_of_faiss: str) -> SnapshotManifest:
    """The manifest of a version whose every other file is written."""
    folder, source, dims = draft.staging.path, draft.source, [s.dim for s in draft.specs]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    space = gallery_space(draft.rotation, dims, settings.model)
    size = draft.built.size
    return SnapshotManifest(
        index=draft.staging.index,
        version=draft.staging.version,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        items=size,
        sides={settings.modality: _side_record(draft, settings)},
        levels=tuple(
            LevelRecord(level=s.level, exit_layer=s.exit_layer, dim=s.dim) for s in draft.specs
        ),
        gallery="nested",
        gallery_space=space,
        query_encoder=fingerprint({"queries": "vectors", "gallery_space": space}),
        model=settings.model or MODEL,
        artifact="",
        faiss_version=version_of_faiss,
        corpus=CorpusRecord(
            kind=f"vectors-{source.kind}",
            root=str((settings.pictures or source.root).resolve()),
            source=source.source,
            failures=draft.streamed.failures,
        ),
        build=_build_record(source, settings),
        options={settings.modality: draft.options},
        imported=ImportRecord(
            source=source.kind,
            dim=source.dim,
            metric=settings.metric,
            rotated=draft.rotation.matrix is not None,
            fitted_on=draft.rotation.rows,
            shares=draft.rotation.shares(dims),
            lengths=draft.streamed.lengths,
            model=settings.model,
        ),
        widths=tuple(draft.widths),
        gate={
            f"{settings.modality}_rows": float(size),
            f"{settings.modality}_self_retrieval_rows": draft.tried,
        },
        files={path.relative_to(folder).as_posix(): file_record(path) for path in files},
    )


def _side_record(draft: Draft, settings: ImportSettings) -> SideRecord:
    taken = draft.taken
    return SideRecord(
        rows=draft.built.size,
        max_rows_per_item=1,
        faiss_levels=(1,),
        family=taken.family,
        level1=taken.level1,
        rows_type=settings.rows_type,
        graph_levels=draft.graphs,
        maskable=taken.maskable,
    )


def _build_record(source: VectorSource, settings: ImportSettings) -> BuildRecord:
    return BuildRecord(
        batch_size=part_rows(source.dim),
        max_failures=settings.max_failures,
        materialise=False,
        sample=settings.sample,
        target=settings.target,
        must=settings.wishes.must,
        build_threads=settings.build_threads,
    )
