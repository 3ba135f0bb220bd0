"""Batches of streamed pictures: files read from end to end, shuffled in a buffer.

For tars on a slow or remote disk, where drawing single pictures would cost a request each. Files
(webdataset shards, tables) come in a new order each pass and are dealt out among all loading
processes of all training processes, which then read on their own.

Notable: a picture that leaves the buffer is used or, broken, replaced by a copy of another that is
at hand, so every batch takes the same number of pictures out; and a pass carries nothing over into
the next. So a run that goes on finds its place without reading the passes whose files were counted
before, and reads along in the one that it stopped in without decoding anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from hivlp.models.corpus import Unusable
from hivlp.models.errors import HivlpError, TrainingError
from hivlp.models.runtime.progress import Progress
from hivlp.models.training.data.failures import LeftOut, told
from hivlp.models.training.data.listed import REPLACEMENTS, Share, left_out
from hivlp.models.training.data.order import BUFFER, REPLACEMENT, SHARDS, stream
from hivlp.models.training.data.prepare import (
    Loaded,
    Preparation,
    Prepared,
    Preparer,
    failed,
)
from hivlp.models.training.data.settings import DataSettings
from hivlp.models.training.data.sources import DataSource, Pictures, UsablePicture

KEPT = 8
"""Pictures that left the buffer last, which may stand in for a broken one when it is empty."""


class PictureStream:
    """Pictures of stream `own` of `streams`, pass after pass without end, in shuffled order.

    Bad entries are put into `bad`, numbers of usable pictures of files read to their end into
    `counted`; who reads empties both. Raises TrainingError once it has met every file of the
    corpora, and none has a usable picture.
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
        self._epoch = 0
        self._empty: set[int] = set()
        self.buffer: list[UsablePicture] = []
        self._last: deque[UsablePicture] = deque(maxlen=KEPT)
        self.bad: list[Unusable] = []
        self.counted: dict[int, int] = {}

    @property
    def at_hand(self) -> list[UsablePicture]:
        """What may stand in for a broken picture: the buffer, and what left it last."""
        return [*self.buffer, *self._last]

    def pass_over(self, pictures: int, counts: Mapping[int, int]) -> int:
        """Skip whole passes by `counts`, usable pictures of files; how many of `pictures` are left
        to be read along. Before anything is read.
        """
        left = pictures
        while left and any(counts.values()):
            counted = [counts.get(part) for part in self._parts(self._epoch)]
            known = [count for count in counted if count is not None]
            if len(known) < len(counted) or sum(known) > left:
                break
            left -= sum(known)
            self._epoch += 1
        return left

    def __iter__(self) -> Iterator[UsablePicture]:
        while True:
            yield from self._shuffled(self._epoch)
            self._epoch += 1
            if len(self._empty) == self._pictures.parts:
                reasons = f": {told(self.bad)}" if self.bad else ""
                raise TrainingError(f"data.stream: no file has a usable picture{reasons}")

    def _shuffled(self, epoch: int) -> Iterator[UsablePicture]:
        rng, held = stream(self._seed, BUFFER, self.own, epoch), 0
        self._last.clear()
        for found in self._ordered(epoch):
            self.buffer.append(found)
            held += len(found.data or b"")
            while len(self.buffer) >= self._most or held > self._most_bytes:
                taken = self._take(rng)
                held -= len(taken.data or b"")
                yield taken
        while self.buffer:
            yield self._take(rng)

    def _take(self, rng: np.random.Generator) -> UsablePicture:
        place = int(rng.integers(len(self.buffer)))
        self.buffer[place], self.buffer[-1] = self.buffer[-1], self.buffer[place]
        taken = self.buffer.pop()
        self._last.append(taken)
        return taken

    def _parts(self, epoch: int) -> list[int]:
        order = stream(self._seed, SHARDS, epoch).permutation(self._pictures.parts)
        return [int(part) for part in order[self.own :: self._streams]]

    def _ordered(self, epoch: int) -> Iterator[UsablePicture]:
        for part in self._parts(epoch):
            if part in self._empty:
                continue
            usable = 0
            for found in self._pictures.read_part(part):
                if isinstance(found, UsablePicture):
                    usable += 1
                    yield found
                elif isinstance(found, Unusable):
                    self.bad.append(found)
            self.counted[part] = usable
            if not usable:
                self._empty.add(part)


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
        counts: Mapping[int, int],
    ) -> None:
        """`counts`: usable pictures of files, by their number, as far as they are known."""
        self._source, self._settings, self._preparation = source, settings, preparation
        self._share, self._steps, self._counts = share, steps, counts

    def __iter__(self) -> Iterator[Loaded]:
        broken: list[LeftOut] = []
        try:
            yield from self._batches(broken)
        except HivlpError as error:
            yield failed(error, broken)

    def _batches(self, broken: list[LeftOut]) -> Iterator[Loaded]:
        """Batches; what is left out stands in `broken`, also where no batch comes of it."""
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
        maker.pass_over(done * share.batch, self._counts)
        for _ in range(own + done * workers, self._steps.stop, workers):
            broken.clear()
            yield maker.batch(share.batch, broken)


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

    def pass_over(self, pictures: int, counts: Mapping[int, int]) -> None:
        """Skip whole passes, and read along without decoding in the one that is begun."""
        left = self._stream.pass_over(pictures, counts)
        if left:
            quiet = self._number > 0  # one reader tells for all
            with Progress("finding the place in the files", left, "picture", quiet=quiet) as told:
                for _ in islice(self._items, left):
                    told.step()
        self._taken = pictures
        self._stream.bad.clear()  # listed when they were met first

    def batch(self, size: int, broken: list[LeftOut]) -> Loaded:
        """The next one. What it lists as left out is put into `broken` too."""
        try:
            rows = [self._row(next(self._items), broken) for _ in range(size)]
        finally:
            broken += [LeftOut(each, each.place) for each in self._stream.bad]
            self._stream.bad.clear()
        parts, self._stream.counted = self._stream.counted, {}
        tensors = self._preparer.batch(rows)
        return {"tensors": tensors, "broken": list(broken), "parts": parts, "error": None}

    def _row(self, taken: UsablePicture, broken: list[LeftOut]) -> Prepared:
        self._taken += 1
        tried: list[LeftOut] = []
        for found in self._candidates(taken):
            try:
                data = found.data or self._pictures.picture(found.corpus, found.picture)
                return self._preparer.prepare(found, data, self._number, self._taken)
            except HivlpError as error:
                tried.append(left_out(found, error, self._source))
                broken.append(tried[-1])
        listed = told([each.what for each in tried])
        raise TrainingError(f"{len(tried)} pictures drawn for one place are all broken: {listed}")

    def _candidates(self, taken: UsablePicture) -> Iterator[UsablePicture]:
        yield taken
        others = [each for each in self._stream.at_hand if each is not taken]
        if not others:
            return
        rng = stream(self._seed, REPLACEMENT, self._number, self._taken)
        for place in rng.permutation(len(others))[:REPLACEMENTS]:
            yield others[int(place)]
