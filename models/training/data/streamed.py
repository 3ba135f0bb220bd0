"""Batches of streamed pictures: files read from end to end, shuffled in a buffer.

For tars on a slow or remote disk, where drawing single pictures would cost a request each. Files
(webdataset shards, tables) come in a new order each pass and are dealt out among all loading
processes of all training processes, which then read on their own.

Notable: a picture that leaves the buffer is used or, broken, replaced by a copy of one that is
still in it. So every batch takes the same number of pictures out, and a run that goes on finds its
place by reading along without decoding anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

from torch.utils.data import IterableDataset, get_worker_info

from hivlp.models.corpus import Unusable
from hivlp.models.errors import HivlpError, TrainingError
from hivlp.models.training.data.listed import REPLACEMENTS, Share, unusable
from hivlp.models.training.data.order import BUFFER, SHARDS, stream
from hivlp.models.training.data.prepare import (
    Loaded,
    Preparation,
    Prepared,
    Preparer,
    failed,
)
from hivlp.models.training.data.settings import DataSettings
from hivlp.models.training.data.sources import DataSource, Pictures, UsablePicture


class PictureStream:
    """Pictures of stream `own` of `streams`, pass after pass without end, in shuffled order.

    Bad entries are put into `bad`, which who reads empties. Raises TrainingError for a pass that
    has no picture.
    """

    def __init__(
        self, pictures: Pictures, settings: DataSettings, seed: int, own: int, streams: int
    ) -> None:
        if pictures.parts < streams:
            raise TrainingError(
                f"data.stream: {pictures.parts} files can't be dealt out to {streams} readers "
                "(processes x data.workers): lower data.workers, or cut the corpus into more files"
            )
        self._pictures, self._seed = pictures, seed
        self.own, self._streams = own, streams
        self._most, self._most_bytes = settings.buffer, settings.buffer_mib * 2**20
        self._rng = stream(seed, BUFFER, own)
        self.buffer: list[UsablePicture] = []
        self.bad: list[Unusable] = []

    def __iter__(self) -> Iterator[UsablePicture]:
        held = 0
        for found in self._ordered():
            self.buffer.append(found)
            held += len(found.data or b"")
            while len(self.buffer) >= self._most or held > self._most_bytes:
                taken = self._take()
                held -= len(taken.data or b"")
                yield taken

    def _take(self) -> UsablePicture:
        place = int(self._rng.integers(len(self.buffer)))
        self.buffer[place], self.buffer[-1] = self.buffer[-1], self.buffer[place]
        return self.buffer.pop()

    def _ordered(self) -> Iterator[UsablePicture]:
        for epoch in count():
            order = stream(self._seed, SHARDS, epoch).permutation(self._pictures.parts)
            usable = 0
            for part in order[self.own :: self._streams]:
                for found in self._pictures.read_part(int(part)):
                    if isinstance(found, UsablePicture):
                        usable += 1
                        yield found
                    elif isinstance(found, Unusable):
                        self.bad.append(found)
            if not usable:
                raise TrainingError("data.stream: a pass over the files found no usable picture")


class StreamedBatches(IterableDataset[Loaded]):
    """Batches start..stop-1 of one process, in order also when several workers make them.

    Of w workers, the one for batch b is b mod w; the loader asks its first worker first, so that
    one plays the worker whose turn batch `start` is.
    """

    def __init__(
        self,
        source: DataSource,
        settings: DataSettings,
        preparation: Preparation,
        share: Share,
        steps: range,
    ) -> None:
        self._source, self._settings, self._preparation = source, settings, preparation
        self._share, self._steps = share, steps

    def __iter__(self) -> Iterator[Loaded]:
        try:
            yield from self._batches()
        except HivlpError as error:
            yield failed(error)

    def _batches(self) -> Iterator[Loaded]:
        info = get_worker_info()
        workers, asked = (1, 0) if info is None else (info.num_workers, info.id)
        own = (self._steps.start + asked) % workers
        share = self._share
        streams = share.processes * workers
        number = share.process * workers + own
        pictures = self._source.open()
        found = PictureStream(pictures, self._settings, self._preparation.seed, number, streams)
        preparer = Preparer(self._preparation)
        maker = _Maker(found, pictures, preparer, self._source, self._preparation.seed)
        done = len(range(own, self._steps.start, workers))
        maker.pass_over(done * share.batch)
        for _ in range(own + done * workers, self._steps.stop, workers):
            yield maker.batch(share.batch)


class _Maker:
    """Batches of one stream."""

    def __init__(
        self,
        found: PictureStream,
        pictures: Pictures,
        preparer: Preparer,
        source: DataSource,
        seed: int,
    ) -> None:
        self._stream, self._number, self._seed = found, found.own, seed
        self._items = iter(found)
        self._pictures, self._preparer, self._source = pictures, preparer, source
        self._taken = 0

    def pass_over(self, pictures: int) -> None:
        """Read along without decoding."""
        for _ in islice(self._items, pictures):
            self._taken += 1
        self._stream.bad.clear()  # listed when they were met first

    def batch(self, size: int) -> Loaded:
        broken: list[Unusable] = []
        rows = [self._row(next(self._items), broken) for _ in range(size)]
        broken += self._stream.bad
        self._stream.bad.clear()
        return {"tensors": self._preparer.batch(rows), "broken": broken, "error": None}

    def _row(self, taken: UsablePicture, broken: list[Unusable]) -> Prepared:
        self._taken += 1
        for found in self._candidates(taken):
            try:
                data = found.data or self._pictures.picture(found.corpus, found.picture)
                return self._preparer.prepare(found, data, self._number, self._taken)
            except HivlpError as error:
                broken.append(unusable(found, error, self._source))
        listed = "; ".join(f"{each.place}: {each.reason}" for each in broken[-3:])
        raise TrainingError(f"{REPLACEMENTS} pictures drawn are all broken: {listed}")

    def _candidates(self, taken: UsablePicture) -> Iterator[UsablePicture]:
        yield taken
        if not self._stream.buffer:
            return
        rng = stream(self._seed, BUFFER, self._number, self._taken)
        for place in rng.integers(len(self._stream.buffer), size=REPLACEMENTS - 1):
            yield self._stream.buffer[int(place)]
