"""Streams: files read from end to end, shuffled, dealt out, and found again after a kill."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from hivlp.models.errors import TrainingError
from hivlp.models.training.data.failures import FailureLog
from hivlp.models.training.data.listed import Share
from hivlp.models.training.data.loader import BatchLoader
from hivlp.models.training.data.settings import DataSettings
from hivlp.models.training.data.sources import DataSource
from hivlp.models.training.data.streamed import PictureStream, StreamedBatches
from tests.unit.models_training import pictured
from tests.unit.models_training.test_training_data import preparation, same, source

ROWS = pictured.rows(24)
ALONE = Share(0, 1, 4)
SETTINGS = DataSettings(stream=True, stream_items=24, buffer=6)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    return source(pictured.tars(tmp_path_factory.mktemp("corpus") / "tars", ROWS, shards=4))


def ids(
    given: DataSource, count: int, *, own: int = 0, streams: int = 1, seed: int = 0
) -> list[str]:
    found = PictureStream(given.open(), SETTINGS, seed, own, streams)
    return [picture.id for picture in islice(found, count)]


def load(
    given: DataSource,
    target: Path,
    steps: range,
    *,
    workers: int = 0,
    share: Share = ALONE,
) -> list[dict[str, torch.Tensor]]:
    made = StreamedBatches(given, SETTINGS, preparation(target), share, steps)
    log = FailureLog(target)
    return list(
        BatchLoader(made, steps, log, workers=workers, pinned=False, expected=24, max_failures=0.5)
    )


def test_a_stream_gives_every_picture_about_once_a_pass_in_another_order(
    shards: DataSource,
) -> None:
    # what is in the buffer when a pass ends comes out in the next: 6 of 24
    first, second = ids(shards, 48)[:24], ids(shards, 48)[24:]
    assert len(set(first)) >= 18
    assert first != second
    assert ids(shards, 24, seed=1) != first
    names = {name for name, _, _ in ROWS}
    assert set(ids(shards, 48)) == names


def test_a_buffer_mixes_pictures_of_several_places(shards: DataSource) -> None:
    unmixed = PictureStream(shards.open(), replace(SETTINGS, buffer=1), 0, 0, 1)
    assert ids(shards, 12) != [picture.id for picture in islice(unmixed, 12)]


def test_a_buffer_holds_no_more_bytes_than_it_may(tmp_path: Path) -> None:
    heavy = [(name, data + bytes(300_000), captions) for name, data, captions in ROWS]
    given = source(pictured.tars(tmp_path / "tars", heavy))
    found = PictureStream(given.open(), replace(SETTINGS, buffer=1000, buffer_mib=1), 0, 0, 1)
    for _ in islice(found, 30):
        assert sum(len(each.data or b"") for each in found.buffer) <= 2**20


def test_streams_share_the_files_of_a_pass(shards: DataSource) -> None:
    at_once = replace(SETTINGS, buffer=1)
    streams = [PictureStream(shards.open(), at_once, 0, own, 4) for own in range(4)]
    dealt = [{picture.id for picture in islice(stream, 6)} for stream in streams]
    assert all(len(each) == 6 for each in dealt)
    assert all(a.isdisjoint(b) for i, a in enumerate(dealt) for b in dealt[i + 1 :])


def test_too_few_files_for_the_readers_is_an_error(shards: DataSource) -> None:
    with pytest.raises(TrainingError, match=r"4 files can't be dealt out to 5 readers"):
        PictureStream(shards.open(), SETTINGS, 0, 0, 5)


def test_a_run_that_goes_on_reads_what_it_would_have_read(
    shards: DataSource, tmp_path: Path
) -> None:
    whole = load(shards, tmp_path, range(9))
    rest = load(shards, tmp_path, range(5, 9))
    assert len(whole) == 9
    assert all(same(a, b) for a, b in zip(whole[5:], rest, strict=True))


def test_a_broken_picture_moves_nothing_that_follows(tmp_path: Path) -> None:
    spoilt = [(n, b"\x89PNG\r\n\x1a\n" if i == 3 else d, c) for i, (n, d, c) in enumerate(ROWS)]
    given = source(pictured.tars(tmp_path / "tars", spoilt))
    whole = load(given, tmp_path, range(9))
    rest = load(given, tmp_path, range(4, 9))
    assert all(len(each["item"]) == 4 for each in whole)
    assert all(same(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert len(FailureLog(tmp_path)) == 1


def test_workers_keep_the_order_of_batches_also_when_a_run_goes_on(
    shards: DataSource, tmp_path: Path
) -> None:
    # of two workers, each makes every other batch from its own half of the files
    found = load(shards, tmp_path, range(1, 4), workers=2)
    streams = [load(shards, tmp_path, range(2), share=Share(own, 2, 4)) for own in range(2)]
    expected = [streams[step % 2][step // 2] for step in range(1, 4)]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a["item"], b["item"])
