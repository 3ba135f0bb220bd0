"""Every form of a corpus, built with a real small model, searched, and its pictures shown."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hivlp.index.build import assemble
from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.corpus import CorpusOptions, open_corpus
from hivlp.index.build.items import Item
from hivlp.index.build.model import Model, query_outputs
from hivlp.index.build.overlay import Overlay
from hivlp.index.cascade import PlanRequest
from hivlp.index.errors import BuildError
from hivlp.index.filters import parse_filter
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.pictures import picture_root, read_picture
from hivlp.index.plans import run_plan
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import Modality
from hivlp.models.runtime.images import ImageLimits
from hivlp.service.main import main
from hivlp.service.pictures import NoPicture, Pictures, locate
from tests.fakes import fake_model
from tests.tiny_artifact import COLOURS, make_tiny_artifact, png, solid

QUIET = BuildSettings(batch_size=4, quiet=True)
PICTURES = {name: png(solid(name)) for name in COLOURS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make_tiny_artifact(tmp_path_factory.mktemp("artifact")))


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "home")


def tars(folder: Path) -> str:
    for shard in range(2):
        with tarfile.open(folder / f"s-{shard}.tar", "w") as stream:
            for number, (name, data) in enumerate(PICTURES.items()):
                if number % 2 == shard:
                    row = json.dumps({"caption": f"a {name}", "hue": name, "n": number}).encode()
                    for ending, content in (("png", data), ("json", row)):
                        info = tarfile.TarInfo(f"{name}.{ending}")
                        info.size = len(content)
                        stream.addfile(info, io.BytesIO(content))
    return str(folder / "s-{0..1}.tar")


def files(folder: Path) -> None:
    (folder / "p").mkdir()
    for name, data in PICTURES.items():
        (folder / "p" / f"{name}.png").write_bytes(data)


def rows() -> list[dict[str, Any]]:
    return [
        {"id": name, "image": f"p/{name}.png", "caption": f"a {name}", "hue": name, "n": number}
        for number, name in enumerate(COLOURS)
    ]


def packed(folder: Path) -> str:
    files(folder)
    text = "".join(json.dumps(row) + "\n" for row in rows())
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder / "c.jsonl.gz")


def parquets(folder: Path) -> str:
    for part in range(2):
        own = [{**row, "image": PICTURES[row["id"]]} for row in rows()[part::2]]
        pq.write_table(pa.Table.from_pylist(own), folder / f"part-{part}.parquet")
    return str(folder)


def karpathy(folder: Path) -> str:
    files(folder)
    images = [
        {
            "filepath": "p",
            "filename": f"{name}.png",
            "imgid": number,
            "split": "test" if number % 2 else "train",
            "sentences": [{"raw": f"a {name}"}],
        }
        for number, name in enumerate(COLOURS)
    ]
    (folder / "d.json").write_text(json.dumps({"images": images}))
    return str(folder / "d.json")


FORMS: dict[str, Callable[[Path], str]] = {
    "tars": tars, "packed": packed, "parquets": parquets, "karpathy": karpathy,
}  # fmt: skip


@pytest.fixture
def memory() -> Iterator[Any]:
    kept = fsspec.filesystem("memory")
    kept.store.clear()
    kept.pseudo_dirs[:] = [""]
    yield kept
    kept.store.clear()
    kept.pseudo_dirs[:] = [""]


def best(store: SnapshotStore, model: Model, text: str) -> str:
    assert model.text is not None
    searcher = LocalSearcher(store.open("default"))
    outputs = query_outputs(model.text, model.text.prepare([text]))
    found = run_plan(searcher, "image", searcher.plan(PlanRequest("image", "text", 1)), outputs)[0]
    return searcher.items("image", found, 1, 0)[0].id


def allowed(snapshot: Snapshot, side: Modality, asked: dict[str, Any]) -> list[int]:
    """Rows that a filter allows."""
    rows = snapshot.filters.rows(parse_filter(asked), side, snapshot.sides[side].row_items)
    return [int(row) for row in rows.rows]


@pytest.mark.parametrize("far", [False, True], ids=["local", "url"])
@pytest.mark.parametrize("form", FORMS)
def test_a_corpus_of_any_form_is_built_searched_and_shown(
    tmp_path: Path, model: Model, store: SnapshotStore, memory: Any, form: str, far: bool
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    given = FORMS[form](folder)
    if far:
        memory.put(str(folder), "/", recursive=True)
        given = given.replace(str(folder), "memory://corpus")
    report = build_index(open_corpus(given), model, store, "default", QUIET)
    manifest = report.manifest
    assert (manifest.items, report.failures) == (len(COLOURS), 0)
    assert {s: r.rows for s, r in manifest.sides.items()} == {"image": 10, "text": 10}
    assert manifest.corpus.root == ("memory://corpus" if far else str(folder))
    assert {w.query for w in manifest.widths} == {"image", "text"}  # pictures were read again
    searcher = LocalSearcher(store.open("default"))
    found = best(store, model, "blue")
    name = "blue" if form != "karpathy" else str(list(COLOURS).index("blue"))
    assert found == name
    reference = searcher.image_ref(name)
    root = picture_root(manifest.corpus.root)
    assert read_picture(root, str(reference)) == PICTURES["blue"]
    shown = locate(root, reference, name)
    assert Pictures(ImageLimits()).original(shown).data == PICTURES["blue"]
    assert Pictures(ImageLimits()).thumbnail(shown, 16).data
    with pytest.raises(NoPicture):
        locate(root, "../corpus/gone.png", name)
    assert build_index(open_corpus(given), model, store, "default", QUIET).fresh == 0


def test_forms_from_the_command_line(
    tmp_path: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    given = karpathy(folder)
    tail = ["--artifact", str(model.path), "--home", str(tmp_path / "home"), "--workers", "3"]
    assert main(["build", given, "--split", "test", *tail]) == 0
    assert "5 items, 5 image rows, 5 text rows" in capsys.readouterr().out
    assert main(["build", given, "--images", str(folder / "p"), *tail]) == 1
    assert "items failed" in capsys.readouterr().err
    assert main(["build", given, "--split", "dev", *tail]) == 2
    assert main(["build", str(folder / "p"), "--aliases", "img2dataset", *tail]) == 1
    assert "no column aliases" in capsys.readouterr().err
    assert main(["build", str(folder / "*.csv"), *tail]) == 1
    assert "no file matches" in capsys.readouterr().err
    assert main(["build", "nothing://bucket/corpus", *tail]) == 1
    assert "can't be opened" in capsys.readouterr().err


def test_a_catalogue_of_many_batches_is_read_like_one(
    tmp_path: Path, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is cut small; what is written says the same as in one piece."""
    count = 500
    table = {
        "id": [f"i{i}" for i in range(count)],
        "text": [f"a {list(COLOURS)[i % 10]} {i % 7}" for i in range(count)],
        "title": [f"title {i * 37 % count}" for i in range(count)],
        "tags": [[f"t{i % 3}", f"t{i % 5}"] for i in range(count)],
        "n": list(range(count)),
    }
    pq.write_table(pa.table(table), tmp_path / "c.parquet")
    model = fake_model(tmp_path)
    corpus = open_corpus(tmp_path / "c.parquet")
    whole = build_index(corpus, model, store, "whole", QUIET)
    for name, value in (("ITEMS_AT_ONCE", 16), ("BATCH_ITEMS", 50), ("FETCH", 33)):
        monkeypatch.setattr(assemble, name, value)
    monkeypatch.setattr("hivlp.index.build.spool.BLOCK_ITEMS", 7)
    monkeypatch.setattr("hivlp.index.snapshot.coding.BLOCK", 8)
    monkeypatch.setattr("hivlp.index.snapshot.coding.RANGE", 3)
    parts = build_index(corpus, model, store, "parts", QUIET)
    one, many = store.open("whole"), store.open("parts")
    assert one.catalogue.table.column("id").num_chunks == 1
    assert many.catalogue.table.column("id").num_chunks > 5
    assert many.catalogue.table.equals(one.catalogue.table)
    for file in set(whole.manifest.files) - {"items.arrow", "text/texts.arrow"}:
        same = (whole.path / file).read_bytes() == (parts.path / file).read_bytes()
        assert same or file.endswith("values.arrow"), file
    asked = {"and": [{"field": "title", "eq": "title 37"}, {"field": "tags", "eq": "t1"}]}
    for snapshot in (one, many):
        assert allowed(snapshot, "text", asked) == [1]
        assert snapshot.catalogue.ordinal("i499") == 499
        assert snapshot.catalogue.metadata(["i77"], ["n"]) == [{"n": 77}]
        assert snapshot.sides["text"].texts[499].as_py() == table["text"][499]


def test_items_of_an_overlay_replace_and_follow_those_of_the_corpus(
    tmp_path: Path, model: Model, store: SnapshotStore
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    corpus = open_corpus(tars(folder))
    new = Item("blue", image_data=PICTURES["red"], captions=("a red",), metadata={"hue": "red"})
    overlay = Overlay(lambda item_id: item_id in ("red", "blue"), [new])
    report = build_index(corpus, model, store, "default", QUIET, overlay)
    assert report.manifest.items == len(COLOURS) - 1
    searcher = LocalSearcher(store.open("default"))
    assert best(store, model, "red") == "blue"
    assert searcher.image_ref("blue") is None
    assert searcher.metadata(["blue"], None) == [{"hue": "red"}]
    twice = Overlay(lambda item_id: False, [new])
    with pytest.raises(BuildError, match="'blue' is there twice"):
        build_index(corpus, model, store, "default", QUIET, twice)
    assert store.current("default") == report.manifest.version


def test_a_metadata_column_too_many_is_refused(
    tmp_path: Path, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.index.build.columns.MAX_COLUMNS", 3)
    path = tmp_path / "c.jsonl"
    names = [{"id": str(n), "text": "red", f"m{n}": 1} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in names))
    with pytest.raises(BuildError, match="'m3': more than 3 different names"):
        build_index(open_corpus(path), fake_model(tmp_path), store, "default", QUIET)


def test_a_karpathy_split_is_metadata_to_filter_by(
    tmp_path: Path, model: Model, store: SnapshotStore
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    options = CorpusOptions(split="all")
    build_index(open_corpus(karpathy(folder), options), model, store, "default", QUIET)
    asked = {"field": "split", "eq": "test"}
    assert allowed(store.open("default"), "image", asked) == [1, 3, 5, 7, 9]
