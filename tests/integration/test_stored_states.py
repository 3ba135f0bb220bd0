"""Pictures' token states beside an index: built, kept, changed, erased, and re-ranked with."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.build.build import BuildReport, BuildSettings, build_index
from hivlp.index.build.calibrate import CalibrationSettings, calibrate
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.erase import erase
from hivlp.index.build.model import Model
from hivlp.index.build.upsert_corpus import upsert_corpus
from hivlp.index.cli import build as build_command
from hivlp.index.cli import search as search_command
from hivlp.index.errors import BuildError, PlanError, SnapshotCorrupt
from hivlp.index.reranking import PairMeans, check_pair, rerank
from hivlp.index.searcher import FoundItem, Searcher
from hivlp.index.searchers import open_searcher
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.amend import amend
from hivlp.index.snapshot.changes import Delete
from hivlp.index.snapshot.prefault import by_need
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import picture_roots
from hivlp.models.encoder import RgbImage
from hivlp.models.errors import DeadlinePassed
from hivlp.models.reranker import Reranker
from hivlp.service.main import main
from tests.tiny_artifact import (
    CELLS,
    COLOURS,
    STATES_SPACE,
    agreement,
    make_tiny_artifact,
    png,
    solid,
)

NAMES = tuple(COLOURS)


class World:
    """A corpus of one square a colour, a model with a re-ranker, and the index of them."""

    def __init__(self, folder: Path) -> None:
        self.home, self.corpus = folder / "home", folder / "corpus"
        self.store = SnapshotStore(self.home)
        self.artifact = make_tiny_artifact(self.home / "artifacts" / "tiny", reranker="same")
        self.corpus.mkdir(parents=True)
        lines = []
        for name, colour in COLOURS.items():
            (self.corpus / f"{name}.png").write_bytes(png(solid(colour, (20, 30))))
            lines.append(json.dumps({"file_name": f"{name}.png", "id": name, "captions": [name]}))
        (self.corpus / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def model(self) -> Model:
        return Model.load(self.artifact, rerank=True)

    def build(self, *, states: bool = True, model: Model | None = None) -> BuildReport:
        settings = BuildSettings(quiet=True, sample=10, store_states=states)
        corpus = open_corpus(str(self.corpus))
        return build_index(corpus, model or self.model(), self.store, "default", settings)

    def open(self) -> tuple[Snapshot, Searcher]:
        snapshot = self.store.open("default")
        return snapshot, open_searcher(snapshot)

    def means(self, searcher: Searcher, reranker: Reranker | None = None) -> PairMeans:
        manifest = self.store.manifest("default", searcher.info.version)
        roots = picture_roots(self.store.folder("default"), manifest.corpus.root)
        found = reranker or self.model().reranker
        assert found is not None
        return PairMeans(searcher, found, roots.read)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def found(searcher: Searcher, names: Sequence[str]) -> list[FoundItem]:
    """Items in a given order, as a search might have found them."""
    rows = [searcher.row_of(name, "image") for name in names]
    return [FoundItem(name, row, 0.5) for name, row in zip(names, rows, strict=True)]


def computed(reranker: Reranker, pictures: Sequence[RgbImage]) -> np.ndarray:
    return reranker.image_states(list(pictures))


class Blind:
    """A re-ranker that can't see: what it says comes from kept states alone."""

    def __init__(self, reranker: Reranker) -> None:
        self._own = reranker

    def __getattr__(self, name: str) -> object:
        return getattr(self._own, name)

    def image_states(self, images: Sequence[RgbImage], *, until: float | None = None) -> None:
        raise AssertionError("a picture was encoded")


def test_stored_states_are_the_computed_ones_in_half_precision(world: World) -> None:
    report = world.build()
    record = report.manifest.states
    assert record is not None
    assert (record.space, record.tokens, record.width) == (STATES_SPACE, CELLS * CELLS, 3)
    snapshot, searcher = world.open()
    rows = np.array([searcher.row_of(name, "image") for name in NAMES])
    stored = searcher.stored_states(rows)
    assert stored is not None
    assert stored.space == STATES_SPACE
    assert stored.known.all()
    reranker = world.model().reranker
    assert reranker is not None
    wanted = computed(reranker, [solid(c, (20, 30)) for c in COLOURS.values()])
    assert stored.states.dtype == np.float16
    np.testing.assert_allclose(stored.states, wanted, atol=1e-3)
    size = report.manifest.files[layout.STATES].size_bytes
    assert size == 128 + len(NAMES) * CELLS * CELLS * 3 * 2
    assert by_need(snapshot)[-1] == layout.STATES


def test_a_text_is_compared_with_kept_states_without_opening_a_picture(world: World) -> None:
    world.build()
    for file in world.corpus.glob("*.png"):
        file.unlink()
    _, searcher = world.open()
    reranker = world.model().reranker
    assert reranker is not None
    blind = Blind(reranker)
    ranked = rerank("a red one", found(searcher, NAMES), world.means(searcher, blind))  # type: ignore[arg-type]
    assert ranked.complete
    for item in ranked.items:
        wanted = agreement("a red one", COLOURS[item.id])
        assert ranked.matches[item.row] == pytest.approx(wanted, abs=2e-3)
    assert ranked.items[0].id == "red"
    values = [ranked.matches[item.row] for item in ranked.items]
    assert values == sorted(values, reverse=True)


def test_without_kept_states_pictures_are_read_and_score_the_same(world: World) -> None:
    world.build()
    _, searcher = world.open()
    with_states = rerank("orange", found(searcher, NAMES), world.means(searcher))
    assert world.build(states=False).manifest.states is None
    _, searcher = world.open()
    assert searcher.stored_states(np.array([0])) is None
    without = rerank("orange", found(searcher, NAMES), world.means(searcher))
    assert [i.id for i in without.items][:2] == [i.id for i in with_states.items][:2]
    for row, value in without.matches.items():
        assert with_states.matches[row] == pytest.approx(value, abs=2e-3)


def test_states_of_another_space_are_not_used(world: World) -> None:
    world.build()
    _, searcher = world.open()
    reranker = world.model().reranker
    assert reranker is not None
    other = Blind(reranker)
    other.states_space = "9" * 64  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="a picture was encoded"):
        rerank("red", found(searcher, NAMES), world.means(searcher, other))  # type: ignore[arg-type]


def test_items_whose_picture_is_gone_stay_behind_in_their_old_order(world: World) -> None:
    world.build(states=False)
    for name in ("red", "green"):
        (world.corpus / f"{name}.png").unlink()
    (world.corpus / "blue.png").write_bytes(b"no picture any more")
    _, searcher = world.open()
    items = found(searcher, ("green", "cyan", "blue", "white", "red"))
    ranked = rerank("white", items, world.means(searcher))
    assert [item.id for item in ranked.items] == ["white", "cyan", "green", "blue", "red"]
    assert not ranked.complete
    assert {item.id for item in ranked.items if item.row in ranked.matches} == {"white", "cyan"}


def test_a_picture_is_compared_with_captions_and_one_that_says_nothing_stays_behind(
    world: World,
) -> None:
    world.build()
    _, searcher = world.open()
    texts = ["green", "", "a red square", "\x07"]
    items = [FoundItem(f"i{i}", i, 0.1, text) for i, text in enumerate(texts)]
    ranked = rerank(solid("red"), items, world.means(searcher))
    assert [item.text for item in ranked.items] == ["a red square", "green", "", "\x07"]
    assert ranked.matches[2] == pytest.approx(1.0, abs=1e-4)
    assert set(ranked.matches) == {0, 2}


def test_equal_matches_keep_their_old_order(world: World) -> None:
    world.build()
    _, searcher = world.open()
    texts = ["a red one", "red", "the red", "green"]
    items = [FoundItem(f"i{i}", i, 0.1, text) for i, text in enumerate(texts)]
    ranked = rerank(solid("red"), items, world.means(searcher))
    assert [item.row for item in ranked.items] == [0, 1, 2, 3]


def test_no_items_are_no_work(world: World) -> None:
    world.build()
    _, searcher = world.open()
    assert rerank("red", [], world.means(searcher)).items == ()
    assert rerank(solid("red"), [], world.means(searcher)).items == ()


@pytest.mark.parametrize("states", [True, False])
def test_a_deadline_that_is_over_raises(world: World, states: bool) -> None:
    world.build(states=states)
    _, searcher = world.open()
    with pytest.raises(DeadlinePassed):
        rerank("red", found(searcher, NAMES), world.means(searcher), until=0.0)


def test_only_a_text_and_a_picture_make_a_pair() -> None:
    check_pair("text", "image")
    check_pair("image", "text")
    for side in ("image", "text"):
        with pytest.raises(PlanError, match="pairs of a text and a picture") as caught:
            check_pair(side, side)  # type: ignore[arg-type]
        assert caught.value.param == "rerank"


def test_a_build_goes_on_from_the_states_that_are_cached(world: World) -> None:
    world.build()
    model = world.model()
    assert model.reranker is not None
    seen: list[int] = []

    class Counting(Blind):
        def prepared_states(self, pixels: np.ndarray, *, until: float | None = None) -> object:
            seen.append(len(pixels))
            return self._own.prepared_states(pixels)

    counting = Model(model.name, model.path, model.text, model.image, Counting(model.reranker))  # type: ignore[arg-type]
    (world.corpus / "red.png").write_bytes(png(solid((250, 1, 1), (20, 30))))
    report = world.build(model=counting)
    assert seen == [1]
    assert report.fresh == 1
    _, searcher = world.open()
    ranked = rerank("red", found(searcher, NAMES), world.means(searcher))
    assert ranked.items[0].id == "red"
    assert ranked.matches[ranked.items[0].row] < 0.999


def test_states_can_be_added_to_an_index_whose_vectors_are_all_cached(world: World) -> None:
    world.build(states=False)
    report = world.build(states=True)
    assert report.fresh == 0
    _, searcher = world.open()
    stored = searcher.stored_states(np.arange(len(NAMES)))
    assert stored is not None
    assert stored.known.all()


def kept_names(world: World, names: Sequence[str]) -> list[str]:
    """Of which of these items the newest version keeps states."""
    _, searcher = world.open()
    stored = searcher.stored_states(np.array([searcher.row_of(n, "image") for n in names]))
    assert stored is not None
    return [name for name, known in zip(names, stored.known.tolist(), strict=True) if known]


def test_calibration_and_changes_leave_states_where_they_are(world: World) -> None:
    world.build()
    calibrate(
        world.store, "default", None, world.model(), CalibrationSettings(quiet=True, sample=10)
    )
    assert kept_names(world, NAMES) == list(NAMES)
    picture_of(world, "new", "orange")
    assert kept_names(world, [*NAMES, "new"]) == list(NAMES)
    amend(world.store, "default", [Delete("red")])
    assert kept_names(world, [name for name in NAMES if name != "red"]) == [
        name for name in NAMES if name != "red"
    ]


def test_the_next_build_keeps_the_states_of_items_that_were_put(world: World) -> None:
    world.build()
    picture_of(world, "new", "orange")
    world.build()
    names = [*NAMES, "new"]
    assert kept_names(world, names) == names
    _, searcher = world.open()
    ranked = rerank("orange", found(searcher, names), world.means(searcher))
    assert {item.id for item in ranked.items[:2]} == {"orange", "new"}


def picture_of(world: World, name: str, colour: str) -> None:
    """Put an item with a picture of one colour, as `hivlp items upsert` does."""
    folder = world.home.parent / "put"
    folder.mkdir()
    (folder / "own.png").write_bytes(png(solid(colour, (9, 17))))
    line = json.dumps({"file_name": "own.png", "id": name, "captions": ["a square"]})
    (folder / "metadata.jsonl").write_text(line, encoding="utf-8")
    upsert_corpus(open_corpus(str(folder)), world.model(), world.store, "default", quiet=True)


def test_keeping_states_needs_a_reranker(world: World, tmp_path: Path) -> None:
    plain = make_tiny_artifact(tmp_path / "plain")
    with pytest.raises(BuildError, match="has no re-ranker"):
        world.build(model=Model.load(plain))
    with pytest.raises(BuildError, match="'tiny' has no re-ranker"):
        Model.load(plain, rerank=True)


def test_the_command_keeps_states_and_says_how_large_they_are(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVLP_HOME", str(world.home))
    given = [str(world.corpus), "--artifact", str(world.artifact), "--store-states"]
    assert build_command(given) == 0
    assert "states: 16 x 3 numbers a picture, 0.0 MiB" in capsys.readouterr().out
    version = world.store.current("default")
    assert world.store.manifest("default", version).states is not None


def test_a_changed_byte_of_the_states_is_found(world: World) -> None:
    report = world.build()
    file = report.path / layout.STATES
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(SnapshotCorrupt, match=r"states\.npy"):
        world.store.open("default")


def test_erased_items_are_in_no_states(world: World) -> None:
    before = world.build().manifest
    _, searcher = world.open()
    row = searcher.row_of("purple", "image")
    stored = searcher.stored_states(np.array([row]))
    assert stored is not None
    secret = stored.states.tobytes()
    assert len(holding(world.home, secret)) == 2  # the version and the cache
    searcher.close()  # type: ignore[attr-defined]
    (world.corpus / "purple.png").unlink()  # found by its numbers, then, not by its content
    report = erase(world.store, "default", ["purple"])
    assert report.left == ()
    assert holding(world.home, secret) == []
    manifest = world.store.manifest("default", report.version)
    assert manifest.states == before.states
    assert manifest.files[layout.STATES].sha256 != before.files[layout.STATES].sha256
    _, searcher = world.open()
    left = [name for name in NAMES if name != "purple"]
    stored = searcher.stored_states(np.arange(len(NAMES)))
    assert stored is not None
    assert np.flatnonzero(~stored.known).tolist() == [row]
    ranked = rerank("blue", found(searcher, left), world.means(searcher))
    assert ranked.complete
    assert ranked.items[0].id == "blue"


def holding(home: Path, secret: bytes) -> list[str]:
    """Files below the state folder in which some bytes are, whole."""
    return [f.name for f in home.rglob("*") if f.is_file() and secret in f.read_bytes()]


def test_an_unreadable_states_cache_is_a_clear_error(world: World) -> None:
    folder = world.home / "cache" / "states"
    folder.mkdir(parents=True)
    (folder / f"{STATES_SPACE}.sqlite").write_bytes(b"not a database, whatever it is called" * 50)
    with pytest.raises(BuildError, match=r"7{64}\.sqlite"):
        world.build()


def test_states_cached_in_another_width_are_a_clear_error(world: World) -> None:
    world.build()
    (file,) = (world.home / "cache" / "states").glob("*.sqlite")
    with sqlite3.connect(file) as base:
        base.execute("UPDATE vectors SET numbers = x'0000'")
    base.close()
    with pytest.raises(BuildError, match="another width"):
        world.build()


def test_a_search_from_the_command_line_shows_matches(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVLP_HOME", str(world.home))
    world.build()
    assert search_command(["a red one", "--rerank", "--rerank-k", "4", "--k", "5"]) == 0
    out = capsys.readouterr().out
    head, *lines = out.splitlines()
    assert head.split() == ["rank", "match", "score", "id", "name"]
    first = lines[0].split()
    assert (first[0], first[1], first[3]) == ("1", "1.000", "red")
    assert lines[4].split()[2:] != lines[3].split()[2:]
    assert len(lines[4].split()) == len(lines[3].split()) - 1  # the fifth was not compared
    assert "re-ranked in" in out
    picture = str(world.corpus / "blue.png")
    assert search_command(["--image", picture, "--modality", "text", "--rerank", "--k", "2"]) == 0
    first = capsys.readouterr().out.splitlines()[1].split()
    assert (first[1], first[3:]) == ("1.000", ["blue", "blue"])


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["red", "--rerank-k", "5"], 2, "--rerank isn't given"),
        (["--vector", "v.npy", "--rerank"], 2, "not --vector"),
        (["red", "--rerank", "--modality", "text"], 1, "pairs of a text and a picture"),
    ],
)
def test_what_cannot_be_reranked_is_refused(
    world: World,
    given: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HIVLP_HOME", str(world.home))
    world.build(states=False)
    assert main(["search", *given]) == code
    assert said in capsys.readouterr().err


def test_a_search_without_a_reranker_says_so(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVLP_HOME", str(world.home))
    world.build(states=False)
    make_tiny_artifact(world.home / "artifacts" / "other")
    other = str(world.home / "artifacts" / "other")
    assert main(["search", "red", "--rerank", "--artifact", other]) == 1
    assert "'tiny' has no re-ranker" in capsys.readouterr().err
