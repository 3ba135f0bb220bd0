"""Items that come one by one: checked, encoded, and made ready to be published as changes.

    ready = encode_drafts(drafts, Workshop(towers, shape, cache_folder, index_folder))

Each draft stands for itself: what is wrong with one is its own answer, the others go on. Encoding
is batched, and goes through the embedding cache, so the next build encodes nothing of it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from hivlp.index.build.embeddings import EmbeddingCache, content_key
from hivlp.index.build.items import RowError, check_id
from hivlp.index.snapshot.changes import Shape, Upsert
from hivlp.index.snapshot.uploads import keep_upload
from hivlp.models.encoder import Encoder, EncoderBatch, RgbImage
from hivlp.models.errors import InputError
from hivlp.models.levels import FloatArray, Modality, normalise
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.texts import clean_text

MAX_TEXTS = 64
BATCH: Mapping[Modality, int] = {"image": 8, "text": 32}


@dataclass(frozen=True, slots=True)
class Draft:
    """An item to be put: captions as they were given, a picture's bytes, vectors of its own.

    `vectors` are rows of the gallery for what needs no encoding: of a picture, (width,) float32; of
    its texts, (n, width), one each (one of an item without a text). They count instead of what an
    encoder would say of the picture or the texts beside them, which are kept to be shown.
    """

    id: str
    texts: tuple[str, ...] = ()
    picture: bytes | None = field(default=None, repr=False)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[Modality, FloatArray] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What drafts are made ready with: a model's towers and where things are kept."""

    image: Encoder[RgbImage] | None
    text: Encoder[str] | None
    shape: Shape
    gallery_space: str
    cache_folder: Path
    index_folder: Path
    limits: ImageLimits = field(default_factory=ImageLimits)
    max_text_chars: int = 2_000
    max_texts: int = MAX_TEXTS


@dataclass(slots=True)
class _Work:
    """One draft under way: what is to be encoded, by cache key."""

    draft: Draft
    texts: dict[bytes, str] = field(default_factory=dict)
    picture: bytes | None = None
    wrong: InputError | None = None


def encode_drafts(drafts: Sequence[Draft], workshop: Workshop) -> list[Upsert | InputError]:
    """Drafts as changes, or what is wrong with each. Raises BuildError, OSError."""
    works = [_Work(draft) for draft in drafts]
    with EmbeddingCache(
        workshop.cache_folder, workshop.gallery_space, workshop.shape.width
    ) as cache:
        prepared = _prepare(works, workshop, cache)
        _encode(prepared, workshop, cache)
        return [
            work.wrong if work.wrong is not None else _ready(work, workshop, cache)
            for work in works
        ]


def _prepare(
    works: Sequence[_Work], workshop: Workshop, cache: EmbeddingCache
) -> dict[Modality, dict[bytes, Any]]:
    """Check every draft; what the cache lacks, prepared for its encoder, by key."""
    wanted: dict[Modality, dict[bytes, Any]] = {"image": {}, "text": {}}
    for work in works:
        try:
            own = dict(_checked(work, workshop, cache))
        except InputError as error:
            work.wrong = error
            continue
        for (modality, key), batch in own.items():
            wanted[modality][key] = batch
    return wanted


def _checked(
    work: _Work, workshop: Workshop, cache: EmbeddingCache
) -> Iterator[tuple[tuple[Modality, bytes], Any]]:
    """Raises InputError naming the field; yields what must be encoded."""
    draft = work.draft
    try:
        check_id(draft.id)
    except RowError as error:
        raise InputError("invalid_id", f"id: {error.reason}", param="id") from error
    if len(draft.texts) > workshop.max_texts:
        message = f"texts: {len(draft.texts)} texts, at most {workshop.max_texts}"
        raise InputError("out_of_range", message, param="texts", limit=workshop.max_texts)
    if not (draft.texts or draft.picture is not None or draft.vectors):
        message = "an item needs texts, an image or a vector to be found by"
        raise InputError("nothing_to_search", message, param="texts")
    if draft.picture is not None and "image" in draft.vectors:
        decode_image(draft.picture, workshop.limits)  # kept to be shown; the vector counts
    elif draft.picture is not None:
        work.picture = content_key("image", draft.picture)
        yield from _picture(work.picture, draft.picture, workshop, cache)
    for place, given in enumerate(draft.texts):
        param = f"texts.{place}"
        text = clean_text(given, max_chars=workshop.max_text_chars, param=param)
        if "text" in draft.vectors:
            continue
        key = content_key("text", text.encode())
        work.texts[key] = text
        yield from _text(key, text, param, workshop, cache)


def _picture(
    key: bytes, data: bytes, workshop: Workshop, cache: EmbeddingCache
) -> Iterator[tuple[tuple[Modality, bytes], Any]]:
    if workshop.image is None:
        message = "image: the model of this index has no image encoder"
        raise InputError("no_encoder", message, param="image")
    pixels = decode_image(data, workshop.limits)
    if cache.missing([key]):
        yield ("image", key), _blamed(workshop.image, pixels, "image")


def _text(
    key: bytes, text: str, param: str, workshop: Workshop, cache: EmbeddingCache
) -> Iterator[tuple[tuple[Modality, bytes], Any]]:
    if workshop.text is None:
        message = f"{param}: the model of this index has no text encoder"
        raise InputError("no_encoder", message, param=param)
    if cache.missing([key]):
        _blamed(workshop.text, text, param)
        yield ("text", key), text


def _blamed(encoder: Encoder[Any], item: Any, param: str) -> EncoderBatch:
    try:
        return encoder.prepare([item])
    except InputError as error:
        error.param = param
        raise


def _encode(
    prepared: Mapping[Modality, Mapping[bytes, Any]], workshop: Workshop, cache: EmbeddingCache
) -> None:
    """Encode in batches, through the whole depth, into the cache."""
    for modality, wanted in prepared.items():
        keys = list(wanted)
        for start in range(0, len(keys), BATCH[modality]):
            part = keys[start : start + BATCH[modality]]
            inputs = [wanted[key] for key in part]
            if modality == "image":
                assert workshop.image is not None
                outputs = workshop.image.encode_gallery(joined_batch(inputs))
            else:
                assert workshop.text is not None
                outputs = workshop.text.encode_gallery(workshop.text.prepare(inputs))
            vectors = np.concatenate([output.vectors for output in outputs], axis=1)
            fine = np.isfinite(vectors).all(axis=1)
            cache.put([k for k, ok in zip(part, fine, strict=True) if ok], vectors[fine])


def joined_batch(batches: Sequence[EncoderBatch]) -> EncoderBatch:
    """Prepared inputs, all of one shape, as one batch."""
    names = batches[0].inputs.keys()
    inputs = {name: np.concatenate([b.inputs[name] for b in batches]) for name in names}
    truncated = tuple(cut for batch in batches for cut in batch.truncated)
    return EncoderBatch(inputs, sum(batch.size for batch in batches), truncated)


def _ready(work: _Work, workshop: Workshop, cache: EmbeddingCache) -> Upsert | InputError:
    draft = work.draft
    keys = [*work.texts, *([work.picture] if work.picture else [])]
    if cache.missing(keys):
        return InputError("not_finite", "the encoder answered NaN or Inf", param="texts")
    image, vectors = draft.vectors.get("image"), draft.vectors.get("text")
    texts: tuple[str, ...] = tuple(work.texts.values())
    if vectors is not None:
        texts = draft.texts or ("",)
    keys += own_keys(draft.vectors)
    if work.picture is not None:
        image = cache.get([work.picture])[0]
    if work.texts:
        vectors = cache.get(list(work.texts))
    reference = None
    if draft.picture is not None:
        reference = keep_upload(workshop.index_folder, draft.picture)
    return Upsert(
        draft.id,
        reference,
        texts,
        draft.metadata,
        image,
        vectors,
        own=workshop.gallery_space if draft.vectors else None,
        keys=tuple(keys),
        uploads=() if reference is None else (reference,),
    )


def own_keys(vectors: Mapping[Modality, FloatArray]) -> list[bytes]:
    """The embedding cache's keys of vectors that were given."""
    return [
        content_key(side, b"own\0" + row.tobytes())
        for side, given in vectors.items()
        for row in np.atleast_2d(given)
    ]


def own_vector(
    given: Sequence[float], shape: Shape, rotation: FloatArray | None = None
) -> FloatArray:
    """A given vector as a row of the gallery: (width,) float32, of unit length.

    `rotation` (width, width) turns it as the vectors of an import were turned. Raises InputError
    for a wrong length, zeros, NaN or Inf, and for galleries of one vector a level, where one says
    nothing of the others.
    """
    if shape.gallery != "nested":
        message = "vector: the levels of this index are not cut from one vector"
        raise InputError("invalid_vector", message, param="vector")
    if len(given) != shape.width:
        message = f"vector: {shape.width} numbers are needed, got {len(given)}"
        raise InputError("invalid_vector", message, param="vector", limit=shape.width)
    vector = np.asarray(given, dtype=np.float64)
    largest = float(np.abs(vector).max())
    if not np.isfinite(largest) or largest == 0.0:
        message = "vector: it must be finite, and more than zeros"
        raise InputError("invalid_vector", message, param="vector")
    unit: FloatArray = normalise((vector[None] / largest).astype(np.float32))
    turned: FloatArray = unit if rotation is None else normalise(unit @ rotation)
    return cast(FloatArray, turned[0])
