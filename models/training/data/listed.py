"""Batches of listed pictures: any batch of a run can be made at any time, by anyone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import Dataset

from hivlp.models.corpus import Unusable
from hivlp.models.errors import HivlpError, TrainingError
from hivlp.models.training.data.listing import Listing
from hivlp.models.training.data.order import EpochOrder, batch_positions
from hivlp.models.training.data.prepare import (
    Loaded,
    Preparation,
    Prepared,
    Preparer,
    failed,
)
from hivlp.models.training.data.sources import DataSource, Pictures, UsablePicture

REPLACEMENTS = 50
"""So many pictures in a row may be broken before the corpus must be."""


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
        self.broken: set[int] = set()


class ListedBatches(Dataset[Loaded]):
    """Batch number i of one process. A broken picture is replaced by the next that isn't.

    The next by number, not by place, so that the replacement too follows from seed and files.
    """

    def __init__(
        self, listing: Path, source: DataSource, preparation: Preparation, share: Share
    ) -> None:
        self._listing, self._source = listing, source
        self._preparation, self._share = preparation, share
        self._means: _Means | None = None

    def __getitem__(self, step: int) -> Loaded:
        try:
            if self._means is None:
                self._means = _Means(self._listing, self._source, self._preparation)
            return self._load(self._means, step)
        except HivlpError as error:
            return failed(error)

    def _load(self, means: _Means, step: int) -> Loaded:
        share, broken = self._share, list[Unusable]()
        positions = batch_positions(step, share.process, share.processes, share.batch)
        rows = [self._row(means, *means.order.at(p), broken) for p in positions]
        return {"tensors": means.preparer.batch(rows), "broken": broken, "error": None}

    def _row(self, means: _Means, epoch: int, first: int, broken: list[Unusable]) -> Prepared:
        count = len(means.listing)
        for number in ((first + i) % count for i in range(min(REPLACEMENTS, count))):
            if number in means.broken:
                continue
            found = means.listing[number]
            try:
                data = means.pictures.picture(found.corpus, found.picture)
                return means.preparer.prepare(found, data, epoch, number)
            except HivlpError as error:
                means.broken.add(number)
                broken.append(unusable(found, error, self._source))
        listed = "; ".join(f"{each.place}: {each.reason}" for each in broken[-3:])
        raise TrainingError(f"{REPLACEMENTS} pictures one after another are broken: {listed}")


def unusable(found: UsablePicture, error: HivlpError, source: DataSource) -> Unusable:
    """A picture that broke, as it is listed."""
    several = len(source.paths) > 1
    place = f"corpus {found.corpus}: {found.picture}" if several else found.picture
    return Unusable(place, found.id, str(error))
