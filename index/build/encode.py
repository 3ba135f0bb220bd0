"""Pictures and captions to vectors, in batches, into the embedding cache.

A few threads read and prepare ahead of the encoder. A picture that breaks takes its item out, a
caption that can't be encoded only itself; both are listed. What is in the cache already is neither
decoded nor encoded again. In memory are at most WINDOW items with their pictures' files, as many
decoded pictures as there are threads, and WINDOW prepared ones; what is done goes to the spool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hivlp.index.build.embeddings import EmbeddingCache, NumberCache, content_key
from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.model import Model
from hivlp.index.build.overlay import Overlay
from hivlp.index.build.readers.base import Corpus
from hivlp.index.build.spool import EncodedItem, ItemSpool
from hivlp.index.build.states import KeptStates
from hivlp.index.errors import BuildError, CorpusError
from hivlp.index.pictures import MAX_PICTURE_BYTES, read_picture
from hivlp.index.snapshot.room import check_room
from hivlp.models.encoder import EncoderBatch
from hivlp.models.errors import ImageError, TextError
from hivlp.models.levels import EarlyOutput, Modality
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.progress import Progress
from hivlp.models.runtime.texts import MAX_TEXT_CHARS, clean_text

Waiting = TypeVar("Waiting")

WINDOW = 64
WINDOW_BYTES = 64 * 2**20
"""A window ends early when its readers hold so many bytes of pictures."""
WORKERS = 2
LIMITS = ImageLimits(max_bytes=MAX_PICTURE_BYTES, max_pixels=100_000_000)


class FailureLog:
    """What is left out, one JSON object a line: place, id, reason. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("w", encoding="utf-8")

    def __enter__(self) -> FailureLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def write(self, failure: BadItem) -> None:
        """Add one thing."""
        self._stream.write(json.dumps(asdict(failure)) + "\n")


@dataclass(slots=True)
class Encoded:
    """What came of a corpus: items in its order, and how much was left out."""

    items: ItemSpool
    lost: int = 0
    lost_captions: int = 0
    fresh: int = 0

    @property
    def failures(self) -> int:
        """How many items and captions were left out."""
        return self.lost + self.lost_captions

    def check_share(self, max_failures: float, listed_in: Path) -> None:
        """Raises BuildError when too large a share of items or of captions was left out."""
        for what, lost, kept in (
            ("items", self.lost, len(self.items)),
            ("captions", self.lost_captions, self.items.texts),
        ):
            if lost and lost / (lost + kept) > max_failures:
                raise BuildError(
                    f"{lost} of {lost + kept} {what} failed, over the allowed share of "
                    f"{max_failures:g}; they are listed in {listed_in}"
                )
        if not len(self.items):
            raise BuildError("the corpus holds nothing that can be encoded")


@dataclass(frozen=True, slots=True)
class EncodeMeans:
    """What encoding works with: `workers` threads read and decode, `batch_size` inputs a batch.

    `states` keeps pictures' token states (None: none are made).
    """

    cache: EmbeddingCache
    spool: ItemSpool
    failures: FailureLog
    batch_size: int = 32
    workers: int = WORKERS
    states: KeptStates | None = None


def encode_corpus(
    corpus: Corpus,
    model: Model,
    means: EncodeMeans,
    progress: Progress,
    overlay: Overlay | None = None,
) -> Encoded:
    """Encode whatever the cache lacks. Raises CorpusError, BuildError (NoRoom where the disk has
    too little for what is to be cached).
    """
    job = _Job(corpus, model, means)
    found = iter(corpus) if overlay is None else overlay.over(corpus)
    with ThreadPoolExecutor(means.workers, thread_name_prefix="hivlp-read") as pool:
        while True:
            window = _window(found)
            if not window:
                break
            job.take(window, pool)
            progress.step(len(window))
            del window  # before the next one is read
    job.finish()
    return job.encoded


def _window(found: Iterator[Item | BadItem]) -> list[Item | BadItem]:
    """The next things of a corpus, at most WINDOW of them."""
    window: list[Item | BadItem] = []
    held = 0
    while len(window) < WINDOW and held < WINDOW_BYTES:
        one = next(found, None)
        if one is None:
            break
        window.append(one)
        if isinstance(one, Item) and one.image_data is not None:
            held += len(one.image_data)
    return window


class _Queue(Generic[Waiting]):
    """Inputs waiting for a full batch of one encoder; `join` makes the batch of them."""

    def __init__(
        self,
        encode: Callable[[EncoderBatch], npt.NDArray[np.floating]],
        join: Callable[[list[Waiting]], EncoderBatch],
        cache: NumberCache,
        size: int,
    ) -> None:
        self._encode = encode
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
        vectors = self._encode(self._join(list(self._waiting.values())))
        if not np.isfinite(vectors).all():
            bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist()
            raise BuildError(f"the encoder answered NaN or Inf for rows {bad} of a batch")
        _put(self._cache, list(self._waiting), vectors)
        self.encoded += len(self._waiting)
        self._waiting.clear()


class _Job:
    def __init__(self, corpus: Corpus, model: Model, means: EncodeMeans) -> None:
        self._corpus = corpus
        self._model = model
        self._failures = means.failures
        self._images: _Queue[EncoderBatch] | None = None
        self._states: _Queue[EncoderBatch] | None = None
        self._texts: _Queue[str] | None = None
        cache, size = means.cache, means.batch_size
        if (image := model.image) is not None:
            self._images = _Queue(_joined(image.encode_gallery), _together, cache, size)
        if (states := means.states) is not None:
            self._states = _Queue(states.encode, _together, states.cache, size)
        if (text := model.text) is not None:
            self._texts = _Queue(_joined(text.encode_gallery), text.prepare, cache, size)
        self._cache = cache
        self.encoded = Encoded(means.spool)

    def take(self, window: Sequence[Item | BadItem], pool: ThreadPoolExecutor) -> None:
        items = [found for found in window if isinstance(found, Item)]
        keys = iter(self._image_keys(items, pool))
        for found in window:
            key = found if isinstance(found, BadItem) else next(keys)
            if isinstance(key, BadItem):
                self._lose(key)
            else:
                assert isinstance(found, Item)
                self._keep(found, key)

    def finish(self) -> None:
        for queue in (self._images, self._texts):
            if queue is not None:
                queue.flush()
                self.encoded.fresh += queue.encoded
        if self._states is not None:
            self._states.flush()

    def _keep(self, item: Item, image_key: bytes | None) -> None:
        if item.vectors:
            self._keep_own(item)
            return
        texts = self._queue_texts(item)
        if image_key is None and not texts:
            self._lose(BadItem(item.place or item.id, item.id, "nothing to encode"))
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

    def _keep_own(self, item: Item) -> None:
        """An item whose vectors came with it: they go through the cache like any."""
        keys: dict[Modality, tuple[bytes, ...]] = {}
        for side, given in item.vectors.items():
            rows = np.atleast_2d(given)
            keys[side] = tuple(content_key(side, b"own\0" + row.tobytes()) for row in rows)
            _put(self._cache, keys[side], rows)
        image = keys.get("image", (None,))[0]
        texts = item.captions if "text" in keys else ()
        metadata = item.metadata
        self.encoded.items.append(
            EncodedItem(item.id, item.image, image, texts, keys.get("text", ()), metadata)
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

    def _lose(self, bad: BadItem) -> None:
        self.encoded.lost += 1
        self._failures.write(bad)

    def _lose_caption(self, item: Item, error: TextError) -> None:
        self.encoded.lost_captions += 1
        reason = f"caption left out: {error.message}"
        self._failures.write(BadItem(item.place or item.id, item.id, reason))

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
        known = [key for key in keys if isinstance(key, bytes)]
        missing = self._images.missing(known)
        stateless = set() if self._states is None else self._states.missing(known)
        wanted = missing | stateless
        fresh = [i for i, key in enumerate(keys) if isinstance(key, bytes) and key in wanted]
        prepared = pool.map(self._prepare, [items[i] for i in fresh], [contents[i] for i in fresh])
        for i, batch in zip(fresh, prepared, strict=True):
            key = keys[i]
            assert isinstance(key, bytes)
            if isinstance(batch, BadItem):
                keys[i] = batch
                continue
            if key in missing:
                self._images.add(key, batch)
            if self._states is not None and key in stateless:
                self._states.add(key, batch)
        return keys

    def _read(self, item: Item) -> bytes | BadItem | None:
        if item.image_data is not None:
            return item.image_data
        if item.image is None or item.vectors:
            return None
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
            return BadItem(item.image or item.place or item.id, item.id, error.message)


def _put(cache: NumberCache, keys: Sequence[bytes], numbers: npt.NDArray[np.floating]) -> None:
    """Into the cache, but for the room that is to stay free. Raises NoRoom, BuildError."""
    folder = cache.path.parent
    what = f"{len(keys)} more in the cache of {folder.name}"
    check_room({folder: cache.row_bytes * len(keys)}, what)
    cache.put(keys, numbers)


def _joined(
    encode_gallery: Callable[[EncoderBatch], tuple[EarlyOutput, ...]],
) -> Callable[[EncoderBatch], npt.NDArray[np.floating]]:
    """All levels of a gallery vector one after the other: a batch to (n, numbers)."""

    def encode(batch: EncoderBatch) -> npt.NDArray[np.floating]:
        return np.concatenate([output.vectors for output in encode_gallery(batch)], axis=1)

    return encode


def _together(batches: Sequence[EncoderBatch]) -> EncoderBatch:
    """Join prepared pictures, all of one shape, into one batch."""
    names = batches[0].inputs.keys()
    inputs = {name: np.concatenate([b.inputs[name] for b in batches]) for name in names}
    truncated = tuple(cut for batch in batches for cut in batch.truncated)
    return EncoderBatch(inputs, sum(batch.size for batch in batches), truncated)
