"""Pictures and captions to vectors, in batches, into the embedding cache.

A few threads read and prepare ahead of the encoder. A picture that breaks takes its item out, a
caption that can't be encoded only itself; both are listed. What is in the cache already is neither
decoded nor encoded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from hivlp.index.build.corpus import Corpus
from hivlp.index.build.embeddings import EmbeddingCache, content_key
from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.model import Model
from hivlp.index.errors import BuildError, CorpusError
from hivlp.index.pictures import MAX_PICTURE_BYTES, read_picture
from hivlp.models.encoder import EncoderBatch
from hivlp.models.errors import ImageError, TextError
from hivlp.models.levels import EarlyOutput
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.progress import Progress
from hivlp.models.runtime.texts import MAX_TEXT_CHARS, clean_text

Waiting = TypeVar("Waiting")

WINDOW = 64
READERS = 2
LIMITS = ImageLimits(max_bytes=MAX_PICTURE_BYTES, max_pixels=100_000_000)


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item whose vectors are in the cache under these keys."""

    id: str
    image: str | None
    image_key: bytes | None
    texts: tuple[str, ...]
    text_keys: tuple[bytes, ...]
    metadata: Mapping[str, Any]


@dataclass(slots=True)
class Encoded:
    """What came of a corpus: items in its order, and what was left out, with the reason."""

    items: list[EncodedItem] = field(default_factory=list)
    lost: list[BadItem] = field(default_factory=list)
    lost_captions: list[BadItem] = field(default_factory=list)
    fresh: int = 0

    @property
    def failures(self) -> list[BadItem]:
        """Everything left out."""
        return [*self.lost, *self.lost_captions]

    def check_share(self, max_failures: float, listed_in: Path) -> None:
        """Raises BuildError when too large a share of items or of captions was left out."""
        captions = sum(len(item.texts) for item in self.items)
        for what, lost, kept in (
            ("items", len(self.lost), len(self.items)),
            ("captions", len(self.lost_captions), captions),
        ):
            if lost and lost / (lost + kept) > max_failures:
                raise BuildError(
                    f"{lost} of {lost + kept} {what} failed, over the allowed share of "
                    f"{max_failures:g}; they are listed in {listed_in}"
                )
        if not self.items:
            raise BuildError("the corpus holds nothing that can be encoded")


def encode_corpus(
    corpus: Corpus, model: Model, cache: EmbeddingCache, batch_size: int, progress: Progress
) -> Encoded:
    """Encode whatever the cache lacks. Raises CorpusError, BuildError."""
    job = _Job(corpus, model, cache, batch_size)
    with ThreadPoolExecutor(READERS, thread_name_prefix="hivlp-read") as pool:
        found = iter(corpus)
        while window := list(islice(found, WINDOW)):
            job.take(window, pool)
            progress.step(len(window))
    job.finish()
    return job.encoded


def write_failures(path: Path, failures: Iterable[BadItem]) -> None:
    """One JSON object a line: place, id, reason."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as stream:
        for failure in failures:
            stream.write(json.dumps(asdict(failure)) + "\n")


class _Queue(Generic[Waiting]):
    """Inputs waiting for a full batch of one tower; `join` makes the batch of them."""

    def __init__(
        self,
        encode_gallery: Callable[[EncoderBatch], tuple[EarlyOutput, ...]],
        join: Callable[[list[Waiting]], EncoderBatch],
        cache: EmbeddingCache,
        size: int,
    ) -> None:
        self._encode = encode_gallery
        self._join = join
        self._cache = cache
        self._size = size
        self._waiting: dict[bytes, Waiting] = {}
        self.encoded = 0

    def missing(self, keys: Sequence[bytes]) -> set[bytes]:
        """Keys that are neither cached nor waiting."""
        return set(self._cache.missing(keys)) - self._waiting.keys()

    def add(self, key: bytes, content: Waiting) -> None:
        """Queue one input; a full batch is encoded at once."""
        self._waiting[key] = content
        if len(self._waiting) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Encode what waits. Raises BuildError where the encoder answers NaN or Inf."""
        if not self._waiting:
            return
        outputs = self._encode(self._join(list(self._waiting.values())))
        vectors = np.concatenate([output.vectors for output in outputs], axis=1)
        if not np.isfinite(vectors).all():
            bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist()
            raise BuildError(f"the encoder answered NaN or Inf for rows {bad} of a batch")
        self._cache.put(self._waiting, vectors)
        self.encoded += len(self._waiting)
        self._waiting.clear()


class _Job:
    def __init__(
        self, corpus: Corpus, model: Model, cache: EmbeddingCache, batch_size: int
    ) -> None:
        self._corpus = corpus
        self._model = model
        self._images: _Queue[EncoderBatch] | None = None
        self._texts: _Queue[str] | None = None
        if (image := model.image) is not None:
            self._images = _Queue(image.encode_gallery, _together, cache, batch_size)
        if (text := model.text) is not None:
            self._texts = _Queue(text.encode_gallery, text.prepare, cache, batch_size)
        self.encoded = Encoded()

    def take(self, window: Sequence[Item | BadItem], pool: ThreadPoolExecutor) -> None:
        items = [found for found in window if isinstance(found, Item)]
        self.encoded.lost += [found for found in window if isinstance(found, BadItem)]
        keys = self._image_keys(items, pool)
        for item, key in zip(items, keys, strict=True):
            if isinstance(key, BadItem):
                self.encoded.lost.append(key)
            else:
                self._keep(item, key)

    def finish(self) -> None:
        for queue in (self._images, self._texts):
            if queue is not None:
                queue.flush()
                self.encoded.fresh += queue.encoded

    def _keep(self, item: Item, image_key: bytes | None) -> None:
        texts = self._queue_texts(item)
        if image_key is None and not texts:
            self.encoded.lost.append(BadItem(item.id, item.id, "nothing to encode"))
            return
        self.encoded.items.append(
            EncodedItem(
                item.id,
                item.image,
                image_key,
                tuple(texts.values()),
                tuple(texts),
                item.metadata,
            )
        )

    def _queue_texts(self, item: Item) -> dict[bytes, str]:
        """Distinct captions that can be encoded, in canonical form, by key; queues the new ones."""
        if self._texts is None or self._model.text is None:
            return {}
        texts: dict[bytes, str] = {}
        for caption in item.captions:
            try:
                text = clean_text(caption, max_chars=MAX_TEXT_CHARS)
            except TextError as error:
                self._lose_caption(item, error)
            else:
                texts[content_key("text", text.encode())] = text
        missing = self._texts.missing(list(texts))
        for key in [key for key in texts if key in missing]:
            try:  # tried alone, so that a text without tokens can't fail its whole batch
                self._model.text.prepare([texts[key]])
            except TextError as error:
                self._lose_caption(item, error)
                del texts[key]
            else:
                self._texts.add(key, texts[key])
        return texts

    def _lose_caption(self, item: Item, error: TextError) -> None:
        bad = BadItem(item.id, item.id, f"caption left out: {error.message}")
        self.encoded.lost_captions.append(bad)

    def _image_keys(
        self, items: Sequence[Item], pool: ThreadPoolExecutor
    ) -> list[bytes | BadItem | None]:
        """Key of each item's picture; None where it has none, or the model can't see."""
        if self._images is None or self._model.image is None:
            return [None] * len(items)
        contents = list(pool.map(self._read, items))
        keys: list[bytes | BadItem | None] = [
            content_key("image", content) if isinstance(content, bytes) else content
            for content in contents
        ]
        missing = self._images.missing([key for key in keys if isinstance(key, bytes)])
        fresh = [i for i, key in enumerate(keys) if isinstance(key, bytes) and key in missing]
        prepared = pool.map(self._prepare, [items[i] for i in fresh], [contents[i] for i in fresh])
        for i, batch in zip(fresh, prepared, strict=True):
            key = keys[i]
            assert isinstance(key, bytes)
            if isinstance(batch, BadItem):
                keys[i] = batch
            else:
                self._images.add(key, batch)
        return keys

    def _read(self, item: Item) -> bytes | BadItem | None:
        if item.image is None:
            return None
        if item.image_data is not None:
            return item.image_data
        try:
            return read_picture(self._corpus.root, item.image)
        except CorpusError as error:
            return BadItem(error.place, item.id, error.reason)

    def _prepare(self, item: Item, content: bytes | BadItem | None) -> EncoderBatch | BadItem:
        """Decode and scale one picture; the full-size pixels do not outlive this call."""
        assert isinstance(content, bytes)
        assert self._model.image is not None
        try:
            return self._model.image.prepare([decode_image(content, LIMITS)])
        except ImageError as error:
            return BadItem(str(item.image), item.id, error.message)


def _together(batches: Sequence[EncoderBatch]) -> EncoderBatch:
    """Join prepared pictures, all of one shape, into one batch."""
    names = batches[0].inputs.keys()
    inputs = {name: np.concatenate([b.inputs[name] for b in batches]) for name in names}
    truncated = tuple(cut for batch in batches for cut in batch.truncated)
    return EncoderBatch(inputs, sum(batch.size for batch in batches), truncated)
