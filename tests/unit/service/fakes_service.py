"""A small world to serve: colours in a two-level nested space, without a model or a file.

The searcher is exact and the encoder instant; both can be held up by a test at any stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanRequest, Stage
from hivlp.index.errors import NoSuchItem, PlanError
from hivlp.index.filter_masks import FilterMasks
from hivlp.index.filters import Expression
from hivlp.index.masks import RowMask
from hivlp.index.plans import make_plan
from hivlp.index.searcher import FoundItem, SnapshotInfo, StoredStates
from hivlp.index.snapshot.coded import code_column
from hivlp.index.snapshot.live import NotKept
from hivlp.index.snapshot.uploads import PictureRoots
from hivlp.models.artifact import ArtifactManifest, SourceRecord, StageRecord, TowerRecord
from hivlp.models.encoder import EncoderBatch, RgbImage
from hivlp.models.errors import TextError
from hivlp.models.levels import (
    EarlyOutput,
    FloatArray,
    GalleryKind,
    LevelSpec,
    Modality,
    nested_prefix,
    normalise,
)
from hivlp.service.overlap import EarlyOutputs
from hivlp.service.serving import Catalogue, ServedModel, ServedVersion
from hivlp.service.settings import Settings
from hivlp.service.timeline import Timeline

LEVELS = (LevelSpec(1, 1, 4), LevelSpec(2, 2, 8), LevelSpec(3, 3, 16))
FINEST = LEVELS[-1].dim
SPACE = "a" * 64
VERSION = "20260101T000000-000000"
NAMES = ("red", "green", "blue", "yellow", "café/☕", "white")


def vector_of(word: str) -> FloatArray:
    """(1, FINEST) float32: a direction of its own for every word."""
    seed = np.frombuffer(word.encode().ljust(4, b"\0"), np.uint8)
    return normalise(np.random.default_rng(seed).normal(size=(1, FINEST)).astype(np.float32))


def nothing(_: int) -> None:
    """Before a stage: go on at once."""


@dataclass
class FakeEncoder:
    """Words become their directions; `before(level)` runs before each stage and may wait."""

    modality: Modality
    before: Callable[[int], None] = nothing
    levels: tuple[LevelSpec, ...] = LEVELS
    gallery: GalleryKind = "nested"
    gallery_space: str = SPACE
    query_encoder: str = "b" * 64
    encoded: list[int] = field(default_factory=list)
    closed: int = 0

    def prepare(self, items: Sequence[str] | Sequence[RgbImage]) -> EncoderBatch:
        if any(isinstance(item, str) and item == "∅" for item in items):
            raise TextError("empty_text", "nothing left", param="texts[0]")
        vectors = [
            vector_of(item) if isinstance(item, str) else vector_of(nearest_colour(item))
            for item in items
        ]
        truncated = tuple(isinstance(item, str) and len(item) > 100 for item in items)
        inputs: dict[str, npt.NDArray[np.generic]] = {"vector": np.concatenate(vectors)}
        if self.modality == "text":  # a token a word, and one at either end
            words = max(len(item.split()) for item in items if isinstance(item, str))
            inputs["input_ids"] = np.ones((len(items), 2 + words), np.int64)
        return EncoderBatch(inputs, len(items), truncated)

    def encode(self, batch: EncoderBatch) -> Iterator[EarlyOutput]:
        vectors = np.asarray(batch.inputs["vector"], np.float32)
        try:
            for spec in self.levels:
                self.before(spec.level)
                self.encoded.append(spec.level)
                yield EarlyOutput(spec.level, nested_prefix(vectors, spec.dim))
        finally:
            self.closed += 1

    def encode_gallery(self, batch: EncoderBatch) -> tuple[EarlyOutput, ...]:
        raise NotImplementedError


def nearest_colour(picture: RgbImage) -> str:
    """The word of a picture: its strongest channel, or white."""
    red, green, blue = (float(v) for v in picture.reshape(-1, 3).mean(axis=0))
    if min(red, green, blue) > 200:
        return "white"
    return ("red", "green", "blue")[int(np.argmax([red, green, blue]))]


@dataclass
class FakeSearcher:
    """Exact search of one row per item and side; `before(level)` runs before each step."""

    before: Callable[[int], None] = nothing
    info: SnapshotInfo = field(
        default_factory=lambda: SnapshotInfo(
            index="default",
            version=VERSION,
            gallery_space=SPACE,
            gallery="nested",
            model="fake",
            levels=LEVELS,
            items=len(NAMES),
            rows={"image": len(NAMES), "text": len(NAMES)},
            created_at="2026-01-01T00:00:00+00:00",
        )
    )
    images: Mapping[str, str] = field(default_factory=dict)
    searched: list[int] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        self.closed = True

    def __post_init__(self) -> None:
        self._rows = np.concatenate([vector_of(name) for name in NAMES])

    def plan(self, request: PlanRequest, *, allowed: int | None = None) -> Plan:
        return make_plan(request, LEVELS, {}, len(NAMES))

    def mask(self, searched: Modality, expression: Expression) -> RowMask:
        columns = {
            "name": code_column("name", pa.chunked_array([[name.title() for name in NAMES]])),
            "length": code_column("length", pa.chunked_array([[len(name) for name in NAMES]])),
        }
        masks = FilterMasks(columns, len(NAMES))
        return masks.rows(expression, searched, np.arange(len(NAMES)))

    def step(
        self,
        searched: Modality,
        stage: Stage,
        queries: FloatArray,
        previous: Sequence[Candidates] | None,
        *,
        mask: RowMask | None = None,
    ) -> list[Candidates]:
        self.before(stage.level)
        self.searched.append(stage.level)
        dim = LEVELS[stage.level - 1].dim
        assert queries.shape == (1, dim), queries.shape
        every = np.arange(len(NAMES)) if mask is None else mask.rows
        rows = every if previous is None else previous[0].rows
        scores = nested_prefix(self._rows, dim)[rows] @ queries[0]
        return [Candidates.ranked(rows, scores, stage.keep)]

    def exact(
        self,
        searched: Modality,
        query: FloatArray,
        keep: int,
        between: Callable[[], None],
        *,
        mask: RowMask | None = None,
    ) -> Candidates:
        between()
        rows = np.arange(len(NAMES)) if mask is None else mask.rows
        return Candidates.ranked(rows, self._rows[rows] @ query, keep)

    def items(self, searched: Modality, found: Candidates, k: int, offset: int) -> list[FoundItem]:
        pairs = list(zip(found.rows.tolist(), found.scores.tolist(), strict=True))
        return [
            FoundItem(NAMES[row], row, score, NAMES[row] if searched == "text" else None)
            for row, score in pairs[offset : offset + k]
        ]

    def row_of(self, item_id: str, modality: Modality) -> int:
        if item_id not in NAMES:
            raise NoSuchItem(item_id)
        return NAMES.index(item_id)

    def vector(self, modality: Modality, row: int, level: int) -> FloatArray:
        return nested_prefix(self._rows[row : row + 1], LEVELS[level - 1].dim)

    def explain(
        self, searched: Modality, queries: Mapping[int, FloatArray], rows: RowArray
    ) -> dict[int, FloatArray]:
        return {
            level: nested_prefix(self._rows, LEVELS[level - 1].dim)[rows] @ query[0]
            for level, query in queries.items()
        }

    def metadata(
        self, item_ids: Sequence[str], names: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        if names is not None and set(names) - {"name", "length"}:
            raise PlanError("no such metadata column", param="with_metadata")
        for item_id in item_ids:
            self.row_of(item_id, "image")
        full = [{"name": one.title(), "length": len(one)} for one in item_ids]
        wanted = ("name", "length") if names is None else names
        return [{name: row[name] for name in wanted} for row in full]

    def stored_states(self, rows: RowArray) -> StoredStates | None:
        return None

    def image_ref(self, item_id: str) -> str | None:
        self.row_of(item_id, "image")
        return self.images.get(item_id)


@dataclass
class FakeLive:
    """A swap cell that counts its leases."""

    served: ServedVersion
    leases: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def lease(
        self, wanted: Callable[[ServedVersion], bool] | None = None
    ) -> Iterator[ServedVersion]:
        if wanted is not None and not wanted(self.served):
            raise NotKept
        with self.lock:
            self.leases += 1
        try:
            yield self.served
        finally:
            with self.lock:
                self.leases -= 1

    def swap(self, value: ServedVersion, keep: Callable[[ServedVersion], bool]) -> None:
        self.served = value

    def expire(self, keep: Callable[[ServedVersion], bool]) -> None:
        pass

    def close_in(self, pool: Executor) -> None:
        pass

    def close(self) -> None:
        self.served.close()


class FakeStore:
    """One older version beside the active one."""

    def versions(self, name: str, /) -> list[str]:
        return ["20250101T000000-000000", VERSION]


@dataclass
class World:
    """Everything served in one test."""

    searcher: FakeSearcher = field(default_factory=FakeSearcher)
    text: FakeEncoder = field(default_factory=lambda: FakeEncoder("text"))
    image: FakeEncoder = field(default_factory=lambda: FakeEncoder("image"))
    pictures: Path | None = None

    def __post_init__(self) -> None:
        model = ServedModel(fake_manifest(), {"text": self.text, "image": self.image})
        roots = PictureRoots(self.pictures)
        served = ServedVersion(self.searcher, model, roots, close_with=self.searcher.close)
        self.live = FakeLive(served)

    def load(self, _: Settings) -> Catalogue:
        return Catalogue({"default": self.live}, FakeStore())


def fake_manifest() -> ArtifactManifest:
    stages = tuple(
        StageRecord(level=s.level, exit_layer=s.exit_layer, dim=s.dim, file="x", inputs=())
        for s in LEVELS
    )
    modalities: tuple[Modality, Modality] = ("text", "image")
    return ArtifactManifest(
        name="fake",
        created_at="2026-01-01T00:00:00Z",
        gallery="nested",
        gallery_space=SPACE,
        query_encoder="b" * 64,
        towers=tuple(
            TowerRecord(modality=m, family="fake", pooling="mean", stages=stages)
            for m in modalities
        ),
        sources=(SourceRecord(name="colours", licence="CC0-1.0", attribution="nobody"),),
        files={},
    )


def early_outputs(
    outputs: Iterator[EarlyOutput],
    wanted: int,
    ahead: Executor | None,
    timeline: Timeline,
    due_s: float | None = None,
) -> EarlyOutputs:
    """The outputs of an encoder of which a plan is known to read so many."""
    early = EarlyOutputs(outputs, ahead, timeline, due_s)
    early.want(wanted)
    return early
