"""Readers: what is good comes through in order, what is bad is named, nothing is lost silently."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hivlp.index import pictures
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.items import BadItem, Item
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import read_picture


def read(path: Path) -> tuple[list[Item], list[BadItem]]:
    found = list(open_corpus(path))
    items = [item for item in found if isinstance(item, Item)]
    return items, [bad for bad in found if isinstance(bad, BadItem)]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def picture(folder: Path, name: str, captions: str | None = None) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"not opened by a reader")
    if captions is not None:
        path.with_suffix(".txt").write_text(captions, encoding="utf-8")


def test_a_folder_of_pictures_with_captions_beside_them(tmp_path: Path) -> None:
    picture(tmp_path, "b.png", "a red heart\n\n  two hearts \na red heart\n")
    picture(tmp_path, "deep/er/a.JPG")
    picture(tmp_path, ".hidden/c.png")
    picture(tmp_path, ".d.png")
    (tmp_path / "notes.md").write_text("no picture")
    items, bad = read(tmp_path)
    assert [(i.id, i.image, i.captions) for i in items] == [
        ("b.png", "b.png", ("a red heart", "two hearts")),
        ("deep/er/a.JPG", "deep/er/a.JPG", ()),
    ]
    assert bad == []


def test_captions_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    picture(tmp_path, "a.png")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xff")
    picture(tmp_path, "b.png")
    items, bad = read(tmp_path)
    assert [item.id for item in items] == ["b.png"]
    assert [(entry.place, "captions" in entry.reason) for entry in bad] == [("a.png", True)]


def test_a_folder_with_metadata_lists_its_rows_first_and_the_others_after(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        picture(tmp_path, name, f"caption of {name}")
    jsonl(
        tmp_path / "metadata.jsonl",
        {"file_name": "b.png", "id": "bee", "captions": ["one", "two"], "artist": "x"},
        {"file_name": "a.png", "text": "three"},
    )
    items, bad = read(tmp_path)
    assert [(i.id, i.image, i.captions) for i in items] == [
        ("bee", "b.png", ("one", "two")),
        ("a.png", "a.png", ("three",)),
        ("c.png", "c.png", ("caption of c.png",)),
    ]
    assert items[0].metadata == {"artist": "x"}
    assert bad == []


def test_two_metadata_files_are_refused(tmp_path: Path) -> None:
    picture(tmp_path, "a.png")
    jsonl(tmp_path / "metadata.jsonl", {"file_name": "a.png"})
    (tmp_path / "metadata.csv").write_text("file_name\na.png\n")
    with pytest.raises(CorpusError, match=r"metadata\.csv and metadata\.jsonl"):
        read(tmp_path)


def test_csv_columns_and_aliases(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(
        '\ufeffkey,image_path,captions,text,price,empty\n007,a.png,"[""x"", ""y""]",z,3,\n'
        "8,,,[not json,4,\n",
        encoding="utf-8",
    )
    items, bad = read(path)
    assert [(i.id, i.image, i.captions) for i in items] == [
        ("007", "a.png", ("x", "y", "z")),
        ("8", None, ("[not json",)),
    ]
    assert items[0].metadata == {"price": "3"}
    assert bad == []


def test_csv_rows_of_the_wrong_length_are_bad(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("id,text,note\na,x,1\nb,x,1,surplus\nc\nd,y,2\n")
    items, bad = read(path)
    assert [item.id for item in items] == ["a", "d"]
    assert [(entry.place, entry.reason.split()[0]) for entry in bad] == [
        ("line 3", "more"),
        ("line 4", "fewer"),
    ]


def test_jsonl_bad_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n\n{broken\n[1]\n"x"\n{"id": "b", "text": "y"}\n')
    items, bad = read(path)
    assert [item.id for item in items] == ["a", "b"]
    assert [entry.place for entry in bad] == ["line 3", "line 4", "line 5"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("x", "x"), (7, "7"), (7.0, "7"), (1.5, "1.5"), (" x ", "x"), ("日本/é", "日本/é"), (0, "0")],
)
def test_ids_are_strings(tmp_path: Path, given: Any, expected: str) -> None:
    items, _ = read(jsonl(tmp_path / "c.jsonl", {"id": given, "text": "x"}))
    assert [item.id for item in items] == [expected]


@pytest.mark.parametrize(
    "row",
    [
        {"id": True, "text": "x"},
        {"id": ["x"], "text": "x"},
        {"id": "a\x00b", "text": "x"},
        {"id": "a\nb", "text": "x"},
        {"id": "\ud83d", "text": "x"},
        {"id": "x" * 513, "text": "x"},
        {"text": "no id and no picture"},
        {"id": "a", "text": 7},
        {"id": "a", "captions": [["x"], 3]},
        {"id": "a", "image": 5},
        {"id": "a", "image": "../outside.png"},
        {"id": "a", "image": "/etc/passwd"},
        {"id": "a", "image": "https://example.org/a.png"},
        {"id": "a", "image": "file:///etc/passwd"},
        {"id": "a", "image": "a\x00.png"},
    ],
)
def test_a_row_that_cannot_be_an_item_is_bad_and_the_next_is_read(tmp_path: Path, row: Any) -> None:
    items, bad = read(jsonl(tmp_path / "c.jsonl", row, {"id": "good", "text": "x"}))
    assert [item.id for item in items] == ["good"]
    assert [entry.place for entry in bad] == ["line 1"]


def test_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    outside.write_bytes(b"x")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "link.png").symlink_to(outside)
    items, bad = read(corpus)
    assert items == []
    assert "leaves the corpus" in bad[0].reason
    with pytest.raises(CorpusError, match="leaves the corpus"):
        read_picture(corpus, "link.png")
    with pytest.raises(CorpusError, match="leaves the corpus"):
        read_picture(corpus, "../outside.png")


def test_an_absolute_path_inside_the_corpus_becomes_relative(tmp_path: Path) -> None:
    row = {"id": "a", "image": str(tmp_path / "x" / "a.png")}
    items, _ = read(jsonl(tmp_path / "c.jsonl", row))
    assert items[0].image == "x/a.png"


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_duplicate_id_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"c.{suffix}"
    if suffix == "jsonl":
        jsonl(path, {"id": 1, "text": "x"}, {"id": "1", "text": "y"})
    elif suffix == "csv":
        path.write_text("id,text\n1,x\n1,y\n")
    else:
        pq.write_table(pa.table({"id": [1, 1], "text": ["x", "y"]}), path)
    with pytest.raises(CorpusError, match="'1' is there twice"):
        read(path)


def test_parquet_with_paths_bytes_and_hugging_face_structs(tmp_path: Path) -> None:
    plain, struct = tmp_path / "p.parquet", tmp_path / "s.parquet"
    pq.write_table(
        pa.table({"id": ["a", "b"], "image": [b"AAA", None], "captions": [["x"], ["y", "z"]]}),
        plain,
    )
    items, bad = read(plain)
    assert [(i.id, i.image, i.image_data, i.captions) for i in items] == [
        ("a", "p.parquet#row=0", b"AAA", ("x",)),
        ("b", None, None, ("y", "z")),
    ]
    assert bad == []
    images = [{"bytes": b"S0", "path": "x.png"}, {"bytes": b"S1", "path": None}]
    pq.write_table(pa.table({"id": [0, 1], "image": images}), struct, row_group_size=1)
    items, _ = read(struct)
    assert [read_picture(tmp_path, str(item.image)) for item in items] == [b"S0", b"S1"]
    assert open_corpus(struct).count() == 2


@pytest.mark.parametrize("ref", ["gone.png", "p.parquet#row=5", "p.parquet#row=x", "gone#row=0"])
def test_a_picture_that_is_gone_is_named(tmp_path: Path, ref: str) -> None:
    pq.write_table(pa.table({"image": [b"A", None]}), tmp_path / "p.parquet")
    with pytest.raises(CorpusError, match=r"unreadable|gone"):
        read_picture(tmp_path, ref)
    with pytest.raises(CorpusError, match="holds no picture"):
        read_picture(tmp_path, "p.parquet#row=1")


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "x.docx"
    other.write_text("x")
    for path in (tmp_path / "nothing", other):
        with pytest.raises(CorpusError, match=path.name):
            open_corpus(path)
    for name, content in (("c.csv", "id,text\na,x\n".encode("utf-16")), ("c.parquet", b"PAR1 no")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorpusError, match=r"unreadable|not readable"):
            read(tmp_path / name)


def test_columns_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl", {"id": "a", "text": "x", "embedding": [0.5]})
    with pytest.raises(CorpusError, match="embedding"):
        read(path)
    (tmp_path / "c.csv").write_text("id,name\na,x\n")
    with pytest.raises(CorpusError, match="no column to index"):
        read(tmp_path / "c.csv")


def test_captions_are_not_read_through_a_link_that_leads_outside(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    picture(corpus, "a.png")
    picture(corpus, "b.png", "a red heart")
    (tmp_path / "secret.txt").write_text("a secret\n")
    (corpus / "a.txt").symlink_to(tmp_path / "secret.txt")
    items, bad = read(corpus)
    assert [item.id for item in items] == ["b.png"]
    assert "leaves the corpus" in bad[0].reason


def test_a_link_to_itself_is_bad_and_the_next_is_read(tmp_path: Path) -> None:
    picture(tmp_path, "b.png")
    (tmp_path / "a.png").symlink_to("a.png")
    items, bad = read(tmp_path)
    assert [item.id for item in items] == ["b.png"]
    assert [entry.place for entry in bad] == ["a.png"]
    with pytest.raises(CorpusError, match="unreadable"):
        read_picture(tmp_path, "a.png")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_row_that_is_not_utf8_is_bad_and_the_next_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"c.{suffix}"
    if suffix == "csv":
        path.write_bytes(b"id,text\n1,caf\xe9\n2,caf\xc3\xa9\n")
    else:
        path.write_bytes(b'{"id": 1, "text": "caf\xe9"}\n{"id": 2, "text": "caf\xc3\xa9"}\n')
    items, bad = read(path)
    assert [(item.id, item.captions) for item in items] == [("2", ("café",))]
    assert [entry.reason for entry in bad] == ["not UTF-8"]


def test_a_huge_csv_field_is_bad_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("id,text\n1," + "x" * 200_000 + "\n2,good\n")
    items, bad = read(path)
    assert [item.id for item in items] == ["2"]
    assert [(entry.place, "limit" in entry.reason) for entry in bad] == [("line 2", True)]


@pytest.mark.parametrize(
    "row",
    [
        '{"id": "bad", "text": ' + "[" * 600 + "]" * 600 + "}",
        '{"id": "bad", "image": "\\ud800.png"}',
    ],
    ids=["nested", "half a character"],
)
def test_rows_made_to_annoy_are_bad_and_the_next_is_read(tmp_path: Path, row: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(row + '\n{"id": "good", "text": "x"}\n')
    items, bad = read(path)
    assert [item.id for item in items] == ["good"]
    assert [entry.place for entry in bad] == ["line 1"]


def test_a_caption_of_brackets_is_text(tmp_path: Path) -> None:
    items, _ = read(jsonl(tmp_path / "c.jsonl", {"id": "a", "text": "[" * 50_000}))
    assert items[0].captions == ("[" * 50_000,)


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(tmp_path, "a.png")
    picture(tmp_path, "locked/b.png")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CorpusError, match="locked: unreadable: Permission denied"):
        read(tmp_path)


def test_a_corpus_whose_path_is_not_utf8_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        picture(folder, "a.png")
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(CorpusError, match="not UTF-8"):
        open_corpus(folder)


def test_only_files_of_a_fair_size_are_read_as_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(CorpusError, match="not a file"):
        read_picture(tmp_path, "pipe.png")
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 4)
    (tmp_path / "a.png").write_bytes(b"12345")
    with pytest.raises(CorpusError, match="5 bytes, the limit is 4"):
        read_picture(tmp_path, "a.png")


def test_a_picture_may_be_named_like_a_row(tmp_path: Path) -> None:
    picture(tmp_path, "a.png")
    for name in ("a#row=1.png", "a#row=2"):
        shutil.copy(tmp_path / "a.png", tmp_path / name)
        assert read_picture(tmp_path, name) == read_picture(tmp_path, "a.png")


@pytest.mark.parametrize("column", ["image_path", "file_name"])
def test_pictures_in_a_parquet_column_of_another_name_are_read(tmp_path: Path, column: str) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], column: [b"A", b"B"], "image": [None, b"C"]}), path)
    items, _ = read(path)
    assert [item.image_data for item in items] == [b"A", b"C"]
    assert [read_picture(tmp_path, str(item.image)) for item in items] == [b"A", b"C"]


def test_a_row_of_a_large_row_group_is_read_without_keeping_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [b"%03d" % i * 50 if i % 7 else None for i in range(200)]
    table = pa.table({"file_name": [None] * 200, "image": images, "note": ["x"] * 200})
    pq.write_table(table, tmp_path / "p.parquet", row_group_size=90, data_page_size=256)
    monkeypatch.setattr(pictures, "MAX_KEPT_BYTES", 1_000)
    kept = len(pictures._KEPT)
    for row in (1, 15, 16, 89, 90, 199):
        assert read_picture(tmp_path, f"p.parquet#row={row}") == images[row]
    with pytest.raises(CorpusError, match="holds no picture"):
        read_picture(tmp_path, "p.parquet#row=7")
    with pytest.raises(CorpusError, match="no such row"):
        read_picture(tmp_path, "p.parquet#row=200")
    assert len(pictures._KEPT) == kept


def test_one_picture_in_many_rows_takes_no_more_memory_than_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = os.urandom(100_000)
    table = pa.table({"image": [picture] * 3_000})
    pq.write_table(table, tmp_path / "p.parquet")  # in a dictionary: 100 kB, as the file says
    del table
    monkeypatch.setattr(pictures, "MAX_KEPT_BYTES", 4 * 2**20)
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        for row in (2_999, 0):
            assert read_picture(tmp_path, f"p.parquet#row={row}") == picture
    finally:
        pa.set_memory_pool(usual)
    assert (pool.max_memory() or 0) < 16 * 2**20
    assert pool.bytes_allocated() < 2**20


def test_neighbours_of_a_small_row_group_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [b"%03d" % i for i in range(50)]
    pq.write_table(pa.table({"image": images}), tmp_path / "p.parquet", row_group_size=25)
    assert read_picture(tmp_path, "p.parquet#row=30") == images[30]
    monkeypatch.setattr(pictures, "_streamed", lambda *_: pytest.fail("decoded again"))
    assert [read_picture(tmp_path, f"p.parquet#row={i}") for i in range(25, 50)] == images[25:]


def test_a_row_group_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    for content in (b"old", b"newer"):
        pq.write_table(pa.table({"image": [content, b"x"]}), path)
        assert read_picture(tmp_path, "p.parquet#row=0") == content


def test_a_picture_in_a_table_has_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"image": [b"12345"]}), tmp_path / "p.parquet")
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 4)
    with pytest.raises(CorpusError, match="5 bytes, the limit is 4"):
        read_picture(tmp_path, "p.parquet#row=0")


def test_a_path_that_is_not_utf8_is_bad_and_the_next_is_read(tmp_path: Path) -> None:
    row = {"id": "a", "image": "caf\udce9.png"}
    items, bad = read(jsonl(tmp_path / "c.jsonl", row, {"id": "good", "text": "x"}))
    assert [item.id for item in items] == ["good"]
    assert [(entry.place, "not UTF-8" in entry.reason) for entry in bad] == [("line 1", True)]


def test_a_duplicate_id_is_named_with_both_places(tmp_path: Path) -> None:
    picture(tmp_path, "a.png")
    jsonl(tmp_path / "metadata.jsonl", {"file_name": "b.png"}, {"id": "a.png", "text": "x"})
    with pytest.raises(CorpusError, match=r"'a\.png' is there twice: line 2 and a\.png"):
        read(tmp_path)


def test_vectors_of_one_s_own_are_sent_to_their_own_command(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "embedding": [[0.5]]}), tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match="hivlp import-vectors"):
        read(tmp_path / "c.parquet")
