"""A Qdrant collection imported: the real client's in-process mode stands in for a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException

from hivlp.index.build.vectors import qdrant, qdrant_folder
from hivlp.index.build.vectors.importing import import_vectors
from hivlp.index.build.vectors.qdrant import QdrantSource, download
from hivlp.index.build.vectors.queries import own_space
from hivlp.index.build.vectors.record import ImportSettings
from hivlp.index.errors import BuildError, CorpusError, NoRoom
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.snapshot import room
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import MissingExtra
from hivlp.models.levels import FloatArray
from hivlp.service.main import main
from tests.fakes import unit_vectors

POINTS, DIM = 230, 24
QUIET = ImportSettings(quiet=True, dims=(8,), sample=100)
URL = "http://qdrant.test:6333"
Capture = pytest.CaptureFixture[str]


def payload_of(number: int) -> dict[str, Any]:
    return {
        "name": f"thing {number}",
        "price": number if number % 2 else number + 0.5,
        "tags": ["a", "b"] if number % 3 else [],
        "made": {"year": 1900 + number},
        "sold": bool(number % 2),
    }


def filled(
    client: QdrantClient, name: str, vectors: FloatArray, distance: Any = models.Distance.COSINE
) -> None:
    client.create_collection(name, models.VectorParams(size=vectors.shape[1], distance=distance))
    points = [
        models.PointStruct(id=i, vector=vector.tolist(), payload=payload_of(i))
        for i, vector in enumerate(vectors)
    ]
    client.upload_points(name, points)


@pytest.fixture
def client() -> QdrantClient:
    client = QdrantClient(":memory:")
    filled(client, "things", unit_vectors(POINTS, DIM))
    return client


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five parts of three pages each."""
    monkeypatch.setattr(qdrant, "PART", 50)
    monkeypatch.setattr(qdrant, "PAGE", 20)
    monkeypatch.setattr(qdrant.time, "sleep", lambda seconds: None)


def taken(client: Any, home: Path, name: str = "things", vector: str | None = None) -> QdrantSource:
    return download(client, URL, name, vector, home, quiet=True)


class Breaking:
    """A client whose scroll fails after some pages, so many times."""

    def __init__(self, client: QdrantClient, pages: int, failures: int, error: Exception) -> None:
        self._client = client
        self._pages, self._failures, self._error = pages, failures, error
        self.offsets: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def scroll(self, *given: Any, **named: Any) -> Any:
        if len(self.offsets) >= self._pages and self._failures:
            self._failures -= 1
            raise self._error
        self.offsets.append(named["offset"])
        return self._client.scroll(*given, **named)


def test_points_become_items_with_their_payloads_as_typed_columns(
    client: QdrantClient, tmp_path: Path
) -> None:
    source = taken(client, tmp_path)
    assert (source.count, source.dim, source.metric) == (POINTS, DIM, "cosine")
    manifest = import_vectors(source, SnapshotStore(tmp_path), "x", QUIET).manifest
    assert manifest.items == POINTS
    assert manifest.corpus.kind == "vectors-qdrant"
    assert URL in manifest.corpus.source
    snapshot = SnapshotStore(tmp_path).open("x")
    assert snapshot.catalogue.metadata(["3", "7"], None) == [
        {**payload_of(n), "made": json.dumps({"year": 1900 + n}), "price": float(n)} for n in (3, 7)
    ]
    searcher = LocalSearcher(snapshot)
    own = own_space(unit_vectors(POINTS, DIM)[[9]], snapshot.rotation, "")
    row = searcher.row_of("9", "image")
    np.testing.assert_allclose(searcher.vector("image", row, 2), own, atol=1e-5)


def test_a_download_that_breaks_goes_on_where_it_stopped(
    client: QdrantClient, tmp_path: Path
) -> None:
    gone = ResponseHandlingException(ConnectionError("gone"))
    breaking = Breaking(client, pages=7, failures=99, error=gone)
    with pytest.raises(CorpusError, match="can't be reached: gone; run it again to go on"):
        taken(breaking, tmp_path)
    state = json.loads(next(tmp_path.rglob("state.json")).read_text())
    assert (state["points"], state["parts"], state["done"]) == (100, 2, False)
    again = Breaking(client, pages=0, failures=0, error=gone)
    source = taken(again, tmp_path)
    assert again.offsets[0] == 100, "two parts of 50 were whole"
    ids = [one for batch in source.batches() for one in batch.table["id"].to_pylist()]
    assert ids == [str(i) for i in range(POINTS)]
    vectors = np.concatenate([batch.vectors for batch in source.batches()])
    np.testing.assert_allclose(vectors, unit_vectors(POINTS, DIM), atol=1e-6)
    source.close()
    once_more = Breaking(client, pages=0, failures=0, error=gone)
    source = taken(once_more, tmp_path)
    assert source.count == POINTS
    assert once_more.offsets == [], "a whole download is not begun again"
    source.discard()
    assert not source.folder.exists()


def test_what_dies_between_a_part_and_its_state_is_downloaded_again(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(qdrant_folder, "replace_text", dies)
        with pytest.raises(KeyboardInterrupt):
            taken(client, tmp_path)
    assert len(list(tmp_path.rglob("part_000000.npy"))) == 1
    assert taken(client, tmp_path).count == POINTS


def broken_off(client: QdrantClient, home: Path) -> Path:
    """The folder of a download that broke after two parts."""
    gone = ResponseHandlingException(ConnectionError("gone"))
    with pytest.raises(CorpusError, match="can't be reached"):
        taken(Breaking(client, pages=7, failures=99, error=gone), home)
    return next(home.rglob("state.json")).parent


def test_parts_that_the_state_does_not_speak_of_bring_no_deleted_point_back(
    client: QdrantClient, tmp_path: Path
) -> None:
    folder = broken_off(client, tmp_path)
    for end in (".npy", ".parquet"):  # as of a process that died before it said so
        (folder / f"part_000002{end}").write_bytes((folder / f"part_000001{end}").read_bytes())
        (folder / f"part_000077{end}").write_bytes((folder / f"part_000001{end}").read_bytes())
    source = taken(client, tmp_path)
    assert source.count == POINTS
    ids = [one for batch in source.batches() for one in batch.table["id"].to_pylist()]
    assert ids == [str(i) for i in range(POINTS)]


@pytest.mark.parametrize(
    ("remade", "words"),
    [
        ({"dim": DIM + 1}, "its vectors' numbers changed since its download began: 24 then, 25"),
        ({"distance": models.Distance.DOT}, "its metric changed .*: 'cosine' then, 'dot' now"),
        ({"count": POINTS - 30}, "its number of points changed .*: 230 then, 200 now; remove"),
        ({"seed": 5}, "its point 0 changed since its download began; remove"),
    ],
)
def test_a_collection_that_was_made_anew_is_not_mixed_with_the_old_one(
    client: QdrantClient, tmp_path: Path, remade: dict[str, Any], words: str
) -> None:
    folder = broken_off(client, tmp_path)
    client.delete_collection("things")
    count, dim = remade.get("count", POINTS), remade.get("dim", DIM)
    vectors = unit_vectors(count, dim, remade.get("seed", 0))
    filled(client, "things", vectors, remade.get("distance", models.Distance.COSINE))
    with pytest.raises(CorpusError, match=words) as caught:
        taken(client, tmp_path)
    assert str(folder) in str(caught.value)


def test_a_part_that_is_gone_is_named(client: QdrantClient, tmp_path: Path) -> None:
    folder = broken_off(client, tmp_path)
    (folder / "part_000001.npy").unlink()
    with pytest.raises(CorpusError, match=r"part_000001\.npy: missing; remove the folder"):
        taken(client, tmp_path)


def test_a_disk_without_room_for_what_is_left_is_told_before_the_download(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Breaking(client, 6, 4, ResponseHandlingException(OSError("gone")))
    with pytest.raises(CorpusError, match="can't be reached"):
        taken(asked, tmp_path)
    downloaded, need = 100, 4 * DIM * (POINTS - 100)
    enough = need + room.kept_bytes(need)
    monkeypatch.setattr(room, "free_bytes", lambda folder: enough - 1)
    idle = Breaking(client, 0, 0, RuntimeError())
    with pytest.raises(NoRoom, match=f"{POINTS - downloaded} points: needs"):
        taken(idle, tmp_path)
    assert idle.offsets == []
    monkeypatch.setattr(room, "free_bytes", lambda folder: enough)
    assert taken(client, tmp_path).count == POINTS


def test_two_imports_do_not_share_a_download(client: QdrantClient, tmp_path: Path) -> None:
    with taken(client, tmp_path), pytest.raises(CorpusError, match="another process imports it"):
        taken(client, tmp_path)
    taken(client, tmp_path).discard()


def test_a_part_has_reached_the_disk_before_the_state_says_so(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    usual = qdrant_folder.replace_text
    monkeypatch.setattr(qdrant_folder, "sync", lambda path: done.append(path.suffix))

    def replace_text(target: Path, text: str) -> None:
        done.append("state")
        usual(target, text)

    monkeypatch.setattr(qdrant_folder, "replace_text", replace_text)
    taken(client, tmp_path)
    assert done == [".parquet", ".npy", "", "state"] * 5


def test_large_payloads_make_smaller_parts(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qdrant, "PART_BYTES", 1)
    source = taken(client, tmp_path)
    assert source.count == POINTS
    assert len(list(source.folder.glob("*.npy"))) == 12, "a page of 20 points each"


@pytest.mark.parametrize("name", ["", "dense"])
def test_the_dense_vectors_of_a_hybrid_collection_are_read(
    client: QdrantClient, tmp_path: Path, name: str
) -> None:
    dense = models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    sparse = {"a_sparse": models.SparseVectorParams()}
    client.create_collection("it", {name: dense} if name else dense, sparse_vectors_config=sparse)
    vectors = unit_vectors(60, DIM)
    words = models.SparseVector(indices=[1, 7], values=[0.5, 0.25])
    points = [
        models.PointStruct(
            id=i, vector={"a_sparse": words} | ({} if i == 5 else {name: vectors[i].tolist()})
        )
        for i in range(60)
    ]
    client.upsert("it", points)
    source = taken(client, tmp_path, "it")
    found = np.concatenate([batch.vectors for batch in source.batches()])
    np.testing.assert_allclose(np.delete(found, 5, 0), np.delete(vectors, 5, 0), atol=1e-6)
    assert next(batch.reasons for batch in source.batches()) == {5: "no vector"}
    source.close()
    assert taken(client, tmp_path, "it").count == 60


def test_a_password_in_the_address_is_shown_nowhere(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    url = "http://robot:hunter2@qdrant.test:6333"
    monkeypatch.setattr(qdrant, "connect", lambda url: client)
    given = ["import-vectors", "--qdrant", url, "--collection", "things", "--dims", "8"]
    assert main([*given, "--home", str(tmp_path)]) == 0
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    gone = ResponseHandlingException(ConnectionError(f"no route to {url}"))
    breaking = Breaking(client, pages=0, failures=9, error=gone)
    with pytest.raises(CorpusError) as caught:
        download(breaking, url, "things", None, tmp_path)
    monkeypatch.undo()
    with pytest.raises(CorpusError) as address:
        qdrant.connect("http://robot:hunter2@[x")
    shown = capsys.readouterr()
    for text in (written, shown.out, shown.err, str(caught.value), str(address.value)):
        assert "hunter2" not in text
    assert "http://...@qdrant.test:6333" in written


def test_pictures_of_a_collection_need_the_folder_they_lie_in(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    points = [
        models.PointStruct(id=i, vector=vector.tolist(), payload={"image": "a.png"})
        for i, vector in enumerate(unit_vectors(30, DIM))
    ]
    client.create_collection("it", models.VectorParams(size=DIM, distance=models.Distance.COSINE))
    client.upsert("it", points)
    store = SnapshotStore(tmp_path / "home")
    (tmp_path / "pictures").mkdir()
    with taken(client, tmp_path, "it") as source:
        manifest = import_vectors(source, store, "x", QUIET).manifest
        assert Path(manifest.corpus.root) == source.folder
        catalogue = store.open("x").catalogue
        assert catalogue.image_ref("7") is None
        assert catalogue.metadata(["7"], None) == [{"_image": "a.png"}]
        settings = replace(QUIET, pictures=tmp_path / "pictures")
        manifest = import_vectors(source, store, "x", settings).manifest
        assert manifest.corpus.root == str(tmp_path / "pictures")
        assert store.open("x").catalogue.image_ref("7") == "a.png"


def test_a_moment_without_an_answer_is_waited_out(client: QdrantClient, tmp_path: Path) -> None:
    gone = ResponseHandlingException(TimeoutError("slow"))
    assert taken(Breaking(client, pages=2, failures=2, error=gone), tmp_path).count == POINTS


def test_one_of_several_named_vectors_is_taken_and_points_without_it_are_listed(
    client: QdrantClient, tmp_path: Path
) -> None:
    params = {
        "picture": models.VectorParams(size=DIM, distance=models.Distance.DOT),
        "words": models.VectorParams(size=4, distance=models.Distance.EUCLID),
    }
    client.create_collection("named", params)
    vectors = unit_vectors(60, DIM)
    client.upsert(
        "named",
        [
            models.PointStruct(
                id=f"00000000-0000-0000-0000-{i:012d}",
                vector={"words": [1.0, 2, 3, 4]}
                | ({} if i == 5 else {"picture": vectors[i].tolist()}),
            )
            for i in range(60)
        ],
    )
    with pytest.raises(CorpusError, match="--vector-name is needed, one of: picture, words"):
        taken(client, tmp_path, "named")
    source = taken(client, tmp_path, "named", "picture")
    assert (source.dim, source.metric) == (DIM, "dot")
    report = import_vectors(source, SnapshotStore(tmp_path), "x", QUIET)
    assert report.manifest.items == 59
    (line,) = report.failures_file.read_text().splitlines()
    assert json.loads(line)["reason"] == "no vector"
    assert json.loads(line)["id"].endswith("000005")


def test_lengths_that_count_in_the_collection_are_refused(
    client: QdrantClient, tmp_path: Path
) -> None:
    lengths = np.linspace(1, 3, POINTS, dtype=np.float32)[:, None]
    filled(client, "dotted", unit_vectors(POINTS, DIM) * lengths, models.Distance.DOT)
    source = taken(client, tmp_path, "dotted")
    settings = ImportSettings(quiet=True, dims=(8,), metric=source.metric)
    with pytest.raises(BuildError, match="lengths differ"):
        import_vectors(source, SnapshotStore(tmp_path), "x", settings)


def _empty(client: QdrantClient) -> None:
    client.create_collection("it", models.VectorParams(size=4, distance=models.Distance.COSINE))


def _many(client: QdrantClient) -> None:
    several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    params = models.VectorParams(
        size=4, distance=models.Distance.COSINE, multivector_config=several
    )
    client.create_collection("it", params)


def _sparse(client: QdrantClient) -> None:
    client.create_collection("it", {}, sparse_vectors_config={"s": models.SparseVectorParams()})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda client: None, "the server says: Collection it not found"),
        (_empty, "holds no points"),
        (_many, "several vectors a point"),
        (_sparse, "--vector-name is needed, one of: none but sparse ones"),
    ],
)
def test_collections_that_cannot_be_imported_say_why(
    client: QdrantClient, tmp_path: Path, make: Callable[[QdrantClient], None], words: str
) -> None:
    make(client)
    with pytest.raises(CorpusError, match=words):
        taken(client, tmp_path, "it")


def test_the_command_imports_and_removes_what_it_downloaded(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(qdrant, "connect", lambda url: client)
    given = ["import-vectors", "--qdrant", URL, "--collection", "things", "--dims", "8"]
    assert main([*given, "--home", str(tmp_path)]) == 0
    assert f"{POINTS} image vectors of {DIM} numbers" in capsys.readouterr().out
    assert not list((tmp_path / "cache" / "imports").iterdir())
    assert main([*given, "--home", str(tmp_path), "--metric", "dot"]) == 2
    assert "--metric is the collection's own" in capsys.readouterr().err


def test_without_the_client_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "qdrant_client", None)
    with pytest.raises(MissingExtra, match=r"hivlp\[qdrant\]"):
        qdrant.connect(URL)
