"""The four kinds of query, and how each becomes a stream of early outputs.

A text or a picture goes through its encoder; an item or a vector is already a gallery vector, whose
levels are cut from it. Everything here runs in a worker thread, except `content`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import orjson

from hivlp.index.errors import NoSuchItem
from hivlp.index.searcher import Searcher
from hivlp.index.snapshot.uploads import PictureRoots
from hivlp.models.encoder import Encoder, EncoderBatch, RgbImage
from hivlp.models.errors import InputError
from hivlp.models.levels import EarlyOutput, FloatArray, Modality, nested_prefix, normalise
from hivlp.models.runtime.images import ImageLimits, PixelRoom, decode_image
from hivlp.models.runtime.texts import clean_text
from hivlp.service.serving import QueryModel
from hivlp.service.settings import Limits
from hivlp.service.timeline import Timeline

MODALITIES: tuple[Modality, Modality] = ("image", "text")


@dataclass(frozen=True, slots=True)
class Opened:
    """A query under way. `exclude` is an item that must not be among the hits.

    `content` is the text or the picture, where the query is one.
    """

    modality: Modality
    outputs: Iterator[EarlyOutput]
    truncated: bool = False
    exclude: str | None = None
    content: str | RgbImage | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What a query is opened in; `pictures` is where those of the items lie.

    `due_s` (`time.perf_counter`; None: never) is when the answer must be there.
    """

    searcher: Searcher
    model: QueryModel
    searched: Modality
    limits: Limits
    timeline: Timeline
    pictures: PictureRoots = field(default_factory=PictureRoots)
    due_s: float | None = None


class Query(Protocol):
    """One kind of query."""

    @property
    def kind(self) -> str:
        """Its word: text, image, similar or vector."""

    @property
    def encodes(self) -> bool:
        """Whether an encoder runs, so that there is something to overlap with."""

    def content(self) -> bytes:
        """What the cache knows it by."""

    def open(self, setting: Setting) -> Opened:
        """Begin. Raises InputError, NoSuchItem."""


class EncodedQuery(Query, Protocol):
    """A query that goes through an encoder, alone or with others of its kind."""

    @property
    def modality(self) -> Modality:
        """The tower that it goes through."""

    @property
    def param(self) -> str:
        """The field that it came in."""

    def read(self, setting: Setting) -> str | RgbImage:
        """What the encoder prepares. Raises InputError."""


@dataclass(frozen=True, slots=True)
class TextQuery:
    """A sentence, cleaned. Make it with `text_query`."""

    text: str
    param: str = "query"
    kind: str = "text"
    modality: Modality = "text"
    encodes: bool = True

    def content(self) -> bytes:
        """The cleaned text."""
        return self.text.encode()

    def read(self, setting: Setting) -> str:  # noqa: ARG002
        """The text itself."""
        return self.text

    def open(self, setting: Setting) -> Opened:
        """Tokenise; the encoder starts when the first output is asked for."""
        return open_encoded(self, setting)


def text_query(text: str, limits: Limits, param: str = "query") -> TextQuery:
    """Clean and check a text. Raises TextError."""
    return TextQuery(clean_text(text, max_chars=limits.max_text_chars, param=param), param)


@dataclass(frozen=True, slots=True)
class ImageQuery:
    """A picture as it was sent."""

    data: bytes
    param: str = "image"
    kind: str = "image"
    modality: Modality = "image"
    encodes: bool = True

    def content(self) -> bytes:
        """The picture's bytes."""
        return self.data

    def read(self, setting: Setting) -> RgbImage:
        """Decode. Raises ImageError."""
        return decode_image(self.data, image_limits(setting.limits))

    def open(self, setting: Setting) -> Opened:
        """Decode and scale; the encoder starts when the first output is asked for."""
        return open_encoded(self, setting)


@dataclass(frozen=True, slots=True)
class ItemQuery:
    """An item of the index: more like it, without it."""

    id: str
    kind: str = "similar"
    encodes: bool = False

    def content(self) -> bytes:
        """The id."""
        return self.id.encode()

    def open(self, setting: Setting) -> Opened:
        """The item's own side of what is searched where it has one, else its other side."""
        modality, row = self._row(setting)
        searcher = setting.searcher
        outputs = gallery_outputs(searcher, modality, row)
        return Opened(modality, outputs, exclude=self.id)

    def _row(self, setting: Setting) -> tuple[Modality, int]:
        for modality in sorted(MODALITIES, key=lambda side: side != setting.searched):
            try:
                return modality, setting.searcher.row_of(self.id, modality)
            except NoSuchItem:
                continue
        raise NoSuchItem(self.id)


@dataclass(frozen=True, slots=True)
class VectorQuery:
    """A vector of the finest level, of any length but zero; it is taken for the searched side.

    On an index of imported vectors it is one as they were imported: it is rotated as they were.
    """

    vector: Sequence[float]
    kind: str = "vector"
    encodes: bool = False

    def content(self) -> bytes:
        """The numbers."""
        return orjson.dumps(list(self.vector))

    def open(self, setting: Setting) -> Opened:
        """Normalise, rotate and cut. Raises InputError for a wrong dimension or a zero vector."""
        info = setting.searcher.info
        finest = info.levels[-1]
        if len(self.vector) != finest.dim:
            message = f"vector: {finest.dim} numbers are needed, got {len(self.vector)}"
            raise InputError("invalid_vector", message, param="vector", limit=finest.dim)
        vector = np.asarray([self.vector], dtype=np.float64)
        largest = float(np.abs(vector).max())
        if not np.isfinite(largest) or largest == 0.0:
            message = "vector: it must be finite, and more than zeros"
            raise InputError("invalid_vector", message, param="vector")
        full = normalise((vector / largest).astype(np.float32))
        if info.rotation is not None:
            full = full @ info.rotation
        if info.gallery == "nested":
            return Opened(setting.searched, _prefixes(setting.searcher, full))
        return Opened(setting.searched, iter([EarlyOutput(finest.level, full)]))


def gallery_outputs(searcher: Searcher, modality: Modality, row: int) -> Iterator[EarlyOutput]:
    """The gallery vector of a row, level by level."""
    levels = searcher.info.levels
    if searcher.info.gallery == "nested":
        return _prefixes(searcher, searcher.vector(modality, row, levels[-1].level))
    return (EarlyOutput(s.level, searcher.vector(modality, row, s.level)) for s in levels)


def _prefixes(searcher: Searcher, full: FloatArray) -> Iterator[EarlyOutput]:
    return (EarlyOutput(s.level, nested_prefix(full, s.dim)) for s in searcher.info.levels)


def open_encoded(query: EncodedQuery, setting: Setting) -> Opened:
    """Read and prepare one query; its encoder starts when the first output is asked for."""
    encoder = setting.model.encoder(query.modality, query.param)
    with setting.timeline.measure("decode"):
        content = query.read(setting)
        batch = prepare(encoder, content, query.param)
    return Opened(query.modality, encoder.encode(batch), batch.truncated[0], content=content)


def prepare(encoder: Encoder[Any], item: Any, param: str) -> EncoderBatch:
    """Prepare one item; what is wrong with it is blamed on the field it came in."""
    try:
        return encoder.prepare([item])
    except InputError as error:
        error.param = param
        raise


def image_limits(limits: Limits, max_bytes: int | None = None) -> ImageLimits:
    """This server's limits in the words of the picture decoder."""
    return ImageLimits(
        max_bytes=limits.max_image_bytes if max_bytes is None else max_bytes,
        max_pixels=limits.max_pixels,
        room=_room(limits.max_decoding_pixels),
    )


@functools.cache
def _room(pixels: int) -> PixelRoom:
    """One for all who decode, searches, thumbnails and items that are put: memory is one too."""
    return PixelRoom(pixels)
