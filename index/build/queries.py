"""Queries to measure with: a sample of the corpus's own pictures and captions, fully encoded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from hivlp.index.build.encode import LIMITS
from hivlp.index.build.model import Model, query_outputs
from hivlp.index.candidates import RowArray
from hivlp.index.errors import CorpusError
from hivlp.index.snapshot.uploads import PictureRoots
from hivlp.models.encoder import Encoder, EncoderBatch, RgbImage
from hivlp.models.errors import ImageError
from hivlp.models.levels import FloatArray
from hivlp.models.runtime.images import decode_image

BATCH = 16
TIMED = 12
"""Queries that are encoded one by one to time the encoder's stages."""


@dataclass(frozen=True, slots=True)
class QuerySet:
    """Encoded queries: `outputs` by level, (n, dim) float32; `ordinals` (n,) say whose they are.

    `skipped` counts pictures that can no longer be read; `from_corpus`: `ordinals` are items of the
    corpus; `encode_ms` is how long each stage of the encoder takes for one query alone.
    """

    outputs: Mapping[int, FloatArray]
    ordinals: RowArray
    skipped: int = 0
    from_corpus: bool = True
    encode_ms: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.ordinals)

    @property
    def held_out(self) -> npt.NDArray[np.bool_]:
        """(n,): every other item's queries, so that no item is on both sides."""
        place: npt.NDArray[np.int64] = np.unique(self.ordinals, return_inverse=True)[1]
        odd: npt.NDArray[np.bool_] = place % 2 == 1
        return odd


def text_queries(model: Model, texts: Sequence[str], ordinals: Sequence[int]) -> QuerySet | None:
    """Encode texts as queries; None without a text tower or texts.

    Blank ones are passed over: of items with a vector of their own, and of erased ones.
    """
    said = [i for i, text in enumerate(texts) if text.strip()]
    texts, ordinals = [texts[i] for i in said], [ordinals[i] for i in said]
    if model.text is None or not texts:
        return None
    parts = [
        query_outputs(model.text, model.text.prepare(texts[start : start + BATCH]))
        for start in range(0, len(texts), BATCH)
    ]
    pace = encode_ms(model.text, [model.text.prepare([text]) for text in texts[:TIMED]])
    return QuerySet(_joined(parts), np.array(ordinals, dtype=np.int64), encode_ms=pace)


def image_queries(
    model: Model, roots: PictureRoots, refs: Sequence[str], ordinals: Sequence[int]
) -> QuerySet | None:
    """Read and encode pictures as queries; None without an image tower or readable pictures."""
    if model.image is None or not refs:
        return None
    parts: list[dict[int, FloatArray]] = []
    kept: list[int] = []
    alone: list[EncoderBatch] = []
    for start in range(0, len(refs), BATCH):
        pictures = [_picture(roots, ref) for ref in refs[start : start + BATCH]]
        readable = [i for i, picture in enumerate(pictures) if picture is not None]
        kept += [ordinals[start + i] for i in readable]
        if readable:
            found = [p for p in pictures if p is not None]
            parts.append(_encoded(model.image, found))
            alone += [model.image.prepare([p]) for p in found[: TIMED - len(alone)]]
    if not parts:
        return None
    pace = encode_ms(model.image, alone)
    skipped = len(refs) - len(kept)
    return QuerySet(_joined(parts), np.array(kept, dtype=np.int64), skipped, encode_ms=pace)


def encode_ms(
    encoder: Encoder[str] | Encoder[RgbImage], alone: Sequence[EncoderBatch]
) -> tuple[float, ...]:
    """Median milliseconds of each stage of an encoder, over batches of one query."""
    spent: list[list[float]] = [[] for _ in encoder.levels]
    for batch in alone:
        began = time.perf_counter()
        for times, _ in zip(spent, encoder.encode(batch), strict=True):
            ended = time.perf_counter()
            times.append(1e3 * (ended - began))
            began = ended
    return tuple(round(median(times), 4) for times in spent)


def _encoded(encoder: Encoder[RgbImage], pictures: Sequence[RgbImage]) -> dict[int, FloatArray]:
    return query_outputs(encoder, encoder.prepare(pictures))


def _picture(roots: PictureRoots, ref: str) -> RgbImage | None:
    try:
        return decode_image(roots.read(ref), LIMITS)
    except (CorpusError, ImageError):
        return None


def _joined(parts: Sequence[Mapping[int, FloatArray]]) -> dict[int, FloatArray]:
    return {level: np.concatenate([part[level] for part in parts]) for level in parts[0]}
