"""Erased items are in no file, whatever happened to them before, meanwhile or afterwards."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.build import build as building
from hivlp.index.build import calibrate as calibrating
from hivlp.index.build import erase as erasing
from hivlp.index.build.build import build_index
from hivlp.index.build.calibrate import CalibrationSettings, calibrate
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.embeddings import content_key
from hivlp.index.build.erase import erase
from hivlp.index.build.upsert_corpus import upsert_corpus
from hivlp.index.errors import BuildError
from hivlp.index.searchers import open_searcher
from hivlp.index.snapshot.amend import amend, hold
from hivlp.index.snapshot.changes import Delete, Upsert
from hivlp.index.snapshot.erasures import add_erased, short_hash
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import keep_upload
from tests.integration.served_home import make_corpus, make_home
from tests.integration.test_changes_outlive_builds import QUIET, contents, model_of, traces
from tests.tiny_artifact import png

SECRET = "quixotic velvet umbrella"


def noise(seed: int) -> bytes:
    """A picture like no other."""
    return png(np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8))


class World:
    """A home whose index holds a secret, and what of it must not be found afterwards."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.corpus = make_corpus(folder / "corpus")
        self.home = make_home(folder / "home", self.corpus)
        self.settings = replace(QUIET, **settings)
        self.needles: list[bytes] = []

    @property
    def store(self) -> SnapshotStore:
        return SnapshotStore(self.home)

    def put(self, seed: int = 1, text: str = SECRET) -> None:
        """Put the secret by the command's function; all it consists of becomes a needle."""
        place = self.folder / "secret"
        place.mkdir(exist_ok=True)
        picture = noise(seed)
        (place / "s.png").write_bytes(picture)
        row = {"id": "secret/1", "caption": text, "name": "hush hush", "image": "s.png"}
        (place / "rows.jsonl").write_text(json.dumps(row))
        corpus = open_corpus(place / "rows.jsonl")
        upsert_corpus(corpus, model_of(self.home), self.store, "default", quiet=True)
        shutil.rmtree(place)
        searcher = open_searcher(self.store.open("default"))
        finest = len(searcher.info.levels)
        self.needles += [text.encode(), b"hush", picture]
        for side in ("image", "text"):
            row_of = searcher.row_of("secret/1", side)  # type: ignore[arg-type]
            vector = searcher.vector(side, row_of, finest)[0]  # type: ignore[arg-type]
            self.needles += [vector.astype("<f4").tobytes(), vector.astype("<f2").tobytes()]
        self.needles += [content_key("image", picture), content_key("text", text.encode())]
        searcher.close()

    def build(self, name: str = "tiny", **settings: Any) -> str:
        corpus = open_corpus(self.corpus)
        settings = replace(self.settings, **settings)  # type: ignore[assignment]
        report = build_index(corpus, model_of(self.home, name), self.store, "default", settings)  # type: ignore[arg-type]
        return report.manifest.version

    def erase(self, wait_s: float = 0.0) -> erasing.ErasedReport:
        return erase(self.store, "default", ["secret/1"], wait_s=wait_s, quiet=True)

    def check_gone(self) -> None:
        assert traces(self.home, self.needles) == []
        assert "secret/1" not in contents(self.store)
        self.store.verify("default")
        self.build()
        assert "secret/1" not in contents(self.store)
        assert traces(self.home, self.needles) == []


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_build_that_was_running_does_not_bring_it_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.put()
    measure = building.measure
    reports = []

    def meanwhile(*given: Any, **named: Any) -> Any:
        reports.append(world.erase())
        return measure(*given, **named)

    monkeypatch.setattr(building, "measure", meanwhile)
    with pytest.raises(BuildError, match="erased while it was being built"):
        world.build()
    monkeypatch.undo()
    assert reports[0].left
    assert all(left.startswith(".building-") for left in reports[0].left)
    again = world.erase()
    assert (again.erased, again.unknown, again.left) == (("secret/1",), (), ())
    world.check_gone()


def test_a_build_that_still_encodes_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.put()
    encode = building.encode_corpus
    reports = []

    def meanwhile(*given: Any, **named: Any) -> Any:
        encoded = encode(*given, **named)
        reports.append(world.erase())
        return encoded

    monkeypatch.setattr(building, "encode_corpus", meanwhile)
    with pytest.raises(BuildError):
        world.build()
    monkeypatch.undo()
    assert reports[0].left
    assert (world.home / "indexes/default/.erasing").exists()
    assert world.erase().left == ()
    world.check_gone()


def test_another_erasure_does_not_forget_what_one_has_still_to_do(world: World) -> None:
    world.put()
    reader = world.store.open("default")
    assert world.erase().left == (reader.manifest.version,)
    erase(world.store, "default", ["red/24"], wait_s=0, quiet=True)
    assert (world.home / "indexes/default/.erasing").exists()
    reader.close()
    assert world.erase().left == ()
    assert not (world.home / "indexes/default/.erasing").exists()
    world.check_gone()


def test_an_older_version_is_not_calibrated_into_a_new_one_when_items_of_it_are_erased(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.put()
    old = world.build()
    world.build()
    measure = calibrating.measure

    def meanwhile(*given: Any, **named: Any) -> Any:
        world.erase()
        return measure(*given, **named)

    monkeypatch.setattr(calibrating, "measure", meanwhile)
    with pytest.raises(BuildError, match="erased while it was measured"):
        calibrate(
            world.store, "default", old, model_of(world.home), CalibrationSettings(quiet=True)
        )
    monkeypatch.undo()
    world.erase()
    world.check_gone()


def test_an_item_that_is_put_again_comes_after_its_erasure_whatever_the_clock_says(
    world: World,
) -> None:
    world.put()
    folder = world.store.folder("default")
    ahead = time.time_ns() + 3_600_000_000_000
    add_erased(folder, [short_hash("secret/1")], ahead)
    world.put(seed=2, text="a newer one")
    assert world.store.manifest("default").changes.last > ahead  # type: ignore[union-attr]
    world.build()
    assert "secret/1" in contents(world.store)


def test_a_picture_that_was_erased_meanwhile_must_be_put_again(world: World) -> None:
    held = hold(world.store, "default")
    row = np.zeros(held.shape.width, np.float32)
    row[0] = 1.0
    change = Upsert("late", f"upload:{'ab' * 32}", (), {}, row)
    with pytest.raises(BuildError, match=r"'late'.*put it again"):
        amend(world.store, "default", [change])


STEPS = ("rewritten", "_removed", "_forget_vectors", "_forget_pictures", "_forget_lists")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True])
def test_an_erasure_that_dies_is_finished_by_running_it_again(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    world.put()
    world.build()
    own = getattr(erasing, step)

    def dies(*given: Any, **named: Any) -> Any:
        if after:
            own(*given, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(erasing, step, dies)
    with pytest.raises(KeyboardInterrupt):
        world.erase()
    monkeypatch.undo()
    report = world.erase()
    assert (report.erased, report.left) == (("secret/1",), ())
    assert not (world.home / "indexes/default/.erasing").exists()
    world.check_gone()


def test_a_cache_that_is_busy_is_an_error_and_a_second_run_finishes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.index.build.embeddings.WAIT_S", 0.1)
    world.put()
    (file,) = (world.home / "cache" / "embeddings").glob("*.sqlite")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(BuildError):
        world.erase()
    other.execute("ROLLBACK")
    other.close()
    assert world.erase().cached >= 2
    world.check_gone()


def test_what_it_was_before_goes_too(world: World) -> None:
    world.put(seed=1, text=SECRET)
    world.put(seed=2, text="another thing altogether")
    world.build()
    world.put(seed=3, text="a third thing")
    world.put(seed=4, text="and a fourth")
    report = world.erase()
    assert report.pictures == 4
    world.check_gone()


@pytest.mark.parametrize("how", ["fp16", "materialise"])
def test_whatever_the_form_of_the_index(tmp_path: Path, how: str) -> None:
    settings: dict[str, Any] = {
        "fp16": {"rows_type": "fp16"},
        "materialise": {"materialise": True},
    }[how]
    world = World(tmp_path, **settings)
    world.put()
    world.build()
    world.erase()
    world.check_gone()


def test_a_gallery_of_one_vector_a_level(tmp_path: Path) -> None:
    world = World(tmp_path)
    shutil.rmtree(world.home)
    make_home(world.home, world.corpus, gallery="per_exit")
    world.put()
    world.build()
    world.erase()
    world.check_gone()


def test_a_picture_that_is_gone_leaves_no_vector_in_the_cache(world: World) -> None:
    world.put()
    world.build()
    shutil.rmtree(world.home / "indexes/default/uploads")
    assert world.erase().cached >= 2
    world.check_gone()


def test_neither_rolling_back_nor_forgetting_changes_brings_it_back(world: World) -> None:
    store = world.store
    square = "red/24"
    before = store.current("default")
    assert erase(store, "default", [square], wait_s=0, quiet=True).erased == (square,)
    assert before not in store.versions("default")
    assert square not in contents(store)
    world.build(forget_changes=True)
    assert square not in contents(store)


def damage(folder: Path, name: str) -> None:
    if name == "missing":
        (folder / "text/texts.arrow").unlink()
    else:
        (folder / name).write_bytes(b"no array")


@pytest.mark.parametrize("name", ["item_ordinals.npy", "text/row_items.npy", "missing"])
def test_an_old_version_that_cannot_be_read_goes(world: World, name: str) -> None:
    world.put()
    old = world.build()
    world.build()
    damage(world.store.path("default", old), name)
    report = world.erase()
    assert old in report.removed
    assert any(old in note for note in report.notes)
    world.check_gone()


def test_an_index_is_calibrated_and_changed_after_an_erasure(world: World) -> None:
    world.put()
    world.build()
    world.erase()
    calibrate(world.store, "default", None, model_of(world.home), CalibrationSettings(quiet=True))
    amend(world.store, "default", [Delete("blue/24")])
    assert {"secret/1", "blue/24"}.isdisjoint(contents(world.store))
    world.check_gone()


def test_leftovers_and_lists_go(world: World) -> None:
    world.put()
    folder = world.store.folder("default")
    active = world.store.path("default", world.store.current("default"))
    (folder / "..erasing.7-7.tmp").write_text(SECRET)
    for kind in (".pulling", ".building", ".removing"):
        shutil.copytree(active, folder / f"{kind}-20200101T000000-000000")
    lists = world.home / "cache" / "builds"
    failure = {"place": "line 1", "id": "secret/1", "reason": f"{SECRET} is too long"}
    text = f"{json.dumps({**failure, 'id': 'x', 'reason': 'r'})}\n{json.dumps(failure)}\n{{cut"
    (lists / "default.failures.jsonl").write_text(text)
    world.erase()
    kept = (lists / "default.failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in kept] == ["x"]
    world.check_gone()


def test_an_id_that_only_a_list_of_failures_names_leaves_it(world: World) -> None:
    lists = world.home / "cache" / "builds" / "default.failures.jsonl"
    lists.write_text(json.dumps({"place": "line 1", "id": "secret/1", "reason": SECRET}) + "\n")
    assert world.erase().unknown == ("secret/1",)
    assert lists.read_text() == ""


@pytest.fixture
def aged(world: World) -> Callable[[bytes], Path]:
    """Keeps an upload that looks old; returns its file."""

    def upload(data: bytes) -> Path:
        reference = keep_upload(world.store.folder("default"), data).removeprefix("upload:")
        path = world.store.folder("default") / "uploads" / reference[:2] / reference
        os.utime(path, (0, 0))
        return path

    return upload


def test_a_picture_that_is_put_again_is_not_collected_before_its_item_is_published(
    world: World, aged: Callable[[bytes], Path]
) -> None:
    old, again = aged(noise(8)), aged(noise(9))
    keep_upload(world.store.folder("default"), noise(9))
    world.store.gc("default")
    assert not old.exists()
    assert again.exists()


def test_changes_of_others_are_kept_through_an_erasure(world: World) -> None:
    world.put()
    amend(world.store, "default", [Delete("blue/24")])
    before = contents(world.store)
    world.erase()
    assert contents(world.store) == {i: m for i, m in before.items() if i != "secret/1"}
