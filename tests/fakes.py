"""Fakes for the search side: an encoder without a model, and snapshots made from plain vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from hivlp.index.backends.choose import codec_for
from hivlp.index.build import gate
from hivlp.index.build.assemble import (
    maskable_beside,
    write_catalogue,
    write_faiss,
    write_graphs,
    write_side,
)
from hivlp.index.build.embeddings import EmbeddingCache
from hivlp.index.build.encode import EncodedItem
from hivlp.index.build.model import Model
from hivlp.index.level_index import Codec, Family, Must, RowsType
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.manifest import (
    BuildRecord,
    CorpusRecord,
    ExitRecord,
    LevelRecord,
    PaceRecord,
    SideRecord,
    SnapshotManifest,
    WidthRecord,
    write_manifest,
)
from hivlp.index.snapshot.store import SnapshotStore, Staging
from hivlp.models.artifact import file_record
from hivlp.models.encoder import EncoderBatch, RgbImage
from hivlp.models.levels import (
    EarlyOutput,
    FloatArray,
    GalleryKind,
    LevelSpec,
    Modality,
    nested_prefix,
    normalise,
)

SPACE = "5" * 64
DIMS = (4, 8, 16)
T = TypeVar("T")


def specs(dims: Sequence[int] = DIMS) -> tuple[LevelSpec, ...]:
    return tuple(LevelSpec(i, 2 * i, dim) for i, dim in enumerate(dims, start=1))


def unit_vectors(count: int, dim: int, seed: int = 0) -> FloatArray:
    rng = np.random.default_rng(seed)
    return normalise(rng.standard_normal((count, dim)).astype(np.float32))


@dataclass(frozen=True)
class FakeEncoder(Generic[T]):
    """Words and colours become the same random directions; early exits are noisy prefixes."""

    modality: Modality
    dims: tuple[int, ...] = DIMS
    gallery: GalleryKind = "nested"
    gallery_space: str = SPACE
    query_encoder: str = "6" * 64
    noise: float = 0.1
    answers_nan: bool = False

    @property
    def levels(self) -> tuple[LevelSpec, ...]:
        return specs(self.dims)

    def prepare(self, items: Sequence[T]) -> EncoderBatch:
        finest = np.stack([self._vector(item) for item in items])
        return EncoderBatch({"finest": finest}, len(items), (False,) * len(items))

    def encode(self, batch: EncoderBatch) -> Iterator[EarlyOutput]:
        for spec in self.levels:
            yield EarlyOutput(spec.level, self._exit(batch, spec))

    def encode_gallery(self, batch: EncoderBatch) -> tuple[EarlyOutput, ...]:
        if self.gallery == "per_exit":
            return tuple(self.encode(batch))
        finest = normalise(np.asarray(batch.inputs["finest"], dtype=np.float32))
        if self.answers_nan:
            finest[-1, 0] = np.nan
        return (EarlyOutput(len(self.dims), finest),)

    def _exit(self, batch: EncoderBatch, spec: LevelSpec) -> FloatArray:
        finest = np.asarray(batch.inputs["finest"], dtype=np.float32)
        exact = nested_prefix(finest, spec.dim)
        if spec.level == len(self.dims):
            return exact
        wobble = np.stack([_direction(f"{spec.level}{row.tobytes()!r}", spec.dim) for row in exact])
        return normalise(exact + self.noise * wobble)

    def _vector(self, item: Any) -> FloatArray:
        words = item.lower().split() if isinstance(item, str) else [_colour_name(item)]
        total = sum((_direction(word, self.dims[-1]) for word in words), np.zeros(self.dims[-1]))
        return np.asarray(total, dtype=np.float32)


def _colour_name(picture: RgbImage) -> str:
    red, green, blue = picture.reshape(-1, 3).mean(axis=0)
    return "red" if red > max(green, blue) else "green" if green > blue else "blue"


def _direction(name: str, dim: int) -> FloatArray:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return unit_vectors(1, dim, seed)[0]


def fake_model(path: Path, **options: Any) -> Model:
    image: FakeEncoder[RgbImage] = FakeEncoder("image", **options)
    text: FakeEncoder[str] = FakeEncoder("text", **options)
    return Model("fake", path, text, image)


def write_snapshot(
    store: SnapshotStore,
    name: str = "default",
    *,
    images: FloatArray | None = None,
    texts: FloatArray | None = None,
    text_items: Sequence[int] = (),
    captions: Sequence[str] | None = None,
    dims: Sequence[int] = DIMS,
    materialise: bool = False,
    widths: Sequence[WidthRecord] = (),
    exits: Sequence[ExitRecord] = (),
    paces: Sequence[PaceRecord] = (),
    metadata: Sequence[dict[str, Any]] | None = None,
    activate: bool = True,
    family: Family = "scan",
    level1: Codec = "flat",
    rows_type: RowsType = "fp32",
    must: Sequence[Must] = ("mask",),
) -> str:
    """Publish a nested snapshot of given unit vectors: item i is `i{i}`; returns its version."""
    levels = specs(dims)
    faiss_levels = tuple(s.level for s in levels) if materialise else (1,)
    items = _items(images, texts, text_items, captions, metadata)
    cache_folder = store.home / "fakes" / str(len(store.versions(name)))
    with EmbeddingCache(cache_folder, SPACE, dims[-1]) as cache, store.stage(name) as staging:
        for mark, vectors in ((b"i%d", images), (b"t%d", texts)):
            if vectors is not None:
                cache.put([mark % i for i in range(len(vectors))], vectors)
        write_catalogue(staging.path, items)
        sides = {}
        for side in layout.SIDES:
            built = write_side(staging.path, side, items, cache, levels, "nested", rows_type)
            if built is not None:
                gate.check_side(built, items)
                codec = codec_for(level1, built.size)
                maskable = maskable_beside(codec, must)
                write_faiss(staging.path, built, faiss_levels, codec, maskable)
                sides[side] = SideRecord(
                    rows=built.size,
                    max_rows_per_item=int(np.bincount(built.row_items).max()),
                    faiss_levels=faiss_levels,
                    family=family,
                    level1=codec,
                    rows_type=rows_type,
                    graph_levels=write_graphs(staging.path, built) if family == "graph" else (),
                    maskable=maskable,
                )
        given = {"widths": tuple(widths), "exits": tuple(exits), "paces": tuple(paces)}
        manifest = _manifest(staging, sides, levels, len(items)).model_copy(update=given)
        write_manifest(staging.path, manifest)
        store.publish(staging, activate=activate)
    return staging.version


def _items(
    images: FloatArray | None,
    texts: FloatArray | None,
    text_items: Sequence[int],
    captions: Sequence[str] | None,
    metadata: Sequence[dict[str, Any]] | None,
) -> list[EncodedItem]:
    """Items with a picture each, where there are pictures, and the texts that `text_items` name."""
    given_texts = () if texts is None else tuple(range(len(texts)))
    words = captions or [f"text {t}" for t in given_texts]
    count = max(0 if images is None else len(images), max(text_items, default=-1) + 1)
    return [
        EncodedItem(
            id=f"i{i}",
            image=f"{i}.png" if images is not None else None,
            image_key=b"i%d" % i if images is not None else None,
            texts=tuple(words[t] for t in given_texts if text_items[t] == i),
            text_keys=tuple(b"t%d" % t for t in given_texts if text_items[t] == i),
            metadata=metadata[i] if metadata else {},
        )
        for i in range(count)
    ]


def _manifest(
    staging: Staging, sides: dict[Modality, SideRecord], levels: Sequence[LevelSpec], count: int
) -> SnapshotManifest:
    """The manifest of what was written, nothing measured."""
    files = sorted(path for path in staging.path.rglob("*") if path.is_file())
    return SnapshotManifest(
        index=staging.index,
        version=staging.version,
        created_at="2024-01-01T00:00:00+00:00",
        items=count,
        sides=sides,
        levels=tuple(
            LevelRecord(level=s.level, exit_layer=s.exit_layer, dim=s.dim) for s in levels
        ),
        gallery="nested",
        gallery_space=SPACE,
        query_encoder="6" * 64,
        model="fake",
        artifact="nowhere",
        faiss_version="none",
        corpus=CorpusRecord(kind="folder", root="nowhere", source="nowhere", failures=0),
        build=BuildRecord(batch_size=1, max_failures=0.0, materialise=False, sample=0, target=0.99),
        files={f.relative_to(staging.path).as_posix(): file_record(f) for f in files},
    )
