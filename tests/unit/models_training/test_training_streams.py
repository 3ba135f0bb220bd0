"""Streams: files read from end to end, shuffled, dealt out, and found again after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from hivlp.models.errors import TrainingError
from hivlp.models.training.data.failures import FailureLog
from hivlp.models.training.data.listed import Share
from hivlp.models.training.data.loader import BatchLoader
from hivlp.models.training.data.parts import PartCounts
from hivlp.models.training.data.settings import DataSettings
from hivlp.models.training.data.sources import DataSource, Found, Pictures
from hivlp.models.training.data.streamed import PictureStream, StreamedBatches
from tests.unit.models_training import pictured
from tests.unit.models_training.test_training_data import (
    chosen,
    failures,
    ids_file,
    preparation,
    same,
    source,
)

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
    parts: PartCounts | None = None,
) -> list[dict[str, torch.Tensor]]:
    known = {} if parts is None else parts.known
    made = StreamedBatches(given, SETTINGS, preparation(target), share, steps, known)
    log = FailureLog(target)
    options = {"workers": workers, "pinned": False, "expected": 24, "max_failures": 0.5}
    return list(BatchLoader(made, steps, log, parts=parts, **options))  # type: ignore[arg-type]


def test_a_stream_gives_every_picture_once_a_pass_in_another_order(shards: DataSource) -> None:
    names = sorted(name for name, _, _ in ROWS)
    line = ids(shards, 72)
    passes = [line[:24], line[24:48], line[48:]]
    assert all(sorted(each) == names for each in passes)
    assert passes[0] != passes[1] != passes[2]
    assert ids(shards, 24, seed=1) != passes[0]


def test_the_files_of_a_stream_come_in_another_order_each_pass(shards: DataSource) -> None:
    pictures = shards.open()
    file_of = {
        found.id: part for part in range(4) for found in pictures.read_part(part) if found.id
    }
    unmixed = PictureStream(pictures, replace(SETTINGS, buffer=1), 0, 0, 1)
    line = [file_of[picture.id] for picture in islice(unmixed, 24 * 6)]
    orders = {tuple(dict.fromkeys(line[first : first + 24])) for first in range(0, 24 * 6, 24)}
    assert len(orders) > 1


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


class Counted:
    """Opened pictures whose readings of files are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[int] = []
        real = Pictures.read_part

        def read_part(pictures: Pictures, part: int) -> Iterator[Found]:
            self.read.append(part)
            return real(pictures, part)

        monkeypatch.setattr(Pictures, "read_part", read_part)


def test_a_run_that_goes_on_reads_no_pass_again_that_was_counted(
    shards: DataSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(shards, tmp_path, range(23), parts=PartCounts(tmp_path))
    kept = PartCounts(tmp_path)
    assert kept.known == dict.fromkeys(range(4), 6)
    counted = Counted(monkeypatch)
    # 24 pictures are 6 batches: batch 20 belongs to pass 3 (from 0), of which two are over
    rest = load(shards, tmp_path, range(20, 23), parts=kept)
    assert all(same(a, b) for a, b in zip(whole[20:], rest, strict=True))
    assert len(counted.read) <= 4
    counted.read.clear()
    load(shards, tmp_path, range(20, 23))
    assert len(counted.read) > 12


def test_counts_survive_a_line_cut_short_and_are_of_every_process(tmp_path: Path) -> None:
    PartCounts(tmp_path).add({0: 5, 1: 3})
    PartCounts(tmp_path, 1).add({2: 4})
    with (tmp_path / "data" / "parts.jsonl").open("a") as stream:
        stream.write("[7, ")
    assert PartCounts(tmp_path).known == {0: 5, 1: 3, 2: 4}


def test_a_broken_picture_moves_nothing_that_follows(tmp_path: Path) -> None:
    spoilt = [(n, b"\x89PNG\r\n\x1a\n" if i == 3 else d, c) for i, (n, d, c) in enumerate(ROWS)]
    given = source(pictured.tars(tmp_path / "tars", spoilt))
    whole = load(given, tmp_path, range(9))
    rest = load(given, tmp_path, range(4, 9))
    assert all(len(each["item"]) == 4 for each in whole)
    assert all(same(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert len(failures(tmp_path)) == 1


def test_a_broken_picture_is_replaced_also_where_the_buffer_is_empty(tmp_path: Path) -> None:
    # every picture but the first leaves an empty buffer, so what left it before stands in
    given = source(pictured.tars(tmp_path / "tars", ROWS, shards=4))
    (last,) = [each.id for each in islice(stream_of(given, buffer=1), 23, 24)]
    spoilt = [(n, b"\x89PNG\r\n\x1a\n" if n == last else d, c) for n, d, c in ROWS]
    broken = source(pictured.tars(tmp_path / "spoilt", spoilt, shards=4))
    settings = replace(SETTINGS, buffer=1)
    made = StreamedBatches(broken, settings, preparation(tmp_path), ALONE, range(6), {})
    assert [each["error"] for each in made] == [None] * 6


def stream_of(given: DataSource, *, buffer: int) -> PictureStream:
    return PictureStream(given.open(), replace(SETTINGS, buffer=buffer), 0, 0, 1)


def two_tables(target: Path) -> DataSource:
    """Two files of twelve pictures, of the first of which `data.leave_out` names all."""
    first = pictured.jsonl_file(target / "a", ROWS[:12])
    second = pictured.jsonl_file(target / "b", ROWS[12:])
    names = ids_file(target / "names", ROWS[:12])
    return chosen(source(first, second), leave_out=names)


@pytest.mark.parametrize("own", [0, 1])
def test_a_reader_whose_files_of_a_pass_are_empty_waits_for_the_next(
    tmp_path: Path, own: int
) -> None:
    given = two_tables(tmp_path)
    assert set(ids(given, 36, own=own, streams=2)) == {name for name, _, _ in ROWS[12:]}


def test_a_stream_without_a_usable_picture_says_why(tmp_path: Path) -> None:
    given = source(pictured.tars(tmp_path / "tars", ROWS), group="colour")
    log = FailureLog(tmp_path)
    made = StreamedBatches(given, SETTINGS, preparation(tmp_path), ALONE, range(3), {})
    loader = BatchLoader(
        made, range(3), log, workers=0, pinned=False, expected=24, max_failures=1.0
    )
    with pytest.raises(TrainingError, match=r"no file has a usable picture: .*'colour', asked for"):
        list(loader)
    assert len(failures(tmp_path)) == 24


def test_bad_entries_read_along_are_not_listed_by_a_run_that_goes_on(tmp_path: Path) -> None:
    rows = [(n, d, c if i else ["\0"]) for i, (n, d, c) in enumerate(ROWS)]
    given = source(pictured.tars(tmp_path / "tars", rows, shards=1))
    (tmp_path / "a").mkdir()
    load(given, tmp_path / "a", range(3))
    assert len(failures(tmp_path / "a")) == 1  # the first entry of the only file
    (tmp_path / "b").mkdir()
    load(given, tmp_path / "b", range(2, 3))
    assert not failures(tmp_path / "b")


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
