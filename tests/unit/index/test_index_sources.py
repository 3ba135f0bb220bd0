"""Where a corpus may lie and how it is named: patterns, packed files, URLs, Karpathy's splits."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import known_implementations

from hivlp.index import remote
from hivlp.index.build.corpus import CorpusOptions, open_corpus
from hivlp.index.build.items import BadItem, Item, RowError, safe_ref
from hivlp.index.build.readers import lines as corpus_lines
from hivlp.index.build.readers.base import PLAIN
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import picture_root, read_picture, remote_stamp, root_text
from hivlp.index.remote import RemoteFolder, below

HOME = "memory://corpus"


def read(path: Path | str, options: CorpusOptions = PLAIN) -> tuple[list[Item], list[BadItem]]:
    found = list(open_corpus(path, options))
    items = [item for item in found if isinstance(item, Item)]
    return items, [bad for bad in found if isinstance(bad, BadItem)]


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty before and after."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


# Tables of many files, packed ones, patterns.


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_packed_tables_are_read_like_others(tmp_path: Path, kind: str) -> None:
    content = b"id,text\na,x\nb,y\n" if kind == "csv" else lines(
        {"id": "a", "text": "x"}, {"id": "b", "text": "y"}
    )  # fmt: skip
    path = tmp_path / f"c.{kind}.gz"
    path.write_bytes(gzip.compress(content))
    items, bad = read(path)
    assert ([(i.id, i.captions, i.place) for i in items], bad) == (
        [("a", ("x",), "line 2" if kind == "csv" else "line 1"),
         ("b", ("y",), "line 3" if kind == "csv" else "line 2")],
        [],
    )  # fmt: skip
    assert open_corpus(path).kind == kind
    path.write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(CorpusError, match=r"c\..*gz: unreadable: .*end-of-stream"):
        read(path)
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"c\..*gz: unreadable: .*gzip"):
        read(path)


def test_a_folder_of_tables_without_pictures_is_one_table(tmp_path: Path) -> None:
    for n in range(3):
        rows = {"id": [f"{n}-{i}" for i in range(2)], "image": [b"%d%d" % (n, i) for i in range(2)]}
        pq.write_table(pa.table(rows), tmp_path / f"part-{n}.parquet")
    (tmp_path / "README.md").write_text("not a table")
    corpus = open_corpus(tmp_path)
    assert (corpus.kind, corpus.count()) == ("parquet", 6)
    items, _ = read(tmp_path)
    assert [(item.id, item.image) for item in items][2:4] == [
        ("1-0", "part-1.parquet#row=0"),
        ("1-1", "part-1.parquet#row=1"),
    ]
    assert items[3].place == "part-1.parquet: row 1"
    assert [read_picture(tmp_path, str(i.image)) for i in items] == [i.image_data for i in items]
    (tmp_path / "a.png").write_bytes(b"x")  # now it is a folder of pictures
    assert open_corpus(tmp_path).kind == "folder"
    assert [item.id for item in read(f"{tmp_path}/*.parquet")[0]] == [i.id for i in items]


def test_patterns_name_files_of_one_kind(tmp_path: Path) -> None:
    for name in ("a/x1.jsonl", "a/x2.jsonl", "b/x3.jsonl", "b/.hidden.jsonl", "b/y.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines({"id": name, "text": "x", "image": "p.png"}))
    found = [item.id for item in read(f"{tmp_path}/*/x*.jsonl")[0]]
    assert found == ["a/x1.jsonl", "a/x2.jsonl", "b/x3.jsonl"]
    assert [item.id for item in read(f"{tmp_path}/{{b,a}}/x[13].jsonl")[0]] == [found[2], found[0]]
    assert [item.id for item in read(f"{tmp_path}/**/*.jsonl")[0]] == found
    corpus = open_corpus(f"{tmp_path}/a/x?.jsonl")
    assert corpus.root == tmp_path / "a"
    for pattern, reason in (
        ("*.parquet", "no file matches"),
        ("nowhere/*.csv", "no file matches"),
        ("b/*", "several kinds"),
        ("a/x{1..9}.jsonl", "no such file"),
        ("a/x{9..1}.jsonl", "no range"),
        ("a/x{1..999999}.jsonl", "no range"),
        ("a/x{1..1000}{1..1000}.jsonl", "more than 100000 files"),
        ("a/x1.{docx}", "no such file"),
    ):
        with pytest.raises(CorpusError, match=reason):
            open_corpus(f"{tmp_path}/{pattern}")


def test_a_name_with_the_letters_of_a_pattern_is_a_name_where_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a[1]{x}.jsonl"
    path.write_bytes(lines({"id": "a", "text": "x"}))
    assert [item.id for item in read(path)[0]] == ["a"]


def test_bad_rows_of_many_files_say_which_file(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"{broken\n" + lines({"id": name, "text": "x"}))
    items, bad = read(f"{tmp_path}/*.jsonl")
    assert [item.id for item in items] == ["a.jsonl", "b.jsonl"]
    assert [entry.place for entry in bad] == ["a.jsonl: line 1", "b.jsonl: line 1"]


def test_a_line_without_an_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_lines, "MAX_LINE_CHARS", 100)
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"[" * 350 + b"\n" + lines({"id": "a", "text": "x"}) + b"x" * 250)
    items, bad = read(path)
    assert [item.id for item in items] == ["a"]
    assert [(entry.place, entry.reason) for entry in bad] == [
        ("line 1", "a line of more than 100 characters"),
        ("line 3", "a line of more than 100 characters"),
    ]
    table = tmp_path / "c.csv"
    table.write_bytes(b"id,text\na,x\nb," + b"y" * 100 + b"\n")
    with pytest.raises(CorpusError, match="a line of more than 100 characters"):
        read(table)


def test_a_cell_that_python_has_no_value_for_is_a_bad_item_and_no_traceback(tmp_path: Path) -> None:
    count = 5
    cells = {
        "at": pa.array([10**14, 0, 0, 0, 0], pa.timestamp("s")),
        "day": pa.array([0, 10**8, 0, 0, 0], pa.int32()).cast(pa.date32()),
        "text": pa.array([b"x", b"x", b"\xff", b"x", b"x"]).view(pa.string()),
        "long": pa.array([0, 0, 0, 2**62, 0], pa.duration("s")),
        "spent": pa.array([1_001] * count, pa.duration("ns")),
        "clock": pa.array([1_001] * count, pa.time64("ns")),
        "nested": pa.array([{"a": 1_001}] * count, pa.struct([("a", pa.timestamp("ns"))])),
    }
    table = pa.table({"id": [f"i{i}" for i in range(count)], **cells})
    pq.write_table(table, tmp_path / "c.parquet")
    items, bad = read(tmp_path / "c.parquet")
    assert [item.id for item in items] == ["i4"]
    assert items[0].metadata["nested"] == {"a": datetime(1970, 1, 1, 0, 0, 0, 1)}
    assert [(entry.place, entry.reason) for entry in bad] == [
        ("row 0", "column 'at': a time outside of the years 1 to 9999, or too long"),
        ("row 1", "column 'day': a time outside of the years 1 to 9999, or too long"),
        ("row 2", "column 'text': not UTF-8"),
        ("row 3", "column 'long': a time outside of the years 1 to 9999, or too long"),
    ]


def test_times_of_nanoseconds_in_parquet_are_cut_to_microseconds(tmp_path: Path) -> None:
    times = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"id": ["a"], "text": ["x"], "at": times}), tmp_path / "c.parquet")
    items, _ = read(tmp_path / "c.parquet")
    assert items[0].metadata["at"].microsecond == 123_456


def test_columns_of_img2dataset_are_read_where_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "00000.parquet"
    rows = {
        "key": ["000", "001"],
        "jpg": [b"JPEG", None],
        "caption": ["a heart", None],
        "url": ["https://example.org/a", "https://example.org/b"],
        "status": ["success", "failed_to_resize"],
        "error_message": [None, "broken"],
    }
    pq.write_table(pa.table(rows), path)
    items, bad = read(path, CorpusOptions(aliases="img2dataset"))
    (item,) = items
    assert (item.id, item.image, item.image_data) == ("000", f"{path.name}#row=0", b"JPEG")
    assert items[0].metadata == {"url": "https://example.org/a", "status": "success"}
    assert [(b.place, b.id, b.reason) for b in bad] == [
        ("row 1", "001", "not downloaded: failed_to_resize broken")
    ]
    assert read_picture(tmp_path, str(items[0].image)) == b"JPEG"
    plain, _ = read(path)
    assert [(i.id, i.image) for i in plain] == [("000", None), ("001", None)]


def test_options_of_another_form_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("id,text\na,x\n")
    for options in (CorpusOptions(split="test"), CorpusOptions(images="x")):
        with pytest.raises(CorpusError, match="Karpathy"):
            open_corpus(path, options)
    path.unlink()
    with pytest.raises(CorpusError, match="no column aliases"):
        open_corpus(tmp_path, CorpusOptions(aliases="img2dataset"))


# Karpathy's splits.

IMAGES: list[Any] = [
    {
        "filepath": "val2014",
        "filename": "a.jpg",
        "imgid": 0,
        "cocoid": 391895,
        "split": "test",
        "sentids": [1, 2],
        "sentences": [
            {"raw": "A man on a bike.", "tokens": ["a"], "imgid": 0, "sentid": 1},
            {"raw": "Two.", "tokens": [], "imgid": 0, "sentid": 2},
        ],
    },
    {"filename": "b.jpg", "imgid": 7, "split": "restval", "sentences": [{"raw": "b"}]},
    {"filename": "c.jpg", "split": "train", "sentences": []},
]


def karpathy(path: Path, *images: Any, **more: Any) -> Path:
    path.write_text(json.dumps({"dataset": "coco", "images": images, **more}))
    return path


def test_a_karpathy_split_is_read_with_its_captions_and_its_split(tmp_path: Path) -> None:
    items, bad = read(karpathy(tmp_path / "dataset_coco.json", *IMAGES))
    assert [(i.id, i.image, i.captions, i.metadata) for i in items] == [
        (
            "391895",
            "val2014/a.jpg",
            ("A man on a bike.", "Two."),
            {"split": "test", "imgid": 0, "cocoid": 391895},
        ),
        ("7", "b.jpg", ("b",), {"split": "restval", "imgid": 7}),
        ("c.jpg", "c.jpg", (), {"split": "train"}),
    ]
    assert bad == []


def test_one_split_of_karpathy_s_and_pictures_elsewhere(tmp_path: Path) -> None:
    path = karpathy(tmp_path / "d.json", *IMAGES)
    images = tmp_path / "images"
    images.mkdir()
    options = CorpusOptions(split="restval", images=str(images))
    items, _ = read(path, options)
    assert [item.id for item in items] == ["7"]
    assert open_corpus(path, options).root == images
    assert read(path, CorpusOptions(split="val")) == ([], [])


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (["x"], "an object is expected, got list"),
        ({"sentences": []}, "no `filename`"),
        ({"filename": "a.jpg", "filepath": 3, "sentences": []}, "no text as `filepath`"),
        ({"filename": "a.jpg"}, "no list `sentences`"),
        ({"filename": "a.jpg", "sentences": [{"tokens": []}]}, "without the text `raw`"),
        ({"filename": "../a.jpg", "sentences": []}, "leaves the corpus"),
        ({"filename": "/etc/passwd", "sentences": []}, "leaves the corpus"),
        ({"filename": "http://x/a.jpg", "sentences": []}, "nothing is fetched"),
    ],
)
def test_a_picture_of_karpathy_s_that_is_wrong_is_named(
    tmp_path: Path, image: Any, reason: str
) -> None:
    items, bad = read(karpathy(tmp_path / "d.json", image, IMAGES[1]))
    assert [item.id for item in items] == ["7"]
    assert [(entry.place, reason in entry.reason) for entry in bad] == [("image 0", True)]


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b'{"images": {}}', b"{", b"", b'{"images": [{]}', b'{"images": ["\xff"]}',
     b'{"other": {"images": [1]}}', b'{"images": [' + b"[" * 100_000, b"[" * 100_000]
)  # fmt: skip
def test_a_json_file_that_is_no_karpathy_split_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "d.json"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"d\.json: (no list `images`|not readable as JSON)"):
        read(path)


def test_a_karpathy_split_is_read_picture_by_picture(tmp_path: Path) -> None:
    path = karpathy(tmp_path / "d.json", *IMAGES)
    path.write_bytes(path.read_bytes()[:-20])  # the end is missing, and the beginning is read
    found = iter(open_corpus(path))
    assert getattr(next(found), "id", None) == "391895"
    with pytest.raises(CorpusError, match="at image 2"):
        list(found)


# URLs.


def test_tables_tars_and_folders_behind_a_url(memory: Any, tmp_path: Path) -> None:
    table = io.BytesIO()
    pq.write_table(pa.table({"id": ["p"], "image": [b"ROW"], "caption": ["x"]}), table)
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as stream:
        info = tarfile.TarInfo("t.jpg")
        info.size = 3
        stream.addfile(info, io.BytesIO(b"TAR"))
    for name, content in {
        "tables/c.parquet": table.getvalue(),
        "tables/c.jsonl.gz": gzip.compress(lines({"id": "j", "text": "x", "image": "i/a.png"})),
        "tables/i/a.png": b"FILE",
        "tars/s-0.tar": shard.getvalue(),
        "folder/b.png": b"B",
        "folder/deep/a.png": b"A",
        "folder/deep/a.txt": b"a caption\n",
        "folder/.hidden/c.png": b"C",
        "d.json": json.dumps({"images": IMAGES}).encode(),
    }.items():
        memory.pipe(f"/corpus/{name}", content)
    for given, root, expected in (
        ("tables/c.parquet", "tables", {"p": b"ROW"}),
        ("tables/c.jsonl.gz", "tables", {"j": b"FILE"}),
        ("tables/*.parquet", "tables", {"p": b"ROW"}),
        ("tars", "tars", {"t": b"TAR"}),
        ("tars/s-{0..0}.tar", "tars", {"t": b"TAR"}),
        ("folder/", "folder", {"b.png": b"B", "deep/a.png": b"A"}),
    ):
        corpus = open_corpus(f"{HOME}/{given}")
        items, bad = read(f"{HOME}/{given}")
        assert bad == []
        assert root_text(corpus.root) == f"{HOME}/{root}"
        opened = picture_root(root_text(corpus.root))
        assert {item.id: read_picture(opened, str(item.image)) for item in items} == expected
    assert items[1].captions == ("a caption",)
    karpathy_items, _ = read(f"{HOME}/d.json", CorpusOptions(images=str(tmp_path)))
    assert [item.id for item in karpathy_items] == ["391895", "7", "c.jpg"]
    assert open_corpus(f"{HOME}/d.json").root == HOME


def test_a_picture_added_behind_a_url_is_seen_by_the_next_reading(memory: Any) -> None:
    memory.pipe("/corpus/a.png", b"A")
    assert len(read(HOME)[0]) == 1
    size, stamp = remote_stamp(HOME, "a.png")
    memory.pipe("/corpus/a.png", b"AB")
    memory.pipe("/corpus/b.png", b"B")
    assert len(read(HOME)[0]) == 2
    assert remote_stamp(HOME, "a.png")[0] == size + 1
    assert remote_stamp(HOME, "a.png")[1] != stamp


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.png", "a.png"),
        ("./x/../a.png", "a.png"),
        ("a//b.png", "a/b.png"),
        ("memory://corpus/x/a.png", "x/a.png"),
        ("a#b?c=d%20.png", "a#b?c=d%20.png"),
    ],
)
def test_paths_below_a_url_are_normal(given: str, expected: str) -> None:
    assert below(HOME, given) == expected


@pytest.mark.parametrize(
    "given",
    ["../a.png", "x/../../a.png", "/a.png", "", ".", "..", "memory://other/a.png",
     "memory://corpus2/a.png", "memory://corpus/../a.png", "https://example.org/a.png",
     "file:///etc/passwd", "a\0.png"],
)  # fmt: skip
def test_nothing_outside_a_url_is_read(memory: Any, given: str) -> None:
    memory.pipe("/a.png", b"outside")
    memory.pipe("/corpus2/a.png", b"outside")
    memory.pipe("/corpus/c.jsonl", lines({"id": "a", "image": given, "text": "x"}))
    with pytest.raises(ValueError, match=r"leaves the corpus|nothing is fetched"):
        below(HOME, given)
    if given:
        items, bad = read(f"{HOME}/c.jsonl")
        assert (items, [entry.id for entry in bad]) == ([], ["a"])
    with pytest.raises(CorpusError, match="unreadable"):
        read_picture(HOME, given)


def test_remote_pictures_have_a_largest_size(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/corpus/a.png", b"12345")
    monkeypatch.setattr("hivlp.index.pictures.MAX_PICTURE_BYTES", 4)
    with pytest.raises(CorpusError, match="5 bytes, the limit is 4"):
        read_picture(HOME, "a.png")
    for ref in ("gone.png", "a.png#row=0", "gone.tar#offset=512,size=3"):
        with pytest.raises(CorpusError, match="unreadable"):
            read_picture(HOME, ref)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"{HOME}/gone.csv", "no such file or folder"),
        (f"{HOME}/*.tar", "no file matches"),
        (f"{HOME}/gone-{{0..3}}.tar", "no such file"),
        ("s3://bucket/corpus", r"pip install 'hivlp\[s3\]'"),
        ("gs://bucket/corpus", r"pip install 'hivlp\[gcs\]'"),
        ("nothing://x/y", "can't be opened"),
        ("simplecache::memory://corpus", "chained URLs|no such file"),
        ("memory://x::memory://corpus", "chained URLs"),
        ("ftp://me:secret@host/x", "holds a user, a password or a query"),
        ("ftp://secret@host/x", "holds a user"),
        ("ftp://me:sec/secret@host/x", "holds a user"),
        ("http://host/c?sig=secret", r"http://host/c\?\.\.\.: holds a user, a password or a query"),
        ("s3://bucket/c?versionId=secret", "holds a user, a password or a query"),
        ("memory://me:secret@x::memory://corpus", "chained URLs"),
    ],
)
def test_a_url_that_cannot_be_read_says_why(
    memory: Any, monkeypatch: pytest.MonkeyPatch, url: str, reason: str
) -> None:
    absent = {"class": "no_such_package.Files", "err": "its package is not installed"}
    for scheme in ("s3", "gs"):  # whether or not the extras are here
        monkeypatch.setitem(known_implementations, scheme, absent)
    memory.pipe("/corpus/a.txt", b"no picture")
    with pytest.raises(CorpusError, match=reason) as caught:
        list(open_corpus(url))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:p@h:80/a?sig=x&b=1#f", "https://...@h:80/a?..."),
        ("s3://s@s3/s", "s3://...@s3/s"),
        ("https://me:p/a?s@s@h/x", "https://...@h/x"),
        ("https://h/x?token", "https://h/x?..."),
        ("s3://bucket/part-?.parquet", "s3://bucket/part-?.parquet"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("a@b/c?d=e", "a@b/c?d=e"),
    ],
)
def test_secrets_of_a_url_are_not_shown(url: str, shown: str) -> None:
    assert remote.redacted(url) == shown


def test_what_a_client_says_of_a_url_is_said_without_its_secrets() -> None:
    url = "https://robot:p%40ssword@host/x?sig=abcdef&v=1"
    said = f"GET {url}: 403 for robot / p@ssword (abcdef) at host"
    assert (
        remote.scrubbed(said, url) == "GET https://...@host/x?...: 403 for ... / ... (...) at host"
    )
    assert remote.scrubbed("v=1 failed", "s3://bucket/v") == "v=1 failed"


WEB = "http://pictures.test/corpus"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("%2e%2e/secret.png", "leaves"),
        ("x/%2E./secret.png", "leaves"),
        ("..%2fsecret.png", "leaves"),
        ("..%5csecret.png", "leaves"),
        ("a/%252e%252e/secret.png", "leaves"),
        ("a.png?x=1", "holds '[?]'"),
        ("a.png%3fx=1", "holds '[?]'"),
        ("a#b.png", "holds '#'"),
        ("a%5cb.png", "holds"),
        (".\t./secret.png", "holds"),
        (f"{WEB}/%2e%2e/secret.png", "leaves"),
    ],
)
def test_names_that_a_web_client_would_read_as_something_else_are_refused(
    given: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        below(WEB, given)
    with pytest.raises(RowError, match=reason):
        safe_ref(WEB, given)


def test_a_corpus_behind_a_real_web_server_is_read_and_not_left(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "corpus" / "in").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"SECRET")
    (tmp_path / "corpus" / "in" / "50% off.png").write_bytes(b"A")
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/corpus"
            assert read_picture(url, "in/50%25 off.png") == b"A"
            count = len(asked)
            for name in ("%2e%2e/secret.png", "..%2fsecret.png", "in/%2e%2e/%2e%2e/secret.png"):
                with pytest.raises(CorpusError, match="leaves the corpus"):
                    read_picture(url, name)
            assert len(asked) == count
            assert not any("secret" in path for path in asked)
        finally:
            server.shutdown()
            thread.join()


def test_errors_of_a_client_are_the_corpus_s(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        """As botocore's: of no class that anyone else knows."""

    memory.pipe("/corpus/c.jsonl", lines({"id": "a", "text": "x"}))
    memory.pipe("/corpus/a.png", b"A")

    def fails(*_: Any, **__: Any) -> Any:
        raise ClientError("the token has expired")

    calls: dict[str, Callable[[], object]] = {
        "cat_file": lambda: read_picture(HOME, "a.png"),
        "info": lambda: read(HOME),
        "ls": lambda: read(HOME),
        "open": lambda: read(f"{HOME}/c.jsonl"),
    }
    for method, call in calls.items():
        with monkeypatch.context() as patched:
            patched.setattr(type(memory), method, fails)
            with pytest.raises(CorpusError, match="the token has expired"):
                call()
    folder = RemoteFolder(HOME)
    with folder.open("c.jsonl") as stream:
        raw = stream.raw  # type: ignore[attr-defined]
        monkeypatch.setattr(raw, "_opened", type("Broken", (), {"read": fails, "close": print})())
        with pytest.raises(OSError, match="the token has expired"):
            stream.read(10)
    assert remote.is_url("s3://x")
    assert not remote.is_url("C:/x")


def test_a_url_of_local_files_is_a_local_path(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"A")
    (tmp_path / "b.png").symlink_to("/etc/passwd")
    corpus = open_corpus(f"file://{tmp_path}")
    assert corpus.root == tmp_path
    items, bad = read(f"file://{tmp_path}")
    assert ([i.id for i in items], ["leaves" in b.reason for b in bad]) == (["a.png"], [True])


def test_csv_fields_have_the_limit_of_the_module() -> None:
    assert csv.field_size_limit() == 131_072  # as docs/data-formats.md says
