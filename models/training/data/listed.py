"""Batches of listed pictures: any batch of a run can be made at any time, by anyone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import Dataset

from hivlp.models.corpus import Unusable
from hivlp.models.errors import HivlpError, TrainingError
from hivlp.models.training.data.failures import LeftOut, told
from hivlp.models.training.data.listing import Listing
from hivlp.models.training.data.order import REPLACEMENT, EpochOrder, batch_positions, stream
from hivlp.models.training.data.prepare import (
    Loaded,
    Preparation,
    Prepared,
    Preparer,
    failed,
)
from hivlp.models.training.data.sources import DataSource, Pictures, UsablePicture

REPLACEMENTS = 200
"""So many pictures are tried for one place before the corpus must be broken."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a run's data a process loads: number, of how many, pictures a batch."""

    process: int
    processes: int
    batch: int


class _Means:
    """What is opened in the process that uses it, and never sent to another."""

    def __init__(self, listing: Path, source: DataSource, preparation: Preparation) -> None:
        self.listing = Listing(listing)
        self.pictures: Pictures = source.open()
        self.preparer = Preparer(preparation)
        self.order = EpochOrder(len(self.listing), preparation.seed)
        self.broken: dict[int, LeftOut] = {}


class ListedBatches(Dataset[Loaded]):
    """Batch number i of one process. A broken picture is replaced by one that isn't.

    That is drawn by the seed, the pass and the broken one's number, so that it follows from seed
    and files, and many that are broken side by side don't all fall upon the same neighbour.
    """

    def __init__(
        self, listing: Path, source: DataSource, preparation: Preparation, share: Share
    ) -> None:
        self._listing, self._source = listing, source
        self._preparation, self._share = preparation, share
        self._means: _Means | None = None

    def __getitem__(self, step: int) -> Loaded:
        broken: list[LeftOut] = []
        try:
            if self._means is None:
                self._means = _Means(self._listing, self._source, self._preparation)
            return self._load(self._means, step, broken)
        except HivlpError as error:
            return failed(error, broken)

    def _load(self, means: _Means, step: int, broken: list[LeftOut]) -> Loaded:
        share = self._share
        positions = batch_positions(step, share.process, share.processes, share.batch)
        rows = [self._row(means, *means.order.at(p), broken) for p in positions]
        tensors = means.preparer.batch(rows)
        return {"tensors": tensors, "broken": broken, "parts": {}, "error": None}

    def _row(self, means: _Means, epoch: int, first: int, broken: list[LeftOut]) -> Prepared:
        tried: list[LeftOut] = []
        for number in self._candidates(means, epoch, first):
            if number not in means.broken:
                found = means.listing[number]
                try:
                    data = means.pictures.picture(found.corpus, found.picture)
                    return means.preparer.prepare(found, data, epoch, number)
                except HivlpError as error:
                    means.broken[number] = left_out(found, error, self._source)
                    broken.append(means.broken[number])
            tried.append(means.broken[number])
        listed = told([each.what for each in tried])
        raise TrainingError(f"{len(tried)} pictures drawn for one place are all broken: {listed}")

    def _candidates(self, means: _Means, epoch: int, first: int) -> Iterator[int]:
        yield first
        count = len(means.listing)
        rng = stream(self._preparation.seed, REPLACEMENT, epoch, first)
        drawn = rng.choice(count, size=min(REPLACEMENTS, count), replace=False)
        yield from (int(number) for number in drawn if number != first)


def left_out(found: UsablePicture, error: HivlpError, source: DataSource) -> LeftOut:
    """A picture that broke, as it is listed, and its row."""
    several = len(source.paths) > 1
    place = f"corpus {found.corpus}: {found.picture}" if several else found.picture
    row = json.dumps([place, found.id, found.captions])
    return LeftOut(Unusable(place, found.id, str(error)), row)
